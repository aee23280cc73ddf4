//! Workers that step alone and meet seldom: Local Adam, DES-LOC, MT-DAO, DiLoCo, from one plan.
//!
//! | type | what it is |
//! |---|---|
//! | [`LocalPlan`], [`Fragment`] | what is exchanged between workers, when, and how it becomes one; every published method is one |
//! | [`Timing`], [`Placement`] | when: a pure function of the group's steps |
//! | [`Select`], [`What`], [`Merge`] | of which parameters, what of them, and how workers' values become one |
//! | [`LocalOptimizer`], [`Workers`] | a worker, sharded at any stage, that steps by a plan |
//! | [`LocalStep`], [`Exchanged`], [`Veto`] | what a step did, and what became of fragments |
//! | [`membership`] | who takes part: epochs, and an arbiter that grants exchanges |
//! | [`Trained`] | what a plan is checked against |
//! | [`LocalTraffic`], [`Shares`] | the bytes a plan sends, before there is a rank |
//!
//! # What is exact
//!
//! On loopback, sharded workers are whole ones in a plain loop, bit for bit. A mean of f32 is taken in f64 and rounded once. So is a
//! weighted one, whose values are multiplied by shares where they are added: it is off by half an ulp and, where values cancel, by
//! some 2^-52 of their size. Of f64 shares are rounded too, to half an ulp. As bf16 each value or difference is rounded, shares and
//! sums are f32, and the mean is rounded. What was averaged without delay and mixing is bit-equal on all workers. `t`, which counts
//! updates, is each worker's own: never averaged, never rolled back.
//!
//! # GPUs
//!
//! Parameters, state, anchors and outer state stay in memory of the GPU: what travels is packed, reduced by NCCL and merged there, in
//! f64 as on the CPU. An exchange copies words to the host (the agreement, a count of what is not finite, the vote) and waits for
//! them. Whole vectors are copied to the host where [`LocalOptimizer::new`] compares workers' first values, and where a save compares
//! what workers keep alike. Bits are those of the CPU where NCCL's sums are exact: NCCL multiplies by shares before it adds, and adds
//! f32 in f32. A communicator that fails ends all others of its process, so [`LocalOptimizer::join`] is refused; workers that are all
//! there are [regrouped](LocalOptimizer::regroup).
//!
//! # Limits
//!
//! 16-bit parameters with an f32 master. Ranks that replicate within a worker, as along `tp`, send what they all have
//! each for itself; they stay alike where a reduction adds in the ranks' order, as loopback's does, or where ranks own as much of each
//! parameter that shares its state in the same way, as placements do unless some say `reduced_over`. Where a collective of all workers fails on some ranks and not on others, as none does on loopback, some may have applied what
//! others have not.

mod agreement;
mod check;
mod describe;
mod engine;
mod error;
mod finite;
mod flight;
mod follow;
mod optimizer;
mod packing;
mod parts;
mod plan;
mod presets;
mod regroup;
mod replica;
#[cfg(feature = "checkpoint")]
mod saving;
mod select;
mod sides;
mod spots;
mod staging;
mod timing;
mod traffic;
mod trained;
mod worker;
mod workers;

pub use agreement::Veto;
pub use engine::Exchanged;
pub use error::{LocalError, LocalWarning};
pub use optimizer::{LocalOptimizer, LocalStep};
pub use plan::{Fragment, LocalPlan, Merge, OnFailure, Outer, Slots, Weights, What};
pub use presets::half_life;
#[cfg(feature = "checkpoint")]
pub(crate) use saving::LocalRecord;
pub use select::{Chosen, Select};
pub use timing::{Placement, Timing};
pub use traffic::{LocalTraffic, Ring, Shares, Worker};
pub use trained::Trained;
pub use workers::Workers;
