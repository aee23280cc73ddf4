//! Units of sharded parameters: gathered before a model reads them, and freed afterwards.

use crate::gather::unit_memory::GatherRoom;
use crate::optimizer::layout_state::{LayoutState, ParamPlace};
use crate::plan::units::Units;
use crate::ranks::host_words;
use crate::reduce::double_ended::From;
use crate::{BucketPlan, Error, MicroBatch, Optimizer, RankRoles};
use meshstep_comm::{Communicator, InFlight, Op, name_calls};
use meshstep_tensor::{Buffer, Slice};
use std::sync::{Arc, MutexGuard, PoisonError};

/// Error in the use of a unit, or of a parameter asked of one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UnitError {
    /// No unit has this name.
    #[error("no unit {unit:?} among the {count} units; Optimizer::units lists their names")]
    Unknown {
        /// The name asked for.
        unit: String,
        /// Number of units.
        count: usize,
    },
    /// Two units would have this name.
    #[error(
        "{name:?} names a unit, and a parameter before the first unit that would name the unit of its bucket; rename \
         one of them, or begin a unit before the parameter"
    )]
    TwoOfOneName {
        /// The name.
        name: String,
    },
    /// The unit is gathered already.
    #[error("unit {unit:?} is gathered already; drop it before gathering it again")]
    Taken {
        /// The unit.
        unit: String,
    },
    /// The parameter is sharded, so no rank has all of it.
    #[error("parameter {name:?} is sharded; gather its unit {unit:?} and read it there")]
    Sharded {
        /// The parameter.
        name: String,
        /// Its unit.
        unit: String,
    },
    /// The parameter belongs to another unit.
    #[error("parameter {name:?} is in unit {unit:?}, not in {gathered:?}; gather {unit:?}")]
    Elsewhere {
        /// The parameter.
        name: String,
        /// Its unit.
        unit: String,
        /// The unit that was asked.
        gathered: String,
    },
}

/// Whole parameters of a unit, freed on drop. At stages that keep parameters whole, these are the optimizer's own.
#[derive(Debug)]
pub struct Gathered<'a>(HeldUnit<'a>);

/// A gather in flight.
#[derive(Debug)]
#[must_use = "dropping a gather in flight waits for it"]
pub struct PendingGather<'a>(HeldUnit<'a>);

#[derive(Debug)]
struct HeldUnit<'a> {
    optimizer: &'a Optimizer,
    unit: usize,
    pieces: Vec<UnitPiece>,
}

/// One bucket of a unit.
#[derive(Debug)]
pub(crate) struct UnitPiece {
    bucket: usize,
    from: From,
    away: Option<Result<InFlight, (Buffer, meshstep_comm::Error)>>,
    here: Option<Buffer>,
}

impl Optimizer {
    /// Returns the units' names, in the order a forward pass gathers them: those of the layouts
    /// ([`LayoutBuilder::unit`](meshstep_tensor::LayoutBuilder::unit)). Each bucket of parameters before a layout's first unit is
    /// a unit too, named after its first parameter.
    pub fn units(&self) -> impl Iterator<Item = &str> {
        self.units.names()
    }

    /// Returns the name of a parameter's unit; `None` for a frozen parameter outside every unit.
    pub fn unit_of(&self, name: &str) -> Result<Option<&str>, Error> {
        Ok(self.units.of(self.index(name)?).map(|unit| self.units.name(unit)))
    }

    /// Gathers a unit's parameters on this rank. Collective at [`Stage::Zero3`](crate::Stage::Zero3), over the ranks that divide
    /// the unit: they gather the same units in the same order, each from one thread, and between two gathers hand over the
    /// gradients of the same parameters, in any order. If one rank lacks some, others may wait for
    /// [`Options::wait_budget`](crate::Options::wait_budget) before they gather. Ranks that gather different units get an error here if
    /// the lengths differ, else from the next step. Ranks that wait for a gather get an error when another rank ends its
    /// micro-batch without it, if communicators compare calls, else at the deadline.
    ///
    /// A unit named after a parameter can be gathered by that parameter's other names too ([`also_called`](Self::also_called)).
    ///
    /// There is memory for any two consecutive units in the order of [`units`](Self::units), counted in
    /// [`Memory::gathered`](crate::Memory::gathered); a third unit, or another pair that is longer, allocates temporarily. A
    /// gathered unit cannot be gathered again before it is dropped.
    ///
    /// ```
    /// # use meshstep_optim::AdamW;
    /// # use meshstep_shard::{StepArgs, Optimizer, Options, Stage};
    /// # use meshstep_tensor::{DType, Layout};
    /// # meshstep_comm::loopback::spawn(4, |comm| -> Result<(), meshstep_shard::Error> {
    /// let layout = Layout::builder().unit("h.0").param("h.0.w", &[64, 64], DType::F32);
    /// let layout = layout.unit("h.1").param("h.1.w", &[64, 64], DType::F32).build()?;
    /// let options = Options { stage: Stage::Zero3, ..Options::default() };
    /// let mut opt = Optimizer::new(comm, layout, AdamW::default(), |_, _| Ok(()), options)?;
    /// let mb = opt.micro_batch(1)?;
    /// let last = mb.gather("h.1")?; // the backward pass begins with the last block
    /// let next = mb.start_gather("h.0")?; // in flight meanwhile
    /// mb.grad("h.1.w", last.param("h.1.w")?)?; // the gradient of |w|^2 / 2
    /// drop(last); // freed
    /// let first = next.wait()?;
    /// mb.grad("h.0.w", first.param("h.0.w")?)?;
    /// drop(first);
    /// mb.finish()?;
    /// opt.step(StepArgs::default())?.outcome()?;
    /// # Ok(())
    /// # })?.into_iter().collect::<Result<(), _>>()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn gather(&self, unit: &str) -> Result<Gathered<'_>, Error> {
        self.start_gather(unit)?.wait()
    }

    /// Starts to gather a unit, which is in flight while the caller computes with the previous unit.
    pub fn start_gather(&self, unit: &str) -> Result<PendingGather<'_>, Error> {
        let _name = name_calls("Optimizer::gather");
        self.reducer.healthy()?;
        let unknown = || UnitError::Unknown { unit: unit.to_owned(), count: self.units.names().count() };
        let index = self.unit_called(unit).ok_or_else(unknown)?;
        if !self.options.stage.cuts_params() {
            return Ok(PendingGather(HeldUnit { optimizer: self, unit: index, pieces: Vec::new() }));
        }
        let list = self.room_for_units().begin(index);
        let pieces = list.ok_or_else(|| UnitError::Taken { unit: unit.to_owned() })?;
        let mut held = HeldUnit { optimizer: self, unit: index, pieces };
        // The other ranks wait for this rank's part.
        self.send_unit(&mut held).inspect_err(|_| self.reducer.abort())?;
        Ok(PendingGather(held))
    }

    /// Returns the unit of this name, or the unit named after the parameter that has this name.
    fn unit_called(&self, name: &str) -> Option<usize> {
        let called = || {
            let &param = self.by_name.get(name)?;
            self.units.called_by(self.entries[param].param.name(), param)
        };
        self.units.index(name).or_else(called)
    }

    /// Sends this rank's part of each bucket of a unit; the buckets of one type share one stretch of memory.
    fn send_unit(&self, held: &mut HeldUnit<'_>) -> Result<(), Error> {
        let mut room = self.room_for_units();
        let kept = |b: usize| &self.reducer.config.buckets[b];
        let buckets = self.units.buckets(held.unit);
        for (i, &first) in buckets.iter().enumerate() {
            let dtype = kept(first).plan.dtype;
            if buckets[..i].iter().any(|&b| kept(b).plan.dtype == dtype) {
                continue;
            }
            let alike = || buckets.iter().copied().filter(|&b| kept(b).plan.dtype == dtype);
            let (mut rest, from) = room.lend(dtype, alike().map(|b| kept(b).plan.len).sum())?;
            for b in alike() {
                let after = rest.split_off(kept(b).plan.len)?;
                let mut part = std::mem::replace(&mut rest, after);
                self.buckets[b].put_into(part.as_mut())?;
                let comm = kept(b).gathers.as_ref().filter(|_| !part.is_empty());
                let (away, here) = match comm {
                    Some(comm) => (Some(comm.start(Op::all_gather(), part, &self.options.queue)), None),
                    None => (None, Some(part)),
                };
                held.pieces.push(UnitPiece { bucket: b, from, away, here });
            }
        }
        Ok(())
    }

    /// Reserves memory for gathering these units of all buckets, if parameters are sharded.
    pub(crate) fn reserve_for(&self, units: &Units, buckets: &[&BucketPlan]) -> Result<(), Error> {
        if self.options.stage.cuts_params() {
            units.check()?;
            self.by_name.iter().try_for_each(|(name, &param)| self.check_alias(units, name, param))?;
            self.room_for_units().reserve(units.names().count(), &units.room(|b| buckets[b]))?;
        }
        Ok(())
    }

    /// Refuses another name of a parameter if that name is a unit's.
    pub(crate) fn check_alias(&self, units: &Units, alias: &str, param: usize) -> Result<(), UnitError> {
        let own = self.entries[param].param.name() == alias;
        match !own && self.options.stage.cuts_params() && units.claims(alias, param) {
            true => Err(UnitError::TwoOfOneName { name: alias.to_owned() }),
            false => Ok(()),
        }
    }

    pub(crate) fn room_for_units(&self) -> MutexGuard<'_, GatherRoom> {
        self.gather_room.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the communicator that gathers the parameters shared among these ranks, if parameters are sharded. It is a
    /// communicator of its own, because gathers and reductions have no common order. The buckets of `added` are about to be added
    /// before them. Collective.
    pub(crate) fn gathers_among(
        &self,
        among: &RankRoles,
        added: &[LayoutState],
    ) -> Result<Option<Arc<dyn Communicator>>, Error> {
        if !self.options.stage.cuts_params() {
            return Ok(None);
        }
        let fixed = &self.reducer.config;
        let mut known = fixed.buckets.iter().chain(added.iter().flat_map(|layout_state| &layout_state.kept));
        let known = known.find(|kept| Arc::ptr_eq(&kept.among.shards, &among.shards));
        match known {
            Some(known) => Ok(known.gathers.clone()),
            None => Ok(among.shards.split(Some(0), among.shards.rank() as i64)?),
        }
    }

    /// Returns a digest of the operations sent so far that must be the same on all ranks.
    pub(crate) fn operations(&mut self) -> u64 {
        let launches = self.reducer.launches();
        match self.gather_room.get_mut().unwrap_or_else(PoisonError::into_inner).gathers() {
            0 => launches,
            gathers => crate::reduce::reducer::digest(launches, gathers, 0),
        }
    }
}

impl<'a> MicroBatch<'a> {
    /// Gathers a unit as [`Optimizer::gather`] does, while gradients are handed over.
    pub fn gather(&self, unit: &str) -> Result<Gathered<'a>, Error> {
        self.optimizer.gather(unit)
    }

    /// Starts a gather as [`Optimizer::start_gather`] does, while gradients are handed over.
    pub fn start_gather(&self, unit: &str) -> Result<PendingGather<'a>, Error> {
        self.optimizer.start_gather(unit)
    }
}

impl<'a> PendingGather<'a> {
    /// Waits until the unit has arrived. On a GPU the options' queue waits: its later work sees the unit, and the host does not
    /// block.
    pub fn wait(mut self) -> Result<Gathered<'a>, Error> {
        self.0.land()?;
        Ok(Gathered(self.0))
    }
}

impl Gathered<'_> {
    /// Returns the values of a parameter of this unit, or of a frozen one.
    pub fn param(&self, name: &str) -> Result<Slice<'_>, Error> {
        let HeldUnit { optimizer, unit, pieces } = &self.0;
        let param = optimizer.index(name)?;
        let of = optimizer.units.of(param);
        if let Some(other) = of.filter(|of| of != unit) {
            let [unit, gathered] = [other, *unit].map(|unit| optimizer.units.name(unit).to_owned());
            return Err(UnitError::Elsewhere { name: name.to_owned(), unit, gathered }.into());
        }
        match &optimizer.entries[param].place {
            ParamPlace::Bucket { bucket, range, .. } if optimizer.options.stage.cuts_params() => {
                let piece = pieces.iter().find(|piece| piece.bucket == *bucket);
                let here = piece.and_then(|piece| piece.here.as_ref());
                assert!(here.is_some(), "a gathered unit has all its buckets");
                let here = here.unwrap_or_else(|| unreachable!("asserted above"));
                Ok(here.as_slice().slice(range.clone())?)
            }
            _ => optimizer.values(param),
        }
    }

    /// Returns the unit's name.
    pub fn unit(&self) -> &str {
        self.0.optimizer.units.name(self.0.unit)
    }
}

impl HeldUnit<'_> {
    /// Waits for every bucket.
    fn land(&mut self) -> Result<(), Error> {
        let _span = tracing::debug_span!("gather", unit = self.unit).entered();
        let mut landed = Ok(());
        for piece in &mut self.pieces {
            if let Some(away) = piece.away.take() {
                let (part, arrived) = host_words::land(away, &self.optimizer.options.queue);
                piece.here = Some(part);
                landed = landed.and(arrived);
            }
        }
        if let Err(failure) = &landed {
            self.optimizer.reducer.poison(failure.clone());
            // Another rank may wait for this rank's gradients.
            self.optimizer.reducer.abort();
        }
        Ok(landed?)
    }
}

impl Drop for HeldUnit<'_> {
    fn drop(&mut self) {
        if !self.optimizer.options.stage.cuts_params() {
            return;
        }
        // A failure has poisoned the optimizer, and the next call returns it.
        let _ = self.land();
        let mut room = self.optimizer.room_for_units();
        let mut whole: Option<(Buffer, From)> = None;
        for UnitPiece { from: own, here, .. } in self.pieces.drain(..) {
            let Some(part) = here else { continue };
            whole = match whole.take() {
                Some((before, from)) => match before.join(part) {
                    Ok(both) => Some((both, from)),
                    // The part belongs to another type's stretch.
                    Err((before, part)) => {
                        room.put(before, from);
                        Some((part, own))
                    }
                },
                None => Some((part, own)),
            };
        }
        if let Some((whole, from)) = whole {
            room.put(whole, from);
        }
        room.end(self.unit, std::mem::take(&mut self.pieces));
    }
}
