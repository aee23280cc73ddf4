//! Plans: the values that workers exchange, when, and how they are merged. Plain data.

use crate::{Placement, Select, Timing};
use meshstep_optim::Rule;
use meshstep_tensor::DType;
use std::sync::Arc;

/// Complete description of the exchanges between workers, the same on all of them.
///
/// ```
/// use meshstep_local::{LocalPlan, Placement};
///
/// let plan = LocalPlan::des_loc(4, 12, 24);
/// // After the 12th update parameters and first moments are averaged, not the second moments.
/// assert_eq!(plan.due(11, Placement::After).collect::<Vec<_>>(), [0, 1]);
/// assert_eq!(plan.due(12, Placement::After).count(), 0);
/// ```
#[derive(Clone, Debug)]
pub struct LocalPlan {
    /// The fragments; fragments of one kind of state must not overlap while both may be due.
    pub fragments: Vec<Fragment>,
    /// Largest number of elements in one bucket of an exchange; a fragment may be cut between buckets anywhere.
    pub bucket_len: usize,
}

/// One kind of state of some parameters, exchanged as a whole.
///
/// ```
/// use meshstep_local::{Chosen, Fragment, LocalError, LocalPlan, LocalWarning, Merge, OnFailure, Outer, ParamSpec, Select, Slots, Timing, What};
/// use meshstep_optim::{AdamW, Rule, Sgd};
/// use meshstep_tensor::DType::F32;
/// use std::sync::Arc;
///
/// // An outer optimizer for the first half of the model, means for the head, and the head's first moments in another step.
/// let outer = Outer { rule: Arc::new(Sgd { momentum: 0.9, ..Sgd::default() }), lr: 0.7 };
/// let half = Fragment {
///     params: Select::Part { index: 0, of: 2 },
///     merge: Merge::Outer(outer),
///     on_failure: OnFailure::Retry,
///     ..Fragment::mean(What::Params, Timing::every(50))
/// };
/// let head = Fragment { params: Select::Names(vec!["head".to_owned()]), ..Fragment::mean(What::Params, Timing::every(10)) };
/// let moments = Timing { offset: 5, ..Timing::every(10) };
/// let moments = Fragment { params: Select::Names(vec!["head".to_owned()]), ..Fragment::mean(What::State(Slots::First), moments) };
/// let plan = LocalPlan::new(vec![half, head, moments]);
///
/// let rule: Arc<dyn Rule> = Arc::new(AdamW::default());
/// let param = |position, name: &str, len| {
///     ParamSpec { name: name.to_owned(), len, whole: len, position, values: F32, state: F32, rule: Arc::clone(&rule) }
/// };
/// let params = [param(0, "body", 100), param(1, "head", 100)];
/// assert_eq!(plan.fragments[0].params.resolve(&params)?, [Chosen { param: 0, range: 0..100 }]);
/// assert!(plan.check(&params)?.iter().all(|warning| matches!(warning, LocalWarning::SecondMomentsApart { .. })));
/// let unknown = Fragment { params: Select::Names(vec!["tail".to_owned()]), ..Fragment::mean(What::Params, Timing::every(10)) };
/// assert!(matches!(LocalPlan::new(vec![]).check(&params), Err(LocalError::NoFragments)));
/// assert!(LocalPlan::new(vec![unknown]).check(&params).is_err());
/// # Ok::<(), LocalError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Fragment {
    /// The parameters.
    pub params: Select,
    /// The kind of state.
    pub what: What,
    /// Steps at which the fragment is exchanged.
    pub timing: Timing,
    /// Merge of the workers' values.
    pub merge: Merge,
    /// Share of the result in a worker's new values: `x = (1 - taken) x + taken result`; above 0, at most 1. Streaming DiLoCo's
    /// alpha is the share of the worker's own values, `1 - taken`.
    pub taken: f64,
    /// Weights of the workers in the mean.
    pub weights: Weights,
    /// Type in which values are sent: f64, f32 or bf16; `None`: their own type. Parameters in a narrower type are sent as
    /// differences from the last exchange.
    pub wire: Option<DType>,
    /// Policy after a failed exchange.
    pub on_failure: OnFailure,
}

/// A kind of state.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum What {
    /// The parameters; the masters of those that have one.
    Params,
    /// The selected state vectors of the rule, for parameters with a rule that has them.
    State(Slots),
    /// All state of the outer optimizer of the fragment with this index, for the elements of that fragment; the fragment's own
    /// choice of parameters is ignored.
    OuterMomentum(usize),
}

/// Selection of a rule's state vectors.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Slots {
    /// All vectors that are not second moments, for example averages of gradients.
    First,
    /// Averages, sums and maxima of squares, as declared by the rule ([`Rule::slot`]).
    Second,
    /// The vector of this name.
    Named(String),
}

/// Merge of the workers' values into one.
#[derive(Clone, Debug)]
pub enum Merge {
    /// The mean of the workers' values. With a delay, a worker keeps the change since it sent its snapshot `s0`: it adds `left
    /// (mean - s0)`, where `left` is the share of `s0` that is still in its value `s`. For parameters `left` is 1 (Zhou et al.,
    /// *DaSGD: Squeezing SGD Parallelization Performance in Distributed Training Using Delayed Averaging*, 2020).
    ///
    /// For state the rule declares `left` ([`Rule::slot`]): `beta^n` after `n` updates for an average, 1 for a sum. An update is
    /// linear, `s = beta s + a`, so `s = beta^n s0 + own` after `n` of them, and an exchange without delay would have given `beta^n
    /// mean + own`: the same value. An average of squares is therefore not negative; a value that rounding makes negative is set to
    /// 0. A maximum has no such share, and is refused with a delay
    /// ([`LocalError::DelayedMaximum`](crate::LocalError::DelayedMaximum)).
    Mean,
    /// A step of an outer optimizer. Its gradient is the movement of the parameters since its last step, `x_outer - mean(x)`.
    Outer(Outer),
    /// Zeros; nothing is sent.
    Reset,
    /// Each worker keeps its own values; nothing is sent.
    Keep,
}

/// An optimizer over the workers' mean difference, in f64 (Douillard et al., *DiLoCo: Distributed Low-Communication Training of
/// Language Models*, 2023; the server optimizer of Reddi et al., *Adaptive Federated Optimization*, 2021).
#[derive(Clone, Debug)]
pub struct Outer {
    /// Update rule, which must be element-wise.
    pub rule: Arc<dyn Rule>,
    /// Learning rate.
    pub lr: f64,
}

/// Weights of workers in a mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Weights {
    /// All workers count equally.
    #[default]
    Uniform,
    /// Each worker counts by the tokens that it has seen since the fragment was last sent: the sum of its micro-batches' weights over
    /// steps that were not skipped. An exchange before the update ([`Placement::Before`](crate::Placement)) does not count the current
    /// step's. If no worker has seen tokens since, the exchange of all fragments that are due in this step fails
    /// ([`Veto::NoWeight`](crate::Veto::NoWeight)).
    /// With a delay, a result is merged as a correction to the worker's own values: for second moments it is as precise as without
    /// delay only if the worker's own share of the mean is not close to 0.
    /// Tokens that several of its ranks process together, for example along `tp`, count once.
    ///
    /// Before the first step no worker has seen tokens, and all count equally.
    Tokens,
}

/// Policy of a fragment after a failed exchange. An exchange fails on all workers or on none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum OnFailure {
    /// Every worker continues with its own values until the fragment is due again.
    #[default]
    KeepLocal,
    /// Every worker goes back to the result of the fragment's last exchange.
    RollBack,
    /// The fragment is due again at the next step.
    Retry,
}

impl LocalPlan {
    /// Default length of a bucket: 64 MiB of f32.
    pub const BUCKET_LEN: usize = 1 << 24;

    /// Creates a plan of these fragments.
    pub fn new(fragments: Vec<Fragment>) -> Self {
        LocalPlan { fragments, bucket_len: Self::BUCKET_LEN }
    }

    /// Returns the fragments, by index, that are sent or reset at step `step`, from 0, on this side of its update.
    pub fn due(&self, step: u64, placement: Placement) -> impl Iterator<Item = usize> + '_ {
        self.those(move |f| f.timing.placement == placement && f.timing.due(step))
    }

    /// Returns the fragments with a result that arrives at this step and side.
    pub fn arriving(&self, step: u64, placement: Placement) -> impl Iterator<Item = usize> + '_ {
        self.those(move |f| f.timing.placement == placement && f.timing.arrives(step))
    }

    fn those<'a>(&'a self, wanted: impl Fn(&Fragment) -> bool + 'a) -> impl Iterator<Item = usize> + 'a {
        let acts = move |f: &Fragment| !matches!(f.merge, Merge::Keep) && wanted(f);
        self.fragments.iter().enumerate().filter(move |(_, f)| acts(f)).map(|(i, _)| i)
    }
}

impl Fragment {
    /// Creates a fragment that takes the mean of `what` of all parameters.
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

    /// Returns true if values are sent to other workers.
    pub(crate) fn travels(&self) -> bool {
        matches!(self.merge, Merge::Mean | Merge::Outer(_)) && self.timing.period.is_some()
    }

    /// Returns true if the sent values are kept until their mean arrives.
    pub(crate) fn keeps_sent(&self) -> bool {
        self.timing.delay > 0 && self.outer().is_none()
    }
}

impl Slots {
    /// Returns the indices of the selected state vectors of a rule.
    pub fn of(&self, rule: &dyn Rule) -> Vec<usize> {
        let has = |slot: usize| match self {
            Slots::First => !rule.slot(slot).squares,
            Slots::Second => rule.slot(slot).squares,
            Slots::Named(name) => rule.state()[slot] == name,
        };
        (0..rule.state().len()).filter(|&slot| has(slot)).collect()
    }
}
