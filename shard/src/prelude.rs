//! Names of a training loop, for a glob import: this crate's, and the preludes of `meshstep-tensor`, `meshstep-comm` and
//! `meshstep-optim`.
//!
//! Each crate has an error of its own, so glob imports of the crates themselves make the name `Error` ambiguous, and so are
//! `Moments` and `Traffic`. The preludes export no `Error`, and no two preludes export different items under one name: all of them
//! can be imported together, and beside another crate's `Error`. Write `meshstep_shard::Error` for the error of a step, which
//! contains the other crates'.
//!
//! ```
//! use meshstep_shard::prelude::*;
//!
//! let finals = loopback::spawn(4, |comm| -> Result<Vec<f32>, meshstep_shard::Error> {
//!     let rank = comm.rank() as f32;
//!     let layout = Layout::builder().param("w", &[2, 2], DType::F32).param("b", &[2], DType::F32).build()?;
//!     let decay = AdamW { weight_decay: 0.1, ..AdamW::default() };
//!     let plain = AdamW { weight_decay: 0.0, ..decay.clone() };
//!     let rules = Groups::new(decay).with(plain, ["b"]);
//!     let options = Options { stage: Stage::Zero2, ..Options::default() };
//!     let ones = |p: &Param, mut out: SliceMut| out.copy_from((&vec![1f32; p.len()]).into());
//!     let mut opt = Optimizer::new(comm, layout, rules, ones, options)?;
//!     for _ in 0..10 {
//!         let mb = opt.micro_batch(1)?;
//!         mb.grad("b", &vec![rank, -rank])?;
//!         mb.grad("w", &[1.0, rank, 3.0, -1.0])?;
//!         mb.finish()?;
//!         match opt.step(StepArgs { lr: 0.01, max_norm: Some(1.0), ..StepArgs::default() })?.outcome()? {
//!             Outcome::Applied { norm, .. } => assert!(norm > 1.0),
//!             Outcome::Skipped { non_finite, .. } => println!("{non_finite} gradients were not finite"),
//!         }
//!     }
//!     Ok(opt.param("w")?.typed::<f32>()?.to_vec())
//! })?;
//! let first = finals[0].clone()?;
//! assert!(finals.into_iter().all(|w| w.is_ok_and(|w| w == first)));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub use crate::{
    Clip, Combine, CrossShard, DataRank, Evaluated, Gathered, Groups, Initial, Master, MicroBatch, Minimized,
    Missing, Moments, NonFinite, Optimizer, Options, Outcome, Owners, Pending, PendingGather, Precision,
    Preemption, RankRoles, ShardedLbfgs, Slot, Stage, Step, StepArgs, Until,
};
pub use meshstep_comm::prelude::*;
pub use meshstep_optim::prelude::*;
pub use meshstep_tensor::prelude::*;
