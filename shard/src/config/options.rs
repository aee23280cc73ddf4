//! Options of an optimizer, and arguments of a step.

use crate::config::precision::Precision;
use crate::config::preemption::Preemption;
use crate::config::slots::SlotRuns;
use crate::config::stage::Stage;
use meshstep_optim::schedule::Schedule;
use meshstep_optim::{LossScale, Norm};
use meshstep_tensor::{DType, Meter, Place, Queue};
use std::time::Duration;

/// How the gradients of several ranks and micro-batches are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Combine {
    /// Mean over ranks and micro-batches. The mean over ranks is taken in the reduction's accumulator, before rounding; the mean
    /// over micro-batches, and over [slots](Options::slots), is a factor of the update.
    #[default]
    Mean,
    /// Sum over ranks and micro-batches.
    Sum,
    /// sum(w g) / sum(w), with w the weight of each micro-batch on each rank: its samples or tokens. Products are rounded once to
    /// the gradients' type; f16 is refused, because w g overflows it.
    Weighted,
}

/// Place where stages 2 and 3 add up the gradients of several micro-batches. Stages 0 and 1 keep the sum on each rank.
///
/// ```
/// use meshstep_shard::prelude::*;
/// use meshstep_shard::{Accumulate, Plan};
///
/// let layout = Layout::builder().param("w", &[1024], DType::F32).build()?;
/// let grads = |accumulate| -> Result<u64, meshstep_shard::Error> {
///     let options = Options { stage: Stage::Zero2, accumulate, ..Options::default() };
///     Ok(Plan::new(&layout, 4, &options)?.memory(0, &AdamW::default()).grads)
/// };
/// assert_eq!((grads(Accumulate::Reduced)?, grads(Accumulate::Local)?), (1024, 4096));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Accumulate {
    /// On the rank that owns the elements: each micro-batch is reduced, and a rank keeps 1/n of the sum and two buckets in flight. k
    /// micro-batches send (k+1)(n-1)/n times the parameters' bytes at stage 2. Sums are rounded after each reduction.
    #[default]
    Reduced,
    /// On each rank, as at stage 1: a rank keeps a sum of all gradients, and reduces it once. A step sends as much as one with a single
    /// micro-batch, and has the bits of stages 0 and 1.
    Local,
}

/// Policy for a rank without a gradient for a parameter: it called [`MicroBatch::none`](crate::MicroBatch::none), or finished its
/// micro-batch without the gradient.
///
/// At stages 2 and 3 a bucket that waits for such a gradient until `finish` holds back the buckets after it, and their memory.
/// `none` completes it at once. Without `none`, a bucket that lacked a gradient on some rank travels after all others in the next
/// step, on every rank, and takes memory of its own until then; a step in which it lacks no gradient restores its place. On a GPU
/// only `none` helps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Missing {
    /// The step fails on every rank, naming rank and parameter; nothing changes.
    #[default]
    Error,
    /// The missing gradient counts as zeros. At stages 2 and 3 a gradient that is absent without
    /// [`MicroBatch::none`](crate::MicroBatch::none) keeps the buckets behind it waiting, and their memory grows beyond the plan.
    Zero,
    /// A parameter without a gradient on any rank is not updated, and its state and `t` stay; a gradient that is missing on some
    /// ranks only counts as zeros there.
    SkipIfMissingEverywhere,
    /// A parameter without a gradient on any rank is not updated, and its state and `t` stay; a gradient that is missing on some
    /// ranks only is an error on every rank, naming one of these ranks and the parameter.
    AllOrNone,
}

impl Missing {
    /// Returns true if ranks count the gradients of each parameter.
    pub(crate) fn counts(self) -> bool {
        matches!(self, Missing::SkipIfMissingEverywhere | Missing::AllOrNone)
    }
}

/// Policy for combined gradients that are infinite or NaN.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum NonFinite {
    /// The step is skipped on every rank: [`Outcome::Skipped`](crate::Outcome::Skipped); more than [`Options::max_skips`] in a
    /// row are an error. No update begins before all gradients have arrived.
    #[default]
    Skip,
    /// The step is taken with any gradients, as in PyTorch: non-finite elements enter parameters and state, and the norm is
    /// infinite. With [`StepArgs::max_norm`] the clip factor is then 0, so that non-finite elements become NaN and the others 0.
    /// PyTorch's `clip_grad_norm_` does so for infinities; for a NaN it makes every gradient NaN. A dynamic loss scale depends on
    /// skips and is refused.
    ///
    /// Gradients do not influence the decision, so a bucket is updated and its parameters are sent while the next is still in
    /// flight, unless `max_norm` limits the combined gradient, a rule (LAMB, LARS) needs sums over whole tensors, or several
    /// groups of ranks share parameters. The decision uses a communicator of its own, split off at construction, and the norm one
    /// more exchange at the end.
    Propagate,
}

/// Gradients that [`StepArgs::max_norm`] limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Clip {
    /// The combined gradient of all ranks and micro-batches is scaled down to the norm, by the same factor on every rank,
    /// `min(1, max_norm / (norm + 1e-6))` ([`clip_coef`](meshstep_optim::clip_coef)): PyTorch's `clip_grad_norm_` applied to reduced
    /// gradients.
    #[default]
    AfterReduce,
    /// Each rank's own gradient, summed over its micro-batches, is scaled down to the norm before it is combined with the other
    /// ranks'. The norm is not known before the step, so gradients stay until then and no communication overlaps the caller's
    /// computation; stages 2 and 3 need [`Accumulate::Local`]. The factor is rounded to f32, the products to the
    /// gradients' type.
    BeforeReduce,
}

/// Source of the initial parameter values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Initial {
    /// Rank 0's values are broadcast; the other ranks' initializers are not called.
    #[default]
    Broadcast,
    /// Every rank supplies them, and they must be equal: a difference is an error that names the first parameter.
    Compare,
}

/// Options of an [`Optimizer`](crate::Optimizer). Every rank passes the same options, which is checked.
#[derive(Clone, Debug)]
pub struct Options {
    /// Sharding stage.
    pub stage: Stage,
    /// Maximum elements of a bucket that holds several parameters. Parameters are never cut, so a larger one gets a bucket of its
    /// own. `None`: max(40e6, 1e6 per rank). At stages 2 and 3, where memory holds the longest two consecutive buckets in flight
    /// ([`Memory::buckets`](crate::Memory::buckets)), `None` is also at most 1/80 of all elements of the type, for small models
    /// 1/16 up to 4 Mi, and at least 1 Mi; and buckets beside a parameter larger than a bucket are cut short.
    pub bucket_len: Option<usize>,
    /// True: buckets travel while the caller computes. False: the thread that fills a bucket waits for its reduction.
    pub overlap: bool,
    /// True: gradients stay on this rank until [`step`](crate::Optimizer::step), for a backward pass that yields them all at its end.
    /// Stages 2 and 3 need [`Accumulate::Local`]. At stage 1 a step that gradients cannot stop
    /// ([`NonFinite::Propagate`], without [`max_norm`](StepArgs::max_norm) on the combined gradient) then reduces, updates and gathers a
    /// long bucket in one pass over memory, among threads or processes of one host: 52 instead of 60 bytes an element on 4 ranks in f32.
    /// No bit depends on it. False: full buckets travel while the caller computes.
    pub reduce_in_step: bool,
    /// Wait budget of a gradient, by the communicator's clock, for the memory of a bucket in flight (stages 2 and 3; at every
    /// stage with overlap off). The wait is in vain if another rank lacks a gradient of that bucket, and itself waits for this
    /// rank in a collective of the model or in a gather. After the budget the thread takes memory beyond the plan, if there is
    /// any ([`Traffic::pool_grown`](crate::Traffic::pool_grown) counts it), and does not wait again in this micro-batch. The
    /// budget halves after each micro-batch with such a wait, down to a thousandth. Choose it longer than the usual skew between
    /// ranks. `Duration::MAX`: no limit except the communicator's, for models in which no rank ever lacks a gradient. On a GPU
    /// the queue waits, not the host, so the communicator's deadline is the only limit there.
    pub wait_budget: Duration,
    /// How the gradients of several ranks and micro-batches are combined.
    pub combine: Combine,
    /// Place where stages 2 and 3 add up micro-batches.
    pub accumulate: Accumulate,
    /// Slots of each step: micro-batches in an order that does not depend on the number of ranks, with sums of the same bits on any number of
    /// them. Each rank makes one micro-batch for each slot of its run. `None`: ranks make any number of micro-batches, and sums are
    /// in the order of the ranks, in a wider accumulator.
    ///
    /// Gradients are summed in the slots' tree, each node rounded to the gradients' type; a mean divides the sum, by a factor of the
    /// update. A rank sends one vector if runs are equal powers of two, else as many as the run with the most complete nodes has, and keeps
    /// at least as many ([`Plan`](crate::Plan) says both). At stages 2 and 3 with runs longer than one, sums are kept as with
    /// [`Accumulate::Local`]. Gradients are f32 or f64, and one group of ranks reduces them.
    pub slots: Option<SlotRuns>,
    /// Policy for missing gradients.
    pub missing: Missing,
    /// Policy for gradients that are not finite.
    pub non_finite: NonFinite,
    /// Source of the initial values.
    pub initial: Initial,
    /// Type in which gradients are handed over and sent; `None`: that of each parameter. f32, bf16 and f16 parameters take any of
    /// the three; f64 parameters always take f64.
    pub grads: Option<DType>,
    /// Types of masters and moments, and their rounding.
    pub precision: Precision,
    /// Norm that is clipped and reported.
    pub norm: Norm,
    /// Gradients that are clipped by it.
    pub clip: Clip,
    /// Factor by which the caller multiplies each loss ([`Optimizer::loss_scale`](crate::Optimizer::loss_scale)); the step
    /// divides the gradients by the same factor, then adjusts it after overflows. `None`: always 1.
    pub loss_scale: Option<LossScale>,
    /// Learning rate of every step, as a function of the steps taken or skipped before it. Steps are then taken with
    /// [`Optimizer::scheduled`](crate::Optimizer::scheduled); a step at another rate is an error on every rank. Ranks with
    /// different schedules are refused when the optimizer is built. `None`: each step's [`StepArgs::lr`].
    pub schedule: Option<Schedule>,
    /// Steps that may be skipped in a row, for gradients that are not finite, before a skip is an error. A skip after which a
    /// dynamic loss scale can still fall does not count.
    pub max_skips: u32,
    /// Request to end the run, which a scheduler's signal makes. It is this rank's own, and not compared between ranks: the step after
    /// a request on any rank says so on every rank ([`Outcome::preempted`](crate::Outcome::preempted)), at no further message. Keep a
    /// clone to request it. [`ShardedLbfgs`](crate::ShardedLbfgs) does not exchange it. The groups of a
    /// [`CrossShard`](crate::CrossShard), and workers, learn of it apart: exchange it among them before all of them save.
    pub preemption: Preemption,
    /// Queue of the optimizer: the place that holds parameters, gradients and state, and the order of all work on them. The CPU's
    /// queue, or a stream of the communicator's GPU. It also orders the caller's own reads and writes. The CPU's queue holds the
    /// threads that share a step's work with the rank's own: those of the process, or others with
    /// [`Queue::cpu_on`]. Ranks may differ in them.
    pub queue: Queue,
    /// Meter that counts bytes. Clones of these options share it: give each rank its own meter to tell ranks apart.
    pub meter: Meter,
}

impl Options {
    /// Returns true if a rank keeps only its chunks of the reduced gradients.
    pub(crate) fn cuts_grads(&self) -> bool {
        let reduced =
            self.accumulate == Accumulate::Reduced && self.slots.as_ref().is_none_or(SlotRuns::are_single);
        self.stage.cuts_grads() && reduced
    }

    /// Returns true if buckets that lacked a gradient in the last step travel last in this one. On a GPU the host does not learn
    /// in time which buckets those are.
    pub(crate) fn defers(&self) -> bool {
        self.cuts_grads() && self.missing != Missing::Error && self.queue.place() == Place::Cpu
    }
}

impl Default for Options {
    fn default() -> Self {
        Options {
            stage: Stage::default(),
            bucket_len: None,
            overlap: true,
            reduce_in_step: false,
            wait_budget: Duration::from_secs(10),
            combine: Combine::default(),
            accumulate: Accumulate::default(),
            slots: None,
            missing: Missing::default(),
            non_finite: NonFinite::default(),
            initial: Initial::default(),
            grads: None,
            precision: Precision::default(),
            norm: Norm::L2,
            clip: Clip::default(),
            loss_scale: None,
            schedule: None,
            max_skips: 50,
            preemption: Preemption::new(),
            queue: Queue::cpu(),
            meter: Meter::new(),
        }
    }
}

/// Arguments of one step. The same on every rank, which is checked bit for bit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepArgs {
    /// Learning rate; with [`Options::schedule`] the schedule's for this step.
    pub lr: f64,
    /// Maximum norm of the gradients ([`Options::clip`] says which gradients); longer ones are scaled down to it. `None`: no
    /// clipping.
    pub max_norm: Option<f64>,
    /// Factor on every gradient, in addition to [`Options::loss_scale`]'s: 1 / loss scale if the caller keeps its own.
    pub grad_scale: f64,
}

impl Default for StepArgs {
    /// lr 0.001 and no clipping.
    fn default() -> Self {
        StepArgs { lr: 1e-3, max_norm: None, grad_scale: 1.0 }
    }
}
