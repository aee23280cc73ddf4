//! What is exchanged between workers, when, and how it becomes one: plain data.

use super::{Placement, Select, Timing};
use meshstep_optim::Rule;
use meshstep_tensor::DType;
use std::sync::Arc;

/// Everything that workers exchange, and when. All of them have the same.
///
/// ```
/// use meshstep_shard::local::{LocalPlan, Placement};
///
/// let plan = LocalPlan::des_loc(4, 12, 24);
/// // After the 12th update parameters and first moments are averaged, not the second moments.
/// assert_eq!(plan.due(11, Placement::After).collect::<Vec<_>>(), [0, 1]);
/// assert_eq!(plan.due(12, Placement::After).count(), 0);
/// ```
#[derive(Clone, Debug)]
pub struct LocalPlan {
    /// What is exchanged; fragments of one kind of state do not overlap while both may be due.
    pub fragments: Vec<Fragment>,
    /// Elements after which an exchange goes on in another bucket; fragments may be cut by it anywhere.
    pub bucket_len: usize,
}

/// One kind of state of some parameters, which is exchanged as a whole.
#[derive(Clone, Debug)]
pub struct Fragment {
    /// Of which parameters.
    pub params: Select,
    /// What of them.
    pub what: What,
    /// When.
    pub timing: Timing,
    /// How workers' values become one.
    pub merge: Merge,
    /// The share of the result in what a worker goes on with: `x = (1 - taken) x + taken result`; above 0, at most 1. Streaming
    /// DiLoCo's alpha is the share of the worker's own, 1 less this.
    pub taken: f64,
    /// Whose values count how much.
    pub weights: Weights,
    /// The type values travel in: f64, f32 or bf16; `None`: their own. Of parameters in a narrower one differences from the last
    /// exchange travel.
    pub wire: Option<DType>,
    /// What becomes of the fragment where an exchange does not come about.
    pub on_failure: OnFailure,
}

/// A kind of state.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum What {
    /// The parameters; their masters, where they have some.
    Params,
    /// Those of the rule's state vectors that are named, of the parameters whose rule has them.
    State(Slots),
    /// All state of the outer optimizer of the fragment with this index, of the elements that that has; the fragment's own choice
    /// of parameters does not count.
    OuterMomentum(usize),
}

/// Which state vectors of a rule.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Slots {
    /// All that are no second moments, as averages of gradients.
    First,
    /// Averages, sums and maxima of squares, as the rule says ([`Rule::slot`]).
    Second,
    /// One by its name.
    Named(String),
}

/// How workers' values become one.
#[derive(Clone, Debug)]
pub enum Merge {
    /// Their mean. Of what was sent `delay` steps before, the worker keeps what it has added since: with the snapshot `s0` that it
    /// sent, `s += left (mean - s0)`, where `left` is the share of `s0` that is still in `s`. Of parameters that is 1 (Zhou et al.,
    /// *DaSGD: Squeezing SGD Parallelization Performance in Distributed Training Using Delayed Averaging*, 2020).
    ///
    /// Of state the rule says what it is ([`Rule::slot`]): of an average `beta^n` after `n` updates, of a sum 1. An update is linear,
    /// `s = beta s + a`, so after `n` of them `s = beta^n s0 + own`, and an exchange at once would have come to `beta^n mean + own`:
    /// the same. An average of squares is never negative then; where rounding makes it so it is 0. A maximum has no shares, and is
    /// refused with a delay ([`LocalError::DelayedMaximum`](super::LocalError::DelayedMaximum)).
    Mean,
    /// A step of an outer optimizer: its gradient is what parameters have moved since its last step, `x_outer - mean(x)`.
    Outer(Outer),
    /// Zeros; nothing travels.
    Reset,
    /// Every worker's own; nothing travels.
    Keep,
}

/// An optimizer over the workers' mean difference, in f64 (Douillard et al., *DiLoCo: Distributed Low-Communication Training of
/// Language Models*, 2023; of Reddi et al., *Adaptive Federated Optimization*, 2021, the server's).
#[derive(Clone, Debug)]
pub struct Outer {
    /// Its rule, which sees single elements.
    pub rule: Arc<dyn Rule>,
    /// Its learning rate.
    pub lr: f64,
}

/// Whose values count how much.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Weights {
    /// Every worker's as much.
    #[default]
    Uniform,
    /// As many times as it has seen tokens, by its micro-batches' weights, since the fragment's last exchange; what several of its
    /// ranks compute together, as along `tp`, once.
    ///
    /// Before the first step nobody has seen any: all count alike.
    Tokens,
}

/// What becomes of a fragment where an exchange does not come about, on no worker then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum OnFailure {
    /// Every worker goes on with its own until the fragment is due again.
    #[default]
    KeepLocal,
    /// Every worker goes back to what it had after the last exchange of the fragment.
    RollBack,
    /// The fragment is due again at the next step.
    Retry,
}

impl LocalPlan {
    /// Elements of a bucket unless told otherwise: 64 MiB of f32.
    pub const BUCKET_LEN: usize = 1 << 24;

    /// These fragments.
    pub fn new(fragments: Vec<Fragment>) -> Self {
        LocalPlan { fragments, bucket_len: Self::BUCKET_LEN }
    }

    /// The fragments, by index, that are sent or reset at step `step`, from 0, before or after its update.
    pub fn due(&self, step: u64, placement: Placement) -> impl Iterator<Item = usize> + '_ {
        self.those(move |f| f.timing.placement == placement && f.timing.due(step))
    }

    /// The fragments whose result arrives there.
    pub fn arriving(&self, step: u64, placement: Placement) -> impl Iterator<Item = usize> + '_ {
        self.those(move |f| f.timing.placement == placement && f.timing.arrives(step))
    }

    fn those<'a>(&'a self, wanted: impl Fn(&Fragment) -> bool + 'a) -> impl Iterator<Item = usize> + 'a {
        let acts = move |f: &Fragment| !matches!(f.merge, Merge::Keep) && wanted(f);
        self.fragments.iter().enumerate().filter(move |(_, f)| acts(f)).map(|(i, _)| i)
    }
}

impl Fragment {
    /// The mean of `what` of all parameters.
    pub fn mean(what: What, timing: Timing) -> Self {
        Fragment {
            params: Select::All,
            what,
            timing,
            merge: Merge::Mean,
            taken: 1.0,
            weights: Weights::default(),
            wire: None,
            on_failure: OnFailure::default(),
        }
    }

    /// Whether values go to other workers.
    pub(crate) fn travels(&self) -> bool {
        matches!(self.merge, Merge::Mean | Merge::Outer(_)) && self.timing.period.is_some()
    }

    /// Whether what was sent is kept until its mean arrives.
    pub(crate) fn keeps_sent(&self) -> bool {
        self.timing.delay > 0 && self.outer().is_none()
    }
}

impl Slots {
    /// The state vectors of a rule that these are, by place.
    pub fn of(&self, rule: &dyn Rule) -> Vec<usize> {
        let has = |slot: usize| match self {
            Slots::First => !rule.slot(slot).squares,
            Slots::Second => rule.slot(slot).squares,
            Slots::Named(name) => rule.state()[slot] == name,
        };
        (0..rule.state().len()).filter(|&slot| has(slot)).collect()
    }
}
