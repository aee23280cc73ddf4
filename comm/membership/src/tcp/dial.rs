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
pub(super) struct Dialled {
    pub(super) addr: SocketAddr,
    pub(super) term: u64,
    pub(super) incoming: Incoming,
    pub(super) outgoing: Outgoing,
}

/// Calls all addresses once, and returns the connection to the arbiter of the highest term, which is at least `known`; arbiters of
/// lower terms are told of it, and stop.
///
/// # Errors
/// The first error that another attempt may change, if an address has one: its arbiter may be starting. Else the first one.
pub(super) fn dial(
    addrs: &[SocketAddr],
    token: Option<&Token>,
    run: &str,
    known: u64,
) -> Result<Dialled, ConnectionError> {
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
    for Dialled { addr, term, mut outgoing, .. } in lines {
        if term < highest {
            // It learns of the later arbiter from another worker if this message is lost.
            let _ = outgoing.send(&ToService::Known { term: highest }.encode());
            errors.push(ConnectionError::OldTerm { addr, term, known: highest });
        }
        outgoing.cut();
    }
    current.ok_or_else(|| {
        let changes = errors.iter().position(ConnectionError::may_change).unwrap_or(0);
        errors.into_iter().nth(changes).unwrap_or(ConnectionError::NoAddress)
    })
}

/// Calls one address, and reads the term of its arbiter.
fn open(addr: SocketAddr, token: Option<&Token>, run: &str) -> Result<Dialled, ConnectionError> {
    let (mut incoming, outgoing) = call(addr, token, &purpose(run), DIAL)?;
    let unreachable = |why: Why| rendezvous::Error::Unreachable {
        host: addr.ip().to_string(),
        port: addr.port(),
        after: DIAL,
        last: why.to_string(),
    };
    let first = incoming.next(Instant::now() + DIAL).map_err(unreachable)?;
    match FromService::decode(&first) {
        Some(FromService::Term { term }) => Ok(Dialled { addr, term, incoming, outgoing }),
        _ => Err(ConnectionError::NotAnArbiter { addr, why: Why::NotUnderstood }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use meshstep_cases::process::free_addr;
    use std::io::Write;
    use std::net::TcpListener;

    #[test]
    fn another_program_at_one_address_does_not_end_the_calls_to_an_arbiter_that_is_away() {
        let listener = TcpListener::bind(free_addr()).unwrap();
        let (other, nobody) = (listener.local_addr().unwrap(), free_addr());
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let _ = stream.unwrap().write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
            }
        });
        let error = |addrs: &[SocketAddr]| dial(addrs, None, "run", 0).map(drop).unwrap_err();
        let of_other = error(&[other]);
        assert!(
            matches!(of_other, ConnectionError::NotAnArbiter { addr, .. } if addr == other),
            "{of_other}"
        );
        for addrs in [[nobody, other], [other, nobody]] {
            let error = error(&addrs);
            assert!(error.may_change(), "{addrs:?}: {error}");
        }
        assert_eq!(error(&[]), ConnectionError::NoAddress);
    }
}
