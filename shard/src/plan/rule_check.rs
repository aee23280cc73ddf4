//! Checks of the rules of a part: each sees the elements that it needs.

use crate::{Error, Groups, Options, Part, Stage};

impl Groups {
    /// Checks that these rules can update the parameters of `part` with these options: all groups have one rule. `alike`: all ranks share
    /// all parameters in the same way.
    pub fn check(&self, part: &Part, alike: bool, options: &Options) -> Result<(), Error> {
        self.assign(part.layout())?;
        self.check_one_rule()?;
        options.precision.check_rules(self)?;
        self.check_sight(part, options.stage)?;
        if !alike {
            self.check_shared(options)?;
        }
        self.check_place(options)
    }

    /// Checks that each parameter's rule can see under `stage` the elements that it needs.
    fn check_sight(&self, part: &Part, stage: Stage) -> Result<(), Error> {
        let rule = self.groups[0].rule.name();
        if !self.see_matrices() {
            return Ok(());
        }
        if stage.cuts_params() && !self.update_pieces() {
            return Err(Error::NeedsWholeParams { rule, stage });
        }
        if let Some(name) = part.unknown_cut() {
            let what = format!("whole matrices, for {rule}, of {name:?}, which a mesh cuts");
            return Err(Error::Shared { what, works: "Part::with_cuts" });
        }
        if part.cuts().is_some() && !self.update_pieces() {
            let what = format!("whole matrices, for {rule}, where a mesh cuts them");
            return Err(Error::Shared { what, works: "a rule with Rule::by_matrix" });
        }
        let rules = self.rules(part.layout())?;
        let mut params = part.layout().params().iter().zip(&rules).enumerate();
        let other =
            params.find(|(i, (p, rule))| !p.frozen() && rule.blocks().of(part.whole_shape(*i)).is_none());
        other.map_or(Ok(()), |(i, (p, rule))| {
            let (name, shape) = (p.name().to_owned(), part.whole_shape(i).to_vec());
            Err(Error::NotAMatrix { rule: rule.name(), name, shape, blocks: rule.blocks() })
        })
    }
}
