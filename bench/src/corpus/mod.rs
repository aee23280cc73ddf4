//! Training data of the network: text split into a training part and a held-out part, and batches of both.
//!
//! All functions depend only on the text, the seed and the place in the run, so that every stage uses the same batches, and
//! every rank its own.

mod files;
mod kinds;

pub(crate) use files::Text;

use std::ops::Range;

use anyhow::{Result, ensure};

use crate::gpt::{Batch, VOCAB};
use crate::keyed::Stream;

/// The text is cut into blocks; the last block of every group of this size is held out.
const HELD_OUT_ONE_IN: usize = 16;

/// Maximum length of a block; blocks are shorter if the text would otherwise have too few of them.
const MAX_BLOCK: usize = 64 << 10;

/// Training text and held-out text.
#[derive(Clone, Debug)]
pub(crate) struct Corpus {
    train: Vec<u8>,
    held_out: Vec<u8>,
    context: usize,
}

/// Position of a training batch in a run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    /// Seed of the run.
    pub(crate) seed: u64,
    /// Step, from 0.
    pub(crate) step: usize,
    /// Rank, from 0.
    pub(crate) rank: usize,
}

impl Corpus {
    /// Splits `text` for sequences of `context` bytes.
    ///
    /// # Errors
    /// If the text is too short to give both parts a sequence and the following byte.
    pub(crate) fn new(text: &[u8], context: usize) -> Result<Self> {
        let least = HELD_OUT_ONE_IN * (context + 1);
        ensure!(
            text.len() >= least,
            "the corpus has {} bytes, and sequences of {context} bytes need at least {least}: give --corpus a \
             longer file, or a folder with more text",
            text.len()
        );
        let block = (text.len() / (4 * HELD_OUT_ONE_IN)).clamp(context + 1, MAX_BLOCK);
        let (mut train, mut held_out) = (Vec::new(), Vec::new());
        for (i, block) in text.chunks(block).enumerate() {
            let last_of_its_group = i % HELD_OUT_ONE_IN == HELD_OUT_ONE_IN - 1;
            if last_of_its_group { &mut held_out } else { &mut train }.extend_from_slice(block);
        }
        Ok(Self { train, held_out, context })
    }

    /// Returns the lengths of the training text and the held-out text in bytes.
    pub(crate) fn lens(&self) -> (usize, usize) {
        (self.train.len(), self.held_out.len())
    }

    /// Returns training sequences at positions that depend only on `place` and the row.
    pub(crate) fn train_batch(&self, place: Place, rows: usize) -> Batch {
        self.train_batch_of(self.whole(), place, rows)
    }

    /// Returns the byte range of the whole training text.
    pub(crate) fn whole(&self) -> Range<usize> {
        0..self.train.len()
    }

    /// Returns the byte range of the `index`-th of `of` equal parts of the training text.
    ///
    /// # Errors
    /// If a part would be shorter than a sequence and the following byte.
    pub(crate) fn part(&self, index: usize, of: usize) -> Result<Range<usize>> {
        let (len, least) = (self.train.len(), self.context + 1);
        ensure!(
            len / of >= least,
            "{len} bytes to train on are less than {least} for each of {of} workers: give --corpus a longer file, or fewer --ranks"
        );
        Ok(len * index / of..len * (index + 1) / of)
    }

    /// Sorts the training text by kind, so that different parts of it have different content.
    pub(crate) fn by_kind(self) -> Self {
        Self { train: kinds::sorted(&self.train), ..self }
    }

    /// Returns the share of letters in a part of the training text.
    pub(crate) fn letters(&self, part: Range<usize>) -> f64 {
        kinds::letters(&self.train[part])
    }

    /// Returns sequences of one part of the training text, at positions as in [`train_batch`](Self::train_batch).
    pub(crate) fn train_batch_of(&self, part: Range<usize>, place: Place, rows: usize) -> Batch {
        let stream = Stream::new(place.seed, &[place.step as u64, place.rank as u64]);
        let text = &self.train[part];
        let starts = (text.len() - self.context) as u64;
        self.batch(text, (0..rows as u64).map(|row| stream.below(row, starts) as usize))
    }

    /// Returns the `index`-th of `count` batches of held-out sequences; together they are spread evenly over the held-out
    /// text.
    pub(crate) fn held_out_batch(&self, index: usize, count: usize, rows: usize) -> Batch {
        let last_start = self.held_out.len() - self.context - 1;
        let sequences = (count * rows).max(2);
        self.batch(&self.held_out, (0..rows).map(|row| (index * rows + row) * last_start / (sequences - 1)))
    }

    fn batch(&self, text: &[u8], starts: impl Iterator<Item = usize>) -> Batch {
        let mut batch = Batch { rows: 0, inputs: Vec::new(), targets: Vec::new() };
        for start in starts {
            batch.rows += 1;
            batch.inputs.extend_from_slice(&text[start..start + self.context]);
            batch.targets.extend_from_slice(&text[start + 1..start + 1 + self.context]);
        }
        batch
    }
}

/// Returns the entropy of the byte frequencies of `text` in nats per byte: `-sum p ln p`.
pub(crate) fn byte_entropy(text: &[u8]) -> f64 {
    let mut counts = [0u64; VOCAB];
    for &byte in text {
        counts[usize::from(byte)] += 1;
    }
    let share = |&count: &u64| count as f64 / text.len() as f64;
    -counts.iter().filter(|&&count| count > 0).map(share).map(|p| p * libm::log(p)).sum::<f64>()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn corpus(len: usize, context: usize) -> Corpus {
        let text: Vec<u8> = (0..len as u64).map(|i| Stream::new(5, &[]).below(i, 256) as u8).collect();
        Corpus::new(&text, context).unwrap()
    }

    #[test]
    fn one_block_in_sixteen_is_held_out_and_nothing_is_lost() {
        let corpus = corpus(100_000, 32);
        let (train, held_out) = corpus.lens();
        assert_eq!(train + held_out, 100_000);
        assert!((5_000..7_500).contains(&held_out), "{held_out} bytes held out");
    }

    #[test]
    fn no_held_out_sequence_occurs_in_the_training_text() {
        let corpus = corpus(20_000, 32);
        let batch = corpus.held_out_batch(0, 1, 8);
        for row in batch.inputs.chunks(32) {
            assert!(!corpus.train.windows(32).any(|window| window == row));
        }
    }

    #[test]
    fn batches_depend_on_seed_step_and_rank_and_on_nothing_else() {
        let corpus = corpus(50_000, 16);
        let place = Place { seed: 1, step: 2, rank: 3 };
        let batch = corpus.train_batch(place, 4);
        assert_eq!(batch, corpus.train_batch(place, 4));
        for other in [Place { seed: 2, ..place }, Place { step: 3, ..place }, Place { rank: 0, ..place }] {
            assert_ne!(batch, corpus.train_batch(other, 4), "{other:?}");
        }
        assert_eq!(corpus.train_batch(place, 2).inputs, batch.inputs[..32]);
    }

    #[test]
    fn parts_are_all_of_the_text_and_batches_stay_within_theirs() {
        let corpus = corpus(50_000, 16);
        let parts: Vec<Range<usize>> = (0..7).map(|i| corpus.part(i, 7).unwrap()).collect();
        assert_eq!((parts[0].start, parts[6].end), (0, corpus.lens().0));
        assert!(parts.windows(2).all(|pair| pair[0].end == pair[1].start));
        let place = Place { seed: 1, step: 2, rank: 3 };
        for part in &parts {
            let text = &corpus.train[part.clone()];
            let batch = corpus.train_batch_of(part.clone(), place, 50);
            assert!(batch.inputs.chunks(16).all(|row| text.windows(16).any(|window| window == row)));
        }
        assert_eq!(corpus.train_batch_of(0..corpus.train.len(), place, 4), corpus.train_batch(place, 4));
        let error = corpus.part(0, 3000).unwrap_err().to_string();
        assert!(error.contains("fewer --ranks"), "{error}");
    }

    #[test]
    fn by_kind_each_part_has_more_letters_than_the_one_before_and_held_out_text_stays() {
        let corpus = corpus(200_000, 16);
        let (lens, held_out) = (corpus.lens(), corpus.held_out.clone());
        let letters = |corpus: &Corpus| -> Vec<f64> {
            (0..4).map(|i| corpus.letters(corpus.part(i, 4).unwrap())).collect()
        };
        let apart = |letters: &[f64]| letters.windows(2).all(|pair| pair[0] + 0.01 < pair[1]);
        assert!(!apart(&letters(&corpus)));
        let corpus = corpus.by_kind();
        assert!(apart(&letters(&corpus)), "{:?}", letters(&corpus));
        assert_eq!((corpus.lens(), corpus.held_out), (lens, held_out));
    }

    #[test]
    fn targets_are_the_inputs_one_byte_on() {
        let batch = corpus(50_000, 16).train_batch(Place { seed: 0, step: 0, rank: 0 }, 3);
        assert_eq!((batch.rows, batch.inputs.len(), batch.targets.len()), (3, 48, 48));
        for (inputs, targets) in batch.inputs.chunks(16).zip(batch.targets.chunks(16)) {
            assert_eq!(inputs[1..], targets[..15]);
        }
    }

    #[test]
    fn held_out_batches_reach_from_the_first_byte_to_the_last() {
        let corpus = corpus(50_000, 16);
        let (first, last) = (corpus.held_out_batch(0, 5, 2), corpus.held_out_batch(4, 5, 2));
        assert_eq!(first.inputs[..16], corpus.held_out[..16]);
        assert_eq!(last.targets.last(), corpus.held_out.last());
    }

    #[test]
    fn the_shortest_corpus_works_and_a_byte_less_says_what_would() {
        let least = HELD_OUT_ONE_IN * 33;
        let corpus = corpus(least, 32);
        assert_eq!(corpus.held_out_batch(0, 1, 1).rows, 1);
        let error = Corpus::new(&vec![b'a'; least - 1], 32).unwrap_err().to_string();
        assert!(error.contains("527 bytes") && error.contains("at least 528"), "{error}");
    }

    #[test]
    fn entropy_of_known_texts() {
        assert!((byte_entropy(b"abcd") - 4f64.ln()).abs() < 1e-12);
        assert!(byte_entropy(b"aaaa").abs() < 1e-12);
        let all: Vec<u8> = (0..=255).collect();
        assert!((byte_entropy(&all) - 256f64.ln()).abs() < 1e-12);
    }
}
