//! Types that most programs name, for a glob import. It exports no `Error`, which is `meshstep_optim::Error`, and no
//! [`Moments`](crate::Moments), a name that `meshstep_shard::prelude` gives to the type of the state.

pub use crate::Muon;
pub use crate::schedule::{self, Schedule};
pub use crate::{
    Adagrad, Adam, AdamW, Adopt, Lamb, Lars, Lion, QhAdamW, QhAdopt, RmsProp, ScheduleFreeAdamW, Sgd,
    UncorrectedAdam,
};
pub use crate::{Decay, DynamicLossScale, LossScale, Momentum, Norm, Rounding, Rule};
