//! A whole sharded step as one CUDA graph on every rank: gradients reduced, measured, decided on and applied, parameters
//! gathered.

use crate::common::Run;
use crate::cuda::{alone, devices, room_for, seed, stand_in};
use meshstep_comm::nccl::{self, Captured, Nccl};
use meshstep_comm::{Communicator, Op, Reduction};
use meshstep_optim::cuda::{Decided, Decision, FIELDS, Group, Progress, Settings, Update, Verdict};
use meshstep_optim::{
    AdamW, DynamicLossScale, ExactSum, Flat, LossScale, Norm, NormSum, Rounding, Rule, Segment,
};
use meshstep_shard::{Error, Options, Outcome};
use meshstep_tensor::cuda::{self, Stream};
use meshstep_tensor::{Buffer, Category, DType, Meter, Queue, SliceMut};
use std::sync::Arc;

const RANKS: usize = 2;
/// Elements of each bucket; every rank owns half of each.
const LENS: [usize; 2] = [2 * 1500, 2 * 64];
/// Step in which rank 1 has a non-finite gradient.
const BAD: u64 = 3;

struct Bucket {
    grads: Buffer,
    params: Buffer,
    state: Vec<Buffer>,
    update: Update,
}

/// One rank's part of the step.
struct Whole {
    comm: Arc<Nccl>,
    queue: Queue,
    norm: NormSum,
    decision: Decision,
    sum: Buffer,
    max: Buffer,
    buckets: Vec<Bucket>,
}

fn scaling() -> LossScale {
    LossScale::Dynamic(DynamicLossScale {
        growth_interval: 2,
        init_scale: 4.0,
        ..DynamicLossScale::default()
    })
}

/// Returns element `i` of a bucket's vectors, of a size that a mean over two ranks does not round.
fn value(t: u64, rank: usize, i: usize) -> f32 {
    let mixed = (i as u64 + 1) * (t + 7) * (3 + rank as u64) * 0x9E37_79B9;
    ((mixed >> 16) % 2001) as f32 / 1024.0 - 0.977
}

impl Bucket {
    fn new(rule: &dyn Rule, len: usize, half: std::ops::Range<usize>, queue: &Queue, meter: &Meter) -> Self {
        let buffer = |n| Buffer::zeroed_on(queue, n, DType::F32, meter, Category::State).unwrap();
        let (mut grads, mut params) = (buffer(len), buffer(len));
        let values: Vec<f32> = (0..len).map(|i| value(0, 0, i)).collect();
        queue.upload(values[..].into(), params.as_mut()).unwrap();
        let mut state: Vec<Buffer> = rule.state().iter().map(|_| buffer(half.len())).collect();
        let segments = [Segment::new(0..half.len() / 3, 1), Segment::new(half.len() / 3..half.len(), 1)];
        let group = Group { rule, lr_scale: 1.0, segments: &segments, params: &[] };
        let mut slots: Vec<SliceMut<'_>> = state.iter_mut().map(Buffer::as_mut).collect();
        let flat = flat(&mut params, &mut grads, &mut slots, half);
        let update = Update::new(&flat, &[group], Rounding::Nearest, queue, meter).unwrap();
        Bucket { grads, params, state, update }
    }
}

/// Returns a rank's shard of a bucket.
fn flat<'a, 's>(
    params: &'a mut Buffer,
    grads: &'a mut Buffer,
    state: &'a mut [SliceMut<'s>],
    half: std::ops::Range<usize>,
) -> Flat<'a, 's> {
    Flat {
        params: params.as_mut().slice(half.clone()).unwrap(),
        grads: grads.as_mut().slice(half).unwrap(),
        state,
        copy: None,
        remainder: None,
    }
}

impl Whole {
    fn new(comm: Arc<Nccl>) -> Self {
        let (meter, queue) = (Meter::new(), Queue::cuda(Stream::new(comm.device()).unwrap()));
        let words = |n| Buffer::zeroed_on(&queue, n, DType::U64, &meter, Category::Staging).unwrap();
        let (rule, rank) = (AdamW::default(), comm.rank());
        let bucket = |len: usize| {
            let half = rank * len / RANKS..(rank + 1) * len / RANKS;
            Bucket::new(&rule, len, half, &queue, &meter)
        };
        let progress = Progress::new(0, Some(scaling().start()));
        let mut whole = Whole {
            norm: NormSum::new(Norm::L2, &queue, &meter).unwrap(),
            decision: Decision::new(&progress, 0, &queue, &meter).unwrap(),
            sum: words(3 + ExactSum::WORDS),
            max: words(4 + 2 * FIELDS),
            buckets: LENS.map(bucket).into(),
            queue,
            comm,
        };
        whole.measure().unwrap();
        whole
    }

    fn half(&self, b: usize) -> std::ops::Range<usize> {
        let rank = self.comm.rank();
        rank * LENS[b] / RANKS..(rank + 1) * LENS[b] / RANKS
    }

    fn measure(&mut self) -> Result<(), Error> {
        self.norm.reset(&self.queue)?;
        for b in 0..LENS.len() {
            let half = self.half(b);
            self.norm.add(self.buckets[b].grads.as_slice().slice(half)?, &self.queue)?;
        }
        Ok(())
    }

    /// Launches the step, without any part of the host.
    fn step(&mut self) -> Result<(), Error> {
        let (comm, queue) = (Arc::clone(&self.comm), self.queue.clone());
        let run = |op: Op, buffer: &mut Buffer| -> Result<(), Error> {
            let flight = comm.start(op, buffer.take(), &queue).map_err(|(_, error)| error)?;
            let (whole, ended) = flight.wait(&queue);
            *buffer = whole;
            Ok(ended?)
        };
        for bucket in &mut self.buckets {
            run(Op::reduce_scatter(Reduction::Mean), &mut bucket.grads)?;
        }
        self.measure()?;
        let Whole { norm, decision, sum, max, .. } = self;
        norm.write(sum.as_mut(), max.as_mut(), &queue)?;
        decision.bring(sum.as_mut(), max.as_mut(), &queue)?;
        run(Op::all_reduce(Reduction::Sum), sum)?;
        run(Op::all_reduce(Reduction::Max), max)?;
        decision.decide(sum.as_slice(), max.as_slice(), &queue)?;
        for b in 0..LENS.len() {
            let half = self.half(b);
            let Bucket { grads, params, state, update } = &mut self.buckets[b];
            let mut slots: Vec<SliceMut<'_>> = state.iter_mut().map(Buffer::as_mut).collect();
            update.run(flat(params, grads, &mut slots, half), self.decision.step(), &queue)?;
            run(Op::all_gather(), params)?;
        }
        Ok(())
    }

    fn captured(&mut self) -> Captured {
        let (comm, stream) = (Arc::clone(&self.comm), self.queue.stream().unwrap().clone());
        comm.capture(&stream, || self.step()).unwrap()
    }

    fn launch(&mut self, graph: &Captured) {
        // SAFETY: everything captured lives in `self`, and is used again only by calls on the same queue.
        unsafe { graph.launch(self.queue.stream().unwrap()) }.unwrap();
    }

    /// Prepares step `t`: its gradients, another rate each time, and at last another norm.
    fn begin(&mut self, t: u64, odd: bool) {
        let rank = self.comm.rank();
        for (b, bucket) in self.buckets.iter_mut().enumerate() {
            let mut values: Vec<f32> = (0..LENS[b]).map(|i| value(t, rank, i + b)).collect();
            if t == BAD && rank == 1 && b == 0 {
                values[7] = f32::NAN;
            }
            self.queue.upload(values[..].into(), bucket.grads.as_mut()).unwrap();
        }
        let settings = Settings {
            lr: 0.01 * t as f64 + if odd && rank == 1 { 1.0 } else { 0.0 },
            max_norm: if t < 6 { 1e3 } else { 1e-2 },
            rank: rank as u64,
            world_size: RANKS as u64,
            ..Settings::default()
        };
        self.decision.set(&settings.with_loss_scale(Some(&scaling())), [], &self.queue).unwrap();
    }

    fn decided(&self) -> Decided {
        self.decision.answer(&self.queue).unwrap().read().unwrap()
    }

    fn read(&self, buffer: &Buffer) -> Vec<u32> {
        let mut values = vec![0f32; buffer.len()];
        self.queue.download(buffer.as_slice(), (&mut values[..]).into()).unwrap();
        values.into_iter().map(f32::to_bits).collect()
    }

    /// Returns the parameters; and the state, the steps of each segment, and the run's progress.
    fn end(&self) -> (Vec<Vec<u32>>, String) {
        let params = self.buckets.iter().map(|bucket| self.read(&bucket.params)).collect();
        let state: Vec<_> = self.buckets.iter().flat_map(|b| &b.state).map(|s| self.read(s)).collect();
        let steps: Vec<_> = self.buckets.iter().map(|b| b.update.steps(&self.queue).unwrap()).collect();
        (params, format!("{state:?} {steps:?} {:?}", self.decision.progress(&self.queue).unwrap()))
    }
}

fn ranks<T: Send>(body: impl Fn(Arc<Nccl>) -> T + Sync) -> Vec<T> {
    let devices: Vec<usize> = (0..RANKS).map(|rank| rank % devices()).collect();
    let options = nccl::Options { check: false, ..nccl::Options::default() };
    nccl::spawn(&devices, options, body).unwrap()
}

#[test]
fn a_whole_sharded_step_launched_as_a_graph_equals_the_step() {
    let _alone = alone();
    if !room_for(RANKS) {
        return;
    }
    for order in 0..if stand_in() { 20 } else { 1 } {
        if stand_in() {
            seed(order);
        }
        let ends = ranks(|comm| {
            let (mut direct, mut replayed) = (Whole::new(Arc::clone(&comm)), Whole::new(comm));
            let before = replayed.end();
            let graph = replayed.captured();
            assert_eq!(replayed.end(), before, "nothing is done by a capture");
            let mut verdicts = Vec::new();
            for t in 1..=8 {
                [&mut direct, &mut replayed].into_iter().for_each(|run| run.begin(t, false));
                direct.step().unwrap();
                replayed.launch(&graph);
                if t % 3 == 0 {
                    assert_eq!(replayed.end(), direct.end(), "step {t}, order {order}");
                }
                verdicts.push(replayed.decided());
                assert_eq!(verdicts.last(), Some(&direct.decided()), "step {t}, order {order}");
            }
            assert_eq!(replayed.end(), direct.end(), "order {order}");
            (replayed.end().0, verdicts)
        });
        let (params, verdicts) = &ends[0];
        assert_eq!(ends[1], ends[0], "ranks end alike");
        assert!(params.iter().flatten().all(|&bits| f32::from_bits(bits).is_finite()));
        for (t, decided) in (1..).zip(verdicts) {
            let expected = if t == BAD { (Verdict::Skipped, 1) } else { (Verdict::Applied, 0) };
            assert_eq!((decided.verdict, decided.non_finite), (expected.0 as u32, expected.1), "step {t}");
            assert_eq!(decided.coef < 1.0, t >= 6, "step {t}");
        }
    }
}

#[test]
fn ranks_that_launch_with_different_rates_are_told_by_the_verdict() {
    let _alone = alone();
    if !room_for(RANKS) {
        return;
    }
    ranks(|comm| {
        let mut whole = Whole::new(comm);
        let graph = whole.captured();
        whole.begin(1, true);
        let before = whole.end();
        whole.launch(&graph);
        let Decided { verdict, param, mine, smallest, largest, .. } = whole.decided();
        assert_eq!((verdict, param), (Verdict::Parted as u32, 1));
        let rates = [0.01, 0.01 + 1.0].map(f64::to_bits);
        assert_eq!(([smallest, largest], mine), (rates, rates[whole.comm.rank()]));
        assert_eq!(whole.end(), before);
        whole.begin(2, false);
        whole.launch(&graph);
        assert_eq!(whole.decided().verdict, Verdict::Applied as u32);
    });
}

#[test]
fn a_step_of_an_optimizer_is_no_part_of_a_graph() {
    let _alone = alone();
    if !room_for(RANKS) {
        return;
    }
    ranks(|comm| {
        let queue = Queue::cuda(Stream::new(comm.device()).unwrap());
        let base = Run { ranks: RANKS, ..Run::default() };
        let run = Run { options: Options { queue: queue.clone(), ..base.options.clone() }, ..base };
        let mut optimizer = run.build(comm).unwrap();
        run.hand_over(&mut optimizer, 1, 0).unwrap();
        let stream = queue.stream().unwrap();
        let graph = stream.capture(|| {
            let told = optimizer.step(run.at(1)).unwrap_err().to_string();
            assert!(told.contains("a step of an Optimizer cannot be part of a graph"), "{told}");
            Ok::<_, cuda::Error>(())
        });
        graph.unwrap();
        // The refused capture had no effect, and the step can be taken.
        let outcome = optimizer.step(run.at(1)).unwrap().outcome().unwrap();
        assert!(matches!(outcome, Outcome::Applied { .. }));
    });
}
