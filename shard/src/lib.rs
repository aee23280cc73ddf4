//! The sharded optimizer step on one group of ranks: gradients are reduced, clipped by the global norm and applied to sharded
//! state; every rank ends with the same parameters.
//!
//! ```
//! use meshstep_optim::AdamW;
//! use meshstep_shard::{StepArgs, Optimizer, Options, Outcome, Stage};
//! use meshstep_tensor::{DType, Layout, Slice};
//!
//! let finals = meshstep_comm::loopback::spawn(4, |comm| -> Result<Vec<f32>, meshstep_shard::Error> {
//!     let rank = comm.rank() as f32;
//!     let layout = Layout::builder().param("w", &[3], DType::F32).build()?;
//!     let options = Options { stage: Stage::Zero2, ..Options::default() };
//!     let mut opt = Optimizer::new(comm, layout, AdamW::default(), |_, mut w| w.copy_from(Slice::from(&[1f32; 3][..])), options)?;
//!     for _ in 0..10 {
//!         let mb = opt.micro_batch(1)?;
//!         mb.grad("w", &[rank, 1.0, -1.0][..])?;
//!         mb.finish()?;
//!         let outcome = opt.step(StepArgs { lr: 0.1, max_norm: Some(1.0), ..StepArgs::default() })?.outcome()?;
//!         assert!(matches!(outcome, Outcome::Applied { coef, .. } if coef < 1.0));
//!     }
//!     Ok(opt.param("w")?.typed::<f32>()?.to_vec())
//! })?;
//! let first = finals[0].clone()?;
//! assert!(finals.into_iter().all(|w| w.is_ok_and(|w| w == first)));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! | type | purpose |
//! |---|---|
//! | [`Optimizer`] | parameters and sharded state; takes the steps |
//! | [`Step`] | the calls of a training loop, on an optimizer or any wrapper of one |
//! | [`MicroBatch`], [`Slot`] | take the gradients of a backward pass |
//! | [`ShardedLbfgs`] | L-BFGS over a closure, with sharded history |
//! | [`Evaluated`], [`Minimized`], [`Until`] | steps with closures, and runs to a tolerance |
//! | [`Folding`] | sums and maxima over ranks, for update rules |
//! | [`Gathered`], [`PendingGather`] | a unit of sharded parameters, whole while it is read |
//! | [`Options`], [`Stage`] | the data that is divided among the ranks |
//! | [`Precision`] | masters, remainders, bf16 moments, stochastic rounding: a recipe that is checked |
//! | [`Groups`] | parameter groups with hyperparameters or rules of their own; [`hidden_matrices`] selects those for Muon |
//! | [`RankRoles`], [`ParamGroup`] | parameters that groups of ranks share in different ways, stepped together |
//! | [`Verified`], [`Difference`] | bitwise comparison of replicas and sharded state, and its findings |
//! | [`CrossShard`] | replicas in groups that reduce apart, compared and averaged on request |
//! | [`Plan`], [`Part`] | ownership and bytes, computed without memory or ranks |
//! | [`extend`] | interface for crates that extend the optimizer: `meshstep-checkpoint`, `meshstep-local` |
//! | [`prelude`] | names of a training loop, for a glob import |
//!
//! # On GPUs
//!
//! With the feature `cuda` everything above works on GPUs: [`Options::queue`] is a CUDA stream and the communicator is NCCL's:
//!
//! ```
//! # #[cfg(feature = "cuda")] {
//! use meshstep_comm::nccl;
//! use meshstep_optim::AdamW;
//! use meshstep_shard::{StepArgs, Optimizer, Options};
//! use meshstep_tensor::{Buffer, Category, DType, Layout, Meter, Queue, Slice, cuda::Stream};
//!
//! if let Err(missing) = nccl::probe() {
//!     println!("no GPU to step on: {missing}");
//!     return Ok(());
//! }
//! // One thread per GPU; processes started by torchrun or SLURM call `nccl::from_env`.
//! nccl::spawn(&[0, 1], nccl::Options::default(), |comm| -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
//!     let queue = Queue::cuda(Stream::new(comm.device())?);
//!     let layout = Layout::builder().param("w", &[3], DType::F32).build()?;
//!     let options = Options { queue: queue.clone(), ..Options::default() };
//!     let ones = |_: &_, mut w: meshstep_tensor::SliceMut<'_>| w.copy_from(Slice::from(&[1f32; 3][..]));
//!     let mut opt = Optimizer::new(comm, layout, AdamW::default(), ones, options)?;
//!     let mut grad = Buffer::zeroed_on(&queue, 3, DType::F32, &Meter::new(), Category::Grads)?;
//!     queue.upload([1f32, 2.0, 3.0][..].into(), grad.as_mut())?; // or your kernels, on this stream
//!     let mb = opt.micro_batch(1)?;
//!     mb.grad("w", grad.as_slice())?;
//!     mb.finish()?;
//!     let pending = opt.step(StepArgs { max_norm: Some(1.0), ..StepArgs::default() })?; // launched; the host goes on
//!     println!("{:?}", pending.outcome()?); // waits for the device
//!     Ok(())
//! })?.into_iter().collect::<Result<(), _>>().map_err(|error| error.to_string())?;
//! # }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The device decides the step: it holds the verdict (apply or skip), the clip factor, the loss scale and each parameter's `t`.
//! Results have the CPU's bits wherever NCCL's sums have.
//!
//! # Limits
//! - One group of ranks, or several ([`RankRoles`]).
//! - On GPUs rules that see sums over tensors (LAMB, LARS) are refused. [`Clip::BeforeReduce`] makes the host wait for each step, reading a dynamic loss scale
//!   for the steps launched so far, and L-BFGS for each evaluation.
//! - Rules that see whole matrices (Muon): at stages 1 and 2 no chunk cuts a matrix ([`Part::uncut`]), so ranks with fewer elements have
//!   padding; at stage 3, or where padding would be more than a quarter ([`Part::for_rules`]), the steps of matrices travel to one rank
//!   each and back ([`MatrixExchange`]), and each rank keeps memory for two or three. Matrices of which groups of ranks have parts need
//!   [`Part::with_cuts`], and are refused without.
//! - [`Stage::Zero3`] shards trainable parameters; every rank holds the frozen ones.
//! - A rank that gives up in the middle of a gather leaves the group, which ends the run of the others.
//! - At stages 2 and 3, and with overlap off, a thread that hands over a gradient may wait for other ranks' gradients: ranks of
//!   one process must not share a thread pool for it.
//! - A rank may lack a gradient and wait for another rank in a collective of the model or in a gather. The other rank then waits
//!   in vain: for [`Options::wait_budget`], on GPUs until the communicator's deadline.
//! - Gradients accumulate in their own type: f32 micro-batches in f32, bf16 ones in bf16. Weighted means round w g once to the
//!   gradients' type.

mod closure;
mod config;
mod cross_shard;
mod error;
pub mod extend;
mod gather;
mod optimizer;
mod plan;
pub mod prelude;
mod ranks;
mod reduce;
mod step;
mod update;
mod verify;

pub use closure::lbfgs::{LbfgsStep, NotForLbfgs, ShardedLbfgs};
pub use closure::minimize::{Evaluated, Minimized, Passed, Until};
pub use closure::step::{Guarded, Step};
pub use config::fault::Fault;
pub use config::hidden_matrices::hidden_matrices;
pub use config::options::{Accumulate, Clip, Combine, Initial, Missing, NonFinite, Options, StepArgs};
pub use config::param_groups::Groups;
pub use config::precision::{Master, Moments, Precision};
pub use config::preemption::Preemption;
pub use config::selection::{ByName, ByPredicate, SelectParams, Selection};
pub use config::slots::SlotRuns;
pub use config::stage::{Owners, Stage};
pub use cross_shard::{AssignmentError, CrossShard, Drift, SlotDrift};
pub use error::{DataRankError, Error, ReadError, SlotError, UnitError, WeightError};
pub use gather::unit_gather::{Gathered, PendingGather};
pub use meshstep_optim::Stop;
pub use optimizer::Optimizer;
pub use optimizer::add_params::ParamGroup;
pub use optimizer::micro_batch::{MicroBatch, Slot};
pub use plan::bucket::{BucketPlan, Placed};
pub use plan::bytes::{Memory, Wire};
pub use plan::layout_plan::{Part, Seat, Sizes};
pub use plan::matrix_exchange::{ExchangeWindow, ExchangedMatrix, MatrixExchange, MatrixPiece};
pub use plan::partition::Partition;
pub use plan::rule_parts::{PlanRules, RulePart};
pub use plan::step_plan::{Plan, Seats};
pub use plan::tensor_cuts::{CutRank, TensorCuts};
pub use ranks::agree::{gather_words, same_everywhere};
pub use ranks::data_rank::DataRank;
pub use ranks::roles::{Parts, RankRoles};
pub use reduce::local_clip::LocalClip;
pub use step::outcome::{Outcome, Pending, Traffic};
pub use update::exact_reduce::Folding;
pub use update::values::ParamState;
pub use verify::{Apart, Difference, Held, Repaired, Verified, VerifyError};

/// Keeps README.md true.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
