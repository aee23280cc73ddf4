//! Sums in a binary tree over the ranks: [`Reduction::Pairwise`](crate::Reduction::Pairwise).

use super::{Accumulator, BLOCK, Contributions, WireElement};

/// Ranks whose sum is made without a loop over nodes.
const SUBTREE: usize = 8;

/// Sums one block of the values of `n` ranks into `sum`. Subtrees of eight ranks are added like the digits of a binary counter.
#[inline(always)]
pub(super) fn fold_block<T: WireElement>(from: &mut impl Contributions<T>, sum: &mut [T], n: usize) {
    subtree(from, 0, n, sum);
    if n > SUBTREE {
        rest(from, sum, n);
    }
}

/// Adds the sums of further subtrees to that of the first one.
fn rest<T: WireElement>(from: &mut impl Contributions<T>, sum: &mut [T], n: usize) {
    let (zero, len) = ([T::narrow(T::Wide::ZERO); BLOCK], sum.len());
    let mut first = zero;
    first[..len].copy_from_slice(sum);
    // Sums of complete nodes with their levels, the widest first.
    let mut sums = vec![(0u32, first)];
    for start in (SUBTREE..n).step_by(SUBTREE) {
        let (mut level, mut node) = (0, zero);
        subtree(from, start, n, &mut node[..len]);
        while let Some((_, left)) = sums.pop_if(|(of, _)| *of == level) {
            node = added(left, &node);
            level += 1;
        }
        sums.push((level, node));
    }
    let last = sums.into_iter().rev().map(|(_, node)| node).reduce(|right, left| added(left, &right));
    sum.copy_from_slice(&last.unwrap_or(zero)[..len]);
}

fn added<T: WireElement>(mut left: [T; BLOCK], right: &[T; BLOCK]) -> [T; BLOCK] {
    left.iter_mut().zip(right).for_each(|(l, r)| *l = plus(*l, *r));
    left
}

/// Sums the ranks of the subtree that begins with rank `first`, as far as there are such ranks.
#[inline(always)]
fn subtree<T: WireElement>(from: &mut impl Contributions<T>, first: usize, n: usize, sum: &mut [T]) {
    four(from, first, n, sum);
    add_node(sum, first + 4 < n, |right| four(from, first + 4, n, right));
}

#[inline(always)]
fn four<T: WireElement>(from: &mut impl Contributions<T>, first: usize, n: usize, sum: &mut [T]) {
    pair(from, first, n, sum);
    add_node(sum, first + 2 < n, |right| pair(from, first + 2, n, right));
}

#[inline(always)]
fn pair<T: WireElement>(from: &mut impl Contributions<T>, first: usize, n: usize, sum: &mut [T]) {
    sum.iter_mut().zip(from.values(first)).for_each(|(s, x)| *s = x);
    if first + 1 < n {
        sum.iter_mut().zip(from.values(first + 1)).for_each(|(s, x)| *s = plus(*s, x));
    }
}

/// Adds a node that `write` sums, if it `exists`.
#[inline(always)]
fn add_node<T: WireElement>(sum: &mut [T], exists: bool, write: impl FnOnce(&mut [T])) {
    if exists {
        let mut right = [T::narrow(T::Wide::ZERO); BLOCK];
        let right = &mut right[..sum.len()];
        write(right);
        sum.iter_mut().zip(right).for_each(|(s, x)| *s = plus(*s, *x));
    }
}

/// Returns the sum, rounded once: the wide sum of two f32 has more than twice the digits of an f32, so that rounding twice is rounding once.
#[inline(always)]
fn plus<T: WireElement>(left: T, right: T) -> T {
    T::narrow(left.widen().plus(right.widen()))
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Rows(Vec<Vec<f32>>);

    impl Contributions<f32> for Rows {
        fn values(&mut self, rank: usize) -> impl Iterator<Item = f32> {
            self.0[rank].iter().copied()
        }

        fn factor(&self, _: usize) -> f64 {
            1.0
        }
    }

    /// The definition.
    fn node(rows: &[Vec<f32>], i: usize) -> f32 {
        match rows.len() {
            1 => rows[0][i],
            n => {
                let (left, right) = rows.split_at(n.next_power_of_two() / 2);
                node(left, i) + node(right, i)
            }
        }
    }

    #[test]
    fn sums_are_those_of_the_tree() {
        for n in (1..40).chain([64, 65, 100, 127, 128, 200]) {
            let value = |rank: usize, i: usize| ((rank * 7919 + i * 104_729) % 2003) as f32 / 3.0 - 300.0;
            let rows: Vec<Vec<f32>> = (0..n).map(|rank| (0..50).map(|i| value(rank, i)).collect()).collect();
            let mut sum = vec![0f32; 50];
            fold_block(&mut Rows(rows.clone()), &mut sum, n);
            for (i, sum) in sum.iter().enumerate() {
                assert_eq!(sum.to_bits(), node(&rows, i).to_bits(), "{n} ranks, element {i}");
            }
        }
    }
}
