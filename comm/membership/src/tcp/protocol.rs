//! Messages on a connection to the arbiter's service: those of workers, those of a standby, and the service's term.

use crate::message::{FromArbiter, ToArbiter};
use crate::state::State;
use crate::wire::wire;

/// Version of these messages. It is part of a connection's purpose, so that the other version is refused with both numbers.
pub(crate) const VERSION: u8 = 3;

/// Message to the service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ToService {
    /// A worker's message to the arbiter.
    Ask { message: ToArbiter },
    /// An arbiter of this term exists.
    Known { term: u64 },
    /// A standby asks for the log; `term` is that of its last state, or 0.
    Follow { term: u64 },
    /// The standby has written this record to its disk.
    Kept { number: u64 },
}

/// Message of the service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum FromService {
    /// Term of the arbiter, the first message on every connection.
    Term { term: u64 },
    /// The arbiter's message to a worker.
    Say { message: FromArbiter },
    /// A record of the log for the standby.
    Record { number: u64, state: State },
    /// Another standby follows now.
    Replaced {},
}

wire!(enum ToService {
    1 => Ask { message },
    2 => Known { term },
    3 => Follow { term },
    4 => Kept { number },
});
wire!(enum FromService {
    1 => Term { term },
    2 => Say { message },
    3 => Record { number, state },
    4 => Replaced {},
});

/// Beginning of a purpose; the version and the run follow.
const SERVICE: &str = "membership";

/// Purpose of a connection, checked beside its token: workers of one run cannot call another run's arbiter.
pub(super) fn purpose(run: &str) -> String {
    format!("{SERVICE}/{VERSION} of {run}")
}

/// Returns the version and the run of a purpose. Version 1 had no number.
pub(crate) fn version_and_run(purpose: &str) -> Option<(u8, &str)> {
    let (version, run) = purpose.strip_prefix(SERVICE)?.split_once(" of ")?;
    let version = if version.is_empty() { 1 } else { version.strip_prefix('/')?.parse().ok()? };
    Some((version, run))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Wire;
    use crate::{ConnectionError, Digest};
    use meshstep_comm::rendezvous;

    #[test]
    fn another_version_is_refused_by_its_number_and_another_run_by_its_name() {
        let addr = "127.0.0.1:7".parse().unwrap();
        let refused = |serves: &str| {
            let (run_id, store) = (purpose("a"), serves.to_owned());
            ConnectionError::from(rendezvous::Error::OtherRun { addr, run_id, store })
        };
        let other = |theirs| ConnectionError::OtherVersion { addr, mine: VERSION, theirs };
        assert_eq!(refused("membership of a"), other(1));
        assert_eq!(refused("membership/9 of a"), other(9));
        let (run, serves) = ("a".to_owned(), "b of c".to_owned());
        assert_eq!(refused(&purpose("b of c")), ConnectionError::OtherRun { addr, run, serves });
    }

    #[test]
    fn messages_of_the_service_are_read_as_written_and_no_shorter() {
        let state = State { digest: Some(Digest { plan: 1, rule: 2 }), ..State::new() };
        let record = FromService::Record { number: 7, state };
        for message in [FromService::Term { term: 1 << 32 }, record, FromService::Replaced {}] {
            let bytes = message.encode();
            assert_eq!(FromService::decode(&bytes), Some(message));
            assert!((0..bytes.len()).all(|len| FromService::decode(&bytes[..len]).is_none()));
        }
        for message in
            [ToService::Known { term: 3 }, ToService::Follow { term: 0 }, ToService::Kept { number: 2 }]
        {
            let bytes = message.encode();
            assert_eq!(ToService::decode(&bytes), Some(message));
            assert!((0..bytes.len()).all(|len| ToService::decode(&bytes[..len]).is_none()));
        }
    }
}
