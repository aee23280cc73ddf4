//! Messages between ranks and the store, and their encoding: little-endian; trailing or missing bytes are an error.

mod codec;

use super::{Broken, Refusal, Why};
use codec::{Reader, Writer};
use std::time::Duration;

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
    // The listener's verdict.
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
    Gather {
        generation: u64,
        name: String,
        value: Vec<u8>,
    },
    /// Asks for the ranks that the sender's oldest gather of this name awaits.
    Ask {
        generation: u64,
        name: String,
    },
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
    /// The values of all ranks, in their order.
    Gathered {
        generation: u64,
        name: String,
        values: Vec<Vec<u8>>,
    },
    /// Generations below this one are dropped.
    Retired {
        below: u64,
    },
    // From the store to the ranks of an incomplete gather.
    Absent {
        generation: u64,
        name: String,
        ranks: Vec<usize>,
    },
    /// The gather cannot complete: a rank left before it.
    Hopeless {
        generation: u64,
        name: String,
        rank: usize,
    },
}

impl Message {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Writer(Vec::new());
        match self {
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
            Message::Gather { generation, name, value } => {
                out.bytes(&[16]).number(*generation).text(name).counted(value)
            }
            Message::Ask { generation, name } => out.bytes(&[17]).number(*generation).text(name),
            Message::Gathered { generation, name, values } => {
                out.bytes(&[18]).number(*generation).text(name).list(values, |out, value| {
                    out.counted(value);
                })
            }
            Message::Retired { below } => out.bytes(&[19]).number(*below),
            Message::Absent { generation, name, ranks } => {
                out.bytes(&[20]).number(*generation).text(name).list(ranks, |out, rank| {
                    out.number(*rank as u64);
                })
            }
            Message::Hopeless { generation, name, rank } => {
                out.bytes(&[21]).number(*generation).text(name).number(*rank as u64)
            }
        };
        out.0
    }

    /// Decodes a message; `None` if no [`encode`](Message::encode) returns these bytes.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut input = Reader(bytes);
        let message = match input.byte()? {
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
            16 => {
                Message::Gather { generation: input.number()?, name: input.text()?, value: input.counted()? }
            }
            17 => Message::Ask { generation: input.number()?, name: input.text()? },
            18 => {
                let (generation, name) = (input.number()?, input.text()?);
                Message::Gathered { generation, name, values: input.list(Reader::counted)? }
            }
            19 => Message::Retired { below: input.number()? },
            20 => {
                let (generation, name) = (input.number()?, input.text()?);
                Message::Absent { generation, name, ranks: input.list(Reader::size)? }
            }
            21 => {
                let (generation, name) = (input.number()?, input.text()?);
                Message::Hopeless { generation, name, rank: input.size()? }
            }
            _ => return None,
        };
        input.0.is_empty().then_some(message)
    }

    /// Appends the message to a batch, which travels as one message of the connection.
    pub(super) fn batch(encoded: &[u8], batch: &mut Vec<u8>) {
        batch.extend_from_slice(&(encoded.len() as u32).to_le_bytes());
        batch.extend_from_slice(encoded);
    }

    /// Decodes a batch; `None` if one of its messages is invalid.
    pub(super) fn decode_batch(bytes: &[u8]) -> Option<Vec<Self>> {
        let (mut input, mut messages) = (Reader(bytes), Vec::new());
        while !input.0.is_empty() {
            messages.push(Message::decode(input.slice()?)?);
        }
        Some(messages)
    }
}

impl Claim {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Writer(Vec::new());
        out.text(&self.run_id).number(self.restart).number(self.rank as u64).number(self.world_size as u64);
        out.0
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut input = Reader(bytes);
        let (run_id, restart) = (input.text()?, input.number()?);
        let claim = Claim { run_id, restart, rank: input.size()?, world_size: input.size()? };
        input.0.is_empty().then_some(claim)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    /// Returns one message of each kind.
    fn all() -> Vec<Message> {
        let after = Duration::from_millis(1500);
        let refusals = [
            Refusal::OtherRun { store: "other".to_owned() },
            Refusal::OtherRestart { store: 2 },
            Refusal::OtherWorldSize { store: 8 },
            Refusal::RankTaken,
            Refusal::RankGone,
            Refusal::RankLeft,
            Refusal::OtherPurpose { listener: "store".to_owned() },
            Refusal::OtherEndpoint { listener: "host:1".to_owned() },
        ];
        let whys = [
            Why::Closed,
            Why::Silent { after },
            Why::TooLong { len: 9, max: 8 },
            Why::Forged,
            Why::NotUnderstood,
            Why::WrongToken,
            Why::System { message: "no".to_owned() },
            Why::OtherVersion { theirs: 9 },
            Why::OtherPurpose,
            Why::OtherEndpoint,
        ];
        let broken = [
            Broken::SameRank { rank: 1 },
            Broken::WorldSize { rank: 1, world_size: 5 },
            Broken::GaveUp { rank: 2, after },
            Broken::Full { max: 7 },
        ];
        let mut all = vec![
            Message::Welcome,
            Message::Set { generation: 1, key: b"k".to_vec(), value: vec![0; 128] },
            Message::Fail { rank: 3, generation: u64::MAX, text: "out of memory".to_owned() },
            Message::Beat,
            Message::GiveUp { after },
            Message::Bye,
            Message::Joined { rank: 3 },
            Message::Left { rank: 3 },
            Message::Gather { generation: 1, name: "ü".to_owned(), value: vec![1, 2] },
            Message::Ask { generation: 1, name: "n".to_owned() },
            Message::Gathered { generation: 1, name: "n".to_owned(), values: vec![vec![], vec![1; 9]] },
            Message::Retired { below: 5 },
            Message::Absent { generation: 1, name: "n".to_owned(), ranks: vec![0, 7] },
            Message::Hopeless { generation: 1, name: "n".to_owned(), rank: 2 },
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
    fn a_claim_and_a_batch_are_read_as_written_and_no_longer() {
        let claim = Claim { run_id: "run ü".to_owned(), restart: 3, rank: 1, world_size: 4 };
        let mut bytes = claim.encode();
        assert_eq!(Claim::decode(&bytes), Some(claim));
        bytes.push(0);
        assert_eq!(Claim::decode(&bytes), None);
        let mut batch = Vec::new();
        all().iter().for_each(|message| Message::batch(&message.encode(), &mut batch));
        assert_eq!(Message::decode_batch(&batch), Some(all()));
        batch.push(0);
        assert_eq!(Message::decode_batch(&batch), None);
    }

    proptest! {
        /// Arbitrary bytes give a message that encodes to the same bytes, or `None`, and never a panic.
        #[test]
        fn any_bytes_are_a_message_or_nothing(kind in 0..23u8, rest in vec(prop_oneof![Just(0), 0..9u8, any::<u8>()], 0..120)) {
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
