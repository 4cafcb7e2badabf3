//! Sizes as people write them: `256M`, `1.8G`, `384K`.
//!
//! Owns the one grammar that the command line and the configuration share. Invariant: a size is never guessed.
//! Units are powers of two (`256M` is 256 MiB); a number without unit and the ambiguous `MB` are refused in words.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::fmt;
use std::str::FromStr;
use thiserror::Error;

/// Binary units, largest first: the letter and the power of two.
const UNITS: [(char, u32); 4] = [('T', 40), ('G', 30), ('M', 20), ('K', 10)];
/// Digits after the point that are read; more than a terabyte's worth of bytes cannot be meant.
const MAX_FRACTION_DIGITS: usize = 12;

/// A number of bytes.
///
/// Reads `<number>[.<digits>][space]<unit>` where the unit is `B`, `K`, `M`, `G`, `T` or `KiB`, `MiB`, `GiB`, `TiB`,
/// in either case; a fraction is rounded down to whole bytes. [`Display`](fmt::Display) is for people and rounds to
/// two decimals; what serde writes is exact and reads back as the same size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Size(u64);

/// Why a text is no size. Each message says what to write instead.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[allow(missing_docs)]
pub enum SizeError {
    #[error("{0} is not a size: write a number and a unit, such as 256M, 1.8G or 384K")]
    NotANumber(String),
    #[error("{0} is a size without unit: write {0}M for MiB, {0}K for KiB or {0}B for bytes")]
    NoUnit(String),
    #[error(
        "{text} is ambiguous, since {unit} is a power of ten to some and of two to others: write {letter} or {letter}iB, which are powers of two here"
    )]
    Decimal { text: String, unit: String, letter: char },
    #[error("{text} has the unknown unit {unit}: use B, K, M, G or T")]
    UnknownUnit { text: String, unit: String },
    #[error("{0} is a fraction of a byte")]
    Fraction(String),
    #[error("{0} is larger than any memory: a size has at most 64 bits")]
    TooLarge(String),
}

impl Size {
    /// A size of so many bytes.
    pub const fn from_bytes(bytes: u64) -> Self {
        Size(bytes)
    }

    /// The size in bytes.
    pub const fn bytes(self) -> u64 {
        self.0
    }

    /// The size in the largest unit that divides it: reads back as the same size.
    pub fn exact(self) -> String {
        UNITS
            .iter()
            .find(|(_, shift)| self.0 != 0 && self.0 % (1 << shift) == 0)
            .map_or_else(|| format!("{}B", self.0), |(letter, shift)| format!("{}{letter}", self.0 >> shift))
    }

    fn people(self) -> String {
        for (letter, shift) in UNITS {
            let unit = 1u128 << shift;
            let bytes = u128::from(self.0);
            // A size that would round up to 1024 of the next smaller unit is 1 of this one.
            if bytes + (unit >> 10) / 200 < unit {
                continue;
            }
            let hundredths = (bytes * 100 + unit / 2) / unit;
            return match (hundredths / 100, hundredths % 100) {
                (whole, 0) => format!("{whole} {letter}iB"),
                (whole, part) if part % 10 == 0 => format!("{whole}.{} {letter}iB", part / 10),
                (whole, part) => format!("{whole}.{part:02} {letter}iB"),
            };
        }
        format!("{} B", self.0)
    }
}

/// A text from outside, cut and escaped so that it can stand in a message.
fn quote(text: &str) -> String {
    const SHOWN: usize = 40;
    let cut: String = text.chars().take(SHOWN).collect();
    if cut.len() == text.len() {
        cut.escape_debug().to_string()
    } else {
        format!("{}...", cut.escape_debug())
    }
}

impl FromStr for Size {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = text.split_at(end);
        let unit = unit.strip_prefix(' ').unwrap_or(unit);
        let (whole, fraction) = match number.split_once('.') {
            Some((whole, fraction)) if !fraction.is_empty() && !fraction.contains('.') => (whole, fraction),
            Some(_) => return Err(SizeError::NotANumber(quote(text))),
            None => (number, ""),
        };
        if whole.is_empty() {
            return Err(SizeError::NotANumber(quote(text)));
        }
        if unit.is_empty() {
            return Err(SizeError::NoUnit(quote(number)));
        }
        let shift = shift_of(text, unit)?;
        if shift == 0 && !fraction.is_empty() {
            return Err(SizeError::Fraction(quote(text)));
        }
        if fraction.len() > MAX_FRACTION_DIGITS {
            return Err(SizeError::NotANumber(quote(text)));
        }
        // The whole part is checked to have 64 bits and the fraction 40, so 128 bits hold both shifted by 40.
        let whole: u64 = whole.parse().map_err(|_| SizeError::TooLarge(quote(text)))?;
        let part = if fraction.is_empty() {
            0
        } else {
            let digits: u128 = fraction.parse().map_err(|_| SizeError::NotANumber(quote(text)))?;
            (digits << shift) / 10u128.pow(fraction.len() as u32)
        };
        let bytes = (u128::from(whole) << shift) + part;
        u64::try_from(bytes).map(Size).map_err(|_| SizeError::TooLarge(quote(text)))
    }
}

fn shift_of(text: &str, unit: &str) -> Result<u32, SizeError> {
    let upper = unit.to_ascii_uppercase();
    if upper == "B" {
        return Ok(0);
    }
    let mut letters = upper.chars();
    let known = letters.next().and_then(|first| UNITS.iter().find(|(letter, _)| *letter == first));
    match (known, letters.as_str()) {
        (Some((_, shift)), "" | "IB") => Ok(*shift),
        (Some((letter, _)), "B") => {
            Err(SizeError::Decimal { text: quote(text), unit: quote(unit), letter: *letter })
        }
        _ => Err(SizeError::UnknownUnit { text: quote(text), unit: quote(unit) }),
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.people())
    }
}

impl Serialize for Size {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.exact())
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;
        impl de::Visitor<'_> for Text {
            type Value = Size;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a size in quotes, such as \"256M\"")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Size, E> {
                text.parse().map_err(E::custom)
            }
            fn visit_u64<E: de::Error>(self, number: u64) -> Result<Size, E> {
                Err(E::custom(SizeError::NoUnit(number.to_string())))
            }
            fn visit_i64<E: de::Error>(self, number: i64) -> Result<Size, E> {
                match u64::try_from(number) {
                    Ok(number) => self.visit_u64(number),
                    Err(_) => Err(E::custom(SizeError::NotANumber(number.to_string()))),
                }
            }
        }
        deserializer.deserialize_any(Text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bytes(text: &str) -> u64 {
        text.parse::<Size>().unwrap_or_else(|e| panic!("{text}: {e}")).bytes()
    }

    fn refusal(text: &str) -> String {
        text.parse::<Size>().expect_err(text).to_string()
    }

    #[test]
    fn sizes_read_as_people_write_them_in_powers_of_two() {
        assert_eq!(bytes("256M"), 256 << 20);
        assert_eq!(bytes("256MiB"), 256 << 20);
        assert_eq!(bytes("256 MiB"), 256 << 20);
        assert_eq!(bytes("384k"), 384 << 10);
        assert_eq!(bytes("1.5G"), 3 << 29);
        assert_eq!(bytes("1.8G"), 1_932_735_283);
        assert_eq!(bytes("2T"), 2 << 40);
        assert_eq!(bytes("4096B"), 4096);
        assert_eq!(bytes("0B"), 0);
        assert_eq!(bytes("18446744073709551615B"), u64::MAX);
    }

    #[test]
    fn a_size_without_unit_is_refused_with_what_to_write() {
        let said = refusal("256");
        assert!(
            said.contains("a size without unit") && said.contains("256M") && said.contains("256B"),
            "{said}"
        );
        assert!(refusal("1.8").contains("a size without unit"));
    }

    #[test]
    fn megabytes_of_ten_to_the_six_are_refused_because_they_are_ambiguous() {
        let said = refusal("256MB");
        assert!(said.contains("ambiguous") && said.contains("MiB"), "{said}");
    }

    #[test]
    fn nonsense_is_refused_and_never_wraps() {
        for text in
            ["", "M", "-1M", "+1M", " 1M", "1M ", "1  M", "1.M", ".5M", "1..5M", "1.2.3M", "0x10M", "1e3M"]
        {
            assert!(text.parse::<Size>().is_err(), "{text:?}");
        }
        assert!(refusal("1Q").contains("unknown unit"));
        assert!(refusal("1KiBs").contains("unknown unit"));
        assert!(format!("1.{}T", "9".repeat(38)).parse::<Size>().is_err(), "no shift overflows");
        assert!(refusal("1.5B").contains("fraction of a byte"));
        assert!(refusal("18446744073709551616B").contains("64 bits"));
        assert!(refusal("16777216T").contains("64 bits"));
        assert!(refusal(&"9".repeat(10_000)).len() < 400, "a message stays short");
        assert!(!refusal("1\u{1b}[31m").contains('\u{1b}'), "escapes do not reach the terminal");
    }

    #[test]
    fn people_see_the_unit_that_fits() {
        let shown = |bytes| Size::from_bytes(bytes).to_string();
        assert_eq!(shown(0), "0 B");
        assert_eq!(shown(1023), "1023 B");
        assert_eq!(shown(256 << 20), "256 MiB");
        assert_eq!(shown(23_040), "22.5 KiB");
        assert_eq!(shown(6528), "6.38 KiB");
        assert_eq!(shown((1 << 20) - 1), "1 MiB");
        assert_eq!(shown(u64::MAX), "16777216 TiB");
        assert_eq!(format!("{:>9}|", Size::from_bytes(4096)), "    4 KiB|");
    }

    #[test]
    fn a_configuration_holds_sizes_in_quotes_and_a_bare_number_is_explained() {
        let read = |text| serde_json::from_str::<Size>(text);
        assert_eq!(read("\"256M\"").unwrap().bytes(), 256 << 20);
        assert!(read("256").unwrap_err().to_string().contains("a size without unit"));
        assert!(read("-1").unwrap_err().to_string().contains("not a size"));
        assert!(read("true").unwrap_err().to_string().contains("a size in quotes"));
        assert_eq!(serde_json::to_string(&Size::from_bytes(3 << 20)).unwrap(), "\"3M\"");
    }

    proptest! {
        #[test]
        fn what_is_written_exactly_reads_back(bytes: u64) {
            prop_assert_eq!(Size::from_bytes(bytes).exact().parse::<Size>().unwrap().bytes(), bytes);
        }

        #[test]
        fn what_people_see_reads_back_to_within_half_a_percent(bytes: u64) {
            let back = Size::from_bytes(bytes).to_string().parse::<Size>().map_or(u64::MAX, Size::bytes);
            prop_assert!(back.abs_diff(bytes) <= bytes / 200 + 1);
        }

        #[test]
        fn no_text_makes_the_reader_panic(text in "\\PC*") {
            let _ = text.parse::<Size>();
        }
    }
}
