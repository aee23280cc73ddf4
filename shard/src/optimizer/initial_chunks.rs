//! First values at stage 3: one whole parameter at a time, in the memory for gathered units.

use crate::config::options::{Initial, Options};
use crate::error::Error;
use crate::optimizer::first_values::FirstValues;
use crate::optimizer::layout_state::LayoutState;
use crate::ranks::host_words;
use crate::ranks::roles::RankRoles;
use crate::reduce::together::objection;
use crate::step::exchange::Exchange;
use crate::update::params::ParamPlace;
use meshstep_comm::Op;
use meshstep_tensor::{Param, SliceMut};
use std::fmt::Write;

impl FirstValues<'_> {
    /// Asks for every parameter's first value, in registration order, and keeps this rank's chunk. Collective. A rank with a
    /// failed initializer continues with the values in memory, so that no rank waits, until all ranks learn of the failure.
    pub(super) fn first_chunks(
        &self,
        among: &RankRoles,
        layout_state: &mut LayoutState,
        exchange: &mut Exchange,
        mut initial: impl FnMut(&Param, SliceMut<'_>) -> Result<(), meshstep_tensor::Error>,
    ) -> Result<(), Error> {
        let compare = self.options.initial == Initial::Compare;
        let asked = compare || among.replicas.rank() == 0;
        let (mut filled, mut values) = (Ok(()), String::new());
        for p in 0..layout_state.entries.len() {
            let ask = asked && filled.is_ok();
            let given = self.first_value(layout_state, p, among, ask.then_some(&mut initial), &mut values);
            // The other ranks do not learn of failures outside `initial`, and wait for this rank's part: abort.
            filled = filled.and(given.map_err(|error| self.reducer.abort_with(error))?);
        }
        if compare {
            let text = objection(None) + &values;
            filled = self.agreed(&*among.replicas, exchange, filled, &text);
            if let Err(Error::Comm(_)) = &filled {
                return filled;
            }
        }
        // Other ranks hold other parameters, and must learn of a failure too.
        self.agreed(&*self.reducer.config.comm, exchange, filled, &objection(None))?;
        if !compare {
            layout_state.broadcast_frozen(&*among.replicas, &self.options.queue)?;
        }
        Ok(())
    }

    /// Fills one parameter's place, from `initial` if it is called on this rank, else from the first rank. The inner result is
    /// `initial`'s.
    fn first_value(
        &self,
        layout_state: &mut LayoutState,
        p: usize,
        among: &RankRoles,
        initial: Option<impl FnMut(&Param, SliceMut<'_>) -> Result<(), meshstep_tensor::Error>>,
        values: &mut String,
    ) -> Result<Result<(), Error>, Error> {
        let Options { queue, meter, .. } = self.options;
        let LayoutState { entries, buckets, frozen, first_vector, .. } = layout_state;
        let param = &entries[p].param;
        let ask = |place: SliceMut<'_>| {
            let Some(mut initial) = initial else { return Ok(()) };
            let asked = host_words::fill(queue, meter, place, |place| initial(param, place));
            asked.map_err(|source| Error::Initial { name: param.name().to_owned(), source })
        };
        let mut digest = |whole| -> Result<(), Error> {
            let digest = host_words::digest(queue, meter, whole)?;
            let _ = writeln!(values, "values of {:?} = digest {digest:016x}", param.name());
            Ok(())
        };
        let compare = self.options.initial == Initial::Compare;
        match &entries[p].place {
            ParamPlace::Frozen { vector, range } => {
                let vector = &mut frozen[vector - *first_vector];
                let asked = ask(vector.as_mut().slice(range.clone())?);
                if compare {
                    digest(vector.as_slice().slice(range.clone())?)?;
                }
                Ok(asked)
            }
            ParamPlace::Bucket { bucket, range, .. } => {
                let (mut whole, from) = self.gatherer.room().lend(param.dtype(), param.len())?;
                queue.zero(whole.as_mut())?;
                let asked = ask(whole.as_mut());
                if compare {
                    digest(whole.as_slice())?;
                } else if !whole.is_empty() {
                    host_words::run(&*among.replicas, queue, Op::broadcast(0), &mut whole)?;
                }
                buckets[*bucket].keep(range, whole.as_slice())?;
                self.gatherer.room().put(whole, from);
                Ok(asked)
            }
        }
    }
}
