//! Buckets that are reduced, updated and gathered in one pass: the bits, norms and bytes of three operations.

use crate::common::{Gradients, PRECISIONS, Run, WhichRule, long, name, params};
use meshstep_comm::tcp::in_process::InProcessConfig;
use meshstep_comm::{
    Communicator, Error, InFlight, Op, ReduceObserver, Reduction, Stats, WriteChunk, WriteReduced, loopback,
    tcp,
};
use meshstep_shard::{
    Clip, Error as ShardError, Missing, NonFinite, Optimizer, Options, Outcome, Stage, StepArgs,
};
use meshstep_tensor::{Buffer, Category, DType, Meter, Queue, SliceMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

/// Communicator that counts the operations in one pass.
#[derive(Debug)]
struct Counted {
    inner: Arc<dyn Communicator>,
    count: Arc<AtomicUsize>,
}

impl Communicator for Counted {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world_size(&self) -> usize {
        self.inner.world_size()
    }

    fn start(&self, op: Op, buffer: Buffer, after: &Queue) -> Result<InFlight, (Buffer, Error)> {
        self.inner.start(op, buffer, after)
    }

    fn start_observed(
        &self,
        op: Op,
        buffer: Buffer,
        after: &Queue,
        observer: Arc<dyn ReduceObserver>,
    ) -> Result<InFlight, (Buffer, Error)> {
        self.inner.start_observed(op, buffer, after, observer)
    }

    fn all_reduce_keeping(
        &self,
        reduction: Reduction,
        within: Option<Duration>,
        values: &mut [SliceMut<'_>],
        kept: Buffer,
    ) -> (Buffer, Result<u64, Error>) {
        self.inner.all_reduce_keeping(reduction, within, values, kept)
    }

    fn all_gather_written(
        &self,
        buffer: Buffer,
        on: &Queue,
        write: &mut WriteChunk<'_>,
    ) -> (Buffer, Result<(), Error>) {
        self.inner.all_gather_written(buffer, on, write)
    }

    fn gathers_while_written(&self, buffer: &Buffer, on: &Queue) -> bool {
        self.inner.gathers_while_written(buffer, on)
    }

    fn reduce_and_gather(
        &self,
        reduction: Reduction,
        buffers: (&mut Buffer, Buffer),
        on: &Queue,
        write: &mut WriteReduced<'_>,
    ) -> (Buffer, Result<(), Error>) {
        self.count.fetch_add(1, SeqCst);
        self.inner.reduce_and_gather(reduction, buffers, on, write)
    }

    fn reduces_in_one_pass(&self, from: &Buffer, into: &Buffer) -> bool {
        self.inner.reduces_in_one_pass(from, into)
    }

    fn zeroed_on(
        &self,
        queue: &Queue,
        len: usize,
        dtype: DType,
        counted: (&Meter, Category),
        apart: &[usize],
    ) -> Result<Buffer, meshstep_tensor::Error> {
        self.inner.zeroed_on(queue, len, dtype, counted, apart)
    }

    fn register(&self, buffer: &Buffer) -> Result<bool, Error> {
        self.inner.register(buffer)
    }

    fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Arc<dyn Communicator>>, Error> {
        self.inner.split(color, key)
    }

    fn abort(&self) {
        self.inner.abort();
    }

    fn stats(&self) -> Stats {
        self.inner.stats()
    }
}

/// Lengths that put borders of tensors within parts; a chunk of 4 ranks is longer than one part.
fn lens() -> Vec<usize> {
    let small = [700, 5, 3_000, 64].repeat(8);
    [vec![130_001], small, vec![140_000, 3]].concat()
}

fn run() -> Run {
    let options = Options { stage: Stage::Zero1, non_finite: NonFinite::Propagate, ..Options::default() };
    Run { lens: lens(), steps: 3, max_norm: None, options, ..Run::default() }
}

fn in_step(run: &Run) -> Run {
    let options = Options { reduce_in_step: true, ..run.options.clone() };
    Run { options, ..run.clone() }
}

/// Runs `body` on ranks as threads, and as processes share memory.
fn spawn<T: Send>(shares: bool, n: usize, body: impl Fn(Arc<dyn Communicator>) -> T + Sync) -> Vec<T> {
    if !shares {
        return loopback::spawn(n, body).unwrap();
    }
    let config = loopback::Config::new(n);
    let config = InProcessConfig {
        store: meshstep_cases::process::free_addr(),
        ranks: vec![tcp::Options::default(); n],
        clock: config.clock,
        faults: config.faults,
    };
    tcp::in_process::spawn_with(config, body).unwrap()
}

/// Checks that a run has the same end with and without one pass, which `passes` operations in one pass take on each rank.
fn check(name: &str, run: &Run, passes: usize) {
    for shares in [false, true] {
        let ended = |run: &Run| {
            spawn(shares, run.ranks, |inner| {
                let count = Arc::new(AtomicUsize::new(0));
                let comm = Arc::new(Counted { inner, count: Arc::clone(&count) });
                let end = run.on_rank(comm).unwrap();
                (end, count.load(SeqCst))
            })
        };
        for ((plain, none), (end, count)) in ended(run).into_iter().zip(ended(&in_step(run))) {
            assert!(plain == end, "{name}, shared memory: {shares}");
            assert_eq!((none, count), (0, passes), "{name}, shared memory: {shares}");
        }
    }
}

#[test]
fn every_precision_ends_with_the_bits_of_three_operations() {
    for (row, (dtype, precision)) in PRECISIONS.into_iter().enumerate() {
        let options = Options { precision, ..run().options };
        let run = Run { dtype, grads: dtype, ranks: 2 + row % 3, options, ..run() };
        check(&format!("{dtype} {precision:?}"), &run, 3);
    }
}

#[test]
fn rules_buckets_micro_batches_and_equal_ranks_show_nowhere() {
    use WhichRule::{AmsGrad, Lamb, Sgd, TwoMoments};
    for rule in [Sgd, AmsGrad, TwoMoments] {
        check(&format!("{rule:?}"), &Run { rule, ..run() }, 3);
    }
    // Sums over tensors need all gradients first.
    check("LAMB", &Run { rule: Lamb, ..run() }, 0);
    check("clipped", &Run { max_norm: Some(0.5), ..run() }, 0);
    let skips = Options { non_finite: NonFinite::Skip, ..run().options };
    check("skipping", &Run { options: skips, ..run() }, 0);
    let buckets = Options { bucket_len: Some(165_000), ..run().options };
    let two = Run { ranks: 2, options: buckets, ..run() };
    check("two long buckets", &two, 6);
    check("micro-batches", &Run { micro_batches: 3, ..run() }, 3);
    if long() {
        check("shuffled", &Run { shuffle: true, ..run() }, 3);
    }
    let equal = in_step(&Run { gradients: Gradients::Equal, ..run() });
    let one = Run { ranks: 1, ..equal.clone() };
    assert!(equal.run() == one.run());
    let replicated = in_step(&run().stage(Stage::Replicated));
    assert!(replicated.run() == in_step(&run()).run());
    let own = Options { clip: Clip::BeforeReduce, ..run().options };
    check("own clipping", &Run { options: own, max_norm: Some(0.5), ..run() }, 3);
}

#[test]
fn gradients_that_are_not_finite_are_counted_in_the_norm() {
    let norms = |run: &Run, bad: bool| {
        loopback::spawn(run.ranks, |comm| {
            let mut opt = run.build(comm).unwrap();
            let mb = opt.micro_batch(1).unwrap();
            for (i, len) in lens().into_iter().enumerate() {
                let mut grad = vec![0.25f32; len];
                if bad && i == 33 {
                    grad[2000] = f32::NAN;
                }
                mb.grad(&name(i), &grad[..]).unwrap();
            }
            mb.finish().unwrap();
            match opt.step(StepArgs::default()).unwrap().outcome().unwrap() {
                Outcome::Applied { norm, traffic, .. } => (norm.to_bits(), traffic.sent),
                Outcome::Skipped { .. } => panic!("no step is skipped"),
            }
        })
        .unwrap()
    };
    for bad in [false, true] {
        assert_eq!(norms(&run(), bad), norms(&in_step(&run()), bad));
    }
    assert_eq!(norms(&in_step(&run()), true)[0].0, f64::INFINITY.to_bits());
}

/// A parameter that lacks its gradient on every rank keeps its values.
#[test]
fn missing_gradients_and_errors_between_steps_leave_nothing_behind() {
    let options = Options { missing: Missing::SkipIfMissingEverywhere, ..run().options };
    let ended = |run: &Run| {
        loopback::spawn(run.ranks, |comm| {
            let mut opt = run.build(comm).unwrap();
            for step in 0..4 {
                let mb = opt.micro_batch(1).unwrap();
                for (i, len) in lens().into_iter().enumerate() {
                    if (i + step) % 4 > 0 {
                        let grad: Vec<f32> = (0..len).map(|j| ((j + i + step) % 13) as f32 - 6.0).collect();
                        mb.grad(&name(i), &grad[..]).unwrap();
                    }
                }
                mb.finish().unwrap();
                // A rate that no rank accepts: the gradients are dropped on every rank.
                let lr = if step == 1 { f64::NAN } else { 1e-2 };
                let stepped =
                    opt.step(StepArgs { lr, ..StepArgs::default() }).and_then(|step| step.outcome());
                assert_eq!(stepped.is_ok(), step != 1);
            }
            params(&opt)
        })
        .unwrap()
    };
    let run = Run { options, ..run() };
    assert!(ended(&run) == ended(&in_step(&run)));
}

#[test]
fn stages_that_send_gradients_off_refuse_it() {
    for stage in [Stage::Zero2, Stage::Zero3] {
        loopback::spawn(2, |comm| {
            let told = in_step(&run().stage(stage)).build(comm).unwrap_err();
            assert!(matches!(told, ShardError::StepNeedsGradients), "{told}");
        })
        .unwrap();
    }
}

#[test]
fn ranks_that_differ_in_it_are_refused() {
    let errors = loopback::spawn(2, |comm| {
        let run = if comm.rank() == 0 { run() } else { in_step(&run()) };
        run.build(comm).unwrap_err().to_string()
    });
    assert!(errors.unwrap().iter().all(|told| told.contains("reduce_in_step")));
}

/// Hands over gradients of `value`, all of them or those of `which`.
fn hand_over(opt: &mut Optimizer, value: f32, which: impl Fn(usize) -> bool) {
    let mb = opt.micro_batch(1).unwrap();
    for (i, len) in lens().into_iter().enumerate().filter(|(i, _)| which(*i)) {
        mb.grad(&name(i), &vec![value + i as f32; len][..]).unwrap();
    }
    mb.finish().unwrap();
}

#[test]
fn ranks_whose_bounds_differ_get_an_error_and_nothing_changes() {
    for bound in [1.0, f64::NAN] {
        loopback::spawn(4, |comm| {
            let rank = comm.rank();
            let mut opt = in_step(&run()).build(comm).unwrap();
            let before = params(&opt);
            hand_over(&mut opt, 0.5, |_| true);
            let max_norm = (rank == 2).then_some(bound);
            let started = std::time::Instant::now();
            let told = opt.step(StepArgs { max_norm, ..StepArgs::default() }).unwrap_err();
            match bound.is_nan() {
                true => assert!(matches!(told, ShardError::Fault { rank: 2, .. }), "{told}"),
                false => assert!(matches!(told, ShardError::Disagree { .. }), "{told}"),
            }
            assert!(started.elapsed() < Duration::from_secs(30) && params(&opt) == before);
            hand_over(&mut opt, 0.5, |_| true);
            opt.step(StepArgs::default()).unwrap().outcome().unwrap();
        })
        .unwrap();
    }
}

#[test]
fn discarded_gradients_leave_nothing_behind() {
    let ended = |run: &Run| {
        loopback::spawn(2, |comm| {
            let mut opt = run.build(comm).unwrap();
            hand_over(&mut opt, 7.0, |_| true);
            opt.discard_gradients().unwrap();
            opt.set_frozen([name(0), name(3)].as_slice(), true).unwrap();
            for max_norm in [Some(0.5), None] {
                hand_over(&mut opt, 0.5, |i| i != 0 && i != 3);
                opt.step(StepArgs { max_norm, ..StepArgs::default() }).unwrap().outcome().unwrap();
            }
            params(&opt)
        })
        .unwrap()
    };
    let run = Run { ranks: 2, ..run() };
    assert!(ended(&run) == ended(&in_step(&run)));
}

#[test]
fn a_rank_alone_that_discards_is_found() {
    loopback::spawn(2, |comm| {
        let rank = comm.rank();
        let mut opt = in_step(&run()).build(comm).unwrap();
        hand_over(&mut opt, 1.0, |_| true);
        if rank == 0 {
            opt.discard_gradients().unwrap();
            hand_over(&mut opt, 2.0, |_| true);
        }
        let told = opt.step(StepArgs::default()).unwrap_err();
        assert!(matches!(told, ShardError::Disagree { .. }), "{told}");
    })
    .unwrap();
}
