//! One rank does not get memory, at any of its allocations: the others get the reason, and nothing has changed.

use crate::allocator;
use crate::alone::{DEADLINE, ODD, ends, names_odd};
use crate::common::{Run, WhichRule, draws, name, params, state};
use crate::lbfgs::problems::Problem;
use crate::lbfgs::run;
use meshstep_comm::Communicator;
use meshstep_optim::LineSearch;
use meshstep_shard::{
    CrossShard, DataRank, Error, Fault, Groups, Initial, NonFinite, Optimizer, Options, Stage,
};
use meshstep_tensor::{DType, Layout, Param, SliceMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

/// Runs `body` with its `at`th buffer refused on the odd rank. Returns true if `body` allocated that buffer.
fn without<T>(rank: usize, at: usize, body: impl FnOnce() -> T) -> (T, bool) {
    allocator::without(Some(at).filter(|_| rank == ODD), body)
}

fn assert_told(what: &str, rank: usize, at: usize, error: &Error) {
    let own = matches!(error, Error::Tensor(_) | Error::Optim(_) | Error::Initial { .. } | Error::Comm(_));
    assert!(if rank == ODD { own } else { names_odd(error) }, "{what}, {at}, rank {rank}: {error:?}");
}

fn zeros(_: &Param, _: SliceMut<'_>) -> Result<(), meshstep_tensor::Error> {
    Ok(())
}

fn more() -> Layout {
    Layout::builder().param("more", &[40], DType::F32).frozen("still", &[3], DType::F32).build().unwrap()
}

/// Returns true if the odd rank allocated that many buffers while adding parameters. If so, nothing has changed after the
/// refusal; in any case the parameters are added in the end, and the run reaches `expected`.
fn added(run: &Run, at: usize, what: &str, expected: &[Vec<u8>]) -> bool {
    let began = Instant::now();
    let hit = ends(run.ranks, |comm| {
        let rank = comm.rank();
        let mut opt = run.build(comm).unwrap();
        run.hand_over(&mut opt, 1, 0).unwrap();
        opt.step(run.at(1)).unwrap().outcome().unwrap();
        let seen = |opt: &Optimizer| (params(opt), state(opt), opt.options().meter.live_total());
        let before = seen(&opt);
        let mut add = || opt.add_param_group(more(), run.groups(), zeros);
        let (told, hit) = without(rank, at, &mut add);
        if let Err(error) = &told {
            assert_told(what, rank, at, error);
            assert!(!matches!(error, Error::Comm(_)), "{what}, {at}, rank {rank}: {error:?}");
            assert_eq!(seen(&opt), before, "{what}, {at}, rank {rank}");
            opt.add_param_group(more(), run.groups(), zeros).unwrap();
        }
        let mb = opt.micro_batch(1).unwrap();
        for i in 0..run.lens.len() {
            let grad: Vec<f32> = run.gradient(2, 0, rank, i).iter().map(|&g| g as f32).collect();
            mb.grad(&name(i), &grad[..]).unwrap();
        }
        mb.grad("more", &[0f32; 40][..]).unwrap();
        mb.finish().unwrap();
        opt.step(run.at(2)).unwrap().outcome().unwrap();
        assert_eq!(params(&opt)[..run.lens.len()], *expected, "{what}, {at}");
        (told.is_err(), rank == ODD && hit)
    });
    let missed = hit[ODD].1;
    assert!(hit.iter().all(|&(failed, _)| failed == missed), "{what}, {at}: {hit:?}");
    assert!(began.elapsed() < DEADLINE);
    missed
}

#[test]
fn for_parameters_that_are_added() {
    let mut drawn = draws(1);
    for stage in [Stage::Replicated, Stage::Zero1, Stage::Zero2] {
        for rule in [WhichRule::AdamW, WhichRule::Lamb] {
            for initial in [Initial::Broadcast, Initial::Compare] {
                if !drawn() {
                    continue;
                }
                let non_finite =
                    if initial == Initial::Compare { NonFinite::Propagate } else { NonFinite::Skip };
                if rule == WhichRule::Lamb && stage == Stage::Replicated {
                    continue;
                }
                let options = Options { initial, non_finite, ..Run::default().options };
                let run =
                    Run { ranks: 2, steps: 2, rule, max_norm: None, options, ..Run::default() }.stage(stage);
                let (what, expected) = (format!("{stage:?} {rule:?} {initial:?}"), run.run().params);
                let buffers = (0..).take_while(|&at| added(&run, at, &what, &expected)).count();
                assert!(buffers > 4, "{what}: {buffers}");
            }
        }
    }
}

/// Checks that every rank gets an error for each buffer of `make` that the odd rank lacks.
fn every_buffer_of<T>(what: &str, make: impl Fn(Arc<dyn Communicator>) -> Result<T, Error> + Sync) {
    for at in 0.. {
        let told = ends(2, |comm| {
            let rank = comm.rank();
            without(rank, at, || make(comm).map(drop))
        });
        if !told[ODD].1 {
            assert!(at > 4 && told.iter().all(|(made, _)| made.is_ok()), "{what}: {told:?}");
            return;
        }
        for (rank, (made, _)) in told.iter().enumerate() {
            let Err(error) = made else {
                panic!("{what}: nothing is wrong on rank {rank} without buffer {at}")
            };
            assert_told(what, rank, at, error);
        }
    }
}

#[test]
fn for_what_is_made() {
    let run = Run { ranks: 2, ..Run::default() };
    every_buffer_of("an optimizer", |comm| run.build(comm));
    every_buffer_of("an optimizer of ranks with the same micro-batches", |comm| {
        let place = DataRank { index: 0, ranks: 2, first: comm.rank() == 0 };
        let mut opt = Optimizer::empty(comm, place, run.options.clone())?;
        opt.add_param_group(more(), run.groups(), zeros)
    });
    every_buffer_of("L-BFGS", |comm| {
        run::Run::new(Problem::Rosenbrock, &[40, 9], LineSearch::StrongWolfe).build(comm)
    });
    for initial in [Initial::Broadcast, Initial::Compare] {
        let options = Options { stage: Stage::Replicated, initial, ..run.options.clone() };
        every_buffer_of("replicas", |comm| {
            CrossShard::new(
                comm,
                None,
                run.layout(),
                Groups::from(crate::common::adamw()),
                zeros,
                options.clone(),
            )
        });
    }
}

/// The odd rank has memory for two buckets, which it has begun, and needs a third to complete the bucket that the other waits
/// for: a failure can be retried in the step, once.
#[test]
fn for_a_bucket_that_others_wait_for() {
    let tries = [(false, false), (true, false), (true, true)];
    let cases = [Stage::Zero2, Stage::Zero3].into_iter().flat_map(|stage| tries.map(|tries| (stage, tries)));
    for (stage, (twice, discards)) in cases {
        let options = Options { stage, bucket_len: Some(64), ..Options::default() };
        let run = Run { lens: vec![64; 6], ranks: 2, options, ..Run::default() };
        let told = ends(2, |comm| {
            let rank = comm.rank();
            let mut opt = run.build(comm).unwrap();
            if rank == ODD {
                let mb = opt.micro_batch(1).unwrap();
                [0, 1].iter().for_each(|&i| mb.grad(&name(i), &[1f32; 64][..]).unwrap());
                let (finished, hit) = without(rank, 0, || mb.finish());
                assert!(hit && matches!(finished, Err(Error::Tensor(_))), "{finished:?}");
            } else if let Err(error) = run.hand_over(&mut opt, 1, 0) {
                return (error, false);
            }
            let mut step = || {
                let drops = discards && rank == ODD;
                let ended = if drops { opt.discard_gradients() } else { opt.step(run.at(1)).map(drop) };
                ended.unwrap_err()
            };
            let told = if twice { without(rank, 0, &mut step).0 } else { step() };
            (told, opt.micro_batch(1).map(drop).is_ok())
        });
        for (rank, (error, goes_on)) in told.iter().enumerate() {
            let expected = match (twice, rank) {
                (false, _) => matches!(error, Error::Fault { rank: ODD, fault: Fault::Unfinished }),
                (true, ODD) => matches!(error, Error::Tensor(_)),
                (true, _) => names_odd(error),
            };
            assert!(expected && *goes_on != twice, "{twice}, rank {rank}: {error:?}");
        }
    }
}

/// The odd rank waits in vain for a bucket in flight, and has no memory to take instead: it continues to wait, until the other
/// rank sends its own.
#[test]
fn for_a_bucket_beyond_the_plan() {
    static REFUSED: AtomicBool = AtomicBool::new(false);
    let wait_budget = Duration::from_millis(1);
    let options = Options { stage: Stage::Zero2, bucket_len: Some(64), wait_budget, ..Options::default() };
    let run = Run { lens: vec![64; 6], ranks: 2, steps: 1, options, ..Run::default() };
    let expected = run.run().params;
    ends(2, |comm| {
        let rank = comm.rank();
        let mut opt = run.build(comm).unwrap();
        while rank != ODD && !REFUSED.load(SeqCst) {
            std::thread::yield_now();
        }
        let mb = opt.micro_batch(1).unwrap();
        for i in (0..6).rev() {
            let grad: Vec<f32> = run.gradient(1, 0, rank, i).iter().map(|&g| g as f32).collect();
            allocator::tell(Some(&REFUSED).filter(|_| i == 3));
            let give = || mb.grad(&name(i), &grad[..]).unwrap();
            if i == 3 { without(rank, 0, give).0 } else { give() }
        }
        assert!(REFUSED.load(SeqCst));
        mb.finish().unwrap();
        opt.step(run.at(1)).unwrap().outcome().unwrap();
        assert_eq!(params(&opt), expected);
    });
}
