//! First values of parameters, and the ranks' agreement on them.

use crate::config::options::{Initial, Options};
use crate::error::Error;
use crate::gather::gatherer::Gatherer;
use crate::optimizer::layout_state::LayoutState;
use crate::ranks::agree;
use crate::ranks::roles::RankRoles;
use crate::reduce::reducer::GradReducer;
use crate::reduce::together::objection;
use crate::step::exchange::Exchange;
use crate::update::owned_bucket::Owned;
use meshstep_comm::Communicator;
use meshstep_tensor::{Buffer, Param, SliceMut};
use std::sync::Arc;

/// Parts of an optimizer that give parameters their first values.
#[derive(Clone, Copy, Debug)]
pub(super) struct FirstValues<'a> {
    pub(super) options: &'a Options,
    pub(super) reducer: &'a GradReducer,
    pub(super) gatherer: &'a Gatherer,
}

impl FirstValues<'_> {
    /// Gives every parameter its first value. Collective.
    pub(super) fn set(
        &self,
        layout_state: &mut LayoutState,
        exchange: &mut Exchange,
        initial: impl FnMut(&Param, SliceMut<'_>) -> Result<(), meshstep_tensor::Error>,
    ) -> Result<(), Error> {
        let among = &*Arc::clone(&layout_state.among);
        if self.options.stage.cuts_params() {
            self.first_chunks(among, layout_state, exchange, initial)?;
        } else {
            self.first_wholes(among, layout_state, exchange, initial)?;
        }
        let masters = layout_state.buckets.iter_mut().try_for_each(Owned::fill_masters);
        self.agreed(&*self.reducer.config.comm, exchange, masters, &objection(None))
    }

    fn first_wholes(
        &self,
        among: &RankRoles,
        layout_state: &mut LayoutState,
        exchange: &mut Exchange,
        initial: impl FnMut(&Param, SliceMut<'_>) -> Result<(), meshstep_tensor::Error>,
    ) -> Result<(), Error> {
        let compare = self.options.initial == Initial::Compare;
        let first = among.replicas.rank() == 0;
        let mut filled = if compare || first { layout_state.fill(self.options, initial) } else { Ok(()) };
        if compare {
            let mut text = objection(None);
            filled = filled.and_then(|()| layout_state.describe_values(self.options, &mut text));
            filled = self.agreed(&*among.replicas, exchange, filled, &text);
            if let Err(Error::Comm(_)) = &filled {
                return filled;
            }
        }
        // Other ranks hold other parameters, and must learn of a failure too.
        self.agreed(&*self.reducer.config.comm, exchange, filled, &objection(None))?;
        if !compare {
            layout_state.broadcast(&*among.replicas, &self.options.queue)?;
        }
        Ok(())
    }

    /// Compares this rank's result `done` and `text` with those of all ranks of `comm`, and returns the first error.
    pub(super) fn agreed(
        &self,
        comm: &dyn Communicator,
        exchange: &mut Exchange,
        done: Result<(), Error>,
        text: &str,
    ) -> Result<(), Error> {
        let objection = done.as_ref().err().map(|error| objection(Some(error)));
        let text = objection.as_deref().unwrap_or(text);
        let same = self.compare(comm, text, Some(exchange.room()));
        done.and(same)
    }

    /// Checks that all ranks of `comm` give this text. A communication error poisons the reducer, so that no rank waits.
    pub(super) fn compare(
        &self,
        comm: &dyn Communicator,
        text: &str,
        room: Option<&mut Buffer>,
    ) -> Result<(), Error> {
        let same = agree::compare(comm, self.options, text, room);
        if let Err(Error::Comm(failure)) = &same {
            self.reducer.poison(failure.clone());
        }
        same
    }
}
