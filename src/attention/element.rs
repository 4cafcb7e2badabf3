//! The element types of KV rows, and their conversion to and from f32.
//!
//! Invariant: rows are read and written through raw pointers, with no alignment asked for, and never seen as slices,
//! because they lie in memory that other processes can write.
//!
//! f16 is converted by a few plain operations without branches: the compiler vectorises them on every target, while
//! the standard library's f16 is not stable in Rust 1.85 and conversions by instruction stay scalar there. The loops
//! are as plain as can be on purpose: cut into steps by hand, they came out as shuffles, four times as long.

/// What one value of a K or V row is stored as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// IEEE 754 binary16.
    F16,
    /// IEEE 754 binary32.
    F32,
}

impl Element {
    /// All of them. In C, each is `KVB_` and its name, and its number is its place here: new ones come last.
    pub const ALL: [Element; 2] = [Element::F16, Element::F32];

    /// Its label in a profile, and the bytes of one value.
    const fn facts(self) -> (&'static str, usize) {
        match self {
            Element::F16 => ("f16", F16::BYTES),
            Element::F32 => ("f32", F32::BYTES),
        }
    }

    /// Its label in a profile.
    pub const fn name(self) -> &'static str {
        self.facts().0
    }

    /// Bytes of one value.
    pub const fn bytes(self) -> usize {
        self.facts().1
    }
}

impl std::fmt::Display for Element {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Element {
    type Err = String;

    /// By its name; the error says which there are.
    fn from_str(text: &str) -> Result<Self, String> {
        let known = Element::ALL.into_iter().find(|e| e.name() == text);
        known
            .ok_or_else(|| format!("the kernel computes with {}", Element::ALL.map(Element::name).join(", ")))
    }
}

/// A stored type, known at compile time.
pub(super) trait Stored {
    const BYTES: usize;

    /// Converts the rows' first `dst.len()` values.
    ///
    /// # Safety
    /// `src` is valid for reads of `BYTES * dst.len()` bytes.
    unsafe fn load(src: *const u8, dst: &mut [f32]);
}

pub(super) struct F16;
pub(super) struct F32;

impl Stored for F16 {
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn load(src: *const u8, dst: &mut [f32]) {
        let src = src.cast::<u16>();
        for (n, out) in dst.iter_mut().enumerate() {
            // SAFETY: value n is within dst.len(), which the caller vouches for.
            *out = f16_to_f32(unsafe { src.add(n).read_unaligned() });
        }
    }
}

impl Stored for F32 {
    const BYTES: usize = 4;

    #[inline(always)]
    unsafe fn load(src: *const u8, dst: &mut [f32]) {
        let src = src.cast::<f32>();
        for (n, out) in dst.iter_mut().enumerate() {
            // SAFETY: value n is within dst.len(), which the caller vouches for.
            *out = unsafe { src.add(n).read_unaligned() };
        }
    }
}

/// Reads a row of `dst.len()` values as f32.
///
/// # Safety
/// `src` is valid for reads of `element.bytes() * dst.len()` bytes; no alignment is needed.
pub unsafe fn load_row(element: Element, src: *const u8, dst: &mut [f32]) {
    match element {
        // SAFETY: the caller's promise, with the type's own size.
        Element::F16 => unsafe { F16::load(src, dst) },
        // SAFETY: the same.
        Element::F32 => unsafe { F32::load(src, dst) },
    }
}

/// Stores f32 values as a row, each rounded to the nearest value of `element`, ties to even.
///
/// # Safety
/// `dst` is valid for writes of `element.bytes() * src.len()` bytes; no alignment is needed.
pub unsafe fn store_row(element: Element, dst: *mut u8, src: &[f32]) {
    match element {
        Element::F16 => {
            let dst = dst.cast::<u16>();
            for (n, value) in src.iter().enumerate() {
                // SAFETY: value n is within src.len(), which the caller vouches for.
                unsafe { dst.add(n).write_unaligned(f32_to_f16(*value)) };
            }
        }
        // SAFETY: `dst` is valid for src.len() values of 4 bytes, and cannot overlap a live borrow of ours.
        Element::F32 => unsafe {
            std::ptr::copy_nonoverlapping(src.as_ptr().cast::<u8>(), dst, src.len() * 4)
        },
    }
}

/// Exact for every input: sign, exponent and mantissa are moved to their places, and a multiplication by 2^112 corrects
/// the exponent's bias from 15 to 127, for subnormal numbers too. (A process that has told its processor to take
/// subnormals for zero reads 0 below 2^-14.)
#[inline(always)]
fn f16_to_f32(bits: u16) -> f32 {
    const TWO_TO_112: f32 = f32::from_bits((112 + 127) << 23);
    // The shift of a signed number leaves copies of the sign between its place and the exponent.
    let moved = (i32::from(bits as i16) << 13) as u32 & 0x8fff_e000;
    let value = f32::from_bits(moved) * TWO_TO_112;
    // Infinity and NaN have all exponent bits set, in both types; here they came out as 2^16 and more.
    let special = if value.abs() >= 65536.0 { 0x7f80_0000 } else { 0 };
    f32::from_bits(value.to_bits() | special)
}

/// Rounds to nearest, ties to even; too large becomes infinity, NaN a quiet NaN.
#[inline(always)]
fn f32_to_f16(value: f32) -> u16 {
    const BIAS: u32 = (127 - 15) << 23;
    let sign = (value.to_bits() >> 16) & 0x8000;
    let magnitude = value.to_bits() & 0x7fff_ffff;
    // The mantissa loses 13 bits: add just under half of the last kept bit, and that bit itself for the ties.
    let normal = magnitude.wrapping_sub(BIAS).wrapping_add(0xfff + ((magnitude >> 13) & 1)) >> 13;
    // Adding 0.5 moves the last bit of an f16 subnormal, 2^-24, to the last bit of the f32, which rounds there.
    let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
    let half = if magnitude < BIAS + (1 << 23) { subnormal } else { normal };
    // From 65520 on the nearest is infinity.
    let half = if magnitude >= 0x477f_f000 { 0x7c00 } else { half };
    let half = if magnitude > 0x7f80_0000 { 0x7e00 } else { half };
    (sign | half) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Under Miri every pattern would take an hour; a step that shares no factor with 2^16 still meets every exponent.
    const STEP: usize = if cfg!(miri) { 251 } else { 1 };

    /// Exact everywhere: under Miri `powi` errs a little, on purpose.
    fn power_of_two(exponent: i32) -> f64 {
        f64::from_bits(((1023 + exponent) as u64) << 52)
    }

    /// The definition, in f64.
    fn by_definition(bits: u16) -> f64 {
        let sign = if bits & 0x8000 == 0 { 1.0 } else { -1.0 };
        let mantissa = f64::from(bits & 0x3ff);
        match (bits >> 10) & 0x1f {
            0 => sign * mantissa * power_of_two(-24),
            31 if mantissa == 0.0 => sign * f64::INFINITY,
            31 => f64::NAN,
            e => sign * (1024.0 + mantissa) * power_of_two(i32::from(e) - 25),
        }
    }

    #[test]
    fn every_f16_reads_as_its_exact_value_and_is_stored_back_as_itself() {
        for bits in (0..=u16::MAX).step_by(STEP) {
            let (got, want) = (f16_to_f32(bits), by_definition(bits));
            if want.is_nan() {
                assert!(got.is_nan() && f32_to_f16(got) & 0x7fff == 0x7e00, "{bits:#06x}");
                continue;
            }
            assert_eq!(f64::from(got), want, "{bits:#06x}");
            assert_eq!(got.is_sign_negative(), bits & 0x8000 != 0, "{bits:#06x}");
            assert_eq!(f32_to_f16(got), bits, "{bits:#06x}");
        }
    }

    #[test]
    fn a_value_between_two_f16_is_stored_as_the_nearer_one_and_a_tie_as_the_even_one() {
        for bits in (0..0x7bffu16).step_by(STEP) {
            let (low, high) = (by_definition(bits), by_definition(bits + 1));
            let tie = ((low + high) / 2.0) as f32; // exact: one more bit than f16 has
            let even = if bits & 1 == 0 { bits } else { bits + 1 };
            assert_eq!(f32_to_f16(tie), even, "{bits:#06x}");
            assert_eq!(f32_to_f16(f32::from_bits(tie.to_bits() - 1)), bits, "{bits:#06x}");
            assert_eq!(f32_to_f16(f32::from_bits(tie.to_bits() + 1)), bits + 1, "{bits:#06x}");
            assert_eq!(f32_to_f16(-tie), even | 0x8000, "{bits:#06x}");
        }
        assert_eq!(f32_to_f16(65519.996), 0x7bff);
        assert_eq!(f32_to_f16(65520.0), 0x7c00);
        assert_eq!(f32_to_f16(f32::MAX), 0x7c00);
        assert_eq!(f32_to_f16(f32::MIN_POSITIVE / 2.0), 0);
    }

    #[test]
    fn rows_of_any_length_and_alignment_come_back_as_they_were_stored() {
        let values: Vec<f32> = (0..67).map(|n| (n as f32 - 33.0) * 0.25).collect();
        for element in Element::ALL {
            for len in [0, 1, 15, 16, 17, 64, 67] {
                for offset in 0..4 {
                    let mut bytes = vec![0xa5u8; offset + len * element.bytes() + 1];
                    let mut back = vec![0.0; len];
                    // SAFETY: the row of `len` values lies between the offset and the last byte of `bytes`.
                    unsafe {
                        store_row(element, bytes.as_mut_ptr().add(offset), &values[..len]);
                        load_row(element, bytes.as_ptr().add(offset), &mut back);
                    }
                    assert_eq!(back, values[..len]);
                    assert_eq!(bytes.last(), Some(&0xa5), "wrote past the row");
                }
            }
        }
    }
}
