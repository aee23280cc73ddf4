//! Means that are reduced where the values lie: in which plans, and what an exchange that does not count leaves.

use crate::common::{self, Gradients, Run};
use meshstep_comm::{Communicator, Error, InFlight, Op, Reduction, Stats, loopback};
use meshstep_local::{
    Fragment, LocalOptimizer, LocalPlan, LocalStep, OnFailure, Slots, Timing, Veto, Weights, What, Workers,
};
use meshstep_shard::Options;
use meshstep_shard::Step;
use meshstep_tensor::{Buffer, DType, Meter, Queue, SliceMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

/// A rank's communicator that counts all-reduces in place and others; one in place fails on every rank, as one that times out does.
#[derive(Debug)]
struct Counting {
    inner: Arc<dyn Communicator>,
    in_place: AtomicUsize,
    packed: AtomicUsize,
    fails: usize,
}

impl Communicator for Counting {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world_size(&self) -> usize {
        self.inner.world_size()
    }

    fn start(&self, op: Op, buffer: Buffer, after: &Queue) -> Result<InFlight, (Buffer, Error)> {
        self.packed.fetch_add(1, Relaxed);
        self.inner.start(op, buffer, after)
    }

    fn all_reduce_keeping(
        &self,
        reduction: Reduction,
        within: Option<Duration>,
        values: &mut [SliceMut<'_>],
        mut kept: Buffer,
    ) -> (Buffer, Result<u64, Error>) {
        if self.in_place.fetch_add(1, Relaxed) == self.fails {
            kept.as_mut().bytes_mut().unwrap().fill(0xA5);
            let broken = Error::Remote { rank: 0, message: "its line is broken".to_owned() };
            return (kept, Err(broken));
        }
        self.inner.all_reduce_keeping(reduction, within, values, kept)
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

/// Values of a rank after each step, and the calls between workers.
struct Ended {
    values: Vec<Vec<Vec<u8>>>,
    vetoes: Vec<Vec<(usize, Veto)>>,
    in_place: usize,
    packed: usize,
    /// Bytes allocated by all but the first three steps.
    allocated: u64,
}

fn run() -> Run {
    Run { ranks: 2, gradients: Gradients::Rough, max_norm: None, lens: vec![901, 64, 300], ..Run::default() }
}

fn values(run: &Run, local: &LocalOptimizer) -> Vec<Vec<u8>> {
    let mut all = common::params(local.optimizer());
    for i in 0..run.lens.len() {
        let state = local.state(&common::name(i)).unwrap();
        all.extend(state.slots.iter().map(|(_, slot)| slot.bytes().unwrap().to_vec()));
    }
    all
}

/// Takes step `t` with a weight of the rank's own.
fn step(run: &Run, local: &mut LocalOptimizer, (rank, t): (usize, u64)) -> LocalStep {
    let batch = local.micro_batch(1 + rank as u64).unwrap();
    for i in 0..run.lens.len() {
        let grad: Vec<f32> = run.gradient(t, 0, rank, i).iter().map(|&g| g as f32).collect();
        batch.grad(&common::name(i), &grad[..]).unwrap();
    }
    batch.finish().unwrap();
    local.step(run.at(t)).unwrap()
}

/// Trains two workers of one rank each; the all-reduce in place with number `fails` fails.
fn train(plan: &LocalPlan, steps: u64, fails: usize) -> Vec<Ended> {
    loopback::spawn(2, |world| {
        let (rank, meter) = (world.rank(), Meter::new());
        let run = Run { options: Options { meter: meter.clone(), ..run().options }, ..run() };
        let (comm, Workers { world, across }) = Workers::split(world, rank as u32).unwrap();
        let [in_place, packed] = [0, 0].map(AtomicUsize::new);
        let across = Arc::new(Counting { inner: across, in_place, packed, fails });
        let workers = Workers { world, across: Arc::clone(&across) as _ };
        let mut local = LocalOptimizer::new(run.build(comm).unwrap(), workers, plan.clone()).unwrap();
        let (mut all, mut vetoes, mut before) = (Vec::new(), Vec::new(), 0);
        for t in 1..=steps {
            if t == 4 {
                meter.reset_peaks();
                before = meter.peak_total();
            }
            vetoes.push(step(&run, &mut local, (rank, t)).exchanged.failed);
            all.push(values(&run, &local));
        }
        let [in_place, packed] = [&across.in_place, &across.packed].map(|calls| calls.load(Relaxed));
        Ended { values: all, vetoes, in_place, packed, allocated: meter.peak_total() - before }
    })
    .unwrap()
}

const NEVER: usize = usize::MAX;

#[test]
fn a_mean_in_its_own_type_at_once_is_in_place_and_nothing_else_is() {
    let adam = || LocalPlan::local_adam(2);
    let moment = Fragment::mean(What::State(Slots::First), Timing::every(2));
    let half = LocalPlan::local_sgd(2).with(|f| f.taken = 0.5);
    let mixed = LocalPlan::new([half.clone().fragments, vec![moment.clone()]].concat());
    let in_f64 = LocalPlan::new(vec![Fragment { wire: Some(DType::F64), ..moment }]);
    // The number of lanes in place and of packed ones in each exchange.
    let plans = [
        ("local adam", adam(), 1, 0),
        ("weighted by tokens", adam().with(|f| f.weights = Weights::Tokens), 3, 0),
        ("rolls back", adam().with(|f| f.on_failure = OnFailure::RollBack), 1, 0),
        ("a share of the mean", half.clone(), 0, 1),
        ("a share in the same lane", mixed, 0, 1),
        ("a share, and a lane in f64", LocalPlan::new([half.fragments, in_f64.fragments].concat()), 0, 2),
        ("delayed", adam().with(|f| f.timing.delay = 1), 0, 1),
        ("in bf16", LocalPlan::local_sgd(2).with(|f| f.wire = Some(DType::BF16)), 0, 1),
        ("an outer optimizer", LocalPlan::diloco(2), 0, 1),
    ];
    for (name, plan, in_place, packed) in plans {
        for end in train(&plan, 8, NEVER) {
            assert_eq!((end.in_place, end.packed), (4 * in_place, 4 * packed), "{name}");
            assert!(end.vetoes.iter().all(Vec::is_empty), "{name}");
            assert!(end.allocated < 4_096, "{name}: {} bytes", end.allocated);
        }
    }
}

#[test]
fn whichever_bucket_fails_all_values_are_as_before_the_exchange() {
    for policy in [OnFailure::KeepLocal, OnFailure::RollBack] {
        let plan = LocalPlan { bucket_len: 500, ..LocalPlan::local_adam(2) };
        let plan = plan.with(|f| f.on_failure = policy);
        // Three vectors of 1,265 elements.
        let buckets = 8;
        let whole = train(&plan, 5, NEVER);
        assert_eq!(whole[0].in_place, 2 * buckets);
        let alone = train(&LocalPlan::local_adam(100), 3, NEVER);
        for fails in 0..buckets {
            for (rank, end) in train(&plan, 5, fails).iter().enumerate() {
                assert_eq!(end.in_place, fails + 1 + buckets, "nothing is reduced after a failure");
                let vetoes: Vec<usize> = end.vetoes.iter().map(Vec::len).collect();
                assert_eq!(vetoes, [0, 3, 0, 0, 0]);
                let kept = if policy == OnFailure::RollBack { None } else { Some(&alone[rank].values[..3]) };
                assert!(kept.is_none_or(|kept| end.values[..3] == *kept), "rank {rank}, bucket {fails}");
            }
        }
    }
}

/// The result of the first exchange is what the second one rolls back to.
#[test]
fn an_exchange_in_place_is_what_is_rolled_back_to() {
    let plan = LocalPlan::local_adam(2).with(|f| f.on_failure = OnFailure::RollBack);
    for (rank, end) in train(&plan, 4, 1).iter().enumerate() {
        assert_eq!(end.vetoes[3].len(), 3);
        assert!(end.values[3] == end.values[1] && end.values[2] != end.values[1], "rank {rank}");
    }
}

/// Backends without the call of their own give the same bits through a copy.
#[test]
fn the_default_of_a_backend_gives_the_same_bits() {
    #[derive(Debug)]
    struct Plain(Arc<dyn Communicator>);
    impl Communicator for Plain {
        fn rank(&self) -> usize {
            self.0.rank()
        }
        fn world_size(&self) -> usize {
            self.0.world_size()
        }
        fn start(&self, op: Op, buffer: Buffer, after: &Queue) -> Result<InFlight, (Buffer, Error)> {
            self.0.start(op, buffer, after)
        }
        fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Arc<dyn Communicator>>, Error> {
            self.0.split(color, key)
        }
        fn abort(&self) {
            self.0.abort();
        }
        fn stats(&self) -> Stats {
            self.0.stats()
        }
    }
    let plan = LocalPlan { bucket_len: 77, ..LocalPlan::local_adam(1) };
    let ends = |plain: bool| {
        loopback::spawn(2, |world| {
            let (comm, mut workers) = Workers::split(Arc::clone(&world), world.rank() as u32).unwrap();
            // One of both ranks is enough: the calls are one collective.
            if plain && world.rank() == 1 {
                workers.across = Arc::new(Plain(workers.across));
            }
            let run = run();
            let mut local = LocalOptimizer::new(run.build(comm).unwrap(), workers, plan.clone()).unwrap();
            for t in 1..=3 {
                assert_eq!(step(&run, &mut local, (world.rank(), t)).exchanged.merged.len(), 3);
            }
            values(&run, &local)
        })
        .unwrap()
    };
    assert!(ends(true) == ends(false));
}
