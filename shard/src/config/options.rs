//! What a run is made with, and what changes from step to step.

use crate::{Owners, Precision};
use meshstep_optim::schedule::Schedule;
use meshstep_optim::{LossScale, Norm};
use meshstep_tensor::{DType, Meter, Place, Queue};
use std::time::Duration;

/// What is divided among the ranks.
///
/// | stage | parameters | gradients | state | sent per step and rank, parameters P, ranks n |
/// |---|---|---|---|---|
/// | `Replicated` | all | all | all | all-reduce: 2(n-1)/n P |
/// | `Zero1` | all | all | 1/n | reduce-scatter + all-gather: 2(n-1)/n P |
/// | `Zero2` | all | 1/n, and two buckets of each part and type | 1/n | the same; (k+1)(n-1)/n P with k micro-batches |
/// | `Zero3` | 1/n, and two units | as `Zero2` | 1/n | two all-gathers + reduce-scatter for each of k micro-batches: 3k(n-1)/n P |
/// | `WholeParams` | all | all | by whole parameters | all-reduce + broadcasts: 2(n-1)/n P + at most P |
///
/// Stages 0 to 3 are those of Rajbhandari et al., *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models*
/// (2020). On the loopback backend all of them end with the same bits where a step has one micro-batch; with several, stages 2
/// and 3 round each reduction where the others round one, and they agree where sums and means are exact.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Stage {
    /// Stage 0: every rank updates everything.
    Replicated,
    /// Optimizer state is sharded.
    #[default]
    Zero1,
    /// Optimizer state and gradients are sharded; a bucket of gradients is given back once it is reduced.
    Zero2,
    /// Parameters are sharded too, as ZeRO-3 and FSDP do: whoever reads some gathers their unit
    /// ([`Optimizer::gather`](crate::Optimizer::gather)) and drops it; a step gathers nothing. Frozen parameters are on every rank.
    Zero3,
    /// The classic sharded optimizer: each parameter has one owner, which updates and broadcasts it.
    WholeParams(Owners),
}

impl Stage {
    /// Whether each rank updates its chunk of every bucket, whatever parameters that cuts.
    pub(crate) fn cuts_state(self) -> bool {
        matches!(self, Stage::Zero1) || self.cuts_grads()
    }

    /// Whether a rank keeps its chunks of the reduced gradients alone.
    pub(crate) fn cuts_grads(self) -> bool {
        matches!(self, Stage::Zero2) || self.cuts_params()
    }

    /// Whether a rank keeps its chunks of the parameters alone.
    pub(crate) fn cuts_params(self) -> bool {
        matches!(self, Stage::Zero3)
    }
}

/// How gradients of several ranks and micro-batches become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Combine {
    /// Their mean over ranks and micro-batches. The mean over ranks is taken in the reduction's accumulator, before
    /// rounding; that over micro-batches is a factor into the update.
    #[default]
    Mean,
    /// Their sum.
    Sum,
    /// sum(w g) / sum(w), w the weight of each micro-batch on each rank: its samples or tokens. Products are rounded to the
    /// gradients' type once; f16 is refused, since w g overflows it.
    Weighted,
}

/// What happens when a rank has no gradient for a parameter: it said [`MicroBatch::none`](crate::MicroBatch::none), or finished
/// its micro-batch without.
///
/// At stages 2 and 3 a bucket that waits for such a gradient until `finish` holds back those after it, and memory with them. `none`
/// completes it at once. Where nobody says `none`, a bucket that lacked a gradient on some rank travels after all others in the next
/// step, on every rank, and takes memory of its own until then; a step in which it lacks nothing puts it back. On a GPU
/// only `none` helps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Missing {
    /// The step fails on every rank, naming rank and parameter; nothing changes.
    #[default]
    Error,
    /// It counts as zeros.
    Zero,
    /// A parameter that no rank has a gradient for is left alone, its state and its `t` too; missing on some ranks
    /// counts as zeros there.
    SkipIfMissingEverywhere,
    /// A parameter that no rank has a gradient for is left alone, its state and its `t` too; missing on some ranks is an
    /// error on every rank, naming one of them and the parameter.
    AllOrNone,
}

impl Missing {
    /// Whether ranks count who has a gradient for what.
    pub(crate) fn counts(self) -> bool {
        matches!(self, Missing::SkipIfMissingEverywhere | Missing::AllOrNone)
    }
}

/// What happens when a combined gradient is infinite or NaN.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum NonFinite {
    /// The step is skipped on every rank: [`Outcome::Skipped`](crate::Outcome::Skipped), an error after
    /// [`Options::max_skips`] in a row. No update begins before all gradients are there.
    #[default]
    Skip,
    /// The step is taken whatever the gradients hold, as PyTorch takes it: what is not finite goes into parameters and state,
    /// and the norm is infinite. With [`At::max_norm`] the factor is 0 then, so that the elements that are not finite become
    /// NaN and the others 0. PyTorch's `clip_grad_norm_` does so for infinities; for a NaN it makes every gradient NaN. A dynamic
    /// loss scale lives on skips and is refused.
    ///
    /// As no gradient decides anything, a bucket is updated, and its parameters sent off, while the next still travels, unless
    /// `max_norm` limits the combined gradient, a rule (LAMB, LARS) needs sums over whole tensors, or parameters are shared among
    /// several groups of ranks. What decides
    /// goes through a communicator of its own, split off at construction, and the norm in one more exchange at the end.
    Propagate,
}

/// Which gradients [`At::max_norm`] limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Clip {
    /// The combined one: what all ranks and micro-batches have together is scaled down to the norm, and every rank scales
    /// alike. What PyTorch's `clip_grad_norm_` does to reduced gradients.
    #[default]
    AfterReduce,
    /// Each rank's own: what its micro-batches have together is scaled down to the norm before it is combined with the
    /// other ranks'. Gradients stay until the step, since the norm is not known before, so that nothing travels while the
    /// caller computes; stages 2 and 3, which do not keep them, are refused. The factor is rounded to f32, the products to the
    /// gradients' type.
    BeforeReduce,
}

/// Where the first parameter values come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Initial {
    /// Rank 0's go to everyone; the other ranks' values are not asked for.
    #[default]
    Broadcast,
    /// Every rank has them, and they must be the same: a difference is an error naming the first parameter.
    Compare,
}

/// How an [`Optimizer`](crate::Optimizer) is built. The same on every rank; that is checked.
#[derive(Clone, Debug)]
pub struct Options {
    /// What is divided among the ranks.
    pub stage: Stage,
    /// The most elements of a bucket of several parameters. A parameter is never cut, so a larger one is a bucket of its own.
    /// `None`: max(40e6, 1e6 per rank). At stages 2 and 3, where the longest two neighbours are held as gradients travel
    /// ([`Memory::buckets`](crate::Memory::buckets)), it is at most an 80th of all elements of the type, or of small models a 16th,
    /// from 64 Ki to 4 Mi; and what lies beside a parameter larger than a bucket is cut short.
    pub bucket_len: Option<usize>,
    /// Whether buckets travel while the caller computes. Off: the thread that fills a bucket waits for its reduction.
    pub overlap: bool,
    /// How long a gradient waits, by the communicator's clock, for a bucket that travels and whose memory it needs (stages 2 and 3;
    /// at every stage with overlap off). Where another rank lacks a gradient of that bucket, and itself waits for this rank in a
    /// collective of the model or in a gather, that is in vain. Then memory is taken beyond the plan, if there is any
    /// ([`Traffic::pool_grown`](crate::Traffic::pool_grown) counts it), without another wait of this thread in this micro-batch; of micro-batches
    /// in a row that have waited in vain each waits half as long, down to a thousandth. Longer than ranks are apart otherwise.
    /// `Duration::MAX`: without an end but the communicator's, for models whose ranks never lack a gradient. On a GPU its queue
    /// waits, and not the host, so that the communicator's deadline is the only end there.
    pub patience: Duration,
    /// How gradients of several ranks and micro-batches become one.
    pub combine: Combine,
    /// What happens when a gradient is missing.
    pub missing: Missing,
    /// What happens when a gradient is not finite.
    pub non_finite: NonFinite,
    /// Where the first values come from.
    pub initial: Initial,
    /// The type gradients are handed over and travel in; `None`: that of each parameter. f32, bf16 and f16 parameters take any
    /// of the three; f64 parameters always take f64.
    pub grads: Option<DType>,
    /// What is kept of parameters and state, and how.
    pub precision: Precision,
    /// The norm that is clipped and reported.
    pub norm: Norm,
    /// Which gradients are clipped by it.
    pub clip: Clip,
    /// What the caller multiplies each loss with ([`Optimizer::loss_scale`](crate::Optimizer::loss_scale)); the step divides
    /// the gradients by that same scale, and then lets it follow the overflows. `None`: 1, always.
    pub loss_scale: Option<LossScale>,
    /// The learning rate of every step, by the steps taken or skipped before it: steps are taken with
    /// [`Optimizer::scheduled`](crate::Optimizer::scheduled), and one at another rate is an error on every rank. Ranks with
    /// different schedules are refused when the optimizer is made. `None`: each step's [`At::lr`] says.
    pub schedule: Option<Schedule>,
    /// Steps skipped in a row, for gradients that are not finite, before that is an error. A skip after which a dynamic loss
    /// scale can still fall does not count.
    pub max_skips: u32,
    /// Where parameters, gradients and state are, and the order of all work on them: the CPU's queue, or a stream of the GPU that
    /// the communicator is of. What the caller's own work writes and reads is ordered by the same queue.
    pub queue: Queue,
    /// Where bytes are counted. Clones of these options count together: give each rank its own meter to tell ranks apart.
    pub meter: Meter,
}

impl Options {
    /// Whether buckets that lacked a gradient in the last step travel last in this one. On a GPU the host does not hear in time
    /// which those are.
    pub(crate) fn defers(&self) -> bool {
        self.stage.cuts_grads() && self.missing != Missing::Error && self.queue.place() == Place::Cpu
    }
}

impl Default for Options {
    fn default() -> Self {
        Options {
            stage: Stage::default(),
            bucket_len: None,
            overlap: true,
            patience: Duration::from_secs(10),
            combine: Combine::default(),
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
            queue: Queue::cpu(),
            meter: Meter::new(),
        }
    }
}

/// What one step is taken with. The same on every rank; that is checked, bit for bit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct At {
    /// Learning rate: [`Options::schedule`]'s for this step, where there is one.
    pub lr: f64,
    /// The largest norm the gradients may have ([`Options::clip`] says which); longer ones are scaled down to it. `None`: no
    /// clipping.
    pub max_norm: Option<f64>,
    /// A factor on every gradient, beside [`Options::loss_scale`]'s: 1 / loss scale where the caller keeps one.
    pub grad_scale: f64,
}

impl Default for At {
    /// lr 0.001 and no clipping.
    fn default() -> Self {
        At { lr: 1e-3, max_norm: None, grad_scale: 1.0 }
    }
}
