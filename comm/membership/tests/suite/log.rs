//! The arbiter's log: cut at every byte, with flipped bits in every byte, opened twice, grown past its limit.

use crate::common::DIGEST;
use meshstep_membership::{Decision, Departure, Former, Log, LogError, Place, State, Worker};
use std::path::Path;

/// Returns a state of round `round` with a length that varies.
fn state(round: u64) -> State {
    let place = |id: u64| Place {
        worker: Worker { id, life: id * 1000 + round },
        contact: "c".repeat((id + round) as usize % 5),
        counts: !round.is_multiple_of(3),
        vetoes: id as usize,
        gone: (id == 2).then_some(Departure::Silent),
    };
    let decision = match round % 3 {
        0 => None,
        1 => Some(Decision::Commit {}),
        _ => Some(Decision::Abort { vetoed: vec![1], failed: vec![], lost: vec![2, round] }),
    };
    State {
        term: 1,
        digest: Some(DIGEST),
        epoch: round / 2,
        round,
        step: 16 * round,
        decision,
        members: (0..round % 4).map(place).collect(),
        gone: vec![Former { worker: Worker { id: 9, life: 9 }, why: Departure::Vetoed }],
    }
}

/// Writes a log of the states of rounds 0, 1, ..., and returns its bytes and the end of each record.
fn written(path: &Path, rounds: u64) -> (Vec<u8>, Vec<usize>) {
    let len = || std::fs::metadata(path).unwrap().len() as usize;
    let (mut log, last) = Log::open(path).unwrap();
    assert_eq!(last, None);
    let mut ends = vec![len()];
    for round in 0..rounds {
        log.append(&state(round)).unwrap();
        ends.push(len());
    }
    (std::fs::read(path).unwrap(), ends)
}

/// Opens a log of these bytes and returns its last state.
fn read(path: &Path, bytes: &[u8]) -> Result<Option<State>, LogError> {
    std::fs::write(path, bytes).unwrap();
    Log::open(path).map(|(_, last)| last)
}

/// Returns the state of the last of `n` records.
fn last_of(n: usize) -> Option<State> {
    n.checked_sub(1).map(|round| state(round as u64))
}

#[test]
fn the_last_record_counts_and_one_that_is_cut_short_does_not() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    let (bytes, ends) = written(&path, 4);
    for len in 0..=bytes.len() {
        let whole = ends.iter().filter(|end| **end <= len).count().saturating_sub(1);
        assert_eq!(read(&path, &bytes[..len]), Ok(last_of(whole)), "cut at {len} of {ends:?}");
        // The cut record is gone, and the log can be continued.
        if len % 5 == 0 || ends.contains(&len) {
            let (mut log, _) = Log::open(&path).unwrap();
            log.append(&state(7)).unwrap();
            drop(log);
            assert_eq!(Log::open(&path).unwrap().1, Some(state(7)), "cut at {len}");
        }
        let kept = if len < ends[0] { 0 } else { ends[whole] };
        assert_eq!(std::fs::read(&path).unwrap()[..kept], bytes[..kept]);
        // The system had allocated the space and filled it with zeros.
        let zeros = [&bytes[..len], &vec![0; bytes.len() + 40 - len]].concat();
        assert_eq!(read(&path, &zeros), Ok(last_of(whole)), "zeros from {len} of {ends:?}");
    }
}

#[test]
fn a_changed_bit_is_an_error_that_says_where() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    let (bytes, ends) = written(&path, 3);
    for (at, bit) in (0..bytes.len()).flat_map(|at| [(at, at % 8), (at, (at + 3) % 8)]) {
        let mut changed = bytes.clone();
        changed[at] ^= 1 << bit;
        let expected = match ends.iter().rev().find(|end| **end <= at) {
            None => LogError::NotALog,
            Some(end) => LogError::Changed { at: *end },
        };
        assert_eq!(read(&path, &changed), Err(expected), "bit {bit} of byte {at}");
        // The file is unchanged, so that a person may look at it.
        assert_eq!(std::fs::read(&path).unwrap(), changed);
    }
    // A record is valid only at its own offset.
    let (first, second) = (&bytes[ends[0]..ends[1]], &bytes[ends[1]..ends[2]]);
    let swapped = [&bytes[..ends[0]], second, first].concat();
    assert_eq!(read(&path, &swapped), Err(LogError::Changed { at: ends[0] }));
    for other in [&b"{}"[..], b"meshstep meetings", &[0, 0, 1]] {
        assert_eq!(read(&path, other), Err(LogError::NotALog));
    }
}

#[test]
fn a_log_is_one_arbiter_s() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    let (log, _) = Log::open(&path).unwrap();
    assert_eq!(Log::open(&path).err(), Some(LogError::Locked { path: path.clone() }));
    drop(log);
    assert!(Log::open(&path).is_ok());
    let nowhere = dir.path().join("no").join("log");
    assert!(matches!(Log::open(&nowhere), Err(LogError::System { what: "open", .. })));
}

#[test]
fn a_long_log_begins_anew_with_its_last_record() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    let (mut log, _) = Log::open(&path).unwrap();
    let mut long = state(3);
    long.members = (0..256)
        .map(|id| Place {
            worker: Worker { id, life: 1 },
            contact: "c".repeat(64),
            ..state(3).members[0].clone()
        })
        .collect();
    let (mut longest, mut last) = (0, 0);
    for round in 0..100 {
        long.round = round;
        log.append(&long).unwrap();
        last = std::fs::metadata(&path).unwrap().len();
        longest = longest.max(last);
    }
    assert!(longest <= 1 << 20 && last < longest, "{last} of {longest} bytes");
    // As if the previous process had ended while it replaced the log.
    std::fs::write(dir.path().join("log.new"), b"half").unwrap();
    drop(log);
    let (mut log, found) = Log::open(&path).unwrap();
    assert_eq!(found, Some(long.clone()));
    long.round = 1000;
    log.append(&long).unwrap();
    drop(log);
    assert_eq!(Log::open(&path).unwrap().1, Some(long));
}

/// A name beside the log that leads elsewhere: a reader of the folder could make the arbiter write over any of its files.
#[cfg(unix)]
#[test]
fn links_are_not_followed_and_their_targets_stay() {
    for suffix in ["", ".lock", ".new"] {
        let dir = tempfile::tempdir().unwrap();
        let (path, precious) = (dir.path().join("log"), dir.path().join("precious"));
        std::fs::write(&precious, "precious").unwrap();
        let link = dir.path().join(format!("log{suffix}"));
        if suffix == ".new" {
            let (mut log, _) = Log::open(&path).unwrap();
            std::os::unix::fs::symlink(&precious, &link).unwrap();
            // Until the log begins anew.
            let mut longest = 0;
            for round in 0.. {
                log.append(&state(round)).unwrap();
                let len = std::fs::metadata(&path).unwrap().len();
                if len < longest {
                    break;
                }
                longest = len;
            }
            assert!(!link.exists(), "the new file is the log now");
            drop(log);
            assert!(Log::open(&path).unwrap().1.is_some());
        } else {
            std::os::unix::fs::symlink(&precious, &link).unwrap();
            let error = Log::open(&path).map(drop).unwrap_err();
            assert!(matches!(error, LogError::System { what: "open", .. }), "{error}");
        }
        assert_eq!(std::fs::read_to_string(&precious).unwrap(), "precious", "log{suffix}");
    }
}
