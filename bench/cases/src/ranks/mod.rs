//! Work that ranks do together, in turns with other work.

mod beside;
mod construction;

pub use beside::{COPY, OURS, Race, in_turns, pass_of};
pub use construction::construction;

use std::sync::{Arc, Barrier, Mutex, PoisonError};
use std::time::Instant;

use anyhow::{Result, anyhow};
use meshstep_comm::{Communicator, loopback};

use crate::race::turns;
use crate::samples::Samples;

/// Work of one rank: runs turn `turn` at the same time as the other ranks.
pub trait Player {
    fn play(&mut self, turn: usize) -> Result<()>;
}

/// Returns the seconds of each turn in each of `rounds` rounds, from the time at which all ranks are ready until the last
/// one is done; the maximum over the ranks' clocks. An additional first round does not count; every other round runs the
/// turns in reverse order.
pub fn together<P: Player>(
    ranks: usize,
    (turns_a_round, rounds): (usize, usize),
    player: impl Fn(Arc<dyn Communicator>) -> Result<P> + Sync,
) -> Result<Vec<Samples>> {
    let (edge, failed) = (Barrier::new(ranks), Mutex::new(None));
    let fail = |error: anyhow::Error| {
        failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
    };
    let has_failed = || failed.lock().unwrap_or_else(PoisonError::into_inner).is_some();
    let of_rank = |comm: Arc<dyn Communicator>| {
        let mut samples = vec![Samples::default(); turns_a_round];
        let mut player = player(comm).map_err(fail).ok();
        for round in 0..=rounds {
            for turn in turns(turns_a_round, round) {
                edge.wait();
                // No rank writes it between these two barriers, so all ranks read the same value.
                let over = has_failed();
                edge.wait();
                if over {
                    return samples;
                }
                let start = Instant::now();
                if let Some(Err(error)) = player.as_mut().map(|player| player.play(turn)) {
                    fail(error);
                }
                edge.wait();
                if round > 0 {
                    samples[turn].push(start.elapsed().as_secs_f64());
                }
            }
        }
        samples
    };
    let samples = loopback::spawn(ranks, of_rank)?;
    if let Some(error) = failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
        return Err(error);
    }
    let longest = |all: Vec<Samples>, of_rank: Vec<Samples>| {
        all.iter().zip(&of_rank).map(|(a, b)| a.largest(b)).collect()
    };
    samples.into_iter().reduce(longest).ok_or_else(|| anyhow!("there are no ranks"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    struct Sleeper(usize);

    impl Player for Sleeper {
        fn play(&mut self, turn: usize) -> Result<()> {
            // Only rank 1 is slow, and only in turn 1.
            if self.0 == 1 && turn == 1 {
                std::thread::sleep(Duration::from_millis(5));
            }
            if turn == 7 { Err(anyhow!("seven")) } else { Ok(()) }
        }
    }

    #[test]
    fn a_turn_takes_as_long_as_its_slowest_rank() {
        let samples = together(3, (2, 4), |comm| Ok(Sleeper(comm.rank()))).unwrap();
        assert_eq!(samples[0].median().rounds, 4);
        assert!(samples[1].median().low >= 0.005);
    }

    #[test]
    fn an_error_of_a_rank_ends_all_of_them() {
        assert!(together(2, (8, 2), |comm| Ok(Sleeper(comm.rank()))).unwrap_err().to_string() == "seven");
        let of_one = |comm: Arc<dyn Communicator>| {
            if comm.rank() == 1 { Err(anyhow!("not made")) } else { Ok(Sleeper(0)) }
        };
        assert_eq!(together(2, (1, 1), of_one).err().unwrap().to_string(), "not made");
    }
}
