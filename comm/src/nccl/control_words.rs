//! Control words that ranks exchange beside their data: to compare calls and to form groups.

use super::core::Core;
use super::issue::Issue;
use super::launch::Patience;
use crate::{Action, Called, Error, Op, Reduction};
use meshstep_tensor::{Buffer, Category, DType};
use std::mem::discriminant;

/// Number of words that describe a call.
const CALL: usize = 6;

impl Core {
    /// Compares calls with those of the ranks that they involve.
    pub(super) fn compare(&self, calls: &[(Op, Buffer)]) -> Result<(), Error> {
        let next = self.ledger().next();
        for (number, (op, buffer)) in (next..).zip(calls) {
            let (action, len, dtype) = (op.action(), buffer.len(), buffer.dtype());
            let mine = Called { op_number: number, action, len, dtype, by: None };
            self.compare_one(Patience { called: mine, within: self.within(*op) })?;
        }
        Ok(())
    }

    pub(super) fn compare_one(&self, patience: Patience) -> Result<(), Error> {
        let mine = patience.called;
        let peer = mine.action.peer();
        let words = self.gather(&encode(&mine), peer, patience)?;
        let asked = |rank: usize| peer.is_none_or(|peer| [peer, self.rank].contains(&rank));
        let said = |rank: usize| if asked(rank) { decode(&words[rank * CALL..][..CALL]) } else { None };
        let calls: Vec<_> = (0..self.world_size).map(said).collect();
        let fits = |(rank, theirs): (usize, &Option<Called>)| match theirs {
            Some(theirs) if peer == Some(rank) => mine.goes_to(theirs) || theirs.goes_to(&mine),
            Some(theirs) => mine.agrees_with(theirs),
            None => !asked(rank),
        };
        if calls.iter().enumerate().all(fits) {
            return Ok(());
        }
        Err(self.broke(Error::Mismatch { op_number: mine.op_number, calls }))
    }

    /// Gathers the words of every rank, or of this one and `peer`, each at its rank's position. The host waits for them; if they
    /// do not arrive, the communicator has failed.
    pub(super) fn gather(
        &self,
        mine: &[u64],
        peer: Option<usize>,
        patience: Patience,
    ) -> Result<Vec<u64>, Error> {
        let n = mine.len();
        let mut words = vec![0; self.world_size * n];
        words[self.rank * n..][..n].copy_from_slice(mine);
        let meter = &self.options.meter;
        let place = Buffer::zeroed_on(&self.queue(), words.len(), DType::U64, meter, Category::Staging);
        // On an error the communicator is ended before the buffer is freed, which would otherwise wait for words that never
        // arrive.
        let mut place = place.map_err(|error| self.broke(error.into()))?;
        self.fill(&mut place, &mut words, peer, patience).map_err(|error| self.broke(error))?;
        Ok(words)
    }

    fn fill(
        &self,
        place: &mut Buffer,
        words: &mut [u64],
        peer: Option<usize>,
        patience: Patience,
    ) -> Result<(), Error> {
        self.arrived(patience)?; // waits for earlier work; `upload` would wait for it without a deadline
        self.queue().upload((&*words).into(), place.as_mut())?;
        let whole = self.describe(Action::AllGather, place, 0);
        let n = words.len() / self.world_size;
        let part = |action, rank: usize| Issue {
            action,
            len: n,
            address: whole.address + rank * n * DType::U64.size(),
            ..whole
        };
        let issues = match peer {
            None => vec![whole],
            Some(peer) => {
                vec![part(Action::Send { to: peer }, self.rank), part(Action::Recv { from: peer }, peer)]
            }
        };
        // SAFETY: `place` has `n` words for each rank. `gather` frees it only when they have arrived, or when the communicator
        // has been ended and its stream is empty.
        unsafe { self.issue(&issues, patience)? };
        self.arrived(patience)?;
        Ok(self.queue().download(place.as_slice(), words.into())?)
    }
}

fn encode(called: &Called) -> [u64; CALL] {
    let (kind, detail) = match called.action {
        Action::AllReduce(reduction) => (1, reduction_number(reduction)),
        Action::ReduceScatter(reduction) => (2, reduction_number(reduction)),
        Action::AllGather => (3, 0),
        Action::ReduceAndGather(reduction) => (10, reduction_number(reduction)),
        Action::AllToAll => (4, 0),
        Action::Broadcast { root } => (5, root as u64),
        Action::Send { to } => (6, to as u64),
        Action::Recv { from } => (7, from as u64),
        Action::Barrier => (8, 0),
        Action::Split { .. } => (9, 0),
    };
    let dtype = DTYPES.iter().position(|&dtype| dtype == called.dtype).map_or(u64::MAX, |at| at as u64);
    let of_reduction = called.action.reduction().map_or(0, Reduction::detail);
    [called.op_number, kind, detail, called.len as u64, dtype, of_reduction]
}

/// Decodes a call; `None` if no rank encodes these words.
fn decode(words: &[u64]) -> Option<Called> {
    let &[op_number, kind, detail, len, dtype, of_reduction] = words else { return None };
    let rank = usize::try_from(detail).ok()?;
    let reduction = REDUCTIONS.get(rank).map(|&reduction| match reduction {
        Reduction::PreMulSum { .. } => Reduction::PreMulSum { factor: f64::from_bits(of_reduction) },
        Reduction::SumThenMax { .. } => Reduction::SumThenMax { sums: of_reduction as usize },
        other => other,
    });
    let action = match kind {
        1 => Action::AllReduce(reduction?),
        2 => Action::ReduceScatter(reduction?),
        3 => Action::AllGather,
        4 => Action::AllToAll,
        5 => Action::Broadcast { root: rank },
        6 => Action::Send { to: rank },
        7 => Action::Recv { from: rank },
        8 => Action::Barrier,
        9 => Action::Split { color: None, key: 0 },
        10 => Action::ReduceAndGather(reduction?),
        _ => return None,
    };
    let dtype = DTYPES.get(usize::try_from(dtype).ok()?).copied().unwrap_or(DType::F32);
    Some(Called { op_number, action, len: usize::try_from(len).ok()?, dtype, by: None })
}

/// Types by their word values; collectives support no other type.
const DTYPES: [DType; 5] = [DType::F32, DType::F64, DType::BF16, DType::F16, DType::U64];
/// Reductions by their word values.
const REDUCTIONS: [Reduction; 7] = [
    Reduction::Sum,
    Reduction::Mean,
    Reduction::Max,
    Reduction::Min,
    Reduction::PreMulSum { factor: 1.0 },
    Reduction::SumThenMax { sums: 0 },
    Reduction::Pairwise,
];

fn reduction_number(reduction: Reduction) -> u64 {
    let same_kind = |other: &Reduction| discriminant(other) == discriminant(&reduction);
    REDUCTIONS.iter().position(same_kind).map_or(u64::MAX, |at| at as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_travel_as_words() {
        let mut actions =
            vec![Action::AllGather, Action::AllToAll, Action::Broadcast { root: 3 }, Action::Barrier];
        actions.extend([
            Action::Send { to: 1 },
            Action::Recv { from: 7 },
            Action::Split { color: None, key: 0 },
        ]);
        actions.push(Action::AllReduce(Reduction::PreMulSum { factor: -0.1 }));
        actions.push(Action::AllReduce(Reduction::SumThenMax { sums: 7 }));
        actions.extend(REDUCTIONS.map(Action::AllReduce));
        actions.extend(REDUCTIONS.map(Action::ReduceScatter));
        actions.extend(REDUCTIONS.map(Action::ReduceAndGather));
        for action in actions {
            for dtype in DTYPES {
                let called = Called { op_number: 1 << 40, action, len: usize::MAX, dtype, by: None };
                assert_eq!(decode(&encode(&called)), Some(called));
            }
        }
        assert_eq!(decode(&[0; CALL]), None);
        assert_eq!(decode(&[0, 1, REDUCTIONS.len() as u64, 0, 0, 0]), None);
    }
}
