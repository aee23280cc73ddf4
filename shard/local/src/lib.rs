//! Workers that step alone and exchange seldom: Local Adam, DES-LOC, MT-DAO, DiLoCo, all from one plan type.
//!
//! ```
//! use meshstep_local::{LocalOptimizer, LocalPlan, Workers};
//! use meshstep_optim::AdamW;
//! use meshstep_shard::{Optimizer, Options, Step, StepArgs};
//! use meshstep_tensor::{DType, Layout};
//!
//! // Four workers of one rank each average parameters every 2 steps, first moments every 4, second moments every 8.
//! let finals = meshstep_comm::loopback::spawn(4, |world| -> Result<f32, Box<dyn std::error::Error + Send + Sync>> {
//!     let worker = world.rank();
//!     let (comm, workers) = Workers::split(world, worker as u32)?;
//!     let layout = Layout::builder().param("w", &[3], DType::F32).build()?;
//!     let inner = Optimizer::new(comm, layout, AdamW::default(), |_, _| Ok(()), Options::default())?;
//!     let mut local = LocalOptimizer::new(inner, workers, LocalPlan::des_loc(2, 4, 8))?;
//!     for _ in 0..8 {
//!         let mb = local.micro_batch(1)?;
//!         mb.grad("w", &[worker as f32, 1.0, -1.0])?; // each worker has its own data
//!         mb.finish()?;
//!         local.step(StepArgs { lr: 0.1, ..StepArgs::default() })?;
//!     }
//!     Ok(local.param("w")?.typed::<f32>()?[0])
//! })?;
//! let all: Vec<u32> = finals.into_iter().map(|w| w.map(f32::to_bits)).collect::<Result<_, _>>().map_err(|e| e.to_string())?;
//! assert!(all.iter().all(|w| *w == all[0]));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! | type | role |
//! |---|---|
//! | [`LocalPlan`], [`Fragment`] | the values workers exchange, when, and how they are merged; every published method is one |
//! | [`Timing`], [`Placement`] | steps of an exchange: a pure function of the group's steps |
//! | [`Select`], [`What`], [`Merge`] | the chosen parameters, the kind of state, and the merge of the workers' values |
//! | [`LocalOptimizer`], [`Workers`] | a worker, sharded at any stage, that steps by a plan |
//! | [`LocalStep`], [`Exchanged`], [`Veto`] | outcome of a step, and of its fragments |
//! | [`meshstep_membership`] | epochs of members, and an arbiter that grants exchanges |
//! | [`ParamSpec`] | a parameter as plans are checked against it |
//! | [`LocalTraffic`], [`Shares`] | bytes that a plan sends, known before a rank exists |
//!
//! # Elastic workers
//!
//! Workers [join](LocalOptimizer::join) and leave a run through a [`Membership`](meshstep_membership::Membership), and
//! [follow](LocalOptimizer::follow) its members before every step:
//!
//! ```
//! use meshstep_comm::{Clock, loopback};
//! use meshstep_local::{LocalOptimizer, LocalPlan, Workers};
//! use meshstep_membership::{Config, Error, InProcess, InProcessWorker, Round};
//! use meshstep_optim::AdamW;
//! use meshstep_shard::{Optimizer, Options, Step, StepArgs};
//! use meshstep_tensor::{DType, Layout};
//! use std::sync::Arc;
//! use std::time::Duration;
//!
//! const LONG: Duration = Duration::from_secs(60);
//! # fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
//! // The communicator of a round's members; workers of several ranks also split it by shard.
//! let connect = |member: &InProcessWorker, round: &Round| -> Result<Workers, Error> {
//!     let world = member.communicator(round, LONG)?;
//!     Ok(Workers { across: Arc::clone(&world), world })
//! };
//! # let outcome = loopback::spawn(1, |comm| -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
//! let layout = Layout::builder().param("w", &[3], DType::F32).build()?;
//! let inner = Optimizer::new(comm, layout, AdamW::default(), |_, _| Ok(()), Options::default())?;
//! let plan = LocalPlan::local_adam(2);
//! let digest = plan.digest(&inner);
//! let run = InProcess::new(Config::new(digest, 1), Clock::real())?; // begins with one worker
//! let member = Arc::new(run.join(7, digest, LONG)?);
//! let mut local = LocalOptimizer::join(inner, plan, member.clone(), |round| connect(&member, round))?;
//! for _ in 0..4 {
//!     local.follow(|round| connect(&member, round))?; // waits for the members if the step exchanges
//!     let mb = local.micro_batch(1)?;
//!     mb.grad("w", &[1f32, 2.0, 3.0])?;
//!     mb.finish()?;
//!     local.step(StepArgs::default())?;
//! }
//! # Ok(())
//! # });
//! # outcome?.remove(0)
//! # }
//! ```
//!
//! # What is exact
//!
//! On loopback, sharded workers equal whole ones in a plain loop, bit for bit. A mean of f32 is taken in f64 and rounded once. A
//! weighted mean multiplies values by shares where they are added: its error is half an ulp and, where values cancel, about 2^-52
//! of their size. For f64 the shares' own rounding adds half an ulp. In bf16 each value or difference is rounded, shares and sums
//! are f32, and the mean is rounded. Values averaged without delay and mixing are bit-equal on all workers. Each worker has its own
//! `t`, which counts updates: it is never averaged and never rolled back.
//!
//! # GPUs
//!
//! Parameters, state, anchors and outer state stay in memory of the GPU: the values to send are packed, reduced by NCCL and merged
//! there, in f64 as on the CPU. An exchange copies words to the host (the agreement, a count of non-finite values, the vote) and
//! waits for them. Whole vectors are copied to the host when [`LocalOptimizer::new`] compares workers' first values, and when a
//! save compares values that workers hold alike. Bits equal the CPU's if NCCL's sums are exact: NCCL multiplies by shares before it
//! adds, and adds f32 in f32. A failing NCCL communicator ends all others of its process, so [`LocalOptimizer::join`] is refused;
//! as long as all workers are present they can be [regrouped](LocalOptimizer::regroup).
//!
//! # Limits
//!
//! 16-bit parameters need an f32 master. Ranks that replicate values within a worker, for example along `tp`, each send their own
//! copy. The copies stay equal if a reduction adds in the ranks' order, as loopback's does, or if the ranks own equally much of
//! each parameter that shares its state in the same way, which placements ensure unless some say `reduced_over`. If a collective of
//! all workers fails on some ranks only, some workers may have applied an exchange that others have not; on loopback this does not
//! happen.

mod error;
mod exchange;
mod plan;
#[cfg(feature = "checkpoint")]
mod saving;
mod worker;

pub use error::{LocalError, LocalWarning};
pub use exchange::engine::Exchanged;
pub use exchange::votes::Veto;
pub use exchange::workers::Workers;
pub use plan::local_plan::{Fragment, LocalPlan, Merge, OnFailure, Outer, Slots, Weights, What};
pub use plan::param_spec::ParamSpec;
pub use plan::presets::half_life;
pub use plan::select::{Chosen, Select};
pub use plan::timing::{Placement, Timing};
pub use plan::traffic::{LocalTraffic, Ring, Shares, Worker};
pub use worker::optimizer::{LocalOptimizer, LocalStep};

/// Keeps README.md true.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
