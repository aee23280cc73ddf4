//! Weights of workers, and workers that do not count yet.

use super::{Does, LEN, failed, first, layout, propagate, train, worker};
use meshstep_comm::loopback;
use meshstep_local::{
    Exchanged, Fragment, LocalOptimizer, LocalPlan, Placement, Select, Timing, Veto, Weights, What, Workers,
};
use meshstep_optim::Sgd;
use meshstep_shard::{Optimizer, Options, Step, StepArgs};

#[test]
fn weights_count_those_who_have_tokens() {
    let plan = LocalPlan::local_sgd(2).with(|f| f.weights = Weights::Tokens);
    let run = |tokens: fn(usize, u64) -> u64| {
        let does = move |rank: usize, step| Does::Grad(worker(rank), tokens(rank, step));
        train(3, &Sgd::default().into(), &Options::default(), &plan, 4, does)
    };
    // Gradients of 1, 2 and 3 at lr 0.5: two steps move by -1, -2, -3.
    let ends = run(|rank, _| [1, 2, 5][rank / 2]);
    assert!(ends.iter().all(|end| end[1].1.params[0] == -(1.0 + 4.0 + 15.0) / 8.0));
    let ends = run(|rank, _| [0, 3, 0][rank / 2]);
    assert!(ends.iter().all(|end| end[1].1.params[0] == -2.0 && end[3].1.params[0] == -4.0));
    // Tokens count since the last exchange.
    let ends = run(|rank, step| if (step < 2) == (rank < 2) { 1 } else { 0 });
    assert!(ends.iter().all(|end| end[1].1.params[0] == -1.0 && end[3].1.params[0] == -1.0 - 2.5));
    // Tokens of a skipped step do not count.
    let does = |rank: usize, step| {
        let skipped = (rank / 2, step) == (0, 0);
        Does::Grad(if skipped { f32::NAN } else { worker(rank) }, if skipped { 1000 } else { 1 })
    };
    let ends = train(3, &Sgd::default().into(), &Options::default(), &plan, 2, does);
    assert!(ends.iter().all(|end| (end[1].1.params[0] + (0.5 + 4.0 + 6.0) / 5.0).abs() < 1e-6));
    // Fragments that are sent together may have different weights.
    let part = |range, period| Fragment {
        params: Select::Elements { name: "x".into(), range },
        weights: Weights::Tokens,
        ..Fragment::mean(What::Params, Timing::every(period))
    };
    let parts = LocalPlan::new(vec![part(0..50, 2), part(50..LEN, 4)]);
    let does = |rank, step| Does::Grad(worker(rank), if rank < 2 && step < 2 { 3 } else { 1 });
    for end in train(2, &Sgd::default().into(), &Options::default(), &parts, 4, does) {
        let moved = |i: usize| end[3].1.params[i] - i as f32 / 8.0;
        // (3 x -1 + -2) / 4, and then the plain mean of -1 and -2; four steps in one exchange, weighted 8 to 4.
        assert!((moved(0) + 1.25 + 1.5).abs() < 1e-5 && (moved(99) + 8.0 / 3.0).abs() < 1e-5);
    }
    let ends = run(|_, _| 0);
    for end in &ends {
        assert_eq!(failed(&end[1].0), [(0, Veto::NoWeight { fragment: 0 })]);
    }
    assert_eq!([0, 2, 4].map(|rank| ends[rank][3].1.params[0]), [-2.0, -4.0, -6.0]);
}

#[test]
fn who_enters_counts_from_the_second_exchange_on() {
    let ends = loopback::spawn(3, |world| {
        let rank = world.rank();
        let (comm, between) = Workers::split(world, rank as u32).unwrap();
        let inner = Optimizer::new(comm, layout(), Sgd::default(), first, Options::default()).unwrap();
        let mut local = LocalOptimizer::new(inner, between, LocalPlan::local_sgd(1)).unwrap();
        if rank == 2 {
            local.enter();
        }
        let mut x = Vec::new();
        for _ in 0..2 {
            let mb = local.micro_batch(1).unwrap();
            mb.grad("x", &[[2.0f32, 4.0, 12.0][rank]; LEN][..]).unwrap();
            mb.finish().unwrap();
            let _ = local.step(StepArgs { lr: 1.0, ..StepArgs::default() }).unwrap();
            x.push(local.param("x").unwrap().typed::<f32>().unwrap()[0]);
        }
        x
    });
    assert!(ends.unwrap().iter().all(|x| *x == [-3.0, -9.0]));
    // Values with weight 0 may be anything.
    let ends = loopback::spawn(3, |world| {
        let rank = world.rank();
        let (comm, between) = Workers::split(world, rank as u32).unwrap();
        let inner = Optimizer::new(comm, layout(), Sgd::default(), first, propagate()).unwrap();
        let mut local = LocalOptimizer::new(inner, between, LocalPlan::local_sgd(1)).unwrap();
        if rank == 2 {
            local.enter();
        }
        let mb = local.micro_batch(1).unwrap();
        mb.grad("x", &[[2.0f32, 4.0, f32::NAN][rank]; LEN][..]).unwrap();
        mb.finish().unwrap();
        let _ = local.step(StepArgs { lr: 1.0, ..StepArgs::default() }).unwrap();
        local.param("x").unwrap().typed::<f32>().unwrap()[0]
    });
    assert_eq!(ends.unwrap(), [-3.0; 3]);
}

/// Before an update the tokens of the steps before it count; before the first step there are none, and all workers count equally.
#[test]
fn tokens_weigh_what_is_exchanged_before_an_update() {
    for period in [1, 3] {
        let plan = LocalPlan::local_sgd(period);
        let plan = plan.with(|f| (f.weights, f.timing.placement) = (Weights::Tokens, Placement::Before));
        // Gradients of 1 and 2 at lr 0.5, with 1 and 3 tokens.
        let does = |rank: usize, _| Does::Grad(worker(rank), 1 + 2 * (rank / 2) as u64);
        let ends = train(2, &Sgd::default().into(), &Options::default(), &plan, 7, does);
        for (rank, end) in ends.iter().enumerate() {
            for (step, (told, _)) in (0u64..).zip(end) {
                let Exchanged { merged, failed, .. } = &told.as_ref().unwrap().exchanged;
                let due = usize::from(step.is_multiple_of(period));
                assert_eq!((merged.len(), failed.len()), (due, 0), "step {step}, period {period}");
            }
            // Six steps averaged, and one of the worker alone.
            let together = -6.0 * (0.5 + 3.0) / 4.0;
            assert!((end[6].1.params[0] - (together - 0.5 * worker(rank))).abs() < 1e-5, "period {period}");
        }
    }
}
