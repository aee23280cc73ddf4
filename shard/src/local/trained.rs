//! What a plan is about: the parameters that train, their types and their rules.

use super::Slots;
use crate::{Groups, Part};
use meshstep_optim::Rule;
use meshstep_tensor::DType;
use std::sync::Arc;

/// A parameter that trains, as plans see it.
#[derive(Clone, Debug)]
pub struct Trained {
    /// Its name.
    pub name: String,
    /// Its elements, here.
    pub len: usize,
    /// Its elements where it is not cut.
    pub whole: usize,
    /// Where it stands among all parameters, as a forward pass uses them.
    pub position: usize,
    /// The type its values are updated in: a master's, where it has one.
    pub values: DType,
    /// The type of its state.
    pub state: DType,
    /// How it is updated.
    pub rule: Arc<dyn Rule>,
}

impl Trained {
    /// The names of such state of its rule.
    pub(crate) fn named(&self, slots: &Slots) -> impl Iterator<Item = &'static str> {
        let names = self.rule.state();
        slots.of(&*self.rule).into_iter().map(|slot| names[slot])
    }

    /// Those of a part, in the order a forward pass uses them, updated by `rules`. An error where the rules do not fit the layout.
    pub fn of(part: &Part, rules: &Groups) -> Result<Vec<Trained>, crate::Error> {
        let groups = rules.assign(part.layout())?;
        let mut all: Vec<Trained> = Vec::new();
        for bucket in part.buckets() {
            for placed in &bucket.params {
                let name = part.layout().params()[placed.param].name().to_owned();
                let rule = Arc::clone(&rules.groups[groups[placed.param]].rule);
                let (position, whole) = part.in_model(placed.param);
                let (values, state) = (bucket.update, bucket.state);
                all.push(Trained { name, len: placed.len, whole, position, values, state, rule });
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

    /// Parameters p0, p1, ... of these lengths, f32 throughout, updated by AdamW.
    pub(crate) fn params(lens: &[usize]) -> Vec<Trained> {
        let rule: Arc<dyn Rule> = Arc::new(AdamW::default());
        let param = |(i, &len): (usize, &usize)| Trained {
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
