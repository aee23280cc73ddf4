//! What ranks do together: steps, and collectives.

use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context as _, Result, anyhow};
use meshstep_comm::Communicator;
use meshstep_shard::Stage;
use meshstep_tensor::DType;
use serde_json::json;

use super::{Race, table, tell};
use crate::measure::peers::{Mpi, Torch};
use crate::measure::record::Section;
use crate::measure::samples::Samples;
use crate::measure::shapes::even;
use crate::measure::suites::comm::{self, operations};
use crate::measure::suites::ranks::{Player, together};
use crate::measure::suites::speed::{BYTES_A_PARAM, Grads, Steps};
use crate::measure::{Effort, copies};

pub(super) const RANKS: usize = 4;

/// A rank, and the other system, which rank 0 waits for and the others for rank 0.
struct Beside<'p, P> {
    /// Its turns: [`OURS`] and [`FLOOR`].
    own: P,
    rank: usize,
    theirs: &'p Mutex<&'p mut (dyn FnMut() -> Result<()> + Send)>,
}

const OURS: usize = 0;
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

/// Ours and the reference copy on 4 ranks, in turns with theirs, by their own clock.
fn in_turns<P: Player>(
    rounds: usize,
    own: impl Fn(Arc<dyn Communicator>) -> Result<P> + Sync,
    mut run: impl FnMut() -> Result<f64> + Send,
) -> Result<Race> {
    let mut seconds = Vec::new();
    let mut theirs = || -> Result<()> {
        seconds.push(run()?);
        Ok(())
    };
    let shared: Mutex<&mut (dyn FnMut() -> Result<()> + Send)> = Mutex::new(&mut theirs);
    let samples = together(RANKS, (FLOOR + 1, rounds), |comm| {
        let rank = comm.rank();
        Ok(Beside { own: own(comm)?, rank, theirs: &shared })
    })?;
    let [ours, _, floor] =
        <[Samples; FLOOR + 1]>::try_from(samples).map_err(|_| anyhow!("a turn is missing"))?;
    // The first round does not count on either side.
    Ok(Race { ours, theirs: seconds.into_iter().skip(1).collect(), floor })
}

/// A rank's step, and rank 0's copy for all of them.
struct Step {
    steps: Steps,
    copied: Vec<u64>,
}

impl Player for Step {
    fn play(&mut self, turn: usize) -> Result<()> {
        if turn == OURS {
            return self.steps.play(0);
        }
        copies::in_place(&mut self.copied);
        Ok(())
    }
}

/// A whole step of data-parallel ranks, 16 tensors of 1 Mi.
pub(super) fn steps(section: &mut Section, effort: Effort, torch: &mut Torch) -> Result<()> {
    let (count, len, rounds) = (16, effort.pick(1 << 14, 1 << 20), effort.pick(3, 11));
    let layout = even(count, len)?;
    let mut table = table(format!("a step of {RANKS} ranks, {} parameters", count * len));
    for (name, theirs, wanted) in [
        ("ZeroRedundancyOptimizer(fused AdamW) over gloo", "zero", 8.0),
        ("all_reduce, clip, fused AdamW over gloo", "ddp", 6.0),
    ] {
        torch.case(json!({ "case": theirs, "count": count, "length": len, "ranks": RANKS }))?;
        let own = |comm: Arc<dyn Communicator>| {
            // Half of the bytes, as each is read and written.
            let copied =
                if comm.rank() == 0 { BYTES_A_PARAM * count * len / 2 / size_of::<u64>() } else { 0 };
            let steps = Steps::new(&comm, &[Stage::Zero1], &layout, Grads::There)?;
            Ok(Step { steps, copied: vec![1; copied] })
        };
        let race = in_turns(rounds, own, || torch.run())?;
        tell(section, &mut table, &format!("{name}; ours stage 1"), &race, wanted);
    }
    section.tables.push(table);
    Ok(())
}

pub(super) fn gloo(section: &mut Section, effort: Effort, torch: &mut Torch) -> Result<()> {
    let wanted = [8.0, 8.0, 5.0];
    let mut table = table(format!("gloo's collectives, {RANKS} ranks"));
    for (i, ((name, ..), wanted)) in operations(RANKS).into_iter().zip(wanted).enumerate() {
        let bytes = largest(effort);
        torch
            .case(json!({ "case": "collective", "operation": name, "bytes": bytes, "ranks": RANKS }))
            .with_context(|| format!("gloo's {name}"))?;
        let race = collective(i, effort, || torch.run())?;
        tell(section, &mut table, &format!("gloo {name}"), &race, wanted);
    }
    section.tables.push(table);
    Ok(())
}

pub(super) fn openmpi(section: &mut Section, effort: Effort, mpi: &mut Mpi) -> Result<()> {
    let wanted = [4.0, 4.0, 0.95];
    let mut table = table(format!("OpenMPI's collectives, {RANKS} ranks"));
    for (i, ((name, ..), wanted)) in operations(RANKS).into_iter().zip(wanted).enumerate() {
        mpi.case(name, largest(effort))?;
        let race = collective(i, effort, || mpi.run())?;
        tell(section, &mut table, &format!("OpenMPI {name}"), &race, wanted);
    }
    section.tables.push(table);
    Ok(())
}

fn largest(effort: Effort) -> usize {
    effort.pick(1 << 20, 64 << 20)
}

/// Operation `i`.
fn collective(i: usize, effort: Effort, run: impl FnMut() -> Result<f64> + Send) -> Result<Race> {
    let len = largest(effort) / DType::F32.size();
    let own = |comm: Arc<dyn Communicator>| Ok(Only(comm::Rank::new(comm, len)?, i));
    let mut race = in_turns(effort.pick(3, 11), own, run)?;
    race.floor = race.floor.times(comm::share_of_copy(RANKS, i));
    Ok(race)
}

/// A rank that has one operation, and its copy.
struct Only(comm::Rank, usize);

impl Player for Only {
    fn play(&mut self, turn: usize) -> Result<()> {
        self.0.play(if turn == OURS { self.1 } else { comm::COPY })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ours_and_theirs_take_turns_and_their_clock_counts() {
        let mut calls = 0.0;
        let own = |comm: Arc<dyn Communicator>| Ok(Only(comm::Rank::new(comm, 64)?, 0));
        let Race { ours, theirs, floor } = in_turns(3, own, || {
            calls += 1.0;
            Ok(calls)
        })
        .unwrap();
        assert_eq!(theirs, [2.0, 3.0, 4.0].into_iter().collect());
        assert!([ours, floor].iter().all(|own| own.median().rounds == 3 && own.median().low > 0.0));
        let fails = in_turns(3, own, || Err(anyhow!("gone")));
        assert_eq!(fails.unwrap_err().to_string(), "gone");
    }
}
