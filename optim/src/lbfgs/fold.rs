//! Exchange between shards after an evaluation or before a direction: one vector of sums and one of maxima.

use super::{History, Loss};
use crate::{ExactSum, Reduce, ReduceError, ordered, unordered};
use meshstep_tensor::DType;
use std::ops::Range;

/// Counts at the head of the sums: non-finite gradient elements, non-finite loss parts, non-finite elements of a new pair, and weights.
const COUNTS: usize = 4;
/// Number of named exact sums, of which `WHOLE` always travel with all words; the others travel with a window, as the rows' products do.
const SCALARS: usize = 6;
const WHOLE: usize = 4;
/// Words before the first product.
const HEAD: usize = COUNTS + WHOLE * ExactSum::WORDS;
/// Words of the maxima, of which the last travels only for a history with scales.
const MAXIMA: usize = 8;

/// Contributions of one shard, and after an exchange the totals of all shards.
#[derive(Debug)]
pub(super) struct Fold {
    words: Vec<u64>,
    /// Window of a product's words that travels; products of f32 need few words.
    window: Range<usize>,
    /// Number of maxima that travel.
    maxima: usize,
    /// Named sums, then the product of each row with the gradient, and in a rounded history with the new `y`.
    sums: Vec<ExactSum>,
    pub(super) mine: Brought,
}

/// Counts, maxima and flags of one shard.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Brought {
    pub(super) bad_grads: u64,
    pub(super) bad_losses: u64,
    pub(super) bad_pairs: u64,
    pub(super) weight: u64,
    pub(super) is_mean: bool,
    /// Bits of the gradient's and the direction's largest magnitude.
    pub(super) grad_max: u64,
    pub(super) d_max: u64,
    /// Bits of the largest change of a gradient element, if the history has scales.
    pub(super) y_max: u64,
    /// Complement of the index of the shard that failed, so that the lowest index wins; 0: none.
    pub(super) fault: u64,
    pub(super) loss: Option<f64>,
    pub(super) digest: u64,
}

/// Result of an exchange, the same on all shards.
#[derive(Clone, Copy, Debug)]
pub(super) struct Known {
    pub(super) brought: Brought,
    /// Lowest and highest whole loss.
    pub(super) losses: Option<(f64, f64)>,
    pub(super) same: bool,
}

impl Fold {
    pub(super) fn new(history_len: usize, history: History, dtype: DType) -> Self {
        let sums = sums(2 * (history_len + 1) * history.products());
        let window = if dtype == DType::F32 { ExactSum::F32_PRODUCTS } else { 0..ExactSum::WORDS };
        Fold {
            words: vec![0; HEAD + (sums - WHOLE) * window.len()],
            window,
            maxima: if history.has_scales() { MAXIMA } else { MAXIMA - 1 },
            sums: vec![ExactSum::new(); sums],
            mine: Brought::default(),
        }
    }

    /// Returns the maximum number of words of the sums and of the maxima.
    pub(super) fn most_words(&self) -> (usize, usize) {
        (self.words.len(), self.maxima)
    }

    /// Returns the window of a product's words that travels.
    pub(super) fn window(&self) -> &Range<usize> {
        &self.window
    }

    /// Resets the contributions, and makes room for `products` products of rows.
    pub(super) fn begin(&mut self, products: usize) {
        self.mine = Brought::default();
        self.sums[..SCALARS + products].fill(ExactSum::new());
    }

    /// Returns `count` products of rows, for writing.
    pub(super) fn products_mut(&mut self, count: usize) -> &mut [ExactSum] {
        &mut self.sums[SCALARS..SCALARS + count]
    }

    /// Adds to a named sum.
    pub(super) fn add(&mut self, scalar: Scalar, sum: &ExactSum) {
        self.sums[scalar as usize].merge(sum);
    }

    /// Adds a shard's loss; returns the code of its kind.
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

    /// Runs one exchange.
    pub(super) fn exchange(&mut self, products: usize, reduce: &dyn Reduce) -> Result<Known, ReduceError> {
        let Fold { window, mine, .. } = self;
        let (scalars, products) = self.sums[..sums(products)].split_at_mut(WHOLE);
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
            [mine.grad_max, mine.d_max, mine.fault, loss, not_loss, mine.digest, !mine.digest, mine.y_max];
        reduce.fold(words, &mut maxima[..self.maxima])?;
        let (slots, _) = words[COUNTS..HEAD].as_chunks::<{ ExactSum::WORDS }>();
        slots.iter().zip(scalars).for_each(|(slot, sum)| *sum = ExactSum::from_words(slot));
        let slots = words[HEAD..].chunks_exact(window.len());
        slots.zip(products).for_each(|(slot, sum)| *sum = ExactSum::from_window(window, slot));
        let [bad_grads, bad_losses, bad_pairs, weight] = [words[0], words[1], words[2], words[3]];
        let [grad_max, d_max, fault, high, not_low, digest, not_digest, y_max] = maxima;
        let losses = (high != 0).then(|| (unordered(!not_low), unordered(high)));
        let brought = Brought {
            bad_grads,
            bad_losses,
            bad_pairs,
            weight,
            is_mean: mine.is_mean,
            grad_max,
            d_max,
            y_max,
            fault,
            digest,
            loss: losses.map(|(_, high)| high),
        };
        Ok(Known { brought, losses, same: digest == !not_digest })
    }

    /// Returns true if the loss is a weighted mean.
    pub(super) fn is_mean(&self) -> bool {
        self.mine.is_mean
    }

    /// Returns a named sum, over all shards after an exchange.
    pub(super) fn scalar(&self, scalar: Scalar) -> &ExactSum {
        &self.sums[scalar as usize]
    }

    /// Returns `count` products of rows, over all shards after an exchange.
    pub(super) fn products(&self, count: usize) -> &[ExactSum] {
        &self.sums[SCALARS..SCALARS + count]
    }
}

/// Returns the number of sums that travel with `products` products of rows. Without rows there is no new pair.
fn sums(products: usize) -> usize {
    if products == 0 { WHOLE } else { SCALARS + products }
}

/// Index of a named sum.
#[derive(Clone, Copy, Debug)]
pub(super) enum Scalar {
    Loss,
    /// `g . g`.
    Squares,
    /// The sum of `|g|`.
    Magnitudes,
    /// `g . d`.
    Slope,
    /// `d . y` of a new pair; zero in a rounded history, which has it among the products of rows.
    Curvature,
    /// `y . y` of a new pair, with the same exception.
    NewSquares,
}
