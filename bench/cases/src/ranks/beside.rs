//! Ranks of this library in turns with another system.

use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Result, anyhow};
use meshstep_comm::Communicator;

use super::{Player, together};
use crate::copies::{MemoryPass, PASSES, PassTimes};
use crate::race::{Contestant, race};
use crate::samples::Samples;

/// Samples of the systems that took turns: this library, the other system, and the references: a copy of the bytes that this
/// library moves, and passes over the same kind of pages.
#[derive(Debug)]
pub struct Race {
    pub ours: Samples,
    pub theirs: Samples,
    pub copy: Samples,
    pub passes: PassTimes,
}

impl Race {
    /// Races this library, the other system and the references in turns; each pass runs over `bytes` bytes.
    pub fn run<X>(
        on: &mut X,
        rounds: usize,
        turns: [Contestant<'_, X>; TURNS],
        bytes: usize,
    ) -> Result<Self> {
        Race::of(race(on, rounds, turns.into())?, bytes)
    }

    fn of(samples: Vec<Samples>, bytes: usize) -> Result<Self> {
        let [ours, theirs, copy, read, write, in_place] = <[Samples; TURNS]>::try_from(samples)
            .map_err(|_| anyhow!("the samples of a turn are missing"))?;
        Ok(Race { ours, theirs, copy, passes: PassTimes { seconds: [read, write, in_place], bytes } })
    }
}

/// A rank, and the other system. Rank 0 runs the other system, and the other ranks wait for rank 0.
struct Beside<'p, P> {
    /// Player of all turns but [`THEIRS`].
    own: P,
    rank: usize,
    theirs: &'p Mutex<&'p mut (dyn FnMut() -> Result<()> + Send)>,
}

/// Turns of a player that races another system. The turns of the passes follow [`COPY`].
pub const OURS: usize = 0;
const THEIRS: usize = 1;
pub const COPY: usize = 2;
const TURNS: usize = COPY + 1 + PASSES.len();

/// Returns the pass of a turn; `None` for the turns before them.
pub fn pass_of(turn: usize) -> Option<MemoryPass> {
    turn.checked_sub(COPY + 1).and_then(|pass| PASSES.get(pass)).copied()
}

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

/// Runs this library and the references on `ranks` ranks, in turns with the other system, which measures its own time. The passes
/// of all ranks together run over `bytes` bytes.
pub fn in_turns<P: Player>(
    (ranks, rounds): (usize, usize),
    bytes: usize,
    own: impl Fn(Arc<dyn Communicator>) -> Result<P> + Sync,
    mut run: impl FnMut() -> Result<f64> + Send,
) -> Result<Race> {
    let mut seconds = Vec::new();
    let mut theirs = || -> Result<()> {
        seconds.push(run()?);
        Ok(())
    };
    let shared: Mutex<&mut (dyn FnMut() -> Result<()> + Send)> = Mutex::new(&mut theirs);
    let samples = together(ranks, (TURNS, rounds), |comm| {
        let rank = comm.rank();
        Ok(Beside { own: own(comm)?, rank, theirs: &shared })
    })?;
    // The first round does not count on either side.
    Ok(Race { theirs: seconds.into_iter().skip(1).collect(), ..Race::of(samples, bytes)? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collectives::Only;

    #[test]
    fn ours_and_theirs_take_turns_and_their_clock_counts() {
        let mut calls = 0.0;
        let own = |comm: Arc<dyn Communicator>| Only::new(comm, 64, 0);
        let Race { ours, theirs, copy, passes } = in_turns((4, 3), 4 * 256, own, || {
            calls += 1.0;
            Ok(calls)
        })
        .unwrap();
        assert_eq!(theirs, [2.0, 3.0, 4.0].into_iter().collect());
        let measured = |samples: &Samples| samples.median().rounds == 3 && samples.median().low > 0.0;
        assert!([ours, copy].iter().chain(&passes.seconds).all(measured));
        let fails = in_turns((4, 3), 4 * 256, own, || Err(anyhow!("gone")));
        assert_eq!(fails.unwrap_err().to_string(), "gone");
    }
}
