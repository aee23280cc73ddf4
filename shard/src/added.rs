//! Parameters on their way into an optimizer: made by each rank, agreed on by all, and only then taken in.

use crate::exchange::Exchange;
use crate::family::{self, Family};
use crate::owned::Owned;
use crate::plan::exchange_words;
use crate::pool::Shelf;
use crate::tensor_totals::TensorTotals;
use crate::units::Units;
use crate::{Among, Error, Groups, Initial, NonFinite, Optimizer, agree};
use meshstep_comm::Communicator;
use meshstep_tensor::{Buffer, Layout, Param, SliceMut};
use std::sync::Arc;

/// All that more parameters take, beside an optimizer that has not changed.
#[derive(Debug)]
pub(crate) struct Added {
    pub(crate) family: Family,
    pub(crate) shelves: Vec<Shelf>,
    /// Of all parameters.
    pub(crate) exchange: Exchange,
    /// Of all parameters.
    pub(crate) totals: TensorTotals,
    /// The ranks once more, where steps are now decided beside the buckets on their way.
    pub(crate) aside: Option<Arc<dyn Communicator>>,
    /// Of all parameters.
    pub(crate) units: Units,
}

impl Optimizer {
    /// Makes everything, has all ranks agree, and takes it in. Every error is every rank's, and but for [`Error::Comm`] leaves
    /// them as they were.
    pub(crate) fn try_add(
        &mut self,
        layout: &Layout,
        groups: Groups,
        among: &Arc<Among>,
        initial: impl FnMut(&Param, SliceMut<'_>) -> Result<(), meshstep_tensor::Error>,
    ) -> Result<(), Error> {
        // An error of an earlier step too is every rank's, as others may have been told of it before.
        let heard = self.check_heard();
        let comm = Arc::clone(self.comm());
        let mut text = family::describe(layout, &groups, &self.options);
        family::describe_among(among, &mut text);
        let ready = heard.and_then(|()| self.check_idle());
        let mut made = ready.and_then(|()| self.make(layout, groups, among));
        if let Err(error) = &made {
            text = family::objection(Some(error));
        }
        let room = made.as_mut().ok().map(|added| added.exchange.room());
        let same = self.tell(&*comm, &text, room);
        let mut added = made?;
        same?;
        added.aside = self.split_aside()?;
        let gathers = self.gathers_among(among)?;
        added.family.kept.iter_mut().for_each(|kept| kept.gathers.clone_from(&gathers));
        self.first_values(among, &mut added, initial)?;
        self.commit(added);
        Ok(())
    }

    /// All memory, so that nothing is missing once ranks have agreed.
    fn make(&self, layout: &Layout, groups: Groups, among: &Arc<Among>) -> Result<Added, Error> {
        let (family, shelves, units) = self.prepare(layout, groups, among)?;
        let count = self.entries.len() + family.entries.len();
        let exchange = Exchange::new(exchange_words(count, &self.options), &self.options)?;
        let (stage, meter) = (self.options.stage, &self.options.meter);
        let groups = self.groups.iter().chain(&family.groups.groups);
        let totals = TensorTotals::new(count, groups, stage, self.comm(), meter)?;
        Ok(Added { family, shelves, exchange, totals, aside: None, units })
    }

    fn split_aside(&self) -> Result<Option<Arc<dyn Communicator>>, Error> {
        let there = self.handover.fixed.aside.is_some();
        if there || self.options.non_finite != NonFinite::Propagate {
            return Ok(None);
        }
        Ok(self.comm().split(Some(0), self.comm().rank() as i64)?)
    }

    fn first_values(
        &self,
        among: &Among,
        Added { family, exchange, .. }: &mut Added,
        initial: impl FnMut(&Param, SliceMut<'_>) -> Result<(), meshstep_tensor::Error>,
    ) -> Result<(), Error> {
        if self.options.stage.cuts_params() {
            self.first_chunks(among, family, exchange, initial)?;
        } else {
            self.first_wholes(among, family, exchange, initial)?;
        }
        let masters = family.buckets.iter_mut().try_for_each(Owned::fill_masters);
        self.agreed(&**self.comm(), exchange, masters, &family::objection(None))
    }

    fn first_wholes(
        &self,
        among: &Among,
        family: &mut Family,
        exchange: &mut Exchange,
        initial: impl FnMut(&Param, SliceMut<'_>) -> Result<(), meshstep_tensor::Error>,
    ) -> Result<(), Error> {
        let compare = self.options.initial == Initial::Compare;
        let first = among.copies.rank() == 0;
        let mut filled = if compare || first { family.fill(&self.options, initial) } else { Ok(()) };
        if compare {
            let mut text = family::objection(None);
            filled = filled.and_then(|()| family.describe_values(&self.options, &mut text));
            filled = self.agreed(&*among.copies, exchange, filled, &text);
            if let Err(Error::Comm(_)) = &filled {
                return filled;
            }
        }
        // Other ranks hold other parameters, and hear of it too.
        self.agreed(&**self.comm(), exchange, filled, &family::objection(None))?;
        if !compare {
            family.broadcast(&*among.copies, &self.options.queue)?;
        }
        Ok(())
    }

    /// What became of this rank's part, once all ranks of `comm` have shown that theirs went as well and gives the same `text`.
    pub(crate) fn agreed(
        &self,
        comm: &dyn Communicator,
        exchange: &mut Exchange,
        done: Result<(), Error>,
        text: &str,
    ) -> Result<(), Error> {
        let objection = done.as_ref().err().map(|error| family::objection(Some(error)));
        let text = objection.as_deref().unwrap_or(text);
        let same = self.tell(comm, text, Some(exchange.room()));
        done.and(same)
    }

    /// Whether all ranks of `comm` give this text. For who cannot ask nobody is to wait.
    fn tell(&self, comm: &dyn Communicator, text: &str, room: Option<&mut Buffer>) -> Result<(), Error> {
        let same = agree::compare(comm, &self.options, text, room);
        if let Err(Error::Comm(failure)) = &same {
            self.handover.poison(failure.clone());
        }
        same
    }
}
