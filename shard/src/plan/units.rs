//! Units: parameters that are gathered together if they are sharded. Arithmetic only.

use crate::{BucketPlan, UnitError};
use arrayvec::ArrayVec;
use meshstep_tensor::{DType, Layout};
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// Number of types that a parameter can have.
const DTYPES: usize = 4;

/// Units of an optimizer or a plan, in the order a forward pass gathers them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Units {
    units: Vec<Unit>,
    by_name: HashMap<Arc<str>, usize>,
    /// Unit of each parameter; `None` for a frozen one outside every unit.
    of: Vec<Option<usize>>,
    /// Name of a unit that is also the name of a unit of parameters before the first unit.
    clash: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Unit {
    name: Arc<str>,
    /// True if the layout names the unit; false if it is named after its first parameter.
    named: bool,
    /// Buckets with parameters of the unit, in ascending order; with sharded parameters they hold no others.
    buckets: Vec<usize>,
}

impl Units {
    /// Makes the layout's units. Each bucket of parameters before its first unit is a unit too, named after its first parameter.
    pub(crate) fn new(layout: &Layout, buckets: &[BucketPlan]) -> Self {
        let params = layout.params();
        let mut units = Units { of: vec![None; params.len()], ..Units::default() };
        units.by_name.reserve(layout.units().len());
        // First parameter before the first unit, of each bucket that has one.
        let nameless = |bucket: &BucketPlan| {
            bucket.params.iter().map(|p| p.param).filter(|&p| params[p].unit().is_none()).min()
        };
        let nameless: Vec<Option<usize>> = buckets.iter().map(nameless).collect();
        let mut firsts: Vec<usize> = nameless.iter().copied().flatten().collect();
        firsts.sort_unstable();
        firsts.iter().for_each(|&first| units.add(&params[first].shared_name(), false));
        layout.units().iter().for_each(|name| units.add(name, true));
        let mut last = (None, None);
        for (p, param) in params.iter().enumerate() {
            // Neighbours are in one unit most of the time.
            if last.0 != param.unit() {
                last = (param.unit(), param.unit().and_then(|name| units.index(name)));
            }
            units.of[p] = last.1;
        }
        for (b, (bucket, first)) in buckets.iter().zip(nameless).enumerate() {
            let own = first.and_then(|first| units.index(params[first].name()));
            for placed in &bucket.params {
                let unit = units.of[placed.param].or(own);
                units.of[placed.param] = unit;
                let known = unit.map(|unit| &mut units.units[unit].buckets);
                // Buckets come in ascending order.
                known.into_iter().filter(|known| known.last() != Some(&b)).for_each(|known| known.push(b));
            }
        }
        units
    }

    /// Adds the units of another layout, with buckets at `places`. Units of one name are merged.
    pub(crate) fn extend(&mut self, other: Units, places: &[usize]) {
        if self.of.is_empty() {
            *self = Units { clash: None, ..other };
            let buckets = self.units.iter_mut().flat_map(|unit| &mut unit.buckets);
            buckets.for_each(|b| *b = places[*b]);
            return;
        }
        self.units.reserve(other.units.len());
        self.by_name.reserve(other.units.len());
        for unit in &other.units {
            self.add(&unit.name, unit.named);
        }
        let known: Vec<Option<usize>> = other.units.iter().map(|unit| self.index(&unit.name)).collect();
        self.of.extend(other.of.iter().map(|unit| unit.and_then(|unit| known[unit])));
        for (unit, known) in other.units.iter().zip(known) {
            if let Some(known) = known.map(|known| &mut self.units[known].buckets) {
                known.extend(unit.buckets.iter().map(|&b| places[b]));
                known.sort_unstable();
            }
        }
    }

    fn add(&mut self, name: &Arc<str>, named: bool) {
        match self.by_name.entry(Arc::clone(name)) {
            Entry::Vacant(vacant) => {
                vacant.insert(self.units.len());
                self.units.push(Unit { name: Arc::clone(name), named, buckets: Vec::with_capacity(1) });
            }
            Entry::Occupied(known) if self.units[*known.get()].named != named => {
                self.clash = Some(name.to_string());
            }
            Entry::Occupied(_) => {}
        }
    }

    /// Checks that unit names are unique.
    pub(crate) fn check(&self) -> Result<(), UnitError> {
        self.clash.clone().map_or(Ok(()), |name| Err(UnitError::TwoOfOneName { name }))
    }

    /// Returns true if `alias` names a unit and parameter `param` may name the unit of its bucket.
    pub(crate) fn claims(&self, alias: &str, param: usize) -> bool {
        let named = |unit: usize| self.units[unit].named;
        self.of(param).is_some_and(|unit| !named(unit)) && self.index(alias).is_some_and(named)
    }

    /// Returns the names of the units.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.units.iter().map(|unit| &*unit.name)
    }

    /// Returns the unit of this name.
    pub(crate) fn index(&self, name: &str) -> Option<usize> {
        self.by_name.get(name).copied()
    }

    /// Returns the unit named after parameter `param`, if its own name is `own`.
    pub(crate) fn called_by(&self, own: &str, param: usize) -> Option<usize> {
        self.of(param).filter(|&unit| !self.units[unit].named && *self.units[unit].name == *own)
    }

    /// Returns a unit's name.
    pub(crate) fn name(&self, unit: usize) -> &str {
        &self.units[unit].name
    }

    /// Returns a unit's buckets, in ascending order.
    pub(crate) fn buckets(&self, unit: usize) -> &[usize] {
        &self.units[unit].buckets
    }

    /// Returns the unit of a parameter.
    pub(crate) fn of(&self, param: usize) -> Option<usize> {
        self.of[param]
    }

    /// Returns the most elements of each type that two consecutive units have together: memory for one that is read and the next
    /// in flight.
    pub(crate) fn room<'b>(&self, bucket: impl Fn(usize) -> &'b BucketPlan) -> Vec<(DType, usize)> {
        let lens = |unit: &Unit| {
            let mut lens: ArrayVec<(DType, usize), DTYPES> = ArrayVec::new();
            for &BucketPlan { dtype, len, .. } in unit.buckets.iter().map(|&b| bucket(b)) {
                match lens.iter_mut().find(|known| known.0 == dtype) {
                    Some((_, known)) => *known += len,
                    None => lens.push((dtype, len)),
                }
            }
            lens
        };
        let (mut room, mut before): (BTreeMap<DType, usize>, ArrayVec<_, DTYPES>) = Default::default();
        for unit in self.units.iter().filter(|unit| !unit.buckets.is_empty()).map(lens) {
            for &(dtype, len) in &unit {
                let before = before.iter().find(|before: &&(DType, usize)| before.0 == dtype);
                let most = room.entry(dtype).or_insert(0);
                *most = (*most).max(len + before.map_or(0, |&(_, before)| before));
            }
            before = unit;
        }
        room.into_iter().filter(|&(_, len)| len > 0).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Options, Part, Sizes, Stage};

    fn layout() -> Layout {
        let add = |b: meshstep_tensor::LayoutBuilder, name: &str, len| b.param(name, &[len], DType::F32);
        let layout = add(add(Layout::builder(), "a", 64), "b", 64).frozen("f", &[9], DType::F32);
        let layout = add(add(layout.unit("u"), "c", 64).param("h", &[3], DType::BF16), "d", 640);
        add(layout.unit("none").unit("v"), "e", 128).build().unwrap()
    }

    fn part(stage: Stage) -> Part {
        let precision = crate::Precision { master: crate::Master::F32, ..Default::default() };
        let options = Options { stage, precision, ..Options::default() };
        Part::new(layout(), Sizes::all(2), [], &options).unwrap()
    }

    #[test]
    fn what_is_before_the_first_unit_is_one_for_each_bucket() {
        let part = part(Stage::Zero3);
        let units = part.units();
        assert_eq!(units.names().collect::<Vec<_>>(), ["a", "u", "none", "v"]);
        let of: Vec<_> = (0..7).map(|p| units.of(p)).collect();
        assert_eq!(of, [Some(0), Some(0), None, Some(1), Some(1), Some(1), Some(3)]);
        // Buckets are in reverse registration order.
        let lens: Vec<_> = part.buckets().iter().map(|b| (b.dtype, b.len)).collect();
        let expected = [(DType::F32, 128), (DType::BF16, 128), (DType::F32, 768), (DType::F32, 128)];
        assert_eq!(lens, expected);
        assert_eq!([0, 1, 2, 3].map(|unit| units.buckets(unit)), [&[3][..], &[1, 2], &[], &[0]]);
        // `u` with either neighbour; its `h` has no neighbour of the same type.
        assert_eq!(units.room(|b| &part.buckets()[b]), [(DType::F32, 896), (DType::BF16, 128)]);
    }

    /// A parameter before the first unit has the name of a unit.
    #[test]
    fn one_name_is_not_two_units() {
        let before = || Layout::builder().param("u", &[4], DType::F32);
        let layouts = [before().unit("u").param("w", &[4], DType::F32), before().unit("u")];
        let made = |layout: Layout, stage| {
            let options = Options { stage, ..Options::default() };
            Part::new(layout, Sizes::all(2), [], &options)
        };
        for layout in layouts.map(|layout| layout.build().unwrap()) {
            let told = made(layout.clone(), Stage::Zero3).unwrap_err();
            assert!(matches!(told, crate::Error::Unit(UnitError::TwoOfOneName { name }) if name == "u"));
            // Nothing is gathered at this stage.
            made(layout, Stage::Zero2).unwrap();
        }
        let alone = made(before().build().unwrap(), Stage::Zero3).unwrap();
        let of_the_name = Layout::builder().unit("u").param("w", &[4], DType::F32).build().unwrap();
        let mut units = alone.units().clone();
        units.extend(made(of_the_name, Stage::Zero3).unwrap().units().clone(), &[1]);
        assert_eq!(units.check(), Err(UnitError::TwoOfOneName { name: "u".into() }));
    }

    #[test]
    fn units_of_one_name_in_two_layouts_are_one() {
        let part = part(Stage::Zero3);
        let mut units = part.units().clone();
        units.extend(part.units().clone(), &[4, 5, 6, 7]);
        assert_eq!(units.names().count(), 4);
        assert_eq!(units.buckets(1), [1, 2, 5, 6]);
        assert_eq!((units.of(3), units.of(10)), (Some(1), Some(1)));
        let room = units.room(|b| &part.buckets()[b % 4]);
        assert_eq!(room, [(DType::F32, 2 * 896), (DType::BF16, 2 * 128)]);
    }
}
