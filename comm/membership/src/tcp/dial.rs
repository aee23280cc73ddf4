//! Calls to the arbiter's addresses: of the arbiters that answer, the one of the highest term is the run's.

use super::protocol::{FromService, ToService, purpose};
use crate::ConnectionError;
use crate::wire::Wire;
use meshstep_comm::rendezvous::{self, Incoming, Outgoing, Token, Why, call};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// Longest time of one attempt.
const DIAL: Duration = Duration::from_secs(1);

/// Connection to an arbiter.
#[derive(Debug)]
pub(super) struct Line {
    pub(super) addr: SocketAddr,
    pub(super) term: u64,
    pub(super) incoming: Incoming,
    pub(super) outgoing: Outgoing,
}

/// Calls all addresses once, and returns the connection to the arbiter of the highest term, which is at least `known`; arbiters of
/// lower terms are told of it, and stop.
///
/// # Errors
/// The first error that another attempt would not change, if all addresses have one; else the last one.
pub(super) fn dial(
    addrs: &[SocketAddr],
    token: Option<&Token>,
    run: &str,
    known: u64,
) -> Result<Line, ConnectionError> {
    let (mut lines, mut errors) = (Vec::new(), Vec::new());
    for &addr in addrs {
        match open(addr, token, run) {
            Ok(line) => lines.push(line),
            Err(error) => errors.push(error),
        }
    }
    let highest = lines.iter().map(|line| line.term).max().unwrap_or(0).max(known);
    // Old ones first; the run's own is the last.
    lines.sort_by_key(|line| line.term);
    let current = lines.pop_if(|line| line.term == highest);
    for Line { addr, term, mut outgoing, .. } in lines {
        if term < highest {
            // It learns of the later arbiter from another worker if this message is lost.
            let _ = outgoing.send(&ToService::Known { term: highest }.encode());
            errors.push(ConnectionError::OldTerm { addr, term, known: highest });
        }
        outgoing.cut();
    }
    let permanent = errors.iter().all(|error| !error.may_change());
    current.ok_or_else(|| if permanent { errors.swap_remove(0) } else { last(errors) })
}

fn last(mut errors: Vec<ConnectionError>) -> ConnectionError {
    errors.pop().unwrap_or(ConnectionError::NoAddress)
}

/// Calls one address, and hears the term of its arbiter.
fn open(addr: SocketAddr, token: Option<&Token>, run: &str) -> Result<Line, ConnectionError> {
    let (mut incoming, outgoing) = call(addr, token, &purpose(run), DIAL)?;
    let unreachable = |why: Why| rendezvous::Error::Unreachable {
        host: addr.ip().to_string(),
        port: addr.port(),
        after: DIAL,
        last: why.to_string(),
    };
    let first = incoming.next(Instant::now() + DIAL).map_err(unreachable)?;
    match FromService::decode(&first) {
        Some(FromService::Term { term }) => Ok(Line { addr, term, incoming, outgoing }),
        _ => Err(ConnectionError::NotAnArbiter { addr, why: Why::NotUnderstood }),
    }
}
