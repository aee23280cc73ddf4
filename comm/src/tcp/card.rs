//! Card of a rank: what the others need to reach it, exchanged once through the store.

use super::host::Host;
use super::options::Encrypt;
use std::net::{IpAddr, SocketAddr};

/// Version of cards, greetings and records.
pub(super) const VERSION: u8 = 3;

/// The card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Card {
    /// Address of the rank's listener.
    pub(super) addr: SocketAddr,
    /// Random name of the listener.
    pub(super) name: String,
    pub(super) host: Host,
    pub(super) encrypt: Encrypt,
}

/// Reason why a card cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unreadable {
    /// The rank's program has another version.
    Version(u8),
    /// The bytes are no card.
    Garbage,
}

impl Card {
    pub(super) fn encode(&self) -> Vec<u8> {
        let Host { boot, network, ipc, id } = &self.host;
        let id = id.map_or(String::new(), |id| id.to_string());
        let ip = self.addr.ip().to_string();
        let mut bytes = vec![VERSION, self.encrypt as u8];
        bytes.extend(self.addr.port().to_le_bytes());
        for text in [&ip, &self.name, boot, network, ipc, &id] {
            bytes.extend((text.len() as u16).to_le_bytes());
            bytes.extend(text.as_bytes());
        }
        bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self, Unreadable> {
        match bytes.first() {
            Some(&VERSION) => Self::fields(&bytes[1..]).ok_or(Unreadable::Garbage),
            Some(&version) => Err(Unreadable::Version(version)),
            None => Err(Unreadable::Garbage),
        }
    }

    fn fields(bytes: &[u8]) -> Option<Self> {
        let (&encrypt, bytes) = bytes.split_first()?;
        let (port, mut rest) = bytes.split_first_chunk::<2>()?;
        let mut text = || {
            let (len, bytes) = rest.split_first_chunk::<2>()?;
            let (text, bytes) = bytes.split_at_checked(u16::from_le_bytes(*len).into())?;
            rest = bytes;
            String::from_utf8(text.to_vec()).ok()
        };
        let ip: IpAddr = text()?.parse().ok()?;
        let name = text()?;
        let [boot, network, ipc, id] = [text()?, text()?, text()?, text()?];
        let id = if id.is_empty() { None } else { Some(id.parse().ok()?) };
        let host = Host { boot, network, ipc, id };
        let addr = SocketAddr::new(ip, u16::from_le_bytes(*port));
        let card = Card { addr, name, host, encrypt: Encrypt::from_byte(encrypt)? };
        rest.is_empty().then_some(card)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn card(addr: &str, encrypt: Encrypt) -> Card {
        let (name, host) =
            ("0a1b".to_owned(), Host::read(Some(u64::MAX).filter(|_| encrypt == Encrypt::Always)));
        Card { addr: addr.parse().unwrap(), name, host, encrypt }
    }

    #[test]
    fn a_card_survives_the_way_and_its_parts_do_not() {
        for encrypt in [Encrypt::Remote, Encrypt::Always, Encrypt::Never] {
            for addr in ["10.0.0.7:80", "[fe80::1]:65535"] {
                let card = card(addr, encrypt);
                let bytes = card.encode();
                assert_eq!(Card::decode(&bytes), Ok(card));
                assert!((0..bytes.len()).all(|len| Card::decode(&bytes[..len]) == Err(Unreadable::Garbage)));
                assert_eq!(Card::decode(&[bytes, vec![0]].concat()), Err(Unreadable::Garbage));
            }
        }
    }

    #[test]
    fn another_version_is_named() {
        let mut bytes = card("127.0.0.1:1", Encrypt::Remote).encode();
        bytes[0] = 9;
        assert_eq!(Card::decode(&bytes), Err(Unreadable::Version(9)));
    }
}
