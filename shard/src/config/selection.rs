//! Selection of parameters for a group: a list of names, or a predicate.

use meshstep_tensor::{Layout, Param};
use std::fmt;
use std::sync::Arc;

/// Parameters that a group takes: names (an array, a `Vec` or an iterator of strings), or a predicate `|p: &Param| ...`.
///
/// The type parameter only tells the two implementations apart; the compiler finds it.
///
/// ```
/// use meshstep_shard::{ByName, ByPredicate, SelectParams, Selection};
/// use meshstep_tensor::Param;
///
/// let names: Selection = SelectParams::<ByName>::select(["h.0.b", "h.1.b"]);
/// let short: Selection = SelectParams::<ByPredicate>::select(|p: &Param| p.shape().len() < 2);
/// assert_eq!((format!("{names:?}"), format!("{short:?}")), (r#"["h.0.b", "h.1.b"]"#.to_owned(), "a predicate".to_owned()));
/// ```
pub trait SelectParams<By> {
    /// Returns the selection.
    fn select(self) -> Selection;
}

/// Marks a selection by names.
#[derive(Debug)]
pub enum ByName {}

/// Marks a selection by a predicate.
#[derive(Debug)]
pub enum ByPredicate {}

/// A selection of parameters.
#[derive(Clone)]
pub struct Selection(pub(crate) Select);

#[derive(Clone)]
pub(crate) enum Select {
    /// Each of these names is a parameter.
    Names(Vec<String>),
    /// Trainable parameters for which the predicate is true.
    Where(Arc<dyn Fn(&Param) -> bool + Send + Sync>),
}

impl<I: IntoIterator> SelectParams<ByName> for I
where
    I::Item: Into<String>,
{
    fn select(self) -> Selection {
        Selection(Select::Names(self.into_iter().map(Into::into).collect()))
    }
}

impl<F: Fn(&Param) -> bool + Send + Sync + 'static> SelectParams<ByPredicate> for F {
    fn select(self) -> Selection {
        Selection(Select::Where(Arc::new(self)))
    }
}

impl Selection {
    /// Returns the names that are listed; none for a predicate.
    pub(crate) fn names(&self) -> &[String] {
        match &self.0 {
            Select::Names(names) => names,
            Select::Where(_) => &[],
        }
    }

    /// Returns the selection with another list of names; a predicate stays.
    pub(crate) fn map_names(&self, names: impl FnOnce(&[String]) -> Vec<String>) -> Selection {
        match &self.0 {
            Select::Names(listed) => Selection(Select::Names(names(listed))),
            Select::Where(_) => self.clone(),
        }
    }

    /// Returns true if the selection has this trainable parameter.
    pub(crate) fn has(&self, param: &Param) -> bool {
        match &self.0 {
            Select::Names(names) => names.iter().any(|name| name == param.name()),
            Select::Where(predicate) => predicate(param),
        }
    }

    /// Returns the registration indices of the trainable parameters of `layout` that a predicate selects.
    pub(crate) fn matches(&self, layout: &Layout) -> Vec<usize> {
        let Select::Where(predicate) = &self.0 else { return Vec::new() };
        let taken = |&(_, p): &(usize, &Param)| !p.frozen() && predicate(p);
        layout.params().iter().enumerate().filter(taken).map(|(i, _)| i).collect()
    }
}

impl fmt::Debug for Selection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Select::Names(names) => names.fmt(f),
            Select::Where(_) => f.write_str("a predicate"),
        }
    }
}
