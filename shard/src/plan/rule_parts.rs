//! Division of a layout by update rule: the parameters of each rule are planned as a part of their own. Arithmetic only.

use crate::config::mixed_rules::is_updated;
use crate::plan::bucket::BucketPlan;
use crate::plan::matrix_exchange::{self, MatrixExchange};
use crate::{Error, Groups, Options, Part, Sizes};
use meshstep_optim::{Rule, Sees};
use meshstep_tensor::Layout;

/// Parameters of a layout that one rule updates, with their groups.
///
/// ```
/// use meshstep_optim::{AdamW, Muon};
/// use meshstep_shard::{Groups, RulePart};
/// use meshstep_tensor::{DType::F32, Layout};
///
/// let layout = Layout::builder().param("emb", &[9, 4], F32).param("up", &[4, 8], F32).param("b", &[8], F32).build()?;
/// let rules = Groups::new(AdamW::default()).with(Muon::default(), ["up"]);
/// let parts = RulePart::split(layout, rules)?;
/// let indices: Vec<(&str, &[usize])> = parts.iter().map(|p| (p.rules.rule().name(), &p.indices[..])).collect();
/// assert_eq!(indices, [("adamw", &[0, 2][..]), ("muon", &[1])]);
/// # Ok::<(), meshstep_shard::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct RulePart {
    /// The parameters, in the order of the whole layout, with all of its units.
    pub layout: Layout,
    /// Groups of one rule.
    pub rules: Groups,
    /// Registration index of each parameter in the whole layout.
    pub indices: Vec<usize>,
}

impl RulePart {
    /// Divides `layout` by rule, in the order of the groups. Frozen parameters join the first part, and so do those of a rule
    /// whose parameters have no elements. Groups of one rule give one part, which is the layout itself.
    pub fn split(layout: Layout, rules: Groups) -> Result<Vec<RulePart>, Error> {
        let whole = |layout: Layout, rules| {
            let indices = (0..layout.params().len()).collect();
            Ok(vec![RulePart { layout, rules, indices }])
        };
        if rules.have_one_rule() {
            return whole(layout, rules);
        }
        let firsts = rules.first_of_rule(&layout)?;
        let updated = layout.params().iter().zip(&firsts).filter(|(param, _)| is_updated(param));
        let mut used: Vec<usize> = updated.filter_map(|(_, first)| *first).collect();
        used.sort_unstable();
        used.dedup();
        match used[..] {
            [] => whole(layout, rules.of_rule(0)),
            [first] => whole(layout, rules.of_rule(first)),
            [joined, ..] => used
                .iter()
                .map(|&first| {
                    let own = |index: usize| firsts[index].filter(|own| used.contains(own));
                    let takes = |index: &usize| own(*index).unwrap_or(joined) == first;
                    let indices: Vec<usize> = (0..firsts.len()).filter(takes).collect();
                    Ok(RulePart { layout: only(&layout, &indices)?, rules: rules.of_rule(first), indices })
                })
                .collect(),
        }
    }
}

/// Returns the layout with these parameters only, and all of its units.
fn only(layout: &Layout, indices: &[usize]) -> Result<Layout, Error> {
    let (mut builder, mut unit) = (Layout::builder(), None);
    for param in indices.iter().map(|&index| &layout.params()[index]) {
        if unit.is_none() && param.unit().is_some() {
            builder = layout.units().iter().fold(builder, |builder, unit| builder.unit(unit));
        }
        if let Some(name) = param.unit().filter(|_| unit != param.unit()) {
            builder = builder.unit(name);
        }
        unit = param.unit();
        builder = match param.frozen() {
            true => builder.frozen(param.name(), param.shape(), param.dtype()),
            false => builder.param(param.name(), param.shape(), param.dtype()),
        };
    }
    if unit.is_none() {
        builder = layout.units().iter().fold(builder, |builder, unit| builder.unit(unit));
    }
    Ok(builder.build()?)
}

/// Plans a layout as one part for each rule, after some buckets of the same ranks. Several parts have the positions of their parameters
/// in the layout; one has the default.
pub(crate) fn plan(
    (layout, rules): (Layout, Groups),
    sizes: &Sizes,
    earlier: &[&BucketPlan],
    options: &Options,
) -> Result<Vec<(Part, Groups)>, Error> {
    let parts = RulePart::split(layout, rules)?;
    let several = parts.len() > 1;
    let mut planned: Vec<(Part, Groups)> = Vec::with_capacity(parts.len());
    for RulePart { layout, rules, indices } in parts {
        options.precision.check_rules(&rules)?;
        let before = planned.iter().flat_map(|(part, _)| part.buckets());
        let before = earlier.iter().copied().chain(before);
        let part = Part::after(layout, sizes.clone(), before, options)?;
        let part = part.for_rules(&rules, options)?;
        planned.push((if several { part.at(indices)? } else { part }, rules));
    }
    Ok(planned)
}

/// Rules of a plan's parts: one rule for all parts, or the [`Groups`] by which they were divided. With groups, a part's rule is that of
/// its first trainable parameter with elements.
///
/// ```
/// use meshstep_optim::{AdamW, Muon};
/// use meshstep_shard::{Groups, Options, Part, PlanRules, RulePart, Sizes};
/// use meshstep_tensor::{DType::F32, Layout};
///
/// let layout = Layout::builder().param("up", &[4, 8], F32).param("b", &[8], F32).build()?;
/// let rules = Groups::new(AdamW::default()).with(Muon::default(), ["up"]);
/// for RulePart { layout, .. } in RulePart::split(layout, rules.clone())? {
///     let part = Part::new(layout, Sizes::all(2), [], &Options::default())?;
///     let own = PlanRules::states(&rules, &part);
///     assert_eq!(own, if part.layout().get("up").is_some() { 1 } else { 2 });
/// }
/// # Ok::<(), meshstep_shard::Error>(())
/// ```
pub trait PlanRules {
    /// Returns the number of state vectors of the part's rule.
    fn states(&self, part: &Part) -> usize;

    /// Returns the elements that the part's rule sees.
    fn sees(&self, part: &Part) -> Sees;

    /// Returns the exchange of the part's matrices.
    fn matrix_exchange(&self, part: &Part) -> MatrixExchange;
}

impl<R: Rule + ?Sized> PlanRules for R {
    fn states(&self, _: &Part) -> usize {
        self.state().len()
    }

    fn sees(&self, _: &Part) -> Sees {
        Rule::sees(self)
    }

    fn matrix_exchange(&self, part: &Part) -> MatrixExchange {
        part.matrix_exchange(self)
    }
}

impl PlanRules for Groups {
    fn states(&self, part: &Part) -> usize {
        self.of_part(part).state().len()
    }

    fn sees(&self, part: &Part) -> Sees {
        self.of_part(part).sees()
    }

    fn matrix_exchange(&self, part: &Part) -> MatrixExchange {
        // A large plan asks for each of its ranks.
        if !self.groups.iter().any(|group| group.rule.by_matrix().is_some()) {
            return MatrixExchange::default();
        }
        let params = part.layout().params();
        part.exchange_by(|param| matrix_exchange::cost(self.rule_of(&params[param]), part.whole_shape(param)))
    }
}

impl Groups {
    fn of_part(&self, part: &Part) -> &dyn Rule {
        let mut params = part.layout().params().iter();
        let first = params.find(|param| is_updated(param)).filter(|_| !self.have_one_rule());
        first.map_or(self.rule(), |param| self.rule_of(param))
    }
}
