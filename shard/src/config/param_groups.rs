//! Parameter groups: rules with hyperparameters of their own for some of the parameters.

use crate::config::digest::digest;
use crate::config::quote::quote;
use crate::config::selection::{SelectParams, Selection};
use crate::{Clip, Error, Options};
use meshstep_optim::{Rule, Sees};
use meshstep_tensor::{Layout, Place};
use std::collections::HashSet;
use std::fmt::Write;
use std::sync::Arc;
use twox_hash::XxHash3_64;

/// Maximum number of state vectors in an update: more than any rule here names.
pub(crate) const MAX_STATES: usize = 8;

/// The rules of an optimizer's parameters: one rule, and others for some of the parameters, with hyperparameters and a learning rate of
/// their own.
///
/// ```
/// use meshstep_optim::AdamW;
/// use meshstep_shard::Groups;
/// use meshstep_tensor::Param;
///
/// let decay = AdamW { weight_decay: 0.1, ..AdamW::default() };
/// let none = AdamW { weight_decay: 0.0, ..decay.clone() };
/// let groups = Groups::new(decay.clone()).with(none.clone(), ["ln.weight", "ln.bias"]);
///
/// // By a predicate: vectors do not decay, and embeddings learn at half the rate.
/// let by_shape = Groups::new(decay.clone())
///     .with(none, |p: &Param| p.shape().len() < 2)
///     .with_lr(decay, 0.5, |p: &Param| p.name().ends_with("embedding"));
/// # let _ = (groups, by_shape);
/// ```
///
/// Groups may have different rules: Muon for the matrices of hidden layers and AdamW for the others, in one optimizer with one exchange,
/// one clip norm over all gradients, and checkpoints by name. Each rule's parameters have buckets of their own, and
/// [`Optimizer::params`](crate::Optimizer::params) lists them rule by rule, in the order of the rules' first groups; first values are
/// asked for in this order.
///
/// ```
/// use meshstep_optim::Muon;
/// use meshstep_shard::hidden_matrices;
/// use meshstep_shard::prelude::*;
///
/// let steps = loopback::spawn(2, |comm| -> Result<f32, meshstep_shard::Error> {
///     let layout = Layout::builder()
///         .param("embedding.weight", &[10, 4], DType::F32)
///         .param("up.weight", &[4, 8], DType::F32)
///         .param("up.bias", &[8], DType::F32)
///         .build()?;
///     // `Muon::moonshot` scales its updates to AdamW's, so that one rate fits both. The bias learns at half of it.
///     let rules = Groups::new(AdamW::default())
///         .with(Muon::moonshot(), hidden_matrices)
///         .with_lr(AdamW::default(), 0.5, ["up.bias"]);
///     let mut opt = Optimizer::new(comm, layout, rules, |_, _| Ok(()), Options::default())?;
///     let mb = opt.micro_batch(1)?;
///     for (name, len) in [("up.bias", 8), ("up.weight", 32), ("embedding.weight", 40)] {
///         mb.grad(name, &vec![1f32; len])?;
///     }
///     mb.finish()?;
///     opt.step(StepArgs { lr: 0.01, max_norm: Some(1.0), ..StepArgs::default() })?.outcome()?;
///     Ok(opt.param("up.bias")?.typed::<f32>()?[0])
/// })?;
/// assert!(steps.into_iter().all(|bias| bias.is_ok_and(|bias| (bias + 0.005).abs() < 1e-6)));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Groups {
    pub(crate) groups: Vec<RuleGroup>,
}

#[derive(Clone, Debug)]
pub(crate) struct RuleGroup {
    pub(crate) rule: Arc<dyn Rule>,
    pub(crate) lr_scale: f64,
    pub(super) params: Selection,
}

impl Groups {
    /// Applies one rule to all parameters.
    pub fn new(rule: impl Rule + 'static) -> Self {
        Groups { groups: vec![RuleGroup::new(rule, 1.0, [""; 0].select())] }
    }

    /// Applies `rule` to some of the parameters: to those of a list of names, or to those for which a predicate `|p: &Param| ...`
    /// is true.
    ///
    /// Every name must be a trainable parameter. A predicate sees the trainable parameters alone and may match none; it is called
    /// more than once, and depends on its argument alone. Under a mesh it sees the shape of this rank's part. A parameter in two
    /// groups is an error.
    pub fn with<By>(self, rule: impl Rule + 'static, params: impl SelectParams<By>) -> Self {
        self.with_lr(rule, 1.0, params)
    }

    /// Applies `rule` to some of the parameters, as [`with`](Self::with), with `lr_scale` times the step's learning rate.
    pub fn with_lr<By>(
        mut self,
        rule: impl Rule + 'static,
        lr_scale: f64,
        params: impl SelectParams<By>,
    ) -> Self {
        self.groups.push(RuleGroup::new(rule, lr_scale, params.select()));
        self
    }

    /// Returns the parameter names that the groups list; a predicate lists none.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.groups.iter().flat_map(|group| group.params.names().iter().map(String::as_str))
    }

    /// Returns the groups for a layout with some of the parameters only: other names are left out, and if one rule updates all of these
    /// parameters, other rules too.
    pub fn within(&self, layout: &Layout) -> Groups {
        let own = |group: &RuleGroup| {
            let known = |name: &&String| layout.index(name).is_some();
            let params = group.params.map_names(|names| names.iter().filter(known).cloned().collect());
            RuleGroup { params, ..group.clone() }
        };
        Groups { groups: self.groups.iter().map(own).collect() }.without_unused(layout)
    }

    /// Returns the groups with each name that `first` knows replaced by its answer, once in each group.
    pub fn renamed<'n>(&self, first: impl Fn(&str) -> Option<&'n str>) -> Groups {
        let renamed = |names: &[String]| {
            let mut known = HashSet::new();
            let names = names.iter().map(|name| first(name).unwrap_or(name));
            names.filter(|name| known.insert(*name)).map(str::to_owned).collect()
        };
        let of = |group: &RuleGroup| RuleGroup { params: group.params.map_names(renamed), ..group.clone() };
        Groups { groups: self.groups.iter().map(of).collect() }
    }

    /// Returns the first group's rule.
    pub fn rule(&self) -> &dyn Rule {
        &*self.groups[0].rule
    }

    /// Refuses rules and options that require all ranks to share all parameters alike.
    pub(crate) fn check_shared(&self, options: &Options) -> Result<(), Error> {
        let sums = self.groups.iter().map(|g| &g.rule).find(|rule| rule.sees() == Sees::TensorSums);
        let (what, works) = match sums {
            // The sums are folded over all ranks, so that each element counts once.
            Some(rule) if !options.stage.cuts_state() => {
                (format!("sums over whole tensors, for {}", rule.name()), "Stage::Zero1, Zero2 or Zero3")
            }
            _ if options.clip == Clip::BeforeReduce => ("Clip::BeforeReduce".to_owned(), "Clip::AfterReduce"),
            _ => return Ok(()),
        };
        Err(Error::Shared { what, works })
    }

    /// Returns the names of the rule's state vectors, the same in every group.
    pub(crate) fn state(&self) -> &'static [&'static str] {
        self.groups[0].rule.state()
    }

    /// Returns true if the rules see whole matrices, so that no rank updates a part of one.
    pub fn see_matrices(&self) -> bool {
        self.rule().sees() == Sees::Matrix
    }

    /// Returns true if no rule needs a whole matrix on one rank: those that see matrices update pieces too ([`Rule::by_matrix`]).
    pub fn update_pieces(&self) -> bool {
        let updates = |rule: &dyn Rule| rule.sees() != Sees::Matrix || rule.by_matrix().is_some();
        self.groups.iter().all(|group| updates(&*group.rule))
    }

    /// Checks that every group's rule has GPU kernels, if memory is on a GPU.
    pub(crate) fn check_place(&self, options: &Options) -> Result<(), Error> {
        if options.queue.place() == Place::Cpu {
            return Ok(());
        }
        let other = self.groups.iter().find(|group| group.rule.on_device().is_none());
        other.map_or(Ok(()), |RuleGroup { rule, .. }| {
            Err(meshstep_optim::Error::NoKernels { rule: rule.name() }.into())
        })
    }

    /// Returns the rule of each parameter, by registration index, or an error in the groups.
    pub fn rules(&self, layout: &Layout) -> Result<Vec<Arc<dyn Rule>>, Error> {
        let groups = self.assign(layout)?;
        Ok(groups.into_iter().map(|group| Arc::clone(&self.groups[group].rule)).collect())
    }

    /// Returns the group of each parameter, by registration index, or an error in the groups.
    pub(crate) fn assign(&self, layout: &Layout) -> Result<Vec<usize>, Error> {
        self.groups.iter().try_for_each(RuleGroup::check)?;
        let mut of = vec![0; layout.params().len()];
        for (g, group) in self.groups.iter().enumerate() {
            let mut indices = group.params.matches(layout);
            for name in group.params.names() {
                let index = layout.index(name).ok_or_else(|| Error::UnknownParam {
                    name: name.clone(),
                    count: layout.params().len(),
                })?;
                if layout.params()[index].frozen() {
                    return Err(Error::FrozenParam { name: name.clone() });
                }
                indices.push(index);
            }
            for index in indices {
                if std::mem::replace(&mut of[index], g) != 0 {
                    return Err(Error::InTwoGroups { name: layout.params()[index].name().to_owned() });
                }
            }
        }
        Ok(of)
    }

    /// Writes one line per hyperparameter, for ranks to compare.
    pub(crate) fn describe(&self, layout: &Layout, text: &mut String) {
        for (param, g) in layout.params().iter().zip(self.assign(layout).unwrap_or_default()) {
            text.push_str("group of ");
            quote(text, param.name());
            let _ = writeln!(text, " = {g}");
        }
        self.groups.iter().enumerate().for_each(|(g, group)| group.describe(g, text));
    }
}

impl<R: Rule + 'static> From<R> for Groups {
    fn from(rule: R) -> Self {
        Groups::new(rule)
    }
}

impl RuleGroup {
    fn new(rule: impl Rule + 'static, lr_scale: f64, params: Selection) -> Self {
        RuleGroup { rule: Arc::new(rule), lr_scale, params }
    }

    /// Returns the group with another rule.
    pub(crate) fn with_rule(&self, rule: Arc<dyn Rule>) -> Self {
        RuleGroup { rule, ..self.clone() }
    }

    /// Returns a digest of the lines that [`describe`](Self::describe) writes, recomputed each time because a rule's
    /// hyperparameters may change. Allocates nothing.
    pub(crate) fn digest(&self) -> u64 {
        let named = |name: &str| XxHash3_64::oneshot(name.as_bytes());
        let names = [self.rule.name()].into_iter().chain(self.rule.state().iter().copied());
        let mut all = of_bits(names.map(named).chain([self.lr_scale.to_bits()]));
        self.rule.each_hyperparameter(&mut |name, value| all = of_bits([all, named(name), value.to_bits()]));
        all
    }

    /// Writes one line per fact about the rule of group `g`, for ranks to compare.
    pub(crate) fn describe(&self, g: usize, text: &mut String) {
        let _ = writeln!(text, "rule of group {g} = {}", self.rule.name());
        let _ = writeln!(text, "lr_scale of group {g} = {}", self.lr_scale);
        self.rule.each_hyperparameter(&mut |name, value| {
            let _ = writeln!(text, "{name} of group {g} = {value}");
        });
        let _ = writeln!(text, "state of group {g} = {:?}", self.rule.state());
    }

    /// Returns the largest number that a step at `lr` computes with, for a tensor of this shape ([`Rule::reach`]).
    pub(crate) fn reach(&self, lr: f64, matrix: Option<(usize, usize)>) -> f64 {
        self.rule.reach(lr * self.lr_scale, matrix)
    }

    fn check(&self) -> Result<(), Error> {
        self.rule.check()?;
        let (rule, states) = (self.rule.name(), self.rule.state().len());
        if states > MAX_STATES {
            return Err(Error::TooManyStates { rule, states, max: MAX_STATES });
        }
        if !(self.lr_scale.is_finite() && self.lr_scale >= 0.0) {
            return Err(Error::LrScale { value: self.lr_scale });
        }
        Ok(())
    }
}

/// Returns a digest of the rules of all groups.
pub(crate) fn of_groups(groups: &[RuleGroup]) -> u64 {
    of_bits(groups.iter().map(RuleGroup::digest))
}

fn of_bits(words: impl IntoIterator<Item = u64>) -> u64 {
    words.into_iter().fold(0, |so_far, word| digest(so_far, word, 0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use meshstep_optim::{AdamW, Lamb};

    #[test]
    fn all_of_a_word_counts() {
        let words = (0..64).map(|bit| of_bits([1 << bit]));
        let digests: std::collections::BTreeSet<u64> = words.chain([of_bits([0])]).collect();
        assert_eq!(digests.len(), 65);
    }

    fn digests(groups: Groups) -> Vec<u64> {
        groups.groups.iter().map(RuleGroup::digest).collect()
    }

    #[test]
    fn a_bit_of_a_hyperparameter_is_another_digest() {
        let next = |x: f64| f64::from_bits(x.to_bits() + 1);
        let adamw = AdamW::default();
        let adamws = Groups::new(adamw.clone())
            .with(AdamW { beta1: next(adamw.beta1), ..adamw.clone() }, [""; 0])
            .with(AdamW { eps: next(adamw.eps), ..adamw.clone() }, [""; 0])
            .with(AdamW { amsgrad: true, ..adamw.clone() }, [""; 0])
            .with_lr(adamw.clone(), next(1.0), [""; 0]);
        let lamb = Lamb::default();
        // A rule without kernels.
        let lambs = Groups::new(lamb.clone())
            .with(Lamb { beta2: next(lamb.beta2), ..lamb.clone() }, [""; 0])
            .with_lr(lamb.clone(), 2.0, [""; 0]);
        assert_eq!(digests(Groups::new(adamw))[0], digests(adamws.clone())[0]);
        let mut all = [digests(adamws), digests(lambs)].concat();
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), count);
    }
}
