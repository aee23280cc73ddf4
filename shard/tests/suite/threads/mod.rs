//! Threads are the caller's choice and change no bit; a full global pool of rayon delays no step.

mod full;

use crate::common::{Run, STAGES, name, params, turns};
use meshstep_optim::Lbfgs;
use meshstep_shard::{Error, Optimizer, Options, Outcome, ShardedLbfgs, Stage};
use meshstep_tensor::{DType, Layout, Meter, Param, Queue, Slice, SliceMut, Threads};
use std::sync::Arc;

/// Lengths of parameters that are worth several threads.
const LENS: [usize; 3] = [300_000, 17, 200_001];

/// A run whose gradients are the same in every step.
struct Steps {
    run: Run,
    grads: Vec<Vec<f32>>,
    opt: Optimizer,
    t: u64,
}

impl Steps {
    fn new(run: &Run, comm: Arc<dyn meshstep_comm::Communicator>) -> Self {
        let rank = comm.rank();
        let narrow = |i| run.gradient(1, 0, rank, i).into_iter().map(|g| g as f32).collect();
        let grads = (0..run.lens.len()).map(narrow).collect();
        Steps { run: run.clone(), grads, opt: run.build(comm).unwrap(), t: 0 }
    }

    /// Accumulates two micro-batches, takes a step and verifies it.
    fn step(&mut self) {
        self.t += 1;
        let Steps { run, grads, opt, t } = self;
        for last in [false, true] {
            let mb = if last { opt.micro_batch(1) } else { opt.accumulate(1) }.unwrap();
            for (i, grad) in grads.iter().enumerate().rev() {
                mb.grad(&name(i), Slice::from(&grad[..])).unwrap();
            }
            mb.finish().unwrap();
        }
        assert!(matches!(opt.step(run.at(*t)).unwrap().outcome().unwrap(), Outcome::Applied { .. }));
        opt.verify().unwrap();
    }
}

fn run(stage: Stage, ranks: usize, threads: &Threads) -> Run {
    let options = Options { bucket_len: None, queue: Queue::cpu_on(threads), ..Options::default() };
    Run { lens: LENS.to_vec(), ranks, micro_batches: 2, options, ..Run::default() }.stage(stage)
}

fn lbfgs(comm: Arc<dyn meshstep_comm::Communicator>, threads: &Threads) -> ShardedLbfgs {
    let rule = Lbfgs { lr: 0.5, max_iter: 3, history_len: 2, ..Lbfgs::default() };
    let layout = Layout::builder().unit("all").param("w", &[LENS[0]], DType::F32).build().unwrap();
    let first = |_: &Param, mut w: SliceMut<'_>| {
        w.typed_mut::<f32>()?.iter_mut().enumerate().for_each(|(i, w)| *w = 0.1 + (i % 7) as f32);
        Ok(())
    };
    let (queue, meter) = (Queue::cpu_on(threads), Meter::new());
    let options = Options { stage: Stage::Zero1, queue, meter, ..Options::default() };
    ShardedLbfgs::new(comm, layout, rule, first, options).unwrap()
}

/// Takes a step of three iterations.
fn iterate(opt: &mut ShardedLbfgs, grad: &mut [f32]) {
    let step = opt.step(|mb| {
        let all = mb.gather("all")?;
        let x = all.param("w")?.typed::<f32>()?;
        grad.iter_mut().zip(x).for_each(|(g, x)| *g = x - 1.0);
        mb.grad("w", &*grad)?;
        Ok::<_, Error>(0.0)
    });
    step.unwrap();
}

#[test]
fn every_choice_of_threads_has_the_same_bits() {
    let others = [Threads::shared(), Threads::new(2).unwrap(), Threads::new(5).unwrap()];
    for (i, stage) in STAGES.into_iter().filter(|stage| *stage != Stage::Zero3).enumerate() {
        let end = |threads: &Threads| {
            let run = run(stage, 2, threads);
            let ends = meshstep_comm::loopback::spawn(2, |comm| {
                let mut steps = Steps::new(&run, comm);
                (0..2).for_each(|_| steps.step());
                params(&steps.opt)
            });
            ends.unwrap()
        };
        let caller = end(&Threads::caller());
        for threads in turns(&[0, 1, 2], i, 1) {
            assert!(end(&others[threads]) == caller, "{stage:?}, {:?}", others[threads]);
        }
    }
}

#[test]
fn lbfgs_has_the_same_bits_on_every_choice_of_threads() {
    let end = |threads: &Threads| {
        let ends = meshstep_comm::loopback::spawn(2, |comm| {
            let mut opt = lbfgs(comm, threads);
            iterate(&mut opt, &mut vec![0.0; LENS[0]]);
            params(opt.optimizer())
        });
        ends.unwrap()
    };
    let caller = end(&Threads::caller());
    for threads in [Threads::shared(), Threads::new(3).unwrap()] {
        assert!(end(&threads) == caller, "{threads:?}");
    }
}

/// Ranks of one optimizer may differ in their threads.
#[test]
fn ranks_choose_their_own_threads() {
    let all = [Threads::caller(), Threads::new(3).unwrap()];
    let ends = meshstep_comm::loopback::spawn(2, |comm| {
        let mut steps = Steps::new(&run(Stage::Zero1, 2, &all[comm.rank()]), comm);
        steps.step();
        params(&steps.opt)
    });
    let ends = ends.unwrap();
    assert!(ends[0] == ends[1]);
}
