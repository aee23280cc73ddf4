//! Cases of replicas in groups, for ranks on CPUs or GPUs: combining, clipping and missing gradients, drift of groups, refusals.

mod clipping;
mod drift;
mod groups;
mod missing;
mod refusals;

use crate::common::put;
use meshstep_comm::{Communicator, loopback};
use meshstep_optim::Rule;
use meshstep_shard::{CrossShard, Error, MicroBatch, Options, Outcome, Pending, Stage, Step, StepArgs};
use meshstep_tensor::{Buffer, Category, DType, Element, Layout, Meter, Param, Queue, Slice, SliceMut};
use std::sync::Arc;

pub(crate) use clipping::*;
pub(crate) use drift::*;
pub(crate) use groups::*;
pub(crate) use missing::*;
pub(crate) use refusals::*;

pub(crate) type Comm = Arc<dyn Communicator>;
type Assignment<'a> = Option<&'a [Vec<usize>]>;

/// A way to run ranks.
pub(crate) trait Ranks {
    /// Runs `body` on each of `ranks` ranks, which work on a queue each, and returns the results.
    fn run<T: Send>(&self, ranks: usize, body: impl Fn(Comm, Queue) -> T + Sync) -> Vec<T>;
}

/// Ranks as threads on the CPU.
pub(crate) struct Loopback;

impl Ranks for Loopback {
    fn run<T: Send>(&self, ranks: usize, body: impl Fn(Comm, Queue) -> T + Sync) -> Vec<T> {
        loopback::spawn(ranks, |comm| body(comm, Queue::cpu())).unwrap()
    }
}

fn zeros(_: &Param, _: SliceMut<'_>) -> Result<(), meshstep_tensor::Error> {
    Ok(())
}

pub(crate) fn layout() -> Layout {
    Layout::builder().param("w", &[2], DType::F32).param("b", &[3], DType::F32).build().unwrap()
}

fn replicated() -> Options {
    Options { stage: Stage::Replicated, ..Options::default() }
}

fn there(queue: &Queue, options: Options) -> Options {
    Options { queue: queue.clone(), ..options }
}

fn build(
    comm: Comm,
    queue: &Queue,
    groups: Assignment<'_>,
    rule: impl Rule + 'static,
    options: Options,
) -> Result<CrossShard, Error> {
    CrossShard::new(comm, groups, layout(), rule, zeros, there(queue, options))
}

fn at_one() -> StepArgs {
    StepArgs { lr: 1.0, ..StepArgs::default() }
}

/// Takes a step with gradient `w` for parameter w, and `b` for b; `None`: not handed over.
fn step(
    opt: &mut CrossShard,
    batch: u64,
    w: Option<[f32; 2]>,
    b: Option<f32>,
    at: StepArgs,
) -> Result<Outcome, Error> {
    pend(opt, batch, w, b, at)?.outcome()
}

/// Takes a step as `step` does, and returns its pending outcome.
pub(crate) fn pend(
    opt: &mut CrossShard,
    batch: u64,
    w: Option<[f32; 2]>,
    b: Option<f32>,
    at: StepArgs,
) -> Result<Pending, Error> {
    let queue = opt.optimizer().options().queue.clone();
    let mb = opt.micro_batch(batch)?;
    w.into_iter().for_each(|w| give(&mb, "w", &w[..], &queue).unwrap());
    b.into_iter().for_each(|b| give(&mb, "b", &[b; 3][..], &queue).unwrap());
    mb.finish()?;
    opt.step(at)
}

fn give<'g>(mb: &MicroBatch<'_>, name: &str, grad: impl Into<Slice<'g>>, queue: &Queue) -> Result<(), Error> {
    mb.grad(name, put(grad.into(), queue).as_slice())
}

fn of<T: Element>(opt: &CrossShard, values: Slice<'_>) -> Vec<T> {
    fetch(values, &opt.optimizer().options().queue)
}

fn fetch<T: Element>(values: Slice<'_>, queue: &Queue) -> Vec<T> {
    let mut here = Buffer::zeroed(values.len(), T::DTYPE, &Meter::new(), Category::Staging).unwrap();
    queue.download(values, here.as_mut()).unwrap();
    here.typed::<T>().unwrap().to_vec()
}

fn values(opt: &CrossShard, name: &str) -> Vec<f32> {
    of(opt, opt.param(name).unwrap())
}

/// Returns the rule's first state vector.
fn first_state(opt: &CrossShard, name: &str) -> Vec<f32> {
    of(opt, opt.optimizer().state(name).unwrap().slots[0].1)
}

fn t(opt: &CrossShard, name: &str) -> u64 {
    opt.optimizer().state(name).unwrap().t
}
