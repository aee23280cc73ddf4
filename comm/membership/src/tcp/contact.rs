//! Contacts of workers, and the communicators of an epoch over them: the epoch's first member opens the store where all meet.

use crate::{Error, Round};
use meshstep_comm::rendezvous::{Environment, Token};
use meshstep_comm::{Communicator, rendezvous, tcp};
use std::fmt;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

/// Ports of a contact. The first member's store of an epoch is still open while that of the next one begins, so they take turns.
const PORTS: usize = 3;

/// Address at which a worker opens the store of an epoch, when it is the epoch's first member. A worker gives it when it joins
/// ([`Caller::contact`](crate::Caller::contact)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Contact {
    ip: IpAddr,
    ports: [u16; PORTS],
}

impl Contact {
    /// Finds free ports of this address of this machine.
    ///
    /// # Errors
    /// [`Error::NoPort`].
    pub fn free(ip: IpAddr) -> Result<Self, Error> {
        let failed = |error: std::io::Error| Error::NoPort { ip, message: error.to_string() };
        let bind = || TcpListener::bind((ip, 0)).map_err(failed);
        // All are held until all are known.
        let listeners = [bind()?, bind()?, bind()?];
        let mut ports = [0; PORTS];
        for (port, listener) in ports.iter_mut().zip(&listeners) {
            *port = listener.local_addr().map_err(failed)?.port();
        }
        Ok(Contact { ip, ports })
    }

    /// Makes this worker's communicator among the members of `round`, each of which calls this function. Members may be lost before
    /// all have called it, which is an error after `deadline` at the latest and costs the workers one exchange. The communicator's
    /// operations wait for other members for `deadline`.
    ///
    /// # Errors
    /// [`Error::World`]; [`Error::NotAContact`] if the first member's contact is not one of these.
    pub fn connect(
        round: &Round,
        run: &str,
        token: Option<&Token>,
        deadline: Duration,
    ) -> Result<Arc<dyn Communicator>, Error> {
        let environment = environment(round, run, token)?;
        let rendezvous = rendezvous::Options { deadline, ..rendezvous::Options::default() };
        let options =
            tcp::Options { rendezvous, connect: deadline, timeout: deadline, ..tcp::Options::default() };
        let world = tcp::join(&environment, &options);
        Ok(world.map_err(|cause| Error::World { epoch: round.epoch, cause })?.communicator())
    }

    /// Returns the address of the store of an epoch.
    fn store(&self, epoch: u64) -> SocketAddr {
        SocketAddr::new(self.ip, self.ports[(epoch % PORTS as u64) as usize])
    }
}

impl fmt::Display for Contact {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c] = self.ports;
        write!(f, "{} {a} {b} {c}", self.ip)
    }
}

/// Text that is no contact.
#[derive(Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a contact is an address and three ports, with spaces between them")]
pub struct InvalidContact;

meshstep_comm::debug_is_display!(InvalidContact);

impl FromStr for Contact {
    type Err = InvalidContact;

    fn from_str(text: &str) -> Result<Self, InvalidContact> {
        let words: Vec<&str> = text.split(' ').collect();
        let [ip, a, b, c] = words[..] else { return Err(InvalidContact) };
        let port = |text: &str| text.parse().map_err(|_| InvalidContact);
        Ok(Contact { ip: ip.parse().map_err(|_| InvalidContact)?, ports: [port(a)?, port(b)?, port(c)?] })
    }
}

/// Returns the place of this worker in the world of a round: ranks are those of the epoch, and its first member runs the store.
fn environment(round: &Round, run: &str, token: Option<&Token>) -> Result<Environment, Error> {
    // A round has members: this worker is one.
    let (id, contact) =
        round.members.first().map(|first| (first.id, first.contact.clone())).unwrap_or_default();
    let found: Result<Contact, _> = contact.parse();
    let store = found.map_err(|_| Error::NotAContact { id, contact })?.store(round.epoch);
    Ok(Environment {
        rank: round.rank,
        world_size: round.members.len(),
        // Each worker is a process of its own machine, as far as the others know.
        local_rank: 0,
        host: store.ip().to_string(),
        port: store.port(),
        run_id: format!("{run} epoch {}", round.epoch),
        restart: round.epoch,
        token: token.cloned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Seat;
    use std::net::Ipv6Addr;

    fn round(epoch: u64, rank: usize, contacts: &[&str]) -> Round {
        let seat = |(id, contact): (u64, &&str)| Seat { id, counts: true, contact: (*contact).to_owned() };
        let members = (7..).zip(contacts).map(seat).collect();
        Round { number: 1, epoch, step: 4, rank, members, gone: Vec::new() }
    }

    #[test]
    fn a_contact_comes_back_from_its_text_and_fits_the_memberships_limit() {
        let found = Contact::free(IpAddr::V4([127, 0, 0, 1].into())).unwrap();
        assert_eq!(found.to_string().parse::<Contact>().unwrap(), found);
        assert!(found.ports[0] != found.ports[1] && found.ports[1] != found.ports[2]);
        let ip = IpAddr::V6(Ipv6Addr::new(u16::MAX, 1, u16::MAX, 1, u16::MAX, 1, u16::MAX, u16::MAX));
        assert!(Contact { ip, ports: [u16::MAX; PORTS] }.to_string().len() <= 64);
        for text in ["127.0.0.1 1 2", "at 7", "127.0.0.1 1 2 3 4", ""] {
            assert!(text.parse::<Contact>().is_err(), "{text}");
        }
        let elsewhere = IpAddr::V4([192, 0, 2, 1].into());
        assert!(matches!(Contact::free(elsewhere), Err(Error::NoPort { .. })));
    }

    #[test]
    fn an_epoch_has_one_store_and_the_next_epoch_another() {
        let of =
            |epoch, rank| environment(&round(epoch, rank, &["127.0.0.1 10 20 30", "x"]), "r", None).unwrap();
        let [first, second] = [of(4, 0), of(4, 1)];
        assert_eq!((first.rank, second.rank, first.world_size), (0, 1, 2));
        assert_eq!((&first.host, first.port, &first.run_id), (&second.host, second.port, &second.run_id));
        assert_eq!(first.host, "127.0.0.1");
        assert_eq!([4, 5, 6, 7].map(|epoch| of(epoch, 0).port), [20, 30, 10, 20]);
        assert_ne!(of(5, 0).run_id, first.run_id);
    }

    #[test]
    fn a_member_that_does_not_come_is_an_error_at_the_deadline_and_a_foreign_contact_at_once() {
        let deadline = Duration::from_millis(200);
        let error = Contact::connect(&round(1, 0, &["at 7"]), "r", None, deadline).unwrap_err();
        assert_eq!(error, Error::NotAContact { id: 7, contact: "at 7".to_owned() });
        let mine = Contact::free(IpAddr::V4([127, 0, 0, 1].into())).unwrap().to_string();
        let error = Contact::connect(&round(1, 0, &[&mine, "x"]), "r", None, deadline).unwrap_err();
        assert!(matches!(error, Error::World { epoch: 1, .. }), "{error}");
    }
}
