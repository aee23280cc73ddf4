//! One row on a vector, with the copy of its bytes.

use anyhow::{Context as _, Result};
use meshstep_tensor::Threads;

use super::{Memory, Row, rows};
use crate::race::{race, timed};
use crate::samples::Samples;

/// A row, and the memory of its update.
pub struct Case {
    pub row: Row,
    memory: Memory,
}

impl Case {
    pub fn new(row: Row, len: usize) -> Result<Self> {
        Ok(Case { memory: Memory::new(&row, len)?, row })
    }

    /// Sets the threads of updates and copies.
    pub fn on(self, threads: &Threads) -> Self {
        Case { memory: self.memory.on(threads), ..self }
    }

    /// Returns the bytes that an update must read and write for each element.
    pub fn bytes(&self) -> usize {
        self.memory.bytes()
    }

    pub fn update(&mut self) {
        self.memory.update(&self.row);
    }

    /// Moves as many bytes as an update.
    pub fn copy(&mut self) {
        self.memory.copy();
    }

    /// Returns the seconds of the copy and of the update, in turns.
    pub fn times(&mut self, rounds: usize) -> Result<[Samples; 2]> {
        let contestants = vec![timed(Case::copy), timed(Case::update)];
        let mut samples = race(self, rounds, contestants)?.into_iter();
        Ok([samples.next().unwrap_or_default(), samples.next().unwrap_or_default()])
    }
}

/// Returns the row of this name on `len` parameters.
pub fn case(name: &str, len: usize) -> Result<Case> {
    let row = rows().into_iter().find(|row| row.name == name);
    Case::new(row.with_context(|| format!("no row of the table is called {name:?}"))?, len)
}
