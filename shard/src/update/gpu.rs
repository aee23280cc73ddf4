//! Updates on a GPU: tables of rows that launches read, and parameters that arrive while the host goes on.

use crate::config::param_groups::RuleGroup;
use crate::error::Error;
use crate::update::owned_bucket::{Owned, ParamUpdate, cut};
use crate::update::segments::{OwnedRange, UpdateTable};
use meshstep_optim::cuda::{Group, StepBlock, Tables, Update};
use meshstep_tensor::cuda::Event;
use meshstep_tensor::{Buffer, Meter, Queue};
use std::sync::{Mutex, PoisonError};

/// Rows of one owned range, once there was an update.
#[derive(Debug, Default)]
pub(crate) struct GpuTable(pub(super) Option<Update>);

impl GpuTable {
    /// Drops the rows; the next update makes them again.
    pub(super) fn clear(&mut self) {
        self.0 = None;
    }
}

/// Event after which the parameters are those of the last step, if the queue has not waited for it.
#[derive(Debug, Default)]
pub(crate) struct ParamArrival(Mutex<Option<Event>>);

impl ParamArrival {
    /// Makes the queue wait for the parameters.
    pub(crate) fn wait(&self, queue: &Queue) -> Result<(), Error> {
        let mut expected = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let (Some(event), Some(stream)) = (&*expected, queue.stream()) {
            stream.wait(event).map_err(meshstep_tensor::Error::from)?;
        }
        *expected = None;
        Ok(())
    }
}

impl Owned {
    /// Makes later uses of the parameters wait for `event`.
    pub(crate) fn expect(&mut self, event: Event) {
        *self.arrival.0.get_mut().unwrap_or_else(PoisonError::into_inner) = Some(event);
    }

    /// Updates the owned parameters on a GPU as the device's `step` decides, per parameter if it counts them; `next` returns the
    /// `t` of a parameter's next update. The rows in `prepared` are ready for the step.
    pub(crate) fn update_on_gpu(
        &mut self,
        grads: &mut Buffer,
        groups: &[RuleGroup],
        next: impl Fn(usize) -> u64,
        (step, prepared): (&StepBlock, Option<&Tables>),
        meter: &Meter,
    ) -> Result<(), Error> {
        // The parameters have arrived: the communicator gathered them before it reduced these gradients.
        let queue = &self.queue;
        for OwnedRange { range, kept, tables, gpu } in &mut self.runs {
            let mut state = cut(&mut self.state, kept)?;
            let vectors = [&mut self.params, &mut *grads];
            let flat = OwnedRange::flat(self.len, range, kept, vectors, self.master.as_mut(), &mut state)?;
            if gpu.0.is_none() && !tables.is_empty() {
                let due = |param: usize| Some(ParamUpdate { t: next(param), ratio: 1.0, matrix: None });
                tables.iter_mut().for_each(|table| table.fill(due));
                let counts =
                    |table: &UpdateTable| if step.counted() > 0 { params_of(table) } else { Vec::new() };
                let params: Vec<_> = tables.iter().map(counts).collect();
                let groups: Vec<_> =
                    tables.iter().zip(&params).map(|(table, params)| group(table, groups, params)).collect();
                gpu.0 = Some(Update::new(&flat, &groups, self.rounding, queue, meter)?);
            }
            match &mut gpu.0 {
                Some(update) if prepared.is_some_and(|tables| tables.has(update)) => {
                    update.sweep(flat, step, queue)?;
                }
                Some(update) => update.run(flat, step, queue)?,
                None => {}
            }
        }
        Ok(())
    }

    /// Returns the tables on a GPU that exist so far.
    pub(crate) fn updates(&mut self) -> impl Iterator<Item = &mut Update> {
        self.runs.iter_mut().filter_map(|run| run.gpu.0.as_mut())
    }
}

/// Returns a table's segments with their group, as a GPU needs them; `params` are their parameters if the device counts them.
fn group<'a>(table: &'a UpdateTable, groups: &'a [RuleGroup], params: &'a [u32]) -> Group<'a> {
    let RuleGroup { rule, lr_scale, .. } = &groups[table.group];
    Group { rule: &**rule, lr_scale: *lr_scale, segments: &table.segments, params }
}

/// Returns the parameter of each piece of a table.
fn params_of(table: &UpdateTable) -> Vec<u32> {
    table.pieces.iter().map(|piece| piece.param as u32).collect()
}
