//! Messages between ranks and the store, and their encoding: little-endian; trailing or missing bytes are an error.

use super::proof::{NONCE, Nonce, Proof, SEAL};
use super::{Broken, Refusal, Why};
use std::time::Duration;

/// Protocol version; a peer of another version gets [`Why::NotUnderstood`].
const VERSION: u8 = 1;

/// Identity that a rank claims.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Claim {
    pub(super) run_id: String,
    pub(super) restart: u64,
    pub(super) rank: usize,
    pub(super) world_size: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Message {
    // Handshake, not sealed.
    Hello {
        nonce: Nonce,
        claim: Claim,
    },
    Challenge {
        nonce: Nonce,
        proof: Proof,
    },
    Answer {
        proof: Proof,
    },
    /// Sent by a rank to a store that does not know its token.
    Stranger,
    /// Sent instead of a hello, to a service other than the store.
    Call {
        nonce: Nonce,
        purpose: String,
    },
    // The store's decision, sealed like all later messages.
    Welcome,
    Refused(Refusal),
    // In both directions: the store forwards the message to all ranks.
    Set {
        generation: u64,
        key: Vec<u8>,
        value: Vec<u8>,
    },
    Fail {
        rank: usize,
        generation: u64,
        text: String,
    },
    Beat,
    // To the store.
    GiveUp {
        after: Duration,
    },
    Bye,
    // From the store to all.
    Joined {
        rank: usize,
    },
    Left {
        rank: usize,
    },
    Lost {
        rank: usize,
        why: Why,
    },
    Broken(Broken),
}

impl Message {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Writer(Vec::new());
        match self {
            Message::Hello { nonce, claim } => {
                out.bytes(&[1, VERSION]).bytes(nonce).text(&claim.run_id);
                out.number(claim.restart).number(claim.rank as u64).number(claim.world_size as u64)
            }
            Message::Challenge { nonce, proof } => out.bytes(&[2]).bytes(nonce).bytes(proof),
            Message::Answer { proof } => out.bytes(&[3]).bytes(proof),
            Message::Stranger => out.bytes(&[4]),
            Message::Welcome => out.bytes(&[5]),
            Message::Refused(refusal) => out.bytes(&[6]).refusal(refusal),
            Message::Set { generation, key, value } => {
                out.bytes(&[7]).number(*generation).counted(key).counted(value)
            }
            Message::Fail { rank, generation, text } => {
                out.bytes(&[8]).number(*rank as u64).number(*generation).text(text)
            }
            Message::Beat => out.bytes(&[9]),
            Message::GiveUp { after } => out.bytes(&[10]).duration(*after),
            Message::Bye => out.bytes(&[11]),
            Message::Joined { rank } => out.bytes(&[12]).number(*rank as u64),
            Message::Left { rank } => out.bytes(&[13]).number(*rank as u64),
            Message::Lost { rank, why } => out.bytes(&[14]).number(*rank as u64).why(why),
            Message::Broken(broken) => out.bytes(&[15]).broken(broken),
            Message::Call { nonce, purpose } => out.bytes(&[16, VERSION]).bytes(nonce).text(purpose),
        };
        out.0
    }

    /// Decodes a message; `None` if no [`encode`](Message::encode) returns these bytes.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut input = Reader(bytes);
        let message = match input.byte()? {
            1 if input.byte()? == VERSION => {
                let (nonce, run_id, restart) = (input.array::<NONCE>()?, input.text()?, input.number()?);
                let claim = Claim { run_id, restart, rank: input.size()?, world_size: input.size()? };
                Message::Hello { nonce, claim }
            }
            2 => Message::Challenge { nonce: input.array::<NONCE>()?, proof: input.array::<SEAL>()? },
            3 => Message::Answer { proof: input.array::<SEAL>()? },
            4 => Message::Stranger,
            5 => Message::Welcome,
            6 => Message::Refused(input.refusal()?),
            7 => Message::Set { generation: input.number()?, key: input.counted()?, value: input.counted()? },
            8 => Message::Fail { rank: input.size()?, generation: input.number()?, text: input.text()? },
            9 => Message::Beat,
            10 => Message::GiveUp { after: input.duration()? },
            11 => Message::Bye,
            12 => Message::Joined { rank: input.size()? },
            13 => Message::Left { rank: input.size()? },
            14 => Message::Lost { rank: input.size()?, why: input.why()? },
            15 => Message::Broken(input.broken()?),
            16 if input.byte()? == VERSION => {
                Message::Call { nonce: input.array::<NONCE>()?, purpose: input.text()? }
            }
            _ => return None,
        };
        input.0.is_empty().then_some(message)
    }
}

struct Writer(Vec<u8>);

impl Writer {
    fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend_from_slice(bytes);
        self
    }

    fn number(&mut self, number: u64) -> &mut Self {
        self.bytes(&number.to_le_bytes())
    }

    fn counted(&mut self, bytes: &[u8]) -> &mut Self {
        self.bytes(&(bytes.len() as u32).to_le_bytes()).bytes(bytes)
    }

    fn text(&mut self, text: &str) -> &mut Self {
        self.counted(text.as_bytes())
    }

    /// Encodes a duration in microseconds, capped at half a million years.
    fn duration(&mut self, duration: Duration) -> &mut Self {
        self.number(u64::try_from(duration.as_micros()).unwrap_or(u64::MAX))
    }

    fn refusal(&mut self, refusal: &Refusal) -> &mut Self {
        match refusal {
            Refusal::OtherRun { store } => self.bytes(&[1]).text(store),
            Refusal::OtherRestart { store } => self.bytes(&[2]).number(*store),
            Refusal::OtherWorldSize { store } => self.bytes(&[3]).number(*store as u64),
            Refusal::RankTaken => self.bytes(&[4]),
            Refusal::RankGone => self.bytes(&[5]),
        }
    }

    fn why(&mut self, why: &Why) -> &mut Self {
        match why {
            Why::Closed => self.bytes(&[1]),
            Why::Silent { after } => self.bytes(&[2]).duration(*after),
            Why::TooLong { len, max } => self.bytes(&[3]).number(*len as u64).number(*max as u64),
            Why::Forged => self.bytes(&[4]),
            Why::NotUnderstood => self.bytes(&[5]),
            Why::WrongToken => self.bytes(&[6]),
            Why::System { message } => self.bytes(&[7]).text(message),
        }
    }

    fn broken(&mut self, broken: &Broken) -> &mut Self {
        match broken {
            Broken::SameRank { rank } => self.bytes(&[1]).number(*rank as u64),
            Broken::WorldSize { rank, world_size } => {
                self.bytes(&[2]).number(*rank as u64).number(*world_size as u64)
            }
            Broken::GaveUp { rank, after } => self.bytes(&[3]).number(*rank as u64).duration(*after),
            Broken::Full { max } => self.bytes(&[4]).number(*max as u64),
        }
    }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (array, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*array)
    }

    fn byte(&mut self) -> Option<u8> {
        self.array::<1>().map(|[byte]| byte)
    }

    fn number(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    fn size(&mut self) -> Option<usize> {
        self.number()?.try_into().ok()
    }

    fn counted(&mut self) -> Option<Vec<u8>> {
        let len = u32::from_le_bytes(self.array()?) as usize;
        let (bytes, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(bytes.to_vec())
    }

    fn text(&mut self) -> Option<String> {
        String::from_utf8(self.counted()?).ok()
    }

    fn duration(&mut self) -> Option<Duration> {
        self.number().map(Duration::from_micros)
    }

    fn refusal(&mut self) -> Option<Refusal> {
        Some(match self.byte()? {
            1 => Refusal::OtherRun { store: self.text()? },
            2 => Refusal::OtherRestart { store: self.number()? },
            3 => Refusal::OtherWorldSize { store: self.size()? },
            4 => Refusal::RankTaken,
            5 => Refusal::RankGone,
            _ => return None,
        })
    }

    fn why(&mut self) -> Option<Why> {
        Some(match self.byte()? {
            1 => Why::Closed,
            2 => Why::Silent { after: self.duration()? },
            3 => Why::TooLong { len: self.size()?, max: self.size()? },
            4 => Why::Forged,
            5 => Why::NotUnderstood,
            6 => Why::WrongToken,
            7 => Why::System { message: self.text()? },
            _ => return None,
        })
    }

    fn broken(&mut self) -> Option<Broken> {
        Some(match self.byte()? {
            1 => Broken::SameRank { rank: self.size()? },
            2 => Broken::WorldSize { rank: self.size()?, world_size: self.size()? },
            3 => Broken::GaveUp { rank: self.size()?, after: self.duration()? },
            4 => Broken::Full { max: self.size()? },
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    /// Returns one message of each kind.
    fn all() -> Vec<Message> {
        let claim = Claim { run_id: "run ü".to_owned(), restart: 3, rank: 1, world_size: 4 };
        let after = Duration::from_millis(1500);
        let refusals = [
            Refusal::OtherRun { store: "other".to_owned() },
            Refusal::OtherRestart { store: 2 },
            Refusal::OtherWorldSize { store: 8 },
            Refusal::RankTaken,
            Refusal::RankGone,
        ];
        let whys = [
            Why::Closed,
            Why::Silent { after },
            Why::TooLong { len: 9, max: 8 },
            Why::Forged,
            Why::NotUnderstood,
            Why::WrongToken,
            Why::System { message: "no".to_owned() },
        ];
        let broken = [
            Broken::SameRank { rank: 1 },
            Broken::WorldSize { rank: 1, world_size: 5 },
            Broken::GaveUp { rank: 2, after },
            Broken::Full { max: 7 },
        ];
        let mut all = vec![
            Message::Hello { nonce: [5; NONCE], claim },
            Message::Challenge { nonce: [6; NONCE], proof: [7; SEAL] },
            Message::Answer { proof: [8; SEAL] },
            Message::Stranger,
            Message::Call { nonce: [9; NONCE], purpose: "other".to_owned() },
            Message::Welcome,
            Message::Set { generation: 1, key: b"k".to_vec(), value: vec![0; 128] },
            Message::Fail { rank: 3, generation: u64::MAX, text: "out of memory".to_owned() },
            Message::Beat,
            Message::GiveUp { after },
            Message::Bye,
            Message::Joined { rank: 3 },
            Message::Left { rank: 3 },
        ];
        all.extend(refusals.map(Message::Refused));
        all.extend(whys.map(|why| Message::Lost { rank: 1, why }));
        all.extend(broken.map(Message::Broken));
        all
    }

    #[test]
    fn every_message_is_read_as_written_and_no_shorter_or_longer() {
        for message in all() {
            let mut bytes = message.encode();
            assert_eq!(Message::decode(&bytes).as_ref(), Some(&message));
            for len in 0..bytes.len() {
                assert_ne!(Message::decode(&bytes[..len]).as_ref(), Some(&message), "{len} of {message:?}");
            }
            bytes.push(0);
            assert_eq!(Message::decode(&bytes), None, "{message:?}");
        }
    }

    #[test]
    fn another_version_is_not_understood() {
        let mut hello = all()[0].encode();
        hello[1] += 1;
        assert_eq!(Message::decode(&hello), None);
    }

    proptest! {
        /// Arbitrary bytes give a message that encodes to the same bytes, or `None`, and never a panic.
        #[test]
        fn any_bytes_are_a_message_or_nothing(kind in 0..18u8, rest in vec(prop_oneof![Just(0), 0..9u8, any::<u8>()], 0..120)) {
            let bytes = [vec![kind], rest].concat();
            if let Some(message) = Message::decode(&bytes) {
                prop_assert_eq!(message.encode(), bytes);
            }
        }

        #[test]
        fn a_changed_message_does_not_panic(at in any::<prop::sample::Index>(), which in any::<prop::sample::Index>(), byte in any::<u8>()) {
            let mut bytes = all()[which.index(all().len())].encode();
            let at = at.index(bytes.len());
            bytes[at] = byte;
            if let Some(message) = Message::decode(&bytes) {
                prop_assert_eq!(message.encode(), bytes);
            }
        }
    }
}
