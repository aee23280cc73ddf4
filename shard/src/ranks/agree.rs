//! Comparison of arguments between ranks, naming the first difference.

use crate::ranks::host_words;
use crate::{Error, Options};
use meshstep_comm::{Communicator, Reduction};
use meshstep_tensor::{Buffer, Meter, Queue};
use twox_hash::XxHash3_64;

/// Checks that every rank has the same text of `key = value` lines. Collective. Equal texts cost three words; otherwise every
/// rank gets the same error, which names the first line that differs from rank 0's. A rank that fails aborts the communicator.
pub fn same_everywhere(comm: &dyn Communicator, options: &Options, text: &str) -> Result<(), Error> {
    let same = compare(comm, options, text, None);
    if matches!(same, Err(Error::Comm(_))) {
        comm.abort();
    }
    same
}

/// Compares texts like [`same_everywhere`], in the words of `room` (at the options' place) if given, else in a new buffer. If
/// this rank fails, the caller aborts.
pub(crate) fn compare(
    comm: &dyn Communicator,
    options: &Options,
    text: &str,
    room: Option<&mut Buffer>,
) -> Result<(), Error> {
    let (queue, meter) = (&options.queue, &options.meter);
    let digest = XxHash3_64::oneshot(text.as_bytes());
    let mut words = [digest, !digest, text.len() as u64];
    match room {
        Some(room) => host_words::all_reduce_in(comm, queue, room, &mut words, Reduction::Max)?,
        None => host_words::all_reduce(comm, queue, meter, &mut words, Reduction::Max)?,
    }
    let [largest, not_smallest, longest] = words;
    if largest == !not_smallest {
        return Ok(());
    }
    let texts = exchange(comm, queue, meter, text, longest as usize)?;
    Err(first_difference(&texts).unwrap_or_else(|| disagree("something", "one digest", 0, "another")))
}

/// Returns every rank's words, in rank order. Collective; every rank gives the same number.
pub fn gather_words(comm: &dyn Communicator, options: &Options, words: &[u64]) -> Result<Vec<u64>, Error> {
    let mut all = vec![0; words.len() * comm.world_size()];
    all[words.len() * comm.rank()..][..words.len()].copy_from_slice(words);
    host_words::all_gather(comm, &options.queue, &options.meter, &mut all)?;
    Ok(all)
}

/// Returns every rank's text, none longer than `longest` bytes.
fn exchange(
    comm: &dyn Communicator,
    queue: &Queue,
    meter: &Meter,
    text: &str,
    longest: usize,
) -> Result<Vec<String>, Error> {
    let chunk = 1 + longest.div_ceil(8);
    let mut all = vec![0; chunk * comm.world_size()];
    let mine = &mut all[chunk * comm.rank()..][..chunk];
    mine[0] = text.len() as u64;
    for (word, bytes) in mine[1..].iter_mut().zip(text.as_bytes().chunks(8)) {
        let mut padded = [0; 8];
        padded[..bytes.len()].copy_from_slice(bytes);
        *word = u64::from_le_bytes(padded);
    }
    host_words::all_gather(comm, queue, meter, &mut all)?;
    Ok(all.chunks(chunk).map(decode).collect())
}

fn decode(words: &[u64]) -> String {
    let bytes: Vec<u8> = words[1..].iter().flat_map(|w| w.to_le_bytes()).collect();
    String::from_utf8_lossy(&bytes[..bytes.len().min(words[0] as usize)]).into_owned()
}

fn first_difference(texts: &[String]) -> Option<Error> {
    let (rank0, others) = texts.split_first()?;
    let differs = others.iter().position(|t| t != rank0)?;
    let (mut ours, mut theirs) = (rank0.lines(), others[differs].lines());
    loop {
        let lines = (ours.next(), theirs.next());
        match lines {
            (None, None) => return None,
            (a, b) if a == b => {}
            (a, b) => {
                let cut = |line: Option<&'_ str>| line.and_then(|l| l.split_once(" = ")).map(owned);
                let (a, b) = (cut(a), cut(b));
                let key = a.as_ref().or(b.as_ref()).map_or("something", |(key, _)| key).to_owned();
                // A line with another key is not this key's value: show it whole.
                let value = |side: Option<(String, String)>| match side {
                    None => "nothing".to_owned(),
                    Some((k, v)) if k == key => v,
                    Some((k, v)) => format!("{k} = {v}"),
                };
                return Some(disagree(&key, &value(a), differs + 1, &value(b)));
            }
        }
    }
}

fn owned((key, value): (&str, &str)) -> (String, String) {
    (key.to_owned(), value.to_owned())
}

fn disagree(what: &str, rank0: &str, rank: usize, theirs: &str) -> Error {
    Error::Disagree { what: what.to_owned(), rank0: rank0.to_owned(), rank, theirs: theirs.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn difference(texts: &[&str]) -> String {
        first_difference(&texts.iter().map(|t| t.to_string()).collect::<Vec<_>>())
            .map_or("none".into(), |e| e.to_string())
    }

    #[test]
    fn the_first_difference_is_named() {
        assert_eq!(difference(&["a = 1\n", "a = 1\n"]), "none");
        let one = difference(&["a = 1\nb = 2\n", "a = 1\nb = 2\n", "a = 1\nb = 3\nc = 4\n"]);
        assert_eq!(one, "ranks disagree on b: rank 0 has 2, rank 2 has 3");
        assert_eq!(difference(&["a = 1\n", ""]), "ranks disagree on a: rank 0 has 1, rank 1 has nothing");
        assert_eq!(difference(&["", "a = 1"]), "ranks disagree on a: rank 0 has nothing, rank 1 has 1");
        assert_eq!(difference(&["a = 1", "b = 1"]), "ranks disagree on a: rank 0 has 1, rank 1 has b = 1");
    }
}
