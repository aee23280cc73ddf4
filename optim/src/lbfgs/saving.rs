//! L-BFGS state as vectors and words, for checkpoints.

use super::History;
use super::state::LbfgsState;
use crate::Error;
use meshstep_tensor::{Buffer, Slice, SliceMut};

impl LbfgsState {
    /// Iterates over every vector that later steps read, by name, in memory of the state's place: directions `d0`, `d1`, .. and `y0`, ..
    /// of the history, gradients `g0`, .., and the last direction `d` if the history has 16 bits, which is the type of its rows.
    pub fn vectors(&self) -> impl Iterator<Item = (String, Slice<'_>)> {
        let all = self.ds.iter().chain(&self.ys).chain(&self.grads).chain(&self.d);
        self.names().into_iter().zip(all.map(Buffer::as_slice))
    }

    /// Same as [`vectors`](Self::vectors), for writing.
    pub fn vectors_mut(&mut self) -> impl Iterator<Item = (String, SliceMut<'_>)> {
        let names = self.names();
        let all = self.ds.iter_mut().chain(&mut self.ys).chain(&mut self.grads).chain(&mut self.d);
        names.into_iter().zip(all.map(Buffer::as_mut))
    }

    fn names(&self) -> Vec<String> {
        let numbered = |what: &'static str, count: usize| (0..count).map(move |i| format!("{what}{i}"));
        numbered("d", self.ds.len())
            .chain(numbered("y", self.ys.len()))
            .chain(numbered("g", self.grads.len()))
            .chain(self.d.is_some().then(|| "d".to_owned()))
            .collect()
    }

    /// Returns the rest of the state: counters, the last step's length, and the history's products. Equal on every shard.
    pub fn words(&self) -> Vec<u64> {
        let head = self.before as u64 | (self.history as u64) << KIND;
        let mut words = vec![head, self.t.to_bits(), self.iterations, self.evaluations];
        self.gram.save(self.fold.window(), &mut words);
        words
    }

    /// Returns an error if [`restore`](Self::restore) would refuse these words.
    pub fn check(&self, words: &[u64]) -> Result<(), Error> {
        let [head, _, iterations, evaluations, gram @ ..] = words else { return Err(foreign(words.len())) };
        let (before, given) = parts_of(*head);
        let Some(given) = given else { return Err(foreign(words.len())) };
        if given != self.history {
            return Err(Error::History { given, expected: self.history });
        }
        let counts = [("iterations", *iterations), ("evaluations", *evaluations)];
        if let Some((name, count)) = counts.into_iter().find(|&(_, count)| count >= MOST) {
            return Err(Error::Scalar { name, value: count as f64, works: "counts below 2^53" });
        }
        let fits = before < self.grads.len() as u64 && self.gram.restored(self.fold.window(), gram).is_some();
        if fits { Ok(()) } else { Err(foreign(words.len())) }
    }

    /// Restores the state from [`words`](Self::words), with the vectors already those of that state. If the words belong to a different
    /// rule, returns an error and changes nothing.
    pub fn restore(&mut self, words: &[u64]) -> Result<(), Error> {
        self.check(words)?;
        if let [head, t, iterations, evaluations, gram @ ..] = words
            && let Some(gram) = self.gram.restored(self.fold.window(), gram)
        {
            self.gram = gram;
            (self.before, self.t) = (parts_of(*head).0 as usize, f64::from_bits(*t));
            (self.iterations, self.evaluations) = (*iterations, *evaluations);
        }
        Ok(())
    }
}

/// Position of the history's code in the first word, above the index of a gradient.
const KIND: u32 = 32;

/// Splits the first word into the index of a gradient and the type of the history.
fn parts_of(head: u64) -> (u64, Option<History>) {
    (head & ((1 << KIND) - 1), History::of_code(head >> KIND))
}

/// No run reaches counts this large.
const MOST: u64 = 1 << 53;

fn foreign(words: usize) -> Error {
    let (name, value) = ("words of a saved L-BFGS state", words as f64);
    Error::Scalar { name, value, works: "words saved by this version from a state of the same rule" }
}
