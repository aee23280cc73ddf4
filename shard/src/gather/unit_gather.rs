//! Units of sharded parameters: gathered before a model reads them, and freed afterwards.

use crate::error::{Error, UnitError};
use crate::gather::gatherer::Gatherer;
use crate::gather::unit_memory::UnitPiece;
use crate::ranks::host_words;
use crate::reduce::double_ended::From;
use crate::reduce::reducer::GradReducer;
use crate::update::params::{ParamPlace, Params};
use arrayvec::ArrayVec;
use meshstep_comm::Op;
use meshstep_tensor::{Buffer, DType, Slice};

/// Number of types that parameters can have.
const FLOATS: usize = 4;

/// Whole parameters of a unit, freed on drop. At stages that keep parameters whole, these are the optimizer's own.
///
/// ```
/// use meshstep_shard::prelude::*;
///
/// let ranks = loopback::spawn(2, |comm| -> Result<f32, meshstep_shard::Error> {
///     let layout = Layout::builder()
///         .unit("h.0").param("h.0.w", &[4], DType::F32)
///         .unit("h.1").param("h.1.w", &[4], DType::F32)
///         .build()?;
///     let ones = |p: &Param, mut out: SliceMut| out.copy_from((&vec![1f32; p.len()]).into());
///     let options = Options { stage: Stage::Zero3, ..Options::default() };
///     let opt = Optimizer::new(comm, layout, AdamW::default(), ones, options)?;
///     let first: Gathered<'_> = opt.gather("h.0")?;
///     let second: PendingGather<'_> = opt.start_gather("h.1")?; // in flight while h.0 is used
///     let sum: f32 = first.param("h.0.w")?.typed::<f32>()?.iter().sum();
///     drop(first); // its memory is free for the unit after the next
///     Ok(sum + second.wait()?.param("h.1.w")?.typed::<f32>()?[0])
/// })?;
/// assert!(ranks.into_iter().all(|sum| sum.is_ok_and(|sum| sum == 5.0)));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Gathered<'a>(HeldUnit<'a>);

/// A gather in flight.
#[derive(Debug)]
#[must_use = "dropping a gather in flight waits for it"]
pub struct PendingGather<'a>(HeldUnit<'a>);

/// Parts of an optimizer that a gather needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UnitSource<'a> {
    pub(crate) params: &'a Params,
    pub(crate) reducer: &'a GradReducer,
    pub(crate) gatherer: &'a Gatherer,
}

#[derive(Debug)]
struct HeldUnit<'a> {
    from: UnitSource<'a>,
    unit: usize,
    pieces: Vec<UnitPiece>,
}

impl<'a> UnitSource<'a> {
    /// Starts to gather the unit `name`.
    pub(crate) fn start(self, name: &str) -> Result<PendingGather<'a>, Error> {
        let UnitSource { params, reducer, gatherer } = self;
        reducer.healthy()?;
        let unit = params.unit(name)?;
        if !params.options.stage.cuts_params() {
            return Ok(PendingGather(HeldUnit { from: self, unit, pieces: Vec::new() }));
        }
        let list = gatherer.room().begin(unit);
        let pieces = list.ok_or_else(|| UnitError::Taken { unit: name.to_owned() })?;
        let mut held = HeldUnit { from: self, unit, pieces };
        // The other ranks wait for this rank's part.
        self.send(&mut held).inspect_err(|_| reducer.abort())?;
        Ok(PendingGather(held))
    }

    /// Sends this rank's part of each bucket of a unit; the buckets of one type share one stretch of memory.
    fn send(self, held: &mut HeldUnit<'_>) -> Result<(), Error> {
        let UnitSource { params, reducer, gatherer } = self;
        let mut room = gatherer.room();
        let kept = |b: usize| &reducer.config.buckets[b];
        let buckets = params.units.buckets(held.unit);
        let mut types: ArrayVec<DType, FLOATS> = ArrayVec::new();
        for &first in buckets {
            let dtype = kept(first).plan.dtype;
            if types.contains(&dtype) {
                continue;
            }
            types.push(dtype);
            let alike = || buckets.iter().copied().filter(|&b| kept(b).plan.dtype == dtype);
            let (mut rest, from) = room.lend(dtype, alike().map(|b| kept(b).plan.len).sum())?;
            for b in alike() {
                let after = rest.split_off(kept(b).plan.len)?;
                let mut part = std::mem::replace(&mut rest, after);
                params.buckets[b].put_into(part.as_mut())?;
                let comm = kept(b).gathers.as_ref().filter(|_| !part.is_empty());
                let (away, here) = match comm {
                    Some(comm) => (Some(comm.start(Op::all_gather(), part, &params.options.queue)), None),
                    None => (None, Some(part)),
                };
                held.pieces.push(UnitPiece { bucket: b, from, away, here });
            }
        }
        Ok(())
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
        let HeldUnit { from: UnitSource { params, .. }, unit, .. } = &self.0;
        let param = params.index(name)?;
        let of = params.units.of(param);
        if let Some(other) = of.filter(|of| of != unit) {
            let [unit, gathered] = [other, *unit].map(|unit| params.units.name(unit).to_owned());
            return Err(UnitError::Elsewhere { name: name.to_owned(), unit, gathered }.into());
        }
        match &params.entries[param].place {
            ParamPlace::Bucket { bucket, range, .. } if params.options.stage.cuts_params() => {
                let here = self.0.piece(*bucket).and_then(|piece| piece.here.as_ref());
                assert!(here.is_some(), "a gathered unit has all its buckets");
                let here = here.unwrap_or_else(|| unreachable!("asserted above"));
                Ok(here.as_slice().slice(range.clone())?)
            }
            _ => params.values(param),
        }
    }

    /// Returns the unit's name.
    pub fn unit(&self) -> &str {
        self.0.from.params.units.name(self.0.unit)
    }
}

impl HeldUnit<'_> {
    /// Returns the piece of bucket `b`, if the unit has it.
    fn piece(&self, b: usize) -> Option<&UnitPiece> {
        let dtype = |b: usize| self.from.reducer.config.buckets[b].plan.dtype;
        let mut rest = &self.pieces[..];
        // The pieces of one type are together, in ascending order of their buckets.
        while let Some(first) = rest.first() {
            let own = dtype(first.bucket);
            let (alike, others) = rest.split_at(rest.partition_point(|piece| dtype(piece.bucket) == own));
            if own == dtype(b) {
                return alike.binary_search_by_key(&b, |piece| piece.bucket).ok().map(|i| &alike[i]);
            }
            rest = others;
        }
        None
    }

    /// Waits for every bucket.
    fn land(&mut self) -> Result<(), Error> {
        let _span = tracing::debug_span!("gather", unit = self.unit).entered();
        let mut landed = Ok(());
        for piece in &mut self.pieces {
            if let Some(away) = piece.away.take() {
                let (part, arrived) = host_words::land(away, &self.from.params.options.queue);
                piece.here = Some(part);
                landed = landed.and(arrived);
            }
        }
        if let Err(failure) = &landed {
            self.from.reducer.poison(failure.clone());
            // Another rank may wait for this rank's gradients.
            self.from.reducer.abort();
        }
        Ok(landed?)
    }
}

impl Drop for HeldUnit<'_> {
    fn drop(&mut self) {
        if !self.from.params.options.stage.cuts_params() {
            return;
        }
        // A failure has poisoned the optimizer, and the next call returns it.
        let _ = self.land();
        let mut room = self.from.gatherer.room();
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
