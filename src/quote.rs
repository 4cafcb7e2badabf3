//! How what came from outside is shown: quoted in errors, in logs, on terminals.
//!
//! Owns nothing. Invariant: what comes out holds no character that could play tricks on a terminal or on who reads it:
//! no control, nothing that turns the direction of writing, and nothing that is there and cannot be seen.
//!
//! **The rule** goes by general categories (UAX #44): shown are letters, marks, numbers, punctuation, symbols, and the one
//! space of ASCII. So no control (Cc), no format character (Cf: joiners, the controls of writing direction, tags, annotations,
//! joiners of hieroglyphs), no separator of lines or paragraphs (Zl, Zp), no other space (Zs), nothing of private use (Co), and
//! nothing that is not assigned (Cn), as of the Unicode version of `unicode-properties` (18.0): what comes later is `?` until
//! that is newer. Then there are the few that have a category of what is seen, and are blank: `BLANK`. And what changes its
//! neighbours only, and would be seen by nobody beside others, is shown where it does: of marks `MARKS` at most in a row,
//! what stacks letters (`STACKERS`) behind one of its script, and of Hangul a vowel or a final (`HANGUL`) behind the letter that it
//! is written in one square with.

use unicode_properties::{GeneralCategoryGroup, UnicodeGeneralCategory};

/// Characters that cannot be seen although they are letters, marks or symbols by category, as ranges: those with the property
/// Default_Ignorable_Code_Point (DerivedCoreProperties.txt: fillers, variation selectors, the grapheme joiner, two vowels of
/// Khmer), and those whose names say that they are blank, null, or fill or join only.
const BLANK: [(u32, u32); 15] = [
    (0x034f, 0x034f),
    (0x115f, 0x1160),
    (0x17b4, 0x17b5),
    (0x180b, 0x180d),
    (0x180f, 0x180f),
    // The braille pattern without dots.
    (0x2800, 0x2800),
    (0x3164, 0x3164),
    (0xfe00, 0xfe0f),
    (0xffa0, 0xffa0),
    // The joiner of Brahmi numbers.
    (0x1_107f, 0x1_107f),
    // The mirror, the blanks and the lost signs of hieroglyphs, which belong to a layout that no terminal has.
    (0x1_3440, 0x1_3446),
    // The filler of Khitan.
    (0x1_6fe4, 0x1_6fe4),
    // The null notehead.
    (0x1_d159, 0x1_d159),
    // Modifiers of sign writing: fill and rotation of the sign before them.
    (0x1_da9b, 0x1_daaf),
    (0xe_0100, 0xe_01ef),
];

/// Characters that put the next letter under the one before, and cannot be seen by themselves: those with the value
/// Invisible_Stacker (IndicSyllabicCategory.txt), the joiner of Tifinagh, and the thick letter selector of Duployan. Words of
/// Burmese and Khmer have them, so they are not blank everywhere.
const STACKERS: [u32; 15] = [
    0x1039, 0x17d2, 0x1a60, 0x2d7f, 0xaaf6, 0x1_0a3f, 0x1_1133, 0x1_13d0, 0x1_193e, 0x1_1a47, 0x1_1a99,
    0x1_1d45, 0x1_1d97, 0x1_1f42, 0x1_bc9d,
];

/// Letters of Hangul that terminals write into the square of the letter before them, each with those that it may follow: vowels
/// behind an initial, finals behind a vowel or a syllable without one. A syllable has one of each at most.
const HANGUL: [(Range, &[Range]); 4] = [
    ((0x1161, 0x11a7), &INITIALS),
    ((0xd7b0, 0xd7c6), &INITIALS),
    ((0x11a8, 0x11ff), &VOWELS),
    ((0xd7cb, 0xd7fb), &VOWELS),
];
const INITIALS: [Range; 2] = [(0x1100, 0x115e), (0xa960, 0xa97c)];
const VOWELS: [Range; 2] = [(0x1161, 0x11a7), (0xd7b0, 0xd7c6)];
/// The syllables in one character, and the places from one without a final to the next.
const SYLLABLES: Range = (0xac00, 0xd7a3);
const FINALS: u32 = 28;

/// The first and the last of some characters.
type Range = (u32, u32);

/// The marks that are shown in a row. Tibetan and Vietnamese need three on one letter; a hundred of them cover the lines above
/// and below.
const MARKS: usize = 4;

/// Whether a character must not reach a terminal or a log: a control, or one that cannot be seen.
pub fn is_tricky(c: char) -> bool {
    if c.is_ascii() {
        return c.is_ascii_control();
    }
    let code = u32::from(c);
    match c.general_category_group() {
        GeneralCategoryGroup::Other | GeneralCategoryGroup::Separator => true,
        _ => BLANK.iter().any(|(first, last)| (*first..=*last).contains(&code)),
    }
}

/// Whether a character is of Hangul and would be written into the square of one that is none of its own.
fn is_astray(before: char, c: char) -> bool {
    let (before, code) = (u32::from(before), u32::from(c));
    let within = |of: &Range, code: u32| (of.0..=of.1).contains(&code);
    let Some((_, behind)) = HANGUL.iter().find(|(of, _)| within(of, code)) else { return false };
    let open = within(&SYLLABLES, before) && (before - SYLLABLES.0) % FINALS == 0;
    let is_final = *behind == VOWELS.as_slice();
    !(behind.iter().any(|of| within(of, before)) || (is_final && open))
}

/// What is shown of a text, one character for each, `?` where it plays tricks but for what is `kept`.
fn harmless(text: &str, kept: impl Fn(char) -> bool) -> impl Iterator<Item = char> {
    let (mut before, mut marks) = ('\0', 0);
    text.chars().map(move |c| {
        let is_mark = c.general_category_group() == GeneralCategoryGroup::Mark;
        marks = if is_mark { marks + 1 } else { 0 };
        // The halves of a block are as fine as scripts are for this.
        let script = |c: char| u32::from(c) >> 7;
        let stacks = STACKERS.contains(&u32::from(c)) && script(before) != script(c);
        let tricky = is_tricky(c) || stacks || marks > MARKS || is_astray(before, c);
        // What is not shown is nothing to stand behind.
        before = if tricky && !kept(c) { '?' } else { c };
        before
    })
}

/// `text` with `?` for every character that plays tricks, the end of a line included: for what is one line.
pub fn plain(text: &str) -> String {
    harmless(text, |_| false).collect()
}

/// `text`, cut to `most` characters; characters that play tricks, but not the end of a line, become `?`.
pub(crate) fn shown(text: &str, most: usize) -> String {
    let kept: String = harmless(text, |c| c == '\n').take(most).collect();
    if text.chars().nth(most).is_some() { kept + "..." } else { kept }
}

/// `text` as one line, cut to `most` characters, with `?` for every character that plays tricks.
pub fn line(text: &str, most: usize) -> String {
    shown(&plain(text), most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quotation_is_cut_between_characters_and_harmless() {
        assert_eq!(shown("关断三号阀门", 2), "关断...");
        assert_eq!(shown("关断", 2), "关断");
        assert_eq!(shown("a\u{1b}[2J\nb\u{7f}", 10), "a?[2J\nb?");
    }

    #[test]
    fn what_turns_the_writing_or_cannot_be_seen_becomes_a_question_mark_and_letters_stay() {
        // An override, an isolate, the Arabic letter mark, a joiner, a byte order mark, both separators, a tag, a variation
        // selector of each kind, a soft hyphen, a filler, an annotation.
        let bad = "\u{202e}\u{2066}\u{61c}\u{200d}\u{feff}\u{2028}\u{2029}\u{e0041}\u{fe0f}\u{e0100}\u{ad}\u{3164}\u{fff9}";
        assert_eq!(plain(bad), "?".repeat(13));
        // Blank by name, joiners of hieroglyphs, fillers, a null note.
        let bad = "\u{2800}\u{13430}\u{13441}\u{115f}\u{ffa0}\u{16fe4}\u{1d159}\u{34f}";
        assert_eq!(plain(bad), "?".repeat(8));
        // Private use, not assigned, no character at all.
        assert_eq!(plain("\u{e000}\u{10fffd}\u{378}\u{2065}\u{fdd0}\u{ffff}"), "?".repeat(6));
        for good in ["engine/system", "关断三号阀门", "Ünïcode é e\u{301}", "نظام", "система", "🙂"]
        {
            assert_eq!(plain(good), good);
        }
    }

    #[test]
    fn what_stacks_letters_is_shown_in_its_script_only_and_of_marks_four_in_a_row() {
        for word in ["မန္တလေး", "ភ្នំពេញ", "हिन्दी", "ภาษาไทยนี้", "Việt"]
        {
            assert_eq!(plain(word), word);
        }
        let apart: String = STACKERS.iter().flat_map(|code| ['a', char::from_u32(*code).unwrap()]).collect();
        assert_eq!(plain(&apart), "a?".repeat(STACKERS.len()));
        let many = format!("a{}b\u{301}", "\u{301}".repeat(100));
        assert_eq!(plain(&many), format!("a{}{}b\u{301}", "\u{301}".repeat(4), "?".repeat(96)));
    }

    #[test]
    fn a_vowel_or_a_final_of_hangul_is_shown_in_a_syllable_only() {
        // In one character each, in letters, a syllable without a final and one behind it, of the extensions.
        for word in [
            "한글",
            "\u{1112}\u{1161}\u{11ab}\u{1100}\u{1173}\u{11af}",
            "가\u{11a8}",
            "\u{a960}\u{d7b0}\u{d7cb}",
        ] {
            assert_eq!(plain(word), word);
        }
        for code in (0x1161..=0x11ff).chain(0xd7b0..=0xd7c6).chain(0xd7cb..=0xd7fb) {
            let c = char::from_u32(code).unwrap();
            assert_eq!(plain(&format!("{c}root{c}{c}")), "?root??", "{code:x}");
        }
        // A second vowel, a second final, a final behind an initial, and behind a syllable that has one.
        let (vowel, last) = ('\u{1161}', '\u{11a8}');
        let many =
            format!("\u{1100}{vowel}{vowel}{last} \u{1100}{vowel}{last}{last} \u{1100}{last} 각{last}");
        assert_eq!(plain(&many), format!("\u{1100}{vowel}?? \u{1100}{vowel}{last}? \u{1100}? 각?"));
    }

    #[test]
    fn of_all_spaces_the_one_of_ascii_is_shown() {
        let spaces: Vec<char> = ('\0'..=char::MAX).filter(|c| c.is_whitespace() && !is_tricky(*c)).collect();
        assert_eq!(spaces, [' ']);
    }

    #[test]
    fn what_is_listed_as_blank_would_be_shown_by_its_category() {
        let mut last = 0;
        for (first, end) in BLANK {
            assert!(last < first && first <= end, "in order, without overlap: {first:x}");
            last = end;
            let shown = |code: &u32| {
                let c = char::from_u32(*code).unwrap();
                let group = c.general_category_group();
                !matches!(group, GeneralCategoryGroup::Other | GeneralCategoryGroup::Separator)
            };
            // Else the rule does without it; single places in a row of modifiers are not assigned.
            assert!(shown(&first) && shown(&end), "{first:x}");
        }
    }
}
