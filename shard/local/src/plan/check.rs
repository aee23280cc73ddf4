//! Checks of a plan against its parameters.

use crate::error::LocalWarning;
use crate::{Chosen, Fragment, LocalError, LocalPlan, Merge, Outer, ParamSpec, Slots, What};
use meshstep_optim::{Carry, Rule, Sees};
use meshstep_tensor::DType;

impl LocalPlan {
    /// Checks the plan against `params`, and returns warnings about settings that its method advises against.
    pub fn check(&self, params: &[ParamSpec]) -> Result<Vec<LocalWarning>, LocalError> {
        if self.fragments.is_empty() {
            return Err(LocalError::NoFragments);
        }
        if self.bucket_len == 0 {
            return Err(LocalError::EmptyBuckets);
        }
        let mut chosen: Vec<Vec<Chosen>> = Vec::new();
        for (i, fragment) in self.fragments.iter().enumerate() {
            fragment.check(i)?;
            chosen.push(self.chosen(i, params)?);
            let rules = chosen[i].iter().map(|chosen| &*params[chosen.param].rule);
            rules.into_iter().try_for_each(|rule| fragment.check_late(i, rule))?;
        }
        for second in 0..chosen.len() {
            (0..second).try_for_each(|first| self.check_apart([first, second], &chosen, params))?;
        }
        Ok(self.warnings(&chosen, params))
    }

    /// Checks that no element is in two fragments of one kind at a time.
    fn check_apart(
        &self,
        [first, second]: [usize; 2],
        chosen: &[Vec<Chosen>],
        params: &[ParamSpec],
    ) -> Result<(), LocalError> {
        let (a, b) = (&self.fragments[first], &self.fragments[second]);
        let (from, until) =
            (a.timing.during.start.max(b.timing.during.start), a.timing.during.end.min(b.timing.during.end));
        // A flight sent at the end of one fragment's time arrives in the other's.
        let meet = from < until.saturating_add(a.timing.delay.max(b.timing.delay));
        if !meet {
            return Ok(());
        }
        match common(&chosen[first], &chosen[second], |param| shares(a, b, &params[param])) {
            None => Ok(()),
            Some(param) => Err(LocalError::Overlap { first, second, name: params[param].name.clone() }),
        }
    }

    fn warnings(&self, chosen: &[Vec<Chosen>], params: &[ParamSpec]) -> Vec<LocalWarning> {
        let mut warnings = Vec::new();
        let squares = |f: &Fragment, rule: &dyn Rule, are: bool| match &f.what {
            What::State(slots) => slots.of(rule).into_iter().find(|&slot| rule.slot(slot).squares == are),
            What::Params | What::OuterMomentum(_) => None,
        };
        let first = |(f, chosen): (&Fragment, &Vec<Chosen>)| {
            f.travels() && chosen.iter().any(|c| squares(f, &*params[c.param].rule, false).is_some())
        };
        let first_moments_meet = self.fragments.iter().zip(chosen).any(first);
        for (fragment, (f, chosen)) in self.fragments.iter().zip(chosen).enumerate() {
            let during = f.timing.during.clone();
            let last = f.timing.placement.count(during.end.saturating_sub(1));
            if f.timing.period.is_some() && f.timing.times(last) == 0 {
                warnings.push(LocalWarning::NeverDue { fragment, from: during.start, until: during.end });
            }
            if f.travels() || !first_moments_meet {
                continue;
            }
            let beta2 = |c: &Chosen| {
                let rule = &*params[c.param].rule;
                match rule.slot(squares(f, rule, true)?).carry {
                    Carry::Linear { keeps, .. } if keeps < 1.0 => Some((rule.name(), keeps)),
                    Carry::Linear { .. } | Carry::Maximum => None,
                }
            };
            let apart = chosen.iter().find_map(beta2);
            warnings.extend(apart.map(|(rule, beta2)| LocalWarning::SecondMomentsApart {
                fragment,
                rule,
                beta2,
            }));
        }
        warnings
    }
}

impl Fragment {
    /// Checks all that does not depend on parameters.
    fn check(&self, fragment: usize) -> Result<(), LocalError> {
        let timing = &self.timing;
        if let Some(period) = timing.period {
            let (offset, delay) = (timing.offset, timing.delay);
            match () {
                () if period == 0 => return Err(LocalError::Period { fragment }),
                () if offset >= period => return Err(LocalError::Offset { fragment, offset, period }),
                () if delay >= period => return Err(LocalError::Delay { fragment, delay, period }),
                () => {}
            }
        }
        if !(self.taken > 0.0 && self.taken <= 1.0) {
            return Err(LocalError::Taken { fragment, taken: self.taken });
        }
        if let Some(wire) = self.wire.filter(|w| !matches!(w, DType::BF16 | DType::F32 | DType::F64)) {
            return Err(LocalError::Wire { fragment, wire });
        }
        self.check_merge(fragment)
    }

    /// Checks that `rule` says how its state decays, if a mean arrives late.
    fn check_late(&self, fragment: usize, rule: &dyn Rule) -> Result<(), LocalError> {
        let What::State(slots) = &self.what else { return Ok(()) };
        if !self.travels() || self.timing.delay == 0 {
            return Ok(());
        }
        for slot in slots.of(rule) {
            let (name, state) = (rule.name(), rule.state()[slot]);
            let Carry::Linear { keeps, first } = rule.slot(slot).carry else {
                let delay = self.timing.delay;
                return Err(LocalError::DelayedMaximum { fragment, rule: name, slot: state, delay });
            };
            let wrong = |keeps: &f64| !(keeps.is_finite() && *keeps >= 0.0);
            if let Some(keeps) = [Some(keeps), first].into_iter().flatten().find(wrong) {
                return Err(LocalError::Keeps { fragment, rule: name, slot: state, keeps });
            }
        }
        Ok(())
    }

    fn check_merge(&self, fragment: usize) -> Result<(), LocalError> {
        let not_for = |merge, what, works| Err(LocalError::Merge { fragment, merge, what, works });
        match (&self.merge, &self.what) {
            (Merge::Outer(_), What::State(_) | What::OuterMomentum(_)) => {
                not_for("an outer optimizer", "state", "Merge::Mean, or What::Params")
            }
            (Merge::Reset, What::Params) => not_for("Merge::Reset", "parameters", "What::State"),
            (Merge::Reset, _) if self.timing.delay > 0 => {
                not_for("Merge::Reset", "a delay, as nothing travels", "a delay of 0")
            }
            (Merge::Mean, What::OuterMomentum(_)) if self.timing.delay > 0 => {
                not_for("a delayed mean", "outer momentum, which is stepped seldom", "a delay of 0")
            }
            (Merge::Outer(outer), _) => {
                let refuse = |why: String| {
                    Err(LocalError::Outer { fragment, rule: outer.rule.name(), lr: outer.lr, why })
                };
                match outer.rule.check() {
                    Err(error) => refuse(error.to_string()),
                    Ok(()) if outer.rule.sees() != Sees::Elements => {
                        refuse("it sees more than an element; use a rule that sees elements".into())
                    }
                    Ok(()) if !(outer.lr >= 0.0 && outer.lr.is_finite()) => {
                        refuse("the learning rate is to be a finite number, 0 or above".into())
                    }
                    Ok(()) => Ok(()),
                }
            }
            _ => Ok(()),
        }
    }

    /// Returns the outer optimizer of the fragment.
    pub(crate) fn outer(&self) -> Option<&Outer> {
        if let Merge::Outer(outer) = &self.merge { Some(outer) } else { None }
    }
}

impl LocalPlan {
    /// Returns the elements that belong to a fragment.
    pub(crate) fn chosen(&self, fragment: usize, params: &[ParamSpec]) -> Result<Vec<Chosen>, LocalError> {
        let this = &self.fragments[fragment];
        let of = if let What::OuterMomentum(of) = this.what { of } else { fragment };
        let no_outer = || LocalError::NoOuter { fragment, of };
        let chosen = self.fragments.get(of).ok_or_else(no_outer)?.params.resolve(params)?;
        let first = chosen.first().ok_or(LocalError::Empty { fragment })?;
        match &this.what {
            What::Params => Ok(chosen),
            What::State(slots) => {
                let rule = &params[first.param].rule;
                let (rule, has) = (rule.name(), rule.state());
                let found: Vec<Chosen> =
                    chosen.into_iter().filter(|c| !slots.of(&*params[c.param].rule).is_empty()).collect();
                // State that never travels need not exist, for example with a rule without second moments.
                let needed = matches!(slots, Slots::Named(_)) || this.timing.period.is_some();
                if found.is_empty() && needed {
                    return Err(LocalError::NoState { fragment, slots: slots.to_string(), rule, has });
                }
                Ok(found)
            }
            What::OuterMomentum(_) => match self.outer_state(of) {
                [] => Err(no_outer()),
                _ => Ok(chosen),
            },
        }
    }

    /// Returns the names of the state vectors of a fragment's outer optimizer.
    pub(crate) fn outer_state(&self, fragment: usize) -> &'static [&'static str] {
        self.fragments[fragment].outer().map_or(&[], |outer| outer.rule.state())
    }
}

/// Returns true if two fragments have the same vector of a parameter.
fn shares(a: &Fragment, b: &Fragment, param: &ParamSpec) -> bool {
    match (&a.what, &b.what) {
        (What::State(a), What::State(b)) => {
            let other = b.of(&*param.rule);
            a.of(&*param.rule).iter().any(|slot| other.contains(slot))
        }
        (a, b) => a == b,
    }
}

fn intersection(a: &Chosen, b: &Chosen) -> Option<usize> {
    let both = a.range.start.max(b.range.start)..a.range.end.min(b.range.end);
    (a.param == b.param && !both.is_empty()).then_some(both.len())
}

/// Returns the first parameter, among those with `counts`, of which both have an element.
fn common(a: &[Chosen], b: &[Chosen], counts: impl Fn(usize) -> bool) -> Option<usize> {
    let (mut i, mut j) = (0, 0);
    while let (Some(x), Some(y)) = (a.get(i), b.get(j)) {
        if counts(x.param) && intersection(x, y).is_some() {
            return Some(x.param);
        }
        // Both lists have each parameter once, in ascending order.
        if x.param <= y.param {
            i += 1;
        } else {
            j += 1;
        }
    }
    None
}
