//! Sorts text by kind, so that different parts of it have different content.

/// Maximum length of a block; blocks are shorter if the text would otherwise have too few of them.
const MAX_BLOCK: usize = 4 << 10;

/// Minimum number of blocks, for a text with at least as many bytes.
const BLOCKS: usize = 256;

/// Returns the share of ASCII letters: high in prose and comments, low in tables and dense code.
pub(crate) fn letters(text: &[u8]) -> f64 {
    let letters = text.iter().filter(|byte| byte.is_ascii_alphabetic()).count();
    letters as f64 / text.len().max(1) as f64
}

/// Returns the blocks of `text`, sorted by their shares of letters. The sort is stable.
pub(super) fn sorted(text: &[u8]) -> Vec<u8> {
    let block = (text.len() / BLOCKS).clamp(1, MAX_BLOCK);
    let mut blocks: Vec<&[u8]> = text.chunks(block).collect();
    blocks.sort_by(|a, b| letters(a).total_cmp(&letters(b)));
    blocks.concat()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keyed::Stream;

    #[test]
    fn letters_are_counted_and_nothing_else() {
        assert!((letters(b"ab 1, 2:\xc3\xa4") - 0.2).abs() < 1e-12);
        assert_eq!((letters(b""), letters(b"xY"), letters(b"12")), (0.0, 1.0, 0.0));
    }

    #[test]
    fn blocks_are_sorted_and_every_byte_stays() {
        for len in [0, 1, 255, 256, 257, 10_000, BLOCKS * MAX_BLOCK + 5] {
            let text: Vec<u8> = (0..len as u64).map(|i| Stream::new(3, &[]).below(i, 128) as u8).collect();
            let sorted = sorted(&text);
            let counts = |text: &[u8]| {
                text.iter().fold([0; 256], |mut counts, &byte| {
                    counts[usize::from(byte)] += 1;
                    counts
                })
            };
            assert_eq!(counts(&sorted), counts(&text), "{len}");
        }
        let (mut text, prose) = (b"1, 2; 3: ".repeat(2000), b"a word and a word ".repeat(1000));
        text.splice(9000..9000, prose.iter().copied());
        let sorted = sorted(&text);
        let (first, last) = sorted.split_at(sorted.len() / 4);
        assert!(letters(first) < 0.01 && letters(&last[last.len() / 2..]) > 0.7);
    }
}
