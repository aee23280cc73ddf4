//! Runs contestants in turns, so that disturbances of the machine affect all of them equally.

use std::time::Instant;

use anyhow::Result;

use crate::samples::Samples;

/// Work that runs once and returns the seconds that it took.
pub type Contestant<'a, X> = Box<dyn FnMut(&mut X) -> Result<f64> + 'a>;

/// Creates a contestant from work that is timed from outside.
pub fn timed<'a, X>(mut work: impl FnMut(&mut X) + 'a) -> Contestant<'a, X> {
    Box::new(move |on| {
        let start = Instant::now();
        work(on);
        Ok(start.elapsed().as_secs_f64())
    })
}

/// Returns the seconds of each contestant in each of `rounds` rounds; every other round runs in reverse order. An
/// additional first round, which touches the memory and starts the threads, is not counted.
pub fn race<X>(on: &mut X, rounds: usize, mut contestants: Vec<Contestant<'_, X>>) -> Result<Vec<Samples>> {
    let mut samples = vec![Samples::default(); contestants.len()];
    for round in 0..=rounds {
        for turn in turns(contestants.len(), round) {
            let seconds = contestants[turn](on)?;
            if round > 0 {
                samples[turn].push(seconds);
            }
        }
    }
    Ok(samples)
}

/// Returns the order of the contestants in a round.
pub fn turns(contestants: usize, round: usize) -> impl Iterator<Item = usize> {
    (0..contestants).map(move |turn| if round.is_multiple_of(2) { turn } else { contestants - 1 - turn })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everyone_runs_once_a_round_and_the_first_round_does_not_count() {
        let logged = |name: char, seconds: f64| -> Contestant<'_, String> {
            Box::new(move |log: &mut String| {
                log.push(name);
                Ok(seconds)
            })
        };
        let mut log = String::new();
        let samples = race(&mut log, 3, vec![logged('a', 1.0), logged('b', 2.0), logged('c', 3.0)]).unwrap();
        assert_eq!(log, "abccbaabccba");
        assert_eq!(samples[1], [2.0; 3].into_iter().collect());
    }

    #[test]
    fn what_fails_ends_the_race() {
        let fails: Contestant<'_, ()> = Box::new(|()| anyhow::bail!("no"));
        assert!(race(&mut (), 2, vec![timed(|()| ()), fails]).is_err());
    }
}
