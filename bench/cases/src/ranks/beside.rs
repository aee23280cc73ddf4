//! Ranks of this library in turns with another system.

use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Result, anyhow};
use meshstep_comm::Communicator;

use super::{Player, together};
use crate::race::{Contestant, race};
use crate::samples::Samples;

/// Samples of the systems that took turns: this library, the other system, and the copy.
#[derive(Debug)]
pub struct Race {
    pub ours: Samples,
    pub theirs: Samples,
    pub floor: Samples,
}

impl Race {
    /// Races this library, the other system and the floor in turns.
    pub fn run<X>(on: &mut X, rounds: usize, turns: [Contestant<'_, X>; 3]) -> Result<Self> {
        let mut samples = race(on, rounds, turns.into())?.into_iter();
        let mut next = || samples.next().unwrap_or_default();
        Ok(Race { ours: next(), theirs: next(), floor: next() })
    }
}

/// A rank, and the other system. Rank 0 runs the other system, and the other ranks wait for rank 0.
struct Beside<'p, P> {
    /// Player of the turns [`OURS`] and [`FLOOR`].
    own: P,
    rank: usize,
    theirs: &'p Mutex<&'p mut (dyn FnMut() -> Result<()> + Send)>,
}

pub const OURS: usize = 0;
const THEIRS: usize = 1;
const FLOOR: usize = 2;

impl<P: Player> Player for Beside<'_, P> {
    fn play(&mut self, turn: usize) -> Result<()> {
        match (turn, self.rank) {
            (THEIRS, 0) => {
                let mut theirs = self.theirs.lock().unwrap_or_else(PoisonError::into_inner);
                (*theirs)()
            }
            (THEIRS, _) => Ok(()),
            _ => self.own.play(turn),
        }
    }
}

/// Runs this library and the floor on `ranks` ranks, in turns with the other system, which measures its own time.
pub fn in_turns<P: Player>(
    (ranks, rounds): (usize, usize),
    own: impl Fn(Arc<dyn Communicator>) -> Result<P> + Sync,
    mut run: impl FnMut() -> Result<f64> + Send,
) -> Result<Race> {
    let mut seconds = Vec::new();
    let mut theirs = || -> Result<()> {
        seconds.push(run()?);
        Ok(())
    };
    let shared: Mutex<&mut (dyn FnMut() -> Result<()> + Send)> = Mutex::new(&mut theirs);
    let samples = together(ranks, (FLOOR + 1, rounds), |comm| {
        let rank = comm.rank();
        Ok(Beside { own: own(comm)?, rank, theirs: &shared })
    })?;
    let [ours, _, floor] = <[Samples; FLOOR + 1]>::try_from(samples)
        .map_err(|_| anyhow!("the samples of a turn are missing"))?;
    // The first round does not count on either side.
    Ok(Race { ours, theirs: seconds.into_iter().skip(1).collect(), floor })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collectives::Only;

    #[test]
    fn ours_and_theirs_take_turns_and_their_clock_counts() {
        let mut calls = 0.0;
        let own = |comm: Arc<dyn Communicator>| Only::new(comm, 64, 0);
        let Race { ours, theirs, floor } = in_turns((4, 3), own, || {
            calls += 1.0;
            Ok(calls)
        })
        .unwrap();
        assert_eq!(theirs, [2.0, 3.0, 4.0].into_iter().collect());
        assert!([ours, floor].iter().all(|own| own.median().rounds == 3 && own.median().low > 0.0));
        let fails = in_turns((4, 3), own, || Err(anyhow!("gone")));
        assert_eq!(fails.unwrap_err().to_string(), "gone");
    }
}
