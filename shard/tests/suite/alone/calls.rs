//! One call of one rank's communicators fails before any other rank learns of it; each call is tried.

use crate::alone::{DEADLINE, ODD, ends, names_odd};
use crate::among::sharing;
use crate::common::{Run, STAGES, WhichRule, tried, turns};
use crate::lbfgs::problems::Problem;
use crate::lbfgs::run;
use meshstep_comm::{Communicator, Error as CommError, InFlight, Op, Stats};
use meshstep_optim::{AdamW, Lbfgs, LineSearch};
use meshstep_shard::{CrossShard, Error, Initial, NonFinite, Optimizer, Options, Stage};
use meshstep_tensor::{Buffer, Category, DType, Layout, Queue};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Instant;

/// A rank's communicator and those split from it; one of their calls fails.
#[derive(Debug)]
struct Failing {
    inner: Arc<dyn Communicator>,
    calls: Arc<AtomicUsize>,
    /// Number of the call that fails.
    at: usize,
}

impl Failing {
    /// Leaves the communicator of every rank but the odd one unchanged.
    fn on_odd(inner: Arc<dyn Communicator>, at: usize) -> (Arc<dyn Communicator>, Arc<AtomicUsize>) {
        let calls = Arc::new(AtomicUsize::new(0));
        if inner.rank() != ODD {
            return (inner, calls);
        }
        (Arc::new(Failing { inner, calls: Arc::clone(&calls), at }), calls)
    }

    fn fails(&self) -> Result<(), CommError> {
        let refused = meshstep_tensor::Error::OutOfMemory { bytes: 1, category: Category::Staging };
        if self.calls.fetch_add(1, SeqCst) == self.at { Err(refused.into()) } else { Ok(()) }
    }
}

impl Communicator for Failing {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world_size(&self) -> usize {
        self.inner.world_size()
    }

    fn start(&self, op: Op, buffer: Buffer, after: &Queue) -> Result<InFlight, (Buffer, CommError)> {
        match self.fails() {
            Ok(()) => self.inner.start(op, buffer, after),
            Err(error) => Err((buffer, error)),
        }
    }

    fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Arc<dyn Communicator>>, CommError> {
        self.fails()?;
        let Some(inner) = self.inner.split(color, key)? else { return Ok(None) };
        Ok(Some(Arc::new(Failing { inner, calls: Arc::clone(&self.calls), at: self.at })))
    }

    fn abort(&self) {
        self.inner.abort();
    }

    fn sound(&self) -> Result<(), CommError> {
        self.inner.sound()
    }

    fn stats(&self) -> Stats {
        self.inner.stats()
    }
}

/// Runs `body` once for each call that the odd rank makes, except the `first` ones, with that call failing: every rank gets an
/// error, the odd one its own. Returns the number of calls, which equals that of a run without failures.
fn every_call_of(
    ranks: usize,
    first: usize,
    what: &str,
    body: impl Fn(Arc<dyn Communicator>) -> Result<(), Error> + Sync,
) -> usize {
    for at in (first..).filter(|at| tried(at - first, 1)) {
        let began = Instant::now();
        let told = ends(ranks, |comm| {
            let (failing, calls) = Failing::on_odd(Arc::clone(&comm), at);
            // A rank that no longer waits for the odd rank gets the error in its next call.
            let end = body(failing).and_then(|()| Ok(comm.barrier()?));
            (end, calls.load(SeqCst))
        });
        if told[ODD].1 <= at {
            assert!(told.iter().all(|(end, _)| end.is_ok()), "{what}: {told:?}");
            return told[ODD].1;
        }
        for (rank, (end, _)) in told.iter().enumerate() {
            let Err(error) = end else { panic!("{what}: nothing is wrong on rank {rank} with call {at}") };
            let told =
                if rank == ODD { error.to_string().contains("no memory for") } else { names_odd(error) };
            assert!(told, "{what}, call {at}, rank {rank}: {error:?}");
        }
        assert!(began.elapsed() < DEADLINE, "{what}, call {at}: somebody has waited for the odd rank");
    }
    unreachable!("some call is the last")
}

fn steps(run: &Run, comm: Arc<dyn Communicator>) -> Result<(), Error> {
    let mut opt = run.build(comm)?;
    for t in 1..=2 {
        run.hand_over(&mut opt, t, 0)?;
        opt.step(run.at(t))?.outcome()?;
    }
    Ok(())
}

#[test]
fn of_steps() {
    let (adamw, lamb) = ((WhichRule::AdamW, Some(1.0)), (WhichRule::Lamb, None));
    let (skip, propagate) = (NonFinite::Skip, NonFinite::Propagate);
    let all = [(adamw, skip), (lamb, skip), (adamw, propagate), (lamb, propagate)];
    for (s, stage) in STAGES.into_iter().enumerate() {
        for ((rule, max_norm), non_finite) in turns(&all, s, 1) {
            let options = Options { non_finite, ..Run::default().options };
            let run = Run { ranks: 3, rule, max_norm, options, ..Run::default() }.stage(stage);
            let what = format!("{stage:?} {rule:?} {non_finite:?}");
            let calls = every_call_of(3, 0, &what, |comm| steps(&run, comm));
            assert!(calls > 10, "{what}: {calls}");
        }
    }
}

#[test]
fn of_parameters_that_are_added() {
    let more = || Layout::builder().param("more", &[40], DType::F32).build().unwrap();
    for initial in [Initial::Broadcast, Initial::Compare] {
        for non_finite in [NonFinite::Skip, NonFinite::Propagate] {
            let options = Options { non_finite, initial, ..Run::default().options };
            let run = Run { ranks: 3, options, ..Run::default() };
            let what = format!("{initial:?} {non_finite:?}");
            let calls = every_call_of(3, 0, &what, |comm| {
                let mut opt = run.build(comm)?;
                let added = opt.add_param_group(more(), AdamW::default(), |_, _| Ok(()));
                assert_eq!(opt.params().count(), run.lens.len() + usize::from(added.is_ok()));
                added
            });
            assert!(calls > 5, "{what}: {calls}");
        }
    }
}

/// Some ranks share only the world with the odd one.
#[test]
fn of_ranks_in_groups() {
    for (stage, non_finite) in [
        (Stage::Zero1, NonFinite::Skip),
        (Stage::Zero2, NonFinite::Propagate),
        (Stage::Replicated, NonFinite::Skip),
    ] {
        let options = Options { stage, non_finite, bucket_len: Some(64), ..Options::default() };
        // The splits that make the groups belong to the test.
        let calls = every_call_of(8, 4, &format!("{stage:?}"), |comm| {
            sharing::steps(comm, AdamW::default(), options.clone(), 1).map(drop)
        });
        assert!(calls > 20, "{stage:?}: {calls}");
    }
}

#[test]
fn of_l_bfgs() {
    for (i, stage) in STAGES.into_iter().enumerate() {
        let search = [LineSearch::None, LineSearch::StrongWolfe][i % 2];
        let run = run::Run::new(Problem::Rosenbrock, &[40, 9], search);
        let rule = Lbfgs { max_iter: 3, ..run.rule.clone() };
        let run = run::Run { rule, options: Options { stage, ..run.options.clone() }, ..run };
        let calls = every_call_of(2, 0, &format!("{stage:?} {search:?}"), |comm| run.on_rank(comm).map(drop));
        assert!(calls > 10, "{stage:?}: {calls}");
    }
}

#[test]
fn of_replicas() {
    let run = Run { ranks: 3, ..Run::default() };
    for initial in [Initial::Broadcast, Initial::Compare] {
        let options = Options { stage: Stage::Replicated, initial, ..run.options.clone() };
        every_call_of(3, 0, &format!("{initial:?}"), |comm| {
            let made =
                CrossShard::new(comm, None, run.layout(), run.groups(), |_, _| Ok(()), options.clone());
            made.map(drop)
        });
    }
}

/// Afterwards every call of the optimizer fails.
#[test]
fn is_told_by_every_later_call() {
    let run = Run { ranks: 2, ..Run::default() };
    let told = ends(2, |comm| {
        let (comm, calls) = Failing::on_odd(comm, usize::MAX - 1);
        let mut opt: Optimizer = run.build(comm).unwrap();
        run.hand_over(&mut opt, 1, 0).unwrap();
        calls.store(usize::MAX - 1, SeqCst);
        let first = opt.step(run.at(1)).map(drop).unwrap_err();
        [first, opt.step(run.at(1)).map(drop).unwrap_err(), opt.discard_gradients().unwrap_err()]
    });
    for (rank, told) in told.iter().enumerate() {
        assert!(told.iter().all(|error| matches!(error, Error::Comm(_))), "rank {rank}: {told:?}");
    }
}
