//! What shards tell each other after an evaluation or before a direction: one vector of sums and one of maxima.

use super::Loss;
use crate::{ExactSum, Reduce, ReduceError, ordered, unordered};
use meshstep_tensor::DType;
use std::ops::Range;

/// Counts at the head of the sums: gradient elements, loss parts, and elements of a new pair that are not finite; weights.
const COUNTS: usize = 4;
/// Exact sums of their own names, and how many of them travel whole and always; the others are products, as those of rows are.
const SCALARS: usize = 6;
const WHOLE: usize = 4;
/// Words before the first product.
const HEAD: usize = COUNTS + WHOLE * ExactSum::WORDS;
/// Words of the maxima.
const MAXIMA: usize = 7;

/// What one shard brings, and what all have together afterwards.
#[derive(Debug)]
pub(super) struct Fold {
    words: Vec<u64>,
    /// The words of a product's sum that travel: f32 needs few.
    window: Range<usize>,
    /// The scalars; then of each row its product with the gradient.
    sums: Vec<ExactSum>,
    pub(super) mine: Brought,
}

/// Counts, maxima and marks of one shard.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Brought {
    pub(super) bad_grads: u64,
    pub(super) bad_losses: u64,
    pub(super) bad_pairs: u64,
    pub(super) weight: u64,
    pub(super) is_mean: bool,
    /// Bits of magnitudes.
    pub(super) grad_max: u64,
    pub(super) d_max: u64,
    /// 1 + the shard whose closure failed, complemented so that the lowest wins; 0: none.
    pub(super) fault: u64,
    pub(super) loss: Option<f64>,
    pub(super) digest: u64,
}

/// What all shards know.
#[derive(Clone, Copy, Debug)]
pub(super) struct Known {
    pub(super) brought: Brought,
    /// Lowest and highest whole loss.
    pub(super) losses: Option<(f64, f64)>,
    pub(super) same: bool,
}

impl Fold {
    pub(super) fn new(history_len: usize, dtype: DType) -> Self {
        let sums = sums(2 * (history_len + 1));
        let window = if dtype == DType::F32 { ExactSum::F32_PRODUCTS } else { 0..ExactSum::WORDS };
        Fold {
            words: vec![0; HEAD + (sums - WHOLE) * window.len()],
            window,
            sums: vec![ExactSum::new(); sums],
            mine: Brought::default(),
        }
    }

    /// Sums and maxima at most.
    pub(super) fn most_words(&self) -> (usize, usize) {
        (self.words.len(), MAXIMA)
    }

    /// The words that a product has.
    pub(super) fn window(&self) -> &Range<usize> {
        &self.window
    }

    /// Forgets what was brought, and makes room for `rows` measured rows.
    pub(super) fn begin(&mut self, rows: usize) {
        self.mine = Brought::default();
        self.sums[..SCALARS + rows].fill(ExactSum::new());
    }

    /// The products of `rows` rows, to be written.
    pub(super) fn products_mut(&mut self, rows: usize) -> &mut [ExactSum] {
        &mut self.sums[SCALARS..SCALARS + rows]
    }

    /// Adds to a scalar.
    pub(super) fn add(&mut self, scalar: Scalar, sum: &ExactSum) {
        self.sums[scalar as usize].merge(sum);
    }

    /// Takes in a shard's loss; returns what kind it is.
    pub(super) fn add_loss(&mut self, loss: Loss) -> u64 {
        let sum = &mut self.sums[Scalar::Loss as usize];
        let (kind, value) = match loss {
            Loss::Whole(value) => {
                self.mine.loss = Some(value);
                (1, value)
            }
            Loss::Part(value) => {
                sum.add(value);
                (2, value)
            }
            Loss::Mean { value, weight } => {
                sum.add_product(value, weight as f64);
                (self.mine.weight, self.mine.is_mean) = (weight, true);
                (3, value)
            }
        };
        self.mine.bad_losses = u64::from(!value.is_finite());
        kind
    }

    /// One exchange.
    pub(super) fn exchange(&mut self, rows: usize, reduce: &dyn Reduce) -> Result<Known, ReduceError> {
        let Fold { window, mine, .. } = self;
        let (scalars, products) = self.sums[..sums(rows)].split_at_mut(WHOLE);
        let words = &mut self.words[..HEAD + products.len() * window.len()];
        let mine = *mine;
        words[..COUNTS].copy_from_slice(&[mine.bad_grads, mine.bad_losses, mine.bad_pairs, mine.weight]);
        let (slots, _) = words[COUNTS..HEAD].as_chunks_mut::<{ ExactSum::WORDS }>();
        slots.iter_mut().zip(&*scalars).for_each(|(slot, sum)| *slot = sum.words());
        let slots = words[HEAD..].chunks_exact_mut(window.len());
        slots.zip(&*products).for_each(|(slot, sum)| sum.write_window(window, slot));
        let loss = mine.loss.map_or(0, ordered);
        let not_loss = mine.loss.map_or(0, |loss| !ordered(loss));
        let mut maxima: [u64; MAXIMA] =
            [mine.grad_max, mine.d_max, mine.fault, loss, not_loss, mine.digest, !mine.digest];
        reduce.fold(words, &mut maxima)?;
        let (slots, _) = words[COUNTS..HEAD].as_chunks::<{ ExactSum::WORDS }>();
        slots.iter().zip(scalars).for_each(|(slot, sum)| *sum = ExactSum::from_words(slot));
        let slots = words[HEAD..].chunks_exact(window.len());
        slots.zip(products).for_each(|(slot, sum)| *sum = ExactSum::from_window(window, slot));
        let [bad_grads, bad_losses, bad_pairs, weight] = [words[0], words[1], words[2], words[3]];
        let [grad_max, d_max, fault, high, not_low, digest, not_digest] = maxima;
        let losses = (high != 0).then(|| (unordered(!not_low), unordered(high)));
        let brought = Brought {
            bad_grads,
            bad_losses,
            bad_pairs,
            weight,
            is_mean: mine.is_mean,
            grad_max,
            d_max,
            fault,
            digest,
            loss: losses.map(|(_, high)| high),
        };
        Ok(Known { brought, losses, same: digest == !not_digest })
    }

    /// Whether the loss is a weighted mean.
    pub(super) fn is_mean(&self) -> bool {
        self.mine.is_mean
    }

    /// A scalar of all shards together.
    pub(super) fn scalar(&self, scalar: Scalar) -> &ExactSum {
        &self.sums[scalar as usize]
    }

    /// The products of `rows` rows with the gradient, of all shards together.
    pub(super) fn products(&self, rows: usize) -> &[ExactSum] {
        &self.sums[SCALARS..SCALARS + rows]
    }
}

/// Sums that travel where `rows` rows are measured: without any there is no new pair.
fn sums(rows: usize) -> usize {
    if rows == 0 { WHOLE } else { SCALARS + rows }
}

/// Which of the sums that have names.
#[derive(Clone, Copy, Debug)]
pub(super) enum Scalar {
    Loss,
    /// `g . g`.
    Squares,
    /// The sum of `|g|`.
    Magnitudes,
    /// `g . d`.
    Slope,
    /// Of a new pair: `d . y`.
    Curvature,
    /// And `y . y`.
    NewSquares,
}
