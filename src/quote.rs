//! How what came from outside is shown: quoted in errors, in logs, on terminals.
//!
//! Owns nothing. Invariant: what comes out holds no character that could play tricks on a terminal or on who reads it:
//! no control, nothing that turns the direction of writing, and nothing that is there and cannot be seen.

/// Characters that are there and cannot be seen, as ranges: those with the property Default_Ignorable_Code_Point (Unicode 16.0,
/// DerivedCoreProperties.txt: joiners and other characters of no width, the controls of writing direction, variation selectors,
/// tags, fillers), and beside these the separators of lines and paragraphs (categories Zl and Zp) and the marks of
/// interlinear annotation, which are of category Cf. Every character of the property Bidi_Control is among them.
const INVISIBLE: [(u32, u32); 19] = [
    (0x00ad, 0x00ad),
    (0x034f, 0x034f),
    (0x061c, 0x061c),
    (0x115f, 0x1160),
    (0x17b4, 0x17b5),
    (0x180b, 0x180f),
    (0x200b, 0x200f),
    // With the two separators, which stand just before the embeddings and overrides.
    (0x2028, 0x202e),
    (0x2060, 0x206f),
    (0x3164, 0x3164),
    (0xfe00, 0xfe0f),
    (0xfeff, 0xfeff),
    (0xffa0, 0xffa0),
    // With the marks of annotation.
    (0xfff0, 0xfffb),
    (0x1_bca0, 0x1_bca3),
    (0x1_d173, 0x1_d17a),
    (0xe_0000, 0xe_001f),
    (0xe_0020, 0xe_007f),
    (0xe_0080, 0xe_0fff),
];

/// Whether a character must not reach a terminal or a log: a control, or one that cannot be seen.
pub fn is_tricky(c: char) -> bool {
    let code = u32::from(c);
    c.is_control() || INVISIBLE.iter().any(|(first, last)| (*first..=*last).contains(&code))
}

/// `text` with `?` for every character that plays tricks, the end of a line included: for what is one line.
pub fn plain(text: &str) -> String {
    text.chars().map(|c| if is_tricky(c) { '?' } else { c }).collect()
}

/// `text`, cut to `most` characters; characters that play tricks, but not the end of a line, become `?`.
pub(crate) fn shown(text: &str, most: usize) -> String {
    let harmless = |c: char| if is_tricky(c) && c != '\n' { '?' } else { c };
    let kept: String = text.chars().take(most).map(harmless).collect();
    if text.chars().nth(most).is_some() { kept + "..." } else { kept }
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
        for good in ["engine/system", "关断三号阀门", "Ünïcode é e\u{301}", "نظام", "система", "🙂"]
        {
            assert_eq!(plain(good), good);
        }
        let mut last = 0;
        for (first, end) in INVISIBLE {
            assert!(last < first && first <= end, "in order, without overlap: {first:x}");
            last = end;
        }
    }
}
