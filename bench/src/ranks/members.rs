//! Communicators of workers that come and go: a new world for each epoch, among the members of its round.

use std::fmt;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::str::FromStr;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use meshstep_comm::Communicator;
use meshstep_comm::rendezvous::{Environment, Token};
use meshstep_membership::{Error, Round};

use super::{Launch, world};

/// Ports of a contact. The first member's store of an epoch is still open while that of the next one begins, so they take turns.
const PORTS: usize = 3;

/// Address at which a worker opens the store of an epoch, when it is the epoch's first member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Contact {
    ip: IpAddr,
    ports: [u16; PORTS],
}

impl Contact {
    /// Finds free ports of this address.
    pub(crate) fn free(ip: IpAddr) -> Result<Self> {
        let bind = |_| TcpListener::bind((ip, 0)).with_context(|| format!("--contact {ip}: no free port"));
        // All are held until all are known.
        let listeners = [bind(0)?, bind(1)?, bind(2)?];
        let mut ports = [0; PORTS];
        for (port, listener) in ports.iter_mut().zip(&listeners) {
            *port = listener.local_addr()?.port();
        }
        Ok(Contact { ip, ports })
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

impl FromStr for Contact {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let mut words = text.split(' ');
        let ip = words.next().context("no address")?.parse()?;
        let mut port = || words.next().context("too few ports")?.parse().context("no port");
        Ok(Contact { ip, ports: [port()?, port()?, port()?] })
    }
}

/// Makes this worker's communicator among the members of a round, each of which makes its own. Members of the epoch may be lost
/// before it is complete, which is an error here and costs the workers one exchange.
pub(crate) fn connect(
    round: &Round,
    run: &str,
    token: Option<&Token>,
) -> Result<Arc<dyn Communicator>, Error> {
    let made = environment(round, run, token)
        .and_then(|environment| world::communicator(&Launch::Rendezvous { environment, local_ranks: 1 }));
    // The membership has no error for other causes; this one means that the epoch has no communicators.
    made.map_err(|error| {
        meshstep_comm::Error::Remote { rank: round.rank, message: format!("{error:#}") }.into()
    })
}

/// Returns the place of this worker in the world of a round: ranks are those of the epoch, and its first member runs the store.
fn environment(round: &Round, run: &str, token: Option<&Token>) -> Result<Environment> {
    let first = round.members.first().context("the round has no members")?;
    let contact: Contact = first.contact.parse().with_context(|| {
        format!("worker {}: its contact {:?} is not one of this program", first.id, first.contact)
    })?;
    let store = contact.store(round.epoch);
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
    use std::net::Ipv6Addr;

    use meshstep_membership::Seat;

    use super::*;

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
        assert!("127.0.0.1 1 2".parse::<Contact>().is_err() && "at 7".parse::<Contact>().is_err());
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
    fn a_foreign_contact_is_an_error_that_costs_an_exchange() {
        let error = connect(&round(1, 0, &["at 7"]), "r", None).unwrap_err();
        assert!(matches!(error, Error::Communicator(_)), "{error}");
        assert!(error.to_string().contains("worker 7"), "{error}");
    }
}
