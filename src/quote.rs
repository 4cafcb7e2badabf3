//! How errors quote what came from outside.
//!
//! Owns nothing. Invariant: what is quoted is short, and holds no character that could play tricks on a terminal.

/// `text`, cut to `most` characters; control characters but the end of a line become `?`.
pub(crate) fn shown(text: &str, most: usize) -> String {
    let harmless = |c: char| if c.is_control() && c != '\n' { '?' } else { c };
    let kept: String = text.chars().take(most).map(harmless).collect();
    if text.chars().nth(most).is_some() { kept + "..." } else { kept }
}

#[cfg(test)]
mod tests {
    use super::shown;

    #[test]
    fn a_quotation_is_cut_between_characters_and_harmless() {
        assert_eq!(shown("关断三号阀门", 2), "关断...");
        assert_eq!(shown("关断", 2), "关断");
        assert_eq!(shown("a\u{1b}[2J\nb\u{7f}", 10), "a?[2J\nb?");
    }
}
