//! One row on a vector, with the copy of its bytes.

use anyhow::{Context as _, Result};
use meshstep_tensor::Threads;

use super::{Memory, Row, rows};
use crate::copies::{MemoryPass, MovedBytes, PASSES, Pages};
use crate::race::{Contestant, race, timed};
use crate::ranks::Race;
use crate::samples::Samples;

/// A row, and the memory of its update.
pub struct Case {
    pub row: Row,
    memory: Memory,
    /// As large as all vectors together; made for the first pass.
    pages: Option<Pages>,
}

impl Case {
    pub fn new(row: Row, len: usize) -> Result<Self> {
        Ok(Case { memory: Memory::new(&row, len)?, row, pages: None })
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

    /// Returns the bytes that an update moves for each element.
    pub fn moved(&self) -> MovedBytes {
        self.memory.moved()
    }

    /// Runs a reference pass over as many bytes as the vectors have.
    fn pass(&mut self, pass: MemoryPass) {
        if let Some(pages) = &mut self.pages {
            pages.pass(pass, self.memory.threads());
        }
    }

    /// Races the update with another system's and with the references. A sample of ours is the mean of `times` updates in a row.
    pub fn beside(&mut self, rounds: usize, times: usize, theirs: Contestant<'_, Case>) -> Result<Race> {
        let bytes = self.memory.held();
        self.pages.get_or_insert(Pages::new(bytes)?);
        let several = |mut work: Box<dyn FnMut(&mut Case)>| {
            timed(move |case: &mut Case| (0..times).for_each(|_| work(case)))
        };
        let pass = |pass: MemoryPass| several(Box::new(move |case| case.pass(pass)));
        let (update, copy) = (several(Box::new(Case::update)), several(Box::new(Case::copy)));
        let [read, write, in_place] = PASSES.map(pass);
        let mut race = Race::run(self, rounds, [update, theirs, copy, read, write, in_place], bytes)?;
        let own = [&mut race.ours, &mut race.copy].into_iter().chain(&mut race.passes.seconds);
        own.for_each(|samples| *samples = samples.times(1.0 / times as f64));
        Ok(race)
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
