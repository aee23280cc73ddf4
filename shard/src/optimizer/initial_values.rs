//! First values of parameters, and the ranks' agreement on them.

use crate::optimizer::layout_state::{self, LayoutState};
use crate::ranks::agree;
use crate::step::exchange::Exchange;
use crate::update::owned_bucket::Owned;
use crate::{Error, Initial, Optimizer, RankRoles};
use meshstep_comm::Communicator;
use meshstep_tensor::{Buffer, Param, SliceMut};
use std::sync::Arc;

impl Optimizer {
    /// Gives every parameter its first value. Collective.
    pub(crate) fn first_values(
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
        self.agreed(&**self.comm(), exchange, masters, &layout_state::objection(None))
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
        let mut filled = if compare || first { layout_state.fill(&self.options, initial) } else { Ok(()) };
        if compare {
            let mut text = layout_state::objection(None);
            filled = filled.and_then(|()| layout_state.describe_values(&self.options, &mut text));
            filled = self.agreed(&*among.replicas, exchange, filled, &text);
            if let Err(Error::Comm(_)) = &filled {
                return filled;
            }
        }
        // Other ranks hold other parameters, and must learn of a failure too.
        self.agreed(&**self.comm(), exchange, filled, &layout_state::objection(None))?;
        if !compare {
            layout_state.broadcast(&*among.replicas, &self.options.queue)?;
        }
        Ok(())
    }

    /// Compares this rank's result `done` and `text` with those of all ranks of `comm`, and returns the first error.
    pub(crate) fn agreed(
        &self,
        comm: &dyn Communicator,
        exchange: &mut Exchange,
        done: Result<(), Error>,
        text: &str,
    ) -> Result<(), Error> {
        let objection = done.as_ref().err().map(|error| layout_state::objection(Some(error)));
        let text = objection.as_deref().unwrap_or(text);
        let same = self.tell(comm, text, Some(exchange.room()));
        done.and(same)
    }

    /// Checks that all ranks of `comm` give this text. A communication error poisons the reducer, so that no rank waits.
    pub(crate) fn tell(
        &self,
        comm: &dyn Communicator,
        text: &str,
        room: Option<&mut Buffer>,
    ) -> Result<(), Error> {
        let same = agree::compare(comm, &self.options, text, room);
        if let Err(Error::Comm(failure)) = &same {
            self.reducer.poison(failure.clone());
        }
        same
    }
}
