//! SplitParts of something that can be split.

/// Iterator over the parts of a value that can be split, such as several vectors of one length, each with the index of its first element.
///
/// ```
/// use meshstep_tensor::SplitParts;
///
/// type Both<'a> = (&'a mut [f32], &'a [f32]);
///
/// fn split<'a>((x, y): Both<'a>, at: usize) -> (Both<'a>, Both<'a>) {
///     let ((x, x_rest), (y, y_rest)) = (x.split_at_mut(at), y.split_at(at));
///     ((x, y), (x_rest, y_rest))
/// }
///
/// let (mut x, y) = ([0f32; 5], [1f32, 2.0, 3.0, 4.0, 5.0]);
/// for (first, (x, y)) in SplitParts::new((&mut x[..], &y[..]), 5, 2, split) {
///     assert!(first % 2 == 0 && x.len() <= 2);
///     x.copy_from_slice(y);
/// }
/// assert_eq!(x, y);
/// ```
#[derive(Debug)]
pub struct SplitParts<V, F> {
    /// What is left: elements `first..end`.
    rest: Option<V>,
    first: usize,
    end: usize,
    part: usize,
    split: F,
}

impl<V, F: Fn(V, usize) -> (V, V)> SplitParts<V, F> {
    /// Cuts a value of `len` elements into parts of `part` elements and a last, shorter one; none if `len` is 0. `split` splits a value
    /// into its first elements, as many as given, and the others.
    pub fn new(value: V, len: usize, part: usize, split: F) -> Self {
        SplitParts { rest: Some(value), first: 0, end: len, part: part.max(1), split }
    }
}

impl<V, F: Fn(V, usize) -> (V, V)> Iterator for SplitParts<V, F> {
    type Item = (usize, V);

    fn next(&mut self) -> Option<(usize, V)> {
        let (first, len) = (self.first, self.end - self.first);
        if len == 0 {
            return None;
        }
        let mut part = self.rest.take()?;
        if len > self.part {
            let (left, right) = (self.split)(part, self.part);
            (part, self.rest) = (left, Some(right));
        }
        self.first += len.min(self.part);
        Some((first, part))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let len = (self.end - self.first).div_ceil(self.part);
        (len, Some(len))
    }
}

impl<V, F: Fn(V, usize) -> (V, V)> DoubleEndedIterator for SplitParts<V, F> {
    fn next_back(&mut self) -> Option<(usize, V)> {
        let len = self.end - self.first;
        if len <= self.part {
            return self.next();
        }
        // Cuts are at multiples of the length of a part, from whichever end.
        let keep = (len - 1) / self.part * self.part;
        let (left, right) = (self.split)(self.rest.take()?, keep);
        (self.rest, self.end) = (Some(left), self.first + keep);
        Some((self.end, right))
    }
}

impl<V, F: Fn(V, usize) -> (V, V)> ExactSizeIterator for SplitParts<V, F> {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ends_give_the_same_parts() {
        for len in 0..40usize {
            let mut values: Vec<u8> = (0..len as u8).collect();
            for part in 1..20 {
                let expected: Vec<(usize, Vec<u8>)> =
                    values.chunks(part).enumerate().map(|(i, v)| (i * part, v.to_vec())).collect();
                for pattern in 0..8u32 {
                    let mut rest =
                        SplitParts::new(&mut values[..], len, part, |v: &mut [u8], at| v.split_at_mut(at));
                    let mut found = Vec::new();
                    for turn in 0.. {
                        let left = rest.len();
                        assert_eq!(left, expected.len() - found.len());
                        let front = pattern >> (turn % 3) & 1 == 0;
                        let Some((at, v)) = (if front { rest.next() } else { rest.next_back() }) else {
                            break;
                        };
                        found.push((at, v.to_vec()));
                    }
                    found.sort();
                    assert_eq!(found, expected, "{len} {part} {pattern}");
                }
            }
        }
    }
}
