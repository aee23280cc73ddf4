//! Owners of exchanged matrices: balance, memory and traffic of real models, and ranks that are lost.

use crate::matrices::{first, matrices, models, values};
use crate::matrix_exchange::{hand_over, options, step};
use meshstep_comm::{Faults, Kind, loopback};
use meshstep_optim::Muon;
use meshstep_shard::{Error, Optimizer, Options, Part, Sizes, Stage, StepArgs};
use meshstep_tensor::Param;
use std::cmp::Reverse;
use std::time::Duration;

fn try_step(opt: &mut Optimizer, t: u64) -> Result<(), Error> {
    let all: Vec<Param> = opt.params().cloned().collect();
    let batch = opt.micro_batch(1)?;
    all.iter().rev().try_for_each(|p| batch.grad(p.name(), &values(p, t)[..]))?;
    batch.finish()?;
    opt.step(StepArgs::default())?.outcome().map(drop)
}

/// Trains three steps on four ranks with these faults. Returns each rank's operations up to the end of the second step, the number of pieces
/// among them, and its error.
fn with_faults(faults: Faults) -> Vec<(u64, u64, Option<Error>)> {
    let timeout = Duration::from_millis(500);
    let config = loopback::Config { timeout, faults, ..loopback::Config::new(4) };
    let ranks = loopback::spawn_with(config, |comm| {
        let mut opt =
            Optimizer::new(comm.clone(), matrices(), Muon::default(), first, options(Stage::Zero3)).unwrap();
        hand_over(&mut opt, 1, |_| true);
        step(&mut opt);
        let before = comm.stats();
        let stepped = try_step(&mut opt, 2);
        let after = comm.stats();
        let pieces =
            [Kind::Send, Kind::Recv].map(|kind| after.of(kind).operations - before.of(kind).operations);
        // A rank that has all its pieces takes the step; the next one tells it.
        let error = stepped.and_then(|()| try_step(&mut opt, 3)).err();
        (after.total().operations, pieces.iter().sum(), error)
    });
    ranks.unwrap()
}

#[test]
fn a_rank_that_is_lost_in_the_exchange_is_an_error_on_every_rank() {
    let sound = with_faults(Faults::none());
    for (rank, (after, pieces, error)) in sound.iter().enumerate() {
        assert!(error.is_none() && *pieces > 0, "rank {rank}: {pieces}, {error:?}");
        // The last operations of the step are the exchange's: the first of them, one in the middle, the last.
        for lost in [after - pieces, after - pieces / 2, after - 1] {
            for (other, (.., error)) in
                with_faults(Faults::none().drop_op(rank, lost)).into_iter().enumerate()
            {
                assert!(
                    matches!(error, Some(Error::Comm(_))),
                    "operation {lost} of rank {rank}: rank {other} has {error:?}"
                );
            }
        }
    }
}

#[test]
fn owners_of_exchanged_matrices_are_balanced_and_need_memory_for_three() {
    for (name, layout) in models() {
        for ranks in 2..=64 {
            let options = Options { stage: Stage::Zero3, ..Options::default() };
            let part = Part::new(layout.clone(), Sizes::all(ranks), [], &options).unwrap();
            let exchange = part.matrix_exchange(&Muon::default());
            let (mut loads, mut in_windows) = (vec![0; ranks], 0);
            for window in exchange.windows() {
                let mut own = vec![0; ranks];
                window.matrices.iter().for_each(|matrix| own[matrix.owner] += matrix.cost);
                in_windows += own.iter().max().unwrap();
                loads.iter_mut().zip(own).for_each(|(load, own)| *load += own);
            }
            let even = loads.iter().sum::<u64>() as f64 / ranks as f64;
            let most = *loads.iter().max().unwrap() as f64 / even;
            let (windows, longest) =
                (exchange.windows().len(), layout.params().iter().map(Param::len).max().unwrap());
            let scratch =
                (0..ranks).map(|rank| exchange.scratch(rank)[0].1).max().unwrap() as f64 / longest as f64;
            let elements = layout.params().iter().map(Param::len).sum::<usize>() as f64;
            let sent = (0..ranks).map(|rank| exchange.sent_bytes(rank)).max().unwrap() as f64 / 4.0;
            let share = sent / (2.0 * elements / ranks as f64);
            let mut costs: Vec<u64> =
                exchange.windows().iter().flat_map(|w| w.matrices.iter().map(|m| m.cost)).collect();
            costs.sort_unstable_by_key(|&cost| Reverse(cost));
            // One rank has k + 1 of the `k ranks + 1` costliest matrices.
            let bound = |k: usize| (k + 1) as u64 * costs.get(k * ranks).unwrap_or(&0);
            let limit = ((0..=costs.len() / ranks).map(bound).max().unwrap() as f64 / even).max(1.15);
            println!(
                "{name}, {ranks} ranks, {windows} windows: {most:.3} of an even cost, {:.3} in turns (limit {limit:.3}); scratch of {scratch:.2} of the longest; {share:.3} of 2/n sent",
                in_windows as f64 / even
            );
            assert!(most <= limit && scratch <= 3.0 && share <= 1.3, "{name}, {ranks} ranks");
        }
    }
}
