//! Construction of optimizers, by ranks together.

use std::sync::{Arc, Barrier};
use std::time::Instant;

use anyhow::Result;
use meshstep_comm::{Communicator, loopback};
use meshstep_optim::AdamW;
use meshstep_shard::{Optimizer, Options, Stage};
use meshstep_tensor::{Layout, Meter};

use crate::samples::Samples;

/// Returns the seconds in which `ranks` new ranks construct an optimizer with AdamW, from the time at which all are ready
/// until the last one is done; the maximum over the ranks' clocks. No round is a warm-up, because programs construct once.
pub fn construction(ranks: usize, layout: &Layout, stage: Stage, rounds: usize) -> Result<Samples> {
    (0..rounds).map(|_| constructed(ranks, layout, stage)).collect()
}

fn constructed(ranks: usize, layout: &Layout, stage: Stage) -> Result<f64> {
    let edge = Barrier::new(ranks);
    let of_rank = |comm: Arc<dyn Communicator>| -> Result<f64> {
        let (layout, options) =
            (layout.clone(), Options { stage, meter: Meter::new(), ..Options::default() });
        edge.wait();
        let start = Instant::now();
        let made = Optimizer::new(comm, layout, AdamW::default(), |_, _| Ok(()), options);
        // An error on one rank is an error on all, so every rank comes here.
        edge.wait();
        let seconds = start.elapsed().as_secs_f64();
        made?;
        Ok(seconds)
    };
    loopback::spawn(ranks, of_rank)?.into_iter().try_fold(0.0, |most: f64, seconds| Ok(most.max(seconds?)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shapes::{STAGES, many};

    #[test]
    fn optimizers_are_constructed_at_every_stage() {
        for (_, stage) in STAGES {
            let layout = many(3, 5, stage == Stage::Zero3).build().unwrap();
            assert_eq!(construction(2, &layout, stage, 2).unwrap().median().rounds, 2);
        }
    }
}
