//! Types that checkpoints save and load, and their contents: state on this rank, and its placement in the model.

use crate::failure::{self, Failed};
use crate::format::placement::{ModelPlacement, Unsharded};
use crate::parts::{CheckpointCall, SavedParts};
use std::fmt;

/// Type with state that the functions of [this crate](crate) save and load: an optimizer, or a wrapper of one.
///
/// A wrapper passes on the contents of the type inside, and adds its placement if it cuts the model's parameters:
///
/// ```
/// # use meshstep_checkpoint::{Contents, LocalPieces, ModelPlacement, Saveable};
/// # use meshstep_shard::Optimizer;
/// # use meshstep_tensor::Param;
/// /// Trains the rows of a model from `first` on.
/// struct Rows {
///     inner: Optimizer,
///     first: u64,
/// }
///
/// struct From(u64);
/// # impl From { fn piece(&self, _: &Param) -> LocalPieces { LocalPieces::whole(&[1]) } }
///
/// impl ModelPlacement for From {
///     fn mesh(&self) -> String {
///         format!("rows from {}", self.0)
///     }
///
///     fn holding(&self, param: &Param) -> LocalPieces {
///         self.piece(param)
///     }
/// }
///
/// impl Saveable for Rows {
///     fn contents(&mut self) -> Contents<'_> {
///         self.inner.contents().placed(From(self.first))
///     }
/// }
/// ```
pub trait Saveable {
    /// Returns this rank's state for one call, with the placement of its parameters.
    fn contents(&mut self) -> Contents<'_>;
}

/// State of a [`Saveable`] on this rank, and the placement of its parameters in the whole model.
pub struct Contents<'a> {
    parts: ContentsParts<'a>,
    placement: Option<Box<dyn ModelPlacement + 'a>>,
}

enum ContentsParts<'a> {
    Borrowed(&'a mut dyn SavedParts),
    Made(Box<dyn SavedParts + 'a>),
}

impl<'a> Contents<'a> {
    /// Returns the contents of a type that describes its own state.
    pub fn of(parts: &'a mut dyn SavedParts) -> Self {
        Contents { parts: ContentsParts::Borrowed(parts), placement: None }
    }

    /// Returns contents with a description of the state that is made for one call.
    pub fn made(parts: impl SavedParts + 'a) -> Self {
        Contents { parts: ContentsParts::Made(Box::new(parts)), placement: None }
    }

    /// Sets the placement of the parameters. Without one, every rank has whole parameters.
    #[must_use]
    pub fn placed(self, placement: impl ModelPlacement + 'a) -> Self {
        Contents { placement: Some(Box::new(placement)), ..self }
    }

    /// Returns the state, and the placement of all ranks that save together.
    pub(crate) fn all(&mut self) -> (&mut dyn SavedParts, Box<dyn ModelPlacement + '_>) {
        let (parts, inside) = self.open();
        let placement = parts.placement(inside);
        (parts, placement)
    }

    /// Returns the state of this rank's group alone, and the placement in it.
    pub(crate) fn of_group(&mut self) -> (&mut dyn SavedParts, Box<dyn ModelPlacement + '_>) {
        let (parts, inside) = self.open();
        (parts.inside(), inside)
    }

    /// Same as [`of_group`](Self::of_group) for a call that some types do not support; the error is the same on every rank.
    pub(crate) fn for_group(
        &mut self,
        call: CheckpointCall,
    ) -> Result<(&mut dyn SavedParts, Box<dyn ModelPlacement + '_>), failure::Error> {
        let (parts, inside) = self.open();
        parts.supports(call).map_err(|error| Failed { rank: 0, error })?;
        Ok((parts.inside(), inside))
    }

    fn open(&mut self) -> (&mut dyn SavedParts, Box<dyn ModelPlacement + '_>) {
        let parts: &mut dyn SavedParts = match &mut self.parts {
            ContentsParts::Borrowed(parts) => &mut **parts,
            ContentsParts::Made(parts) => &mut **parts,
        };
        let placement: Box<dyn ModelPlacement + '_> = match &self.placement {
            Some(placement) => Box::new(&**placement),
            None => Box::new(Unsharded { ranks: parts.optimizer().comm().world_size() }),
        };
        (parts, placement)
    }
}

impl fmt::Debug for Contents<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mesh = self.placement.as_ref().map(|placement| placement.mesh());
        f.debug_struct("Contents").field("mesh", &mesh).finish_non_exhaustive()
    }
}
