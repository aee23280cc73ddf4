//! Numbers and texts as bytes. Numbers compare as their bytes do, so lists of them are sorted without being decoded.

/// Appends a number in 1 to 9 bytes.
pub(crate) fn put(out: &mut Vec<u8>, number: u64) {
    match number {
        0..=240 => out.push(number as u8),
        241..=2287 => out.extend([241 + ((number - 240) >> 8) as u8, (number - 240) as u8]),
        2288..=67823 => out.extend([249, ((number - 2288) >> 8) as u8, (number - 2288) as u8]),
        _ => {
            let len = 8 - number.leading_zeros() as usize / 8;
            out.push(247 + len as u8);
            out.extend(&number.to_be_bytes()[8 - len..]);
        }
    }
}

/// Returns the number of bytes that [`put`] appends.
fn len(number: u64) -> usize {
    match number {
        0..=240 => 1,
        241..=2287 => 2,
        2288..=67823 => 3,
        _ => 9 - number.leading_zeros() as usize / 8,
    }
}

/// Appends a text and its length.
pub(crate) fn put_text(out: &mut Vec<u8>, text: &str) {
    put(out, text.len() as u64);
    out.extend(text.as_bytes());
}

/// Appends numbers, and before them their length in bytes.
pub(crate) fn put_list(out: &mut Vec<u8>, numbers: &[u64]) {
    put(out, numbers.iter().map(|&number| len(number) as u64).sum());
    numbers.iter().for_each(|&number| put(out, number));
}

/// Appends bytes that `fill` appends, and before them their length.
pub(crate) fn put_block<T>(out: &mut Vec<u8>, fill: impl FnOnce(&mut Vec<u8>) -> T) -> T {
    let hole = out.len();
    out.extend([0; 4]);
    let filled = fill(out);
    let len = (out.len() - hole - 4) as u32;
    out[hole..hole + 4].copy_from_slice(&len.to_le_bytes());
    filled
}

/// Reader of such bytes. Behind the end there are zeros and empty texts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cursor<'b>(pub(crate) &'b [u8]);

impl<'b> Cursor<'b> {
    pub(crate) fn is_at_end(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn bytes(&mut self, len: usize) -> &'b [u8] {
        let (bytes, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        bytes
    }

    fn big_endian(&mut self, len: usize) -> u64 {
        self.bytes(len).iter().fold(0, |number, &byte| number << 8 | u64::from(byte))
    }

    pub(crate) fn number(&mut self) -> u64 {
        match self.big_endian(1) {
            first @ 0..=240 => first,
            first @ 241..=248 => 240 + ((first - 241) << 8 | self.big_endian(1)),
            249 => 2288 + self.big_endian(2),
            first => self.big_endian(first as usize - 247),
        }
    }

    pub(crate) fn text(&mut self) -> &'b str {
        let len = self.number() as usize;
        std::str::from_utf8(self.bytes(len)).unwrap_or_default()
    }

    /// Returns the bytes of a list.
    pub(crate) fn list(&mut self) -> &'b [u8] {
        let len = self.number() as usize;
        self.bytes(len)
    }

    pub(crate) fn block(&mut self) -> &'b [u8] {
        let len = self.bytes(4).try_into().map_or(0, u32::from_le_bytes);
        self.bytes(len as usize)
    }
}

/// Returns the numbers of a list.
pub(crate) fn numbers(list: &[u8]) -> impl Iterator<Item = u64> {
    let mut cursor = Cursor(list);
    std::iter::from_fn(move || (!cursor.is_at_end()).then(|| cursor.number()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_come_back_and_compare_as_bytes() {
        let near = |at: u64| at.saturating_sub(2)..=at.saturating_add(2);
        let bounds = [0, 240, 495, 2287, 2288, 67823].into_iter().chain((1..64).map(|bit| 1 << bit));
        let mut all: Vec<u64> = bounds.chain([u64::MAX]).flat_map(near).collect();
        all.sort_unstable();
        all.dedup();
        let encoded = |number: u64| {
            let mut out = Vec::new();
            put(&mut out, number);
            out
        };
        for pair in all.windows(2) {
            let [a, b] = [encoded(pair[0]), encoded(pair[1])];
            assert!(a < b, "{pair:?}");
            assert_eq!((a.len(), Cursor(&a).number()), (len(pair[0]), pair[0]));
        }
        let mut out = Vec::new();
        put_list(&mut out, &all);
        put_text(&mut out, "w");
        put_block(&mut out, |out| put_text(out, "in"));
        let mut cursor = Cursor(&out);
        assert_eq!(numbers(cursor.list()).collect::<Vec<_>>(), all);
        assert_eq!((cursor.text(), Cursor(cursor.block()).text(), cursor.is_at_end()), ("w", "in", true));
        assert_eq!((cursor.number(), cursor.text()), (0, ""));
    }
}
