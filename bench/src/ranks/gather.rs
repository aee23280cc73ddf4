//! Bytes of every rank, on every rank: messages of different lengths over an all-gather.

use std::time::Duration;

use anyhow::{Context as _, Result};
use meshstep_comm::{Communicator, Op};
use meshstep_tensor::{Buffer, Category, DType, Meter};

/// Bytes of an element.
const WORD: usize = size_of::<u64>();

/// Returns the messages of all ranks in their order. Collective; a rank waits for the others for `within`, or else for the
/// communicator's own deadline.
pub(super) fn gather(comm: &dyn Communicator, own: &[u8], within: Option<Duration>) -> Result<Vec<Vec<u8>>> {
    let lens = all_gather(comm, &[own.len() as u64], within)?;
    let longest = lens.iter().max().copied().unwrap_or(0) as usize;
    let mut words: Vec<u64> = own.chunks(WORD).map(word).collect();
    words.resize(longest.div_ceil(WORD), 0);
    let all = all_gather(comm, &words, within)?;
    let message = |(rank, &len): (usize, &u64)| {
        let words = all.get(rank * words.len()..(rank + 1) * words.len()).context("a message is missing")?;
        let bytes = words.iter().flat_map(|word| word.to_le_bytes()).take(len as usize);
        Ok(bytes.collect())
    };
    lens.iter().enumerate().map(message).collect()
}

/// Gathers equally many words of every rank.
fn all_gather(comm: &dyn Communicator, own: &[u64], within: Option<Duration>) -> Result<Vec<u64>> {
    let len = own.len();
    let mut buffer = Buffer::zeroed(len * comm.world_size(), DType::U64, &Meter::new(), Category::Staging)?;
    let begin = comm.rank() * len;
    buffer.typed_mut::<u64>()?[begin..begin + len].copy_from_slice(own);
    let op = Op::all_gather();
    comm.run(within.map_or(op, |within| op.within(within)), &mut buffer)?;
    Ok(buffer.typed::<u64>()?.to_vec())
}

/// Returns up to eight bytes as a word, the first one lowest.
fn word(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte))
}

#[cfg(test)]
mod tests {
    use meshstep_comm::loopback;

    use super::*;

    #[test]
    fn messages_of_any_length_arrive_as_they_are() {
        for lens in [vec![0], vec![0, 0], vec![0, 1, 8], vec![17, 7, 0, 9], vec![1000, 3]] {
            let message =
                |rank: usize| -> Vec<u8> { (0..lens[rank]).map(|i| (i * 7 + rank + 1) as u8).collect() };
            let all =
                loopback::spawn(lens.len(), |comm| gather(&*comm, &message(comm.rank()), None).unwrap());
            let expected: Vec<Vec<u8>> = (0..lens.len()).map(message).collect();
            assert!(all.unwrap().iter().all(|gathered| *gathered == expected), "{lens:?}");
        }
    }

    #[test]
    fn a_rank_that_does_not_come_is_waited_for_as_long_as_allowed() {
        let begin = std::time::Instant::now();
        let within = Duration::from_millis(50);
        let all = loopback::spawn(2, |comm| (comm.rank() == 0).then(|| gather(&*comm, b"x", Some(within))));
        assert!(matches!(all.unwrap().swap_remove(0), Some(Err(_))));
        assert!(begin.elapsed() < Duration::from_secs(60));
    }
}
