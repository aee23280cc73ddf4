//! Parameters as plans see them: their lengths, types and rules.

#[cfg(feature = "checkpoint")]
use crate::Slots;
use meshstep_optim::Rule;
use meshstep_shard::{Groups, Part};
use meshstep_tensor::DType;
use std::sync::Arc;

/// A parameter that trains.
#[derive(Clone, Debug)]
pub struct ParamSpec {
    /// Name of the parameter.
    pub name: String,
    /// Number of elements on this rank.
    pub len: usize,
    /// Number of elements of the whole parameter.
    pub whole: usize,
    /// Position among all parameters in the order of a forward pass.
    pub position: usize,
    /// Type in which values are updated: that of the master, if there is one.
    pub values: DType,
    /// Type of the state.
    pub state: DType,
    /// Update rule.
    pub rule: Arc<dyn Rule>,
}

impl ParamSpec {
    /// Returns the names of the selected state vectors.
    #[cfg(feature = "checkpoint")]
    pub(crate) fn named(&self, slots: &Slots) -> impl Iterator<Item = &'static str> {
        let names = self.rule.state();
        slots.of(&*self.rule).into_iter().map(|slot| names[slot])
    }

    /// Returns the parameters of a part, updated by `rules`, in the order of a forward pass. Returns an error if the rules do not
    /// fit the layout.
    pub fn of(part: &Part, rules: &Groups) -> Result<Vec<ParamSpec>, meshstep_shard::Error> {
        let rules = rules.rules(part.layout())?;
        let mut all: Vec<ParamSpec> = Vec::new();
        for bucket in part.buckets() {
            for placed in &bucket.params {
                let name = part.layout().params()[placed.param].name().to_owned();
                let rule = Arc::clone(&rules[placed.param]);
                let (position, whole) = part.in_model(placed.param);
                let (values, state) = (bucket.update, bucket.state);
                all.push(ParamSpec { name, len: placed.len, whole, position, values, state, rule });
            }
        }
        all.sort_by_key(|trained| trained.position);
        Ok(all)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use meshstep_optim::AdamW;

    /// Returns parameters p0, p1, ... of these lengths, all in f32 and updated by AdamW.
    pub(crate) fn params(lens: &[usize]) -> Vec<ParamSpec> {
        let rule: Arc<dyn Rule> = Arc::new(AdamW::default());
        let param = |(i, &len): (usize, &usize)| ParamSpec {
            name: format!("p{i}"),
            len,
            whole: len,
            position: i,
            values: DType::F32,
            state: DType::F32,
            rule: Arc::clone(&rule),
        };
        lens.iter().enumerate().map(param).collect()
    }
}
