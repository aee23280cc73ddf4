//! This rank's parameters and state: entries by name, rules by group, buckets, frozen vectors.

use crate::config::options::Options;
use crate::config::param_groups::RuleGroup;
use crate::error::{Error, UnitError};
use crate::plan::bucket_order::append;
use crate::plan::units::Units;
use crate::update::owned_bucket::Owned;
use meshstep_tensor::{Buffer, Param};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// Parameters of one rank, the state that it owns, and the rules that update them.
#[derive(Debug)]
pub struct Params {
    pub(crate) options: Options,
    pub(crate) entries: Vec<ParamEntry>,
    by_name: HashMap<Arc<str>, usize>,
    pub(crate) groups: Vec<RuleGroup>,
    pub(crate) buckets: Vec<Owned>,
    pub(crate) frozen: Vec<Buffer>,
    pub(crate) units: Units,
    /// Text that describes how the model is cut into this rank's parameters.
    pub(crate) arrangement: String,
}

/// A parameter, its place, and the number of its updates.
#[derive(Debug)]
pub(crate) struct ParamEntry {
    pub(crate) param: Param,
    pub(crate) place: ParamPlace,
    pub(crate) group: usize,
    pub(crate) t: u64,
    /// Position among all parameters, in the order a forward pass uses them.
    pub(crate) position: usize,
    /// Elements of the parameter before a mesh cuts it.
    pub(crate) whole: usize,
    /// Rows and columns before a mesh cuts it, of a parameter of two dimensions, or of each matrix of one of three.
    pub(crate) matrix: Option<(usize, usize)>,
    /// True while a trainable parameter is frozen.
    pub(crate) paused: bool,
}

/// Place of a parameter's values.
#[derive(Clone, Debug)]
pub(crate) enum ParamPlace {
    /// The `index`th parameter of a bucket.
    Bucket { bucket: usize, index: usize, range: Range<usize> },
    /// In one of the vectors of frozen parameters.
    Frozen { vector: usize, range: Range<usize> },
}

impl ParamEntry {
    /// Returns true if the parameter takes no gradient.
    pub(crate) fn rests(&self) -> bool {
        self.paused || self.param.frozen()
    }
}

impl Params {
    /// Makes an empty set.
    pub(crate) fn new(options: Options) -> Self {
        Params {
            options,
            entries: Vec::new(),
            by_name: HashMap::new(),
            groups: Vec::new(),
            buckets: Vec::new(),
            frozen: Vec::new(),
            units: Units::default(),
            arrangement: String::new(),
        }
    }

    /// Returns the index of the parameter with this name.
    pub(crate) fn index(&self, name: &str) -> Result<usize, Error> {
        let unknown = || Error::UnknownParam { name: name.to_owned(), count: self.entries.len() };
        self.by_name.get(name).copied().ok_or_else(unknown)
    }

    /// Returns true if a parameter has this name.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.by_name.contains_key(name)
    }

    /// Returns a parameter's first name; no characters for an index without a parameter.
    pub(crate) fn name(&self, param: usize) -> String {
        self.entries.get(param).map_or(String::new(), |entry| entry.param.name().to_owned())
    }

    /// Returns the group of a parameter.
    pub(crate) fn group_of(&self, param: usize) -> &RuleGroup {
        &self.groups[self.entries[param].group]
    }

    /// Checks that there are parameters to step; the result is the same on every rank.
    pub(crate) fn check_some(&self) -> Result<(), Error> {
        if self.entries.is_empty() { Err(Error::NothingTrains) } else { Ok(()) }
    }

    /// Adds parameters under their own names.
    pub(crate) fn extend(&mut self, added: Vec<ParamEntry>) {
        let names = added.iter().map(|entry| entry.param.shared_name());
        self.by_name.extend(names.zip(self.entries.len()..));
        append(&mut self.entries, added);
    }

    /// Makes `alias` another name of the parameter `name`.
    pub(crate) fn alias(&mut self, alias: &str, name: &str) -> Result<(), Error> {
        let index = self.index(name)?;
        self.check_alias(&self.units, alias, index)?;
        match self.by_name.get(alias) {
            Some(&other) if other != index => Err(Error::NameTaken { name: alias.to_owned() }),
            _ => {
                self.by_name.insert(alias.into(), index);
                Ok(())
            }
        }
    }

    /// Refuses another name of a parameter if that name is a unit's.
    fn check_alias(&self, units: &Units, alias: &str, param: usize) -> Result<(), UnitError> {
        let own = self.entries[param].param.name() == alias;
        match !own && self.options.stage.cuts_params() && units.claims(alias, param) {
            true => Err(UnitError::TwoOfOneName { name: alias.to_owned() }),
            false => Ok(()),
        }
    }

    /// Checks that units have unique names, which no parameter's other name repeats.
    pub(crate) fn check_units(&self, units: &Units) -> Result<(), UnitError> {
        units.check()?;
        self.by_name.iter().try_for_each(|(name, &param)| self.check_alias(units, name, param))
    }

    /// Returns the unit of this name, or the unit named after the parameter that has this name.
    pub(crate) fn unit(&self, name: &str) -> Result<usize, UnitError> {
        let called = || {
            let &param = self.by_name.get(name)?;
            self.units.called_by(self.entries[param].param.name(), param)
        };
        let unknown = || UnitError::Unknown { unit: name.to_owned(), count: self.units.names().count() };
        self.units.index(name).or_else(called).ok_or_else(unknown)
    }

    /// Makes the queue wait for all parameters of the last step that may still be in flight.
    pub fn wait(&self) -> Result<(), Error> {
        self.buckets.iter().try_for_each(Owned::wait_for_params)
    }
}
