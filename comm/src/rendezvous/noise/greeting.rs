//! Clear part of a greeting, which both sides hash into the handshake, and refusals in clear.

use super::super::Why;

/// Protocol version. Versions are not negotiated: a peer of another one is refused.
pub(in crate::rendezvous) const VERSION: u8 = 2;
/// Longest purpose and longest endpoint, in bytes.
pub(in crate::rendezvous) const MAX_NAME: usize = 264;
/// First bytes of a greeting.
const MAGIC: &[u8; 4] = b"mstp";
/// First byte of a reply.
const MESSAGE: u8 = 1;
const ALERT: u8 = 2;

/// The listener that a caller wants: any other one refuses the call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::rendezvous) struct CallHeader {
    /// Service of the listener.
    pub(in crate::rendezvous) purpose: String,
    /// Name of the listener: an address as the caller has it, or a random name that was published with the address.
    pub(in crate::rendezvous) endpoint: String,
}

impl CallHeader {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.push(VERSION);
        for name in [&self.purpose, &self.endpoint] {
            bytes.extend((name.len() as u16).to_le_bytes());
            bytes.extend(name.as_bytes());
        }
        bytes
    }

    /// Splits a greeting into its header, the header's bytes and the Noise message.
    pub(super) fn split(greeting: &[u8]) -> Result<(Self, &[u8], &[u8]), Why> {
        let rest = greeting.strip_prefix(MAGIC).ok_or(Why::NotUnderstood)?;
        let (version, rest) = rest.split_first().ok_or(Why::NotUnderstood)?;
        if *version != VERSION {
            return Err(Why::OtherVersion { theirs: *version });
        }
        let (purpose, rest) = name(rest).ok_or(Why::NotUnderstood)?;
        let (endpoint, message) = name(rest).ok_or(Why::NotUnderstood)?;
        let header = &greeting[..greeting.len() - message.len()];
        Ok((CallHeader { purpose, endpoint }, header, message))
    }
}

fn name(bytes: &[u8]) -> Option<(String, &[u8])> {
    let (len, rest) = bytes.split_first_chunk::<2>()?;
    let len = usize::from(u16::from_le_bytes(*len));
    let (name, rest) = rest.split_at_checked(len).filter(|_| len <= MAX_NAME)?;
    Some((String::from_utf8(name.to_vec()).ok()?, rest))
}

/// Refusal in clear, by a listener that shares no key with the caller. A forged one ends a call, as a reset does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::rendezvous) enum Alert {
    /// The listener has another token.
    Token,
    /// The listener has this protocol version.
    Version(u8),
}

impl Alert {
    /// The refusal for a stranger's fault; `None` for peers that do not speak this protocol.
    pub(in crate::rendezvous) fn of(why: &Why) -> Option<Self> {
        match why {
            Why::WrongToken => Some(Alert::Token),
            Why::OtherVersion { .. } => Some(Alert::Version(VERSION)),
            _ => None,
        }
    }

    pub(in crate::rendezvous) fn encode(self) -> Vec<u8> {
        match self {
            Alert::Token => vec![ALERT, 1],
            Alert::Version(version) => vec![ALERT, 2, version],
        }
    }
}

/// Returns the reply that carries a Noise message.
pub(super) fn reply(message: &[u8]) -> Vec<u8> {
    [&[MESSAGE], message].concat()
}

/// Returns the Noise message of a reply.
pub(super) fn message(reply: &[u8]) -> Result<&[u8], Why> {
    match reply {
        [MESSAGE, message @ ..] => Ok(message),
        [ALERT, 1] => Err(Why::WrongToken),
        [ALERT, 2, theirs] => Err(Why::OtherVersion { theirs: *theirs }),
        _ => Err(Why::NotUnderstood),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    fn header() -> CallHeader {
        CallHeader { purpose: "store".to_owned(), endpoint: "[::1]:29501".to_owned() }
    }

    #[test]
    fn a_header_is_read_as_written_and_no_shorter() {
        let bytes = header().encode();
        let greeting = [&bytes[..], b"noise"].concat();
        assert_eq!(CallHeader::split(&greeting), Ok((header(), &bytes[..], &b"noise"[..])));
        for len in 0..bytes.len() {
            assert_eq!(CallHeader::split(&bytes[..len]), Err(Why::NotUnderstood), "{len}");
        }
    }

    #[test]
    fn a_peer_of_another_version_is_named() {
        let mut bytes = header().encode();
        bytes[4] = 9;
        let why = CallHeader::split(&bytes).unwrap_err();
        assert_eq!(why, Why::OtherVersion { theirs: 9 });
        let alert = Alert::of(&why).unwrap();
        assert_eq!(message(&alert.encode()), Err(Why::OtherVersion { theirs: VERSION }));
        assert_eq!(message(&Alert::Token.encode()), Err(Why::WrongToken));
        assert_eq!(Alert::of(&Why::NotUnderstood), None);
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_header_or_an_error(bytes in vec(prop_oneof![Just(0), 0..9u8, any::<u8>()], 0..80), with_magic in any::<bool>()) {
            let magic: &[u8] = if with_magic { b"mstp\x02" } else { b"" };
            let bytes = [magic, &bytes].concat();
            if let Ok((header, clear, _)) = CallHeader::split(&bytes) {
                prop_assert_eq!(header.encode(), clear);
            }
        }
    }
}
