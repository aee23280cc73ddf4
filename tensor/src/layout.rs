//! Map from named parameters to ranges of flat vectors. Arithmetic only: no memory.

use crate::{DType, Error};
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

/// Parameters start at multiples of this many elements: one cache line even of 16-bit elements, so that no two parameters share a
/// line and every start is aligned for the widest vector instructions.
pub const ALIGN: usize = 64;

/// Parameter names and their ranges: one flat vector per element type.
///
/// Within a vector the trainable parameters come first, then the frozen ones, each in *reverse* registration order: if parameters
/// are registered in the order of the forward pass, their gradients appear in vector order during the backward pass.
///
/// A *unit* is a set of parameters that a model uses together, such as a transformer block. Sharded parameters are gathered one
/// unit at a time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    params: Vec<Param>,
    by_name: HashMap<Arc<str>, usize>,
    units: Vec<Arc<str>>,
}

/// One parameter of a [`Layout`]. A clone shares its name and shape.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Param {
    name: Arc<str>,
    shape: Arc<[usize]>,
    dtype: DType,
    frozen: bool,
    unit: Option<Arc<str>>,
    start: usize,
    len: usize,
}

impl Layout {
    /// Returns an empty builder.
    pub fn builder() -> LayoutBuilder {
        LayoutBuilder::default()
    }

    /// Returns all parameters in registration order.
    pub fn params(&self) -> &[Param] {
        &self.params
    }

    /// Returns a parameter's index in registration order.
    pub fn index(&self, name: &str) -> Option<usize> {
        self.by_name.get(name).copied()
    }

    /// Returns the parameter of this name.
    pub fn get(&self, name: &str) -> Option<&Param> {
        self.index(name).map(|i| &self.params[i])
    }

    /// Returns the names of the units in the order of their first `unit` call, each once.
    pub fn units(&self) -> &[Arc<str>] {
        &self.units
    }

    /// Returns the elements of the flat vector of `dtype`, a multiple of [`ALIGN`]; 0 if no parameter has that type.
    pub fn len(&self, dtype: DType) -> usize {
        self.end(|p| p.dtype == dtype)
    }

    /// Returns the elements of that vector before its first frozen parameter.
    pub fn trainable_len(&self, dtype: DType) -> usize {
        self.end(|p| p.dtype == dtype && !p.frozen)
    }

    /// Returns the types in use, in a fixed order.
    pub fn dtypes(&self) -> impl Iterator<Item = DType> + '_ {
        [DType::F32, DType::F64, DType::BF16, DType::F16].into_iter().filter(|&d| self.len(d) > 0)
    }

    /// Returns registration indices in the order of the parameters in the vector of `dtype`.
    pub fn flat_order(&self, dtype: DType) -> Vec<usize> {
        let mut order: Vec<usize> =
            (0..self.params.len()).filter(|&i| self.params[i].dtype == dtype).collect();
        order.sort_by_key(|&i| (self.params[i].frozen, std::cmp::Reverse(i)));
        order
    }

    fn end(&self, counts: impl Fn(&Param) -> bool) -> usize {
        self.params.iter().filter(|p| counts(p)).map(|p| p.padded_range().end).max().unwrap_or(0)
    }
}

impl Param {
    /// Name, the key of its gradient and of its tensors in checkpoints.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Name to keep without a copy.
    pub fn shared_name(&self) -> Arc<str> {
        Arc::clone(&self.name)
    }

    /// Dimensions; empty for a scalar.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns true if the parameter is frozen: no gradient, no state.
    pub fn frozen(&self) -> bool {
        self.frozen
    }

    /// Unit of the parameter, if any.
    pub fn unit(&self) -> Option<&str> {
        self.unit.as_deref()
    }

    /// Unit of the parameter, to keep without a copy.
    pub fn shared_unit(&self) -> Option<Arc<str>> {
        self.unit.clone()
    }

    /// Range of the parameter in the flat vector of its type.
    pub fn range(&self) -> Range<usize> {
        self.start..self.start + self.len
    }

    /// Range including the padding up to the next parameter.
    pub fn padded_range(&self) -> Range<usize> {
        self.start..self.start + self.len.next_multiple_of(ALIGN)
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if the parameter has no element (a dimension is 0).
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// Builder of a [`Layout`]; [`build`](Self::build) reports errors.
#[derive(Clone, Debug, Default)]
pub struct LayoutBuilder {
    params: Vec<NewParam>,
    /// Name of each unit and the index of its first parameter.
    units: Vec<(Arc<str>, usize)>,
}

/// One parameter of a builder.
#[derive(Clone, Debug)]
struct NewParam {
    name: Arc<str>,
    shape: Arc<[usize]>,
    dtype: DType,
    frozen: bool,
}

impl LayoutBuilder {
    /// Adds a trainable parameter.
    pub fn param(self, name: impl AsRef<str>, shape: &[usize], dtype: DType) -> Self {
        self.push(name.as_ref().into(), shape, dtype, false)
    }

    /// Adds a frozen parameter.
    pub fn frozen(self, name: impl AsRef<str>, shape: &[usize], dtype: DType) -> Self {
        self.push(name.as_ref().into(), shape, dtype, true)
    }

    /// Begins a unit: the parameters added after this belong to it, until the next unit begins. The same name again continues
    /// that unit.
    pub fn unit(mut self, name: impl AsRef<str>) -> Self {
        self.units.push((name.as_ref().into(), self.params.len()));
        self
    }

    fn push(mut self, name: Arc<str>, shape: &[usize], dtype: DType, frozen: bool) -> Self {
        self.params.push(NewParam { name, shape: shape.into(), dtype, frozen });
        self
    }

    /// Returns the layout, or the first error.
    pub fn build(self) -> Result<Layout, Error> {
        let (params, by_name) =
            (Vec::with_capacity(self.params.len()), HashMap::with_capacity(self.params.len()));
        let mut layout = Layout { params, by_name, units: Vec::new() };
        let (mut units, mut unit) = (self.units.into_iter().peekable(), None);
        let mut known = UnitNames::default();
        for (index, NewParam { name, shape, dtype, frozen }) in self.params.into_iter().enumerate() {
            if name.is_empty() {
                return Err(Error::EmptyName { index });
            }
            if !dtype.is_float() {
                return Err(Error::NotAFloat { name: name.to_string(), dtype });
            }
            if let Some(first) = layout.by_name.insert(Arc::clone(&name), index) {
                return Err(Error::DuplicateName { name: name.to_string(), first, second: index });
            }
            let len = elements(&name, &shape)?;
            while let Some((begun, _)) = units.next_if(|&(_, first)| first <= index) {
                unit = Some(known.begin(begun, index)?);
            }
            let unit = unit.clone();
            layout.params.push(Param { name, shape, dtype, frozen, unit, start: 0, len });
        }
        let count = layout.params.len();
        units.try_for_each(|(begun, _)| known.begin(begun, count).map(drop))?;
        layout.units = known.in_order;
        if layout.params.iter().all(Param::is_empty) {
            return Err(Error::EmptyLayout);
        }
        place(&mut layout)?;
        Ok(layout)
    }
}

/// Unit names in the order of their first call, each once.
#[derive(Debug, Default)]
struct UnitNames {
    in_order: Vec<Arc<str>>,
    known: HashSet<Arc<str>>,
}

impl UnitNames {
    /// Begins a unit, or continues it.
    fn begin(&mut self, unit: Arc<str>, index: usize) -> Result<Arc<str>, Error> {
        if unit.is_empty() {
            return Err(Error::EmptyUnit { index });
        }
        if self.known.insert(Arc::clone(&unit)) {
            self.in_order.push(Arc::clone(&unit));
        }
        Ok(unit)
    }
}

fn elements(name: &str, shape: &[usize]) -> Result<usize, Error> {
    let too_large = || Error::ShapeTooLarge { name: name.to_owned(), shape: shape.to_vec() };
    // One zero makes the product zero, whatever the other dimensions are.
    if shape.contains(&0) {
        return Ok(0);
    }
    shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d)).ok_or_else(too_large)
}

fn place(layout: &mut Layout) -> Result<(), Error> {
    for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
        let mut next = 0usize;
        for i in layout.flat_order(dtype) {
            let param = &mut layout.params[i];
            param.start = next;
            next = param
                .len
                .checked_next_multiple_of(ALIGN)
                .and_then(|len| next.checked_add(len))
                .filter(|end| isize::try_from(end.saturating_mul(8)).is_ok())
                .ok_or_else(|| Error::ShapeTooLarge {
                    name: param.name.to_string(),
                    shape: param.shape.to_vec(),
                })?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn reverse_registration_order_frozen_last() {
        let layout = Layout::builder()
            .param("a", &[3], DType::F32)
            .frozen("f", &[2, 2], DType::F32)
            .param("h", &[5], DType::BF16)
            .param("b", &[65], DType::F32)
            .param("s", &[], DType::F32)
            .build()
            .unwrap();
        let starts: Vec<_> = ["s", "b", "a", "f", "h"].map(|n| layout.get(n).unwrap().range()).into();
        assert_eq!(starts, [0..1, 64..129, 192..195, 256..260, 0..5]);
        assert_eq!((layout.len(DType::F32), layout.trainable_len(DType::F32)), (320, 256));
        assert_eq!(layout.dtypes().collect::<Vec<_>>(), [DType::F32, DType::BF16]);
    }

    #[test]
    fn a_unit_holds_until_the_next_and_may_go_on() {
        let params = |b: LayoutBuilder, names: &[&str]| {
            names.iter().fold(b, |b, name| b.param(*name, &[1], DType::F32))
        };
        let layout = params(params(Layout::builder(), &["a"]).unit("u"), &["b", "c"]).unit("none").unit("v");
        let layout = params(params(layout, &["d"]).unit("u"), &["e"]).unit("last").build().unwrap();
        let units: Vec<_> = layout.params().iter().map(Param::unit).collect();
        assert_eq!(units, [None, Some("u"), Some("u"), Some("v"), Some("u")]);
        assert_eq!(layout.units().iter().map(|unit| &**unit).collect::<Vec<_>>(), ["u", "none", "v", "last"]);
        let nameless = params(Layout::builder(), &["a"]).unit("").param("b", &[1], DType::F32).build();
        assert_eq!(nameless, Err(Error::EmptyUnit { index: 1 }));
    }

    #[test]
    fn errors_are_named() {
        let f32s = |names: &[&str]| {
            names.iter().fold(Layout::builder(), |b, n| b.param(*n, &[2], DType::F32)).build().unwrap_err()
        };
        assert_eq!(f32s(&[]), Error::EmptyLayout);
        assert_eq!(f32s(&["a", ""]), Error::EmptyName { index: 1 });
        assert_eq!(f32s(&["a", "b", "a"]), Error::DuplicateName { name: "a".into(), first: 0, second: 2 });
        let empty = Layout::builder().param("a", &[4, 0, usize::MAX, 9], DType::F32).build();
        assert_eq!(empty, Err(Error::EmptyLayout));
        let integer = Layout::builder().param("a", &[4], DType::U64).build();
        assert_eq!(integer, Err(Error::NotAFloat { name: "a".into(), dtype: DType::U64 }));
        for shape in [vec![usize::MAX, 2], vec![usize::MAX], vec![usize::MAX / 8]] {
            let huge = Layout::builder().param("a", &shape, DType::F32).build();
            assert_eq!(huge, Err(Error::ShapeTooLarge { name: "a".into(), shape }));
        }
    }

    proptest! {
        #[test]
        fn ranges_are_aligned_disjoint_and_cover(
            lens in prop::collection::vec((0usize..200, 0usize..4, any::<bool>()), 1..30)
        ) {
            let dtypes = [DType::F32, DType::F64, DType::BF16, DType::F16];
            let mut builder = Layout::builder();
            for (i, &(len, dtype, frozen)) in lens.iter().enumerate() {
                builder = builder.push(format!("p{i}").into(), &[len], dtypes[dtype], frozen);
            }
            let Ok(layout) = builder.build() else {
                prop_assert!(lens.iter().all(|&(len, ..)| len == 0));
                return Ok(());
            };
            for dtype in dtypes {
                let mut next = 0;
                for i in layout.flat_order(dtype) {
                    let param = &layout.params()[i];
                    prop_assert_eq!(param.padded_range().start, next);
                    prop_assert_eq!(param.range().start % ALIGN, 0);
                    prop_assert_eq!(param.len(), lens[i].0);
                    next = param.padded_range().end;
                }
                prop_assert_eq!(layout.len(dtype), next);
            }
        }
    }
}
