//! Selection of a fragment's parameters and elements.

use crate::{LocalError, ParamSpec};
use std::collections::HashMap;
use std::ops::Range;

/// A selection among the parameters that train.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub enum Select {
    /// All elements.
    #[default]
    All,
    /// Whole parameters, by name.
    Names(Vec<String>),
    /// Part `index` of `of` parts with about equally many elements: whole parameters that are adjacent in the order of a forward
    /// pass. The selection is independent of how a mesh cuts parameters.
    Part {
        /// Index of the part, from 0.
        index: usize,
        /// Number of parts.
        of: usize,
    },
    /// Elements of one parameter that the mesh does not cut, in row-major order.
    Elements {
        /// Name of the parameter.
        name: String,
        /// Range of elements.
        range: Range<usize>,
    },
}

/// Elements of one parameter.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Chosen {
    /// Index of the parameter among those that train.
    pub param: usize,
    /// Range of elements, in row-major order.
    pub range: Range<usize>,
}

impl Select {
    /// Returns the selected elements of `params`, each once, by ascending parameter and without empty parameters. Returns an error
    /// if a name is unknown, a range exceeds its parameter, or the part does not exist.
    pub fn resolve(&self, params: &[ParamSpec]) -> Result<Vec<Chosen>, LocalError> {
        let mut chosen = match self {
            Select::All => (0..params.len()).map(|p| whole(params, p)).collect(),
            Select::Names(names) => named(names, params)?,
            Select::Part { index, of } => part(*index, *of, params)?,
            Select::Elements { name, range } => {
                let param = params.iter().position(|param| param.name == *name);
                let param = param.ok_or_else(|| unknown(name, params))?;
                let ParamSpec { len, whole, .. } = params[param];
                if len != whole {
                    return Err(LocalError::CutElements { name: name.clone(), len, whole });
                }
                if range.start > range.end || range.end > len {
                    return Err(LocalError::Elements { name: name.clone(), range: range.clone(), len });
                }
                vec![Chosen { param, range: range.clone() }]
            }
        };
        chosen.retain(|chosen| !chosen.range.is_empty());
        Ok(chosen)
    }
}

fn whole(params: &[ParamSpec], param: usize) -> Chosen {
    Chosen { param, range: 0..params[param].len }
}

fn unknown(name: &str, params: &[ParamSpec]) -> LocalError {
    LocalError::UnknownParam { name: name.to_owned(), count: params.len() }
}

fn named(names: &[String], params: &[ParamSpec]) -> Result<Vec<Chosen>, LocalError> {
    // Of parameters with one name the first counts.
    let by_name: HashMap<&str, usize> =
        params.iter().enumerate().rev().map(|(p, param)| (&*param.name, p)).collect();
    let find = |name: &String| by_name.get(&**name).copied().ok_or_else(|| unknown(name, params));
    let mut found = names.iter().map(find).collect::<Result<Vec<_>, _>>()?;
    found.sort_unstable();
    if let Some(twice) = found.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(LocalError::NamedTwice { name: params[twice[0]].name.clone() });
    }
    Ok(found.into_iter().map(|param| whole(params, param)).collect())
}

fn part(index: usize, of: usize, params: &[ParamSpec]) -> Result<Vec<Chosen>, LocalError> {
    if index >= of {
        return Err(LocalError::NoSuchPart { index, of });
    }
    let total: u128 = params.iter().map(|param| param.whole as u128).sum();
    let mut before = 0u128;
    let mut chosen = Vec::new();
    for (p, param) in params.iter().enumerate() {
        // A parameter belongs to the part in which its middle lies.
        let middle = 2 * before + param.whole as u128;
        before += param.whole as u128;
        if param.whole > 0 && middle * of as u128 / (2 * total) == index as u128 {
            chosen.push(whole(params, p));
        }
    }
    Ok(chosen)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::param_spec::tests::params;
    use proptest::prelude::*;

    fn names(chosen: &[Chosen], params: &[ParamSpec]) -> Vec<String> {
        chosen.iter().map(|c| format!("{}{:?}", params[c.param].name, c.range)).collect()
    }

    #[test]
    fn choices_are_resolved_in_order_and_errors_named() {
        let params = params(&[10, 0, 20, 30]);
        let resolve = |select: &Select| select.resolve(&params).map(|c| names(&c, &params));
        assert_eq!(resolve(&Select::All).unwrap(), ["p00..10", "p20..20", "p30..30"]);
        let two = Select::Names(vec!["p3".into(), "p0".into(), "p1".into()]);
        assert_eq!(resolve(&two).unwrap(), ["p00..10", "p30..30"]);
        let some = |range| Select::Elements { name: "p2".into(), range };
        assert_eq!(resolve(&some(3..9)).unwrap(), ["p23..9"]);
        assert_eq!(resolve(&some(4..4)).unwrap(), [""; 0]);
        let error = |select: &Select| resolve(select).unwrap_err().to_string();
        assert_eq!(error(&some(3..21)), "elements 3..21 exceed parameter \"p2\", which has 20");
        assert_eq!(
            error(&Select::Names(vec!["q".into()])),
            "no parameter \"q\" among the 4 that train; choose one of these"
        );
        assert_eq!(
            error(&Select::Names(vec!["p0".into(), "p0".into()])),
            "parameter \"p0\" is named twice in one fragment"
        );
        assert_eq!(
            error(&Select::Part { index: 3, of: 3 }),
            "there is no part 3 of 3; parts are counted from 0"
        );
    }

    proptest! {
        #[test]
        fn parts_are_all_elements_once(lens in prop::collection::vec(0usize..50, 1..12), of in 1usize..6) {
            let params = params(&lens);
            let parts = (0..of).flat_map(|index| Select::Part { index, of }.resolve(&params).unwrap());
            prop_assert_eq!(parts.collect::<Vec<_>>(), Select::All.resolve(&params).unwrap());
        }
    }
}
