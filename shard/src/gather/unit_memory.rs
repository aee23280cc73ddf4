//! Memory for gathered units: one stretch per type.

use crate::config::digest::digest;
use crate::config::options::Options;
use crate::reduce::double_ended::{DoubleEnded, From};
use meshstep_comm::InFlight;
use meshstep_tensor::{Buffer, Category, DType, Error, Meter, Queue};

/// Memory for any two consecutive units at a time; further units are allocated and freed.
#[derive(Debug)]
pub(crate) struct GatherRoom {
    stretches: Vec<DoubleEnded>,
    /// True for each unit that is gathered, or in flight.
    taken: Vec<bool>,
    /// Digest of every unit gathered so far, in order.
    gathers: u64,
    /// Lists of buckets, kept so that gathers allocate nothing.
    lists: Vec<Vec<UnitPiece>>,
    /// True once the warning about missing memory was logged.
    grown: bool,
    queue: Queue,
    meter: Meter,
}

/// One bucket of a unit.
#[derive(Debug)]
pub(crate) struct UnitPiece {
    pub(crate) bucket: usize,
    pub(crate) from: From,
    pub(crate) away: Option<Result<InFlight, (Buffer, meshstep_comm::Error)>>,
    pub(crate) here: Option<Buffer>,
}

impl GatherRoom {
    /// Makes a room without memory.
    pub(crate) fn new(options: &Options) -> Self {
        let (queue, meter) = (options.queue.clone(), options.meter.clone());
        let (stretches, taken, lists) = (Vec::new(), Vec::new(), Vec::new());
        GatherRoom { stretches, taken, gathers: 0, lists, grown: false, queue, meter }
    }

    /// Allocates stretches of these lengths in place of shorter ones, which are freed first. Only while nothing is lent.
    pub(crate) fn reserve(&mut self, units: usize, lens: &[(DType, usize)]) -> Result<(), Error> {
        self.taken.resize(units, false);
        for &(dtype, len) in lens {
            let enough = |stretch: &DoubleEnded| stretch.dtype() == dtype && stretch.len() >= len;
            if !self.stretches.iter().any(enough) {
                self.stretches.retain(|stretch| stretch.dtype() != dtype);
                self.stretches.push(DoubleEnded::new(self.allocate(dtype, len)?));
            }
        }
        Ok(())
    }

    /// Counts one more gather of `unit` and returns a list for its buckets; `None` if the unit is gathered already.
    pub(crate) fn begin(&mut self, unit: usize) -> Option<Vec<UnitPiece>> {
        if std::mem::replace(&mut self.taken[unit], true) {
            return None;
        }
        self.gathers = digest(self.gathers, unit as u64, 0);
        Some(self.lists.pop().unwrap_or_default())
    }

    /// Ends the gather of `unit`, after all its memory is back, and takes its list.
    pub(crate) fn end(&mut self, unit: usize, list: Vec<UnitPiece>) {
        self.taken[unit] = false;
        self.lists.push(list);
    }

    /// Returns a digest of every unit gathered so far, in order.
    pub(crate) fn gathers(&self) -> u64 {
        self.gathers
    }

    /// Lends `len` elements.
    pub(crate) fn lend(&mut self, dtype: DType, len: usize) -> Result<(Buffer, From), Error> {
        if len == 0 {
            return Ok((self.allocate(dtype, 0)?, From::Outside));
        }
        let stretch = self.stretches.iter_mut().find(|stretch| stretch.dtype() == dtype);
        if let Some(lent) = stretch.and_then(|stretch| stretch.lend(len)) {
            return Ok(lent);
        }
        if !std::mem::replace(&mut self.grown, true) {
            tracing::warn!(
                "units are gathered out of order, or more than two at a time: each further one allocates temporarily (logged once)"
            );
        }
        Ok((self.allocate(dtype, len)?, From::Outside))
    }

    /// Takes back a lent buffer.
    pub(crate) fn put(&mut self, buffer: Buffer, from: From) {
        if let Some(stretch) = self.stretches.iter_mut().find(|stretch| stretch.dtype() == buffer.dtype()) {
            stretch.put(buffer, from);
        }
    }

    fn allocate(&self, dtype: DType, len: usize) -> Result<Buffer, Error> {
        Buffer::zeroed_on(&self.queue, len, dtype, &self.meter, Category::Gathered)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const F: DType = DType::F32;

    #[test]
    fn two_at_a_time_fit_whatever_comes_back_first() {
        let options = Options::default();
        let mut room = GatherRoom::new(&options);
        room.reserve(3, &[(F, 100)]).unwrap();
        let live = || options.meter.live(Category::Gathered);
        let mut held = vec![room.lend(F, 30).unwrap()];
        for len in [70, 30, 60, 40, 10, 90, 0, 100, 0] {
            let next = room.lend(F, len).unwrap();
            assert_ne!(next.1, held[0].1);
            assert_eq!((next.0.len(), live()), (len, 400));
            let (buffer, from) = std::mem::replace(&mut held[0], next);
            room.put(buffer, from);
        }
        let third = (room.lend(F, 100).unwrap(), room.lend(F, 1).unwrap());
        assert_eq!((third.1.1, live()), (From::Outside, 404));
        room.put(third.1.0, third.1.1);
        assert_eq!(live(), 400);
        room.put(third.0.0, third.0.1);
        let (buffer, from) = held.remove(0);
        room.put(buffer, from);
        assert_eq!(room.lend(F, 50).unwrap().1, From::Front);
        // Only two buffers at a time, even if a third would fit.
        assert_eq!([room.lend(F, 10).unwrap().1, room.lend(F, 10).unwrap().1], [From::Back, From::Outside]);
    }

    #[test]
    fn longer_stretches_take_the_place_of_shorter_ones() {
        let options = Options::default();
        let mut room = GatherRoom::new(&options);
        for (len, live) in [(100, 400), (50, 400), (120, 480)] {
            room.reserve(1, &[(F, len)]).unwrap();
            let peak = options.meter.peak(Category::Gathered);
            assert_eq!((options.meter.live(Category::Gathered), peak), (live, live));
        }
        let list = room.begin(0).unwrap();
        assert!(room.begin(0).is_none());
        room.end(0, list);
        let once = room.gathers();
        assert!(room.begin(0).is_some() && room.gathers() != once);
    }
}
