//! First values at stage 3: whole parameters, as many at a time as a bucket has room for, in the memory for gathered units.

use crate::config::options::{Initial, Options};
use crate::error::Error;
use crate::optimizer::first_values::FirstValues;
use crate::optimizer::layout_state::LayoutState;
use crate::ranks::host_words;
use crate::ranks::roles::RankRoles;
use crate::reduce::double_ended::From;
use crate::reduce::together::objection;
use crate::step::exchange::Exchange;
use crate::update::params::ParamPlace;
use meshstep_comm::Op;
use meshstep_tensor::{ALIGN, Buffer, DType, Error as TensorError, Param, SliceMut};
use std::fmt::Write;
use std::ops::Range;

/// Whole parameters of one type, which travel together.
#[derive(Debug)]
struct Wholes {
    memory: Buffer,
    from: From,
    used: usize,
    /// Index of each parameter, and its range in the memory.
    params: Vec<(usize, Range<usize>)>,
}

impl Wholes {
    fn fits(&self, dtype: DType, len: usize) -> bool {
        self.memory.dtype() == dtype && len <= self.memory.len() - self.used
    }

    /// Returns the range of a parameter's `len` elements, zeroed, behind those of earlier ones.
    fn add(&mut self, p: usize, len: usize) -> Range<usize> {
        let range = self.used..self.used + len;
        self.used = range.end.next_multiple_of(ALIGN).min(self.memory.len());
        self.params.push((p, range.clone()));
        range
    }
}

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
        let (mut filled, mut values, mut wholes) = (Ok(()), String::new(), None);
        for p in 0..layout_state.entries.len() {
            let ask = (asked && filled.is_ok()).then_some(&mut initial);
            let given = self.first_value((layout_state, &mut wholes), p, among, ask, &mut values);
            // The other ranks do not learn of failures outside `initial`, and wait for this rank's part: abort.
            filled = filled.and(given.map_err(|error| self.reducer.abort_with(error))?);
        }
        let sent = wholes.map_or(Ok(()), |wholes| self.keep_chunks(layout_state, wholes, among));
        sent.map_err(|error| self.reducer.abort_with(error))?;
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

    /// Asks for one parameter's value, and broadcasts earlier ones if `wholes` has no room for it. The inner result is
    /// `initial`'s.
    fn first_value(
        &self,
        (layout_state, wholes): (&mut LayoutState, &mut Option<Wholes>),
        p: usize,
        among: &RankRoles,
        initial: Option<impl FnMut(&Param, SliceMut<'_>) -> Result<(), TensorError>>,
        values: &mut String,
    ) -> Result<Result<(), Error>, Error> {
        let (dtype, len) = (layout_state.entries[p].param.dtype(), layout_state.entries[p].param.len());
        if let ParamPlace::Bucket { bucket, .. } = layout_state.entries[p].place {
            if let Some(full) = wholes.take_if(|wholes| !wholes.fits(dtype, len)) {
                self.keep_chunks(layout_state, full, among)?;
            }
            if wholes.is_none() {
                let (memory, from) = self.gatherer.room().lend(dtype, layout_state.kept[bucket].plan.len)?;
                *wholes = Some(Wholes { memory, from, used: 0, params: Vec::new() });
            }
        }
        let Options { queue, meter, .. } = self.options;
        let LayoutState { entries, frozen, first_vector, .. } = layout_state;
        let param = &entries[p].param;
        let (memory, range) = match (&entries[p].place, wholes) {
            (ParamPlace::Bucket { .. }, Some(wholes)) => {
                let range = wholes.add(p, len);
                queue.zero(wholes.memory.as_mut().slice(range.clone())?)?;
                (&mut wholes.memory, range)
            }
            (ParamPlace::Frozen { vector, range }, _) => (&mut frozen[vector - *first_vector], range.clone()),
            (ParamPlace::Bucket { .. }, None) => unreachable!("lent above"),
        };
        let place = memory.as_mut().slice(range.clone())?;
        let asked = initial.map_or(Ok(()), |mut initial| {
            host_words::fill(queue, meter, place, |place| initial(param, place))
        });
        if self.options.initial == Initial::Compare {
            let digest = host_words::digest(queue, meter, memory.as_slice().slice(range)?)?;
            let _ = writeln!(values, "values of {:?} = digest {digest:016x}", param.name());
        }
        Ok(asked.map_err(|source| Error::Initial { name: param.name().to_owned(), source }))
    }

    /// Broadcasts whole parameters from the first rank, unless all ranks were asked, and keeps this rank's chunks.
    fn keep_chunks(
        &self,
        layout_state: &mut LayoutState,
        wholes: Wholes,
        among: &RankRoles,
    ) -> Result<(), Error> {
        let Wholes { mut memory, from, used, params } = wholes;
        let rest = memory.split_off(used)?;
        let compare = self.options.initial == Initial::Compare;
        if !compare && !memory.is_empty() && among.replicas.world_size() > 1 {
            host_words::run(&*among.replicas, &self.options.queue, Op::broadcast(0), &mut memory)?;
        }
        let LayoutState { entries, buckets, .. } = layout_state;
        for (p, here) in params {
            if let ParamPlace::Bucket { bucket, range, .. } = &entries[p].place {
                buckets[*bucket].keep(range, memory.as_slice().slice(here)?)?;
            }
        }
        let whole = memory.join(rest).unwrap_or_else(|_| unreachable!("joined where it was cut"));
        self.gatherer.room().put(whole, from);
        Ok(())
    }
}
