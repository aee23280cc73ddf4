//! Groups of different rules: the rule of each parameter, and the groups of one rule.

use crate::Error;
use crate::config::param_groups::{Groups, RuleGroup};
use crate::config::selection::SelectParams;
use meshstep_optim::Rule;
use meshstep_tensor::{Layout, Param};

impl Groups {
    /// Returns the names of all rules, each once, in the order of their first groups.
    pub fn rule_names(&self) -> Vec<&'static str> {
        let mut names = Vec::new();
        for name in self.groups.iter().map(|group| group.rule.name()) {
            if !names.contains(&name) {
                names.push(name);
            }
        }
        names
    }

    /// Returns the groups of one rule, if one rule updates all parameters of `layout`; all groups otherwise.
    pub(super) fn without_unused(self, layout: &Layout) -> Groups {
        if self.have_one_rule() {
            return self;
        }
        let firsts = self.first_of_rule(layout).unwrap_or_default();
        let updated = layout.params().iter().zip(firsts).filter(|(param, _)| is_updated(param));
        let mut firsts = updated.filter_map(|(_, first)| first);
        match firsts.next().filter(|&one| firsts.all(|first| first == one)) {
            Some(one) => self.of_rule(one),
            None => self,
        }
    }

    /// Refuses groups of different rules.
    pub(crate) fn check_one_rule(&self) -> Result<(), Error> {
        match self.groups.iter().find(|group| !group.has_rule_of(&self.groups[0])) {
            Some(other) => Err(Error::MixedRules { first: self.rule().name(), other: other.rule.name() }),
            None => Ok(()),
        }
    }

    /// Returns true if all groups have the same rule.
    pub(crate) fn have_one_rule(&self) -> bool {
        self.groups.iter().all(|group| group.has_rule_of(&self.groups[0]))
    }

    /// Returns for each parameter the first group of its rule, by registration index; none for a frozen one.
    pub(crate) fn first_of_rule(&self, layout: &Layout) -> Result<Vec<Option<usize>>, Error> {
        let groups = self.assign(layout)?;
        let first = |g: usize| self.groups.iter().position(|other| other.has_rule_of(&self.groups[g]));
        let of = |(param, g): (&Param, usize)| if param.frozen() { None } else { first(g) };
        Ok(layout.params().iter().zip(groups).map(of).collect())
    }

    /// Returns the groups with the rule of group `first`, which takes the parameters that are in no other group.
    pub(crate) fn of_rule(&self, first: usize) -> Groups {
        let rest = RuleGroup { params: [""; 0].select(), ..self.groups[first].clone() };
        let others = self.groups[first + 1..].iter().filter(|group| group.has_rule_of(&rest));
        Groups { groups: std::iter::once(rest.clone()).chain(others.cloned()).collect() }
    }

    /// Returns the rule of a trainable parameter.
    pub(crate) fn rule_of(&self, param: &Param) -> &dyn Rule {
        let group = self.groups.iter().find(|group| group.params.has(param));
        &*group.unwrap_or(&self.groups[0]).rule
    }
}

impl RuleGroup {
    /// Returns true if both groups have the same rule, apart from hyperparameters that leave its state vectors.
    fn has_rule_of(&self, other: &RuleGroup) -> bool {
        (self.rule.name(), self.rule.state()) == (other.rule.name(), other.rule.state())
    }
}

/// Returns true if a rule changes elements of the parameter.
pub(crate) fn is_updated(param: &Param) -> bool {
    !param.frozen() && !param.is_empty()
}
