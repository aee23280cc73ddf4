//! Numbers, texts and reasons as bytes.

use super::super::{Broken, Refusal, Why};
use std::time::Duration;

/// Bytes of a message.
pub(super) struct Writer(pub(super) Vec<u8>);

impl Writer {
    pub(super) fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend_from_slice(bytes);
        self
    }

    pub(super) fn number(&mut self, number: u64) -> &mut Self {
        self.bytes(&number.to_le_bytes())
    }

    pub(super) fn counted(&mut self, bytes: &[u8]) -> &mut Self {
        self.bytes(&(bytes.len() as u32).to_le_bytes()).bytes(bytes)
    }

    pub(super) fn text(&mut self, text: &str) -> &mut Self {
        self.counted(text.as_bytes())
    }

    pub(super) fn list<T>(&mut self, items: &[T], mut write: impl FnMut(&mut Self, &T)) -> &mut Self {
        self.bytes(&(items.len() as u32).to_le_bytes());
        items.iter().for_each(|item| write(self, item));
        self
    }

    /// Encodes a duration in microseconds, capped at half a million years.
    pub(super) fn duration(&mut self, duration: Duration) -> &mut Self {
        self.number(u64::try_from(duration.as_micros()).unwrap_or(u64::MAX))
    }

    pub(super) fn refusal(&mut self, refusal: &Refusal) -> &mut Self {
        match refusal {
            Refusal::OtherRun { store } => self.bytes(&[1]).text(store),
            Refusal::OtherRestart { store } => self.bytes(&[2]).number(*store),
            Refusal::OtherWorldSize { store } => self.bytes(&[3]).number(*store as u64),
            Refusal::RankTaken => self.bytes(&[4]),
            Refusal::RankGone => self.bytes(&[5]),
            Refusal::RankLeft => self.bytes(&[8]),
            Refusal::OtherPurpose { listener } => self.bytes(&[6]).text(listener),
            Refusal::OtherEndpoint { listener } => self.bytes(&[7]).text(listener),
        }
    }

    pub(super) fn why(&mut self, why: &Why) -> &mut Self {
        match why {
            Why::Closed => self.bytes(&[1]),
            Why::Silent { after } => self.bytes(&[2]).duration(*after),
            Why::TooLong { len, max } => self.bytes(&[3]).number(*len as u64).number(*max as u64),
            Why::Forged => self.bytes(&[4]),
            Why::NotUnderstood => self.bytes(&[5]),
            Why::WrongToken => self.bytes(&[6]),
            Why::System { message } => self.bytes(&[7]).text(message),
            Why::OtherVersion { theirs } => self.bytes(&[8, *theirs]),
            Why::OtherPurpose => self.bytes(&[9]),
            Why::OtherEndpoint => self.bytes(&[10]),
        }
    }

    pub(super) fn broken(&mut self, broken: &Broken) -> &mut Self {
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

/// Bytes of a message that have not been read.
pub(super) struct Reader<'a>(pub(super) &'a [u8]);

impl<'a> Reader<'a> {
    pub(super) fn slice(&mut self) -> Option<&'a [u8]> {
        let len = u32::from_le_bytes(self.array()?) as usize;
        let (bytes, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(bytes)
    }

    pub(super) fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (array, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*array)
    }

    pub(super) fn byte(&mut self) -> Option<u8> {
        self.array::<1>().map(|[byte]| byte)
    }

    pub(super) fn number(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    pub(super) fn size(&mut self) -> Option<usize> {
        self.number()?.try_into().ok()
    }

    pub(super) fn counted(&mut self) -> Option<Vec<u8>> {
        self.slice().map(<[u8]>::to_vec)
    }

    /// Reads items until their announced number; a false number ends with the input.
    pub(super) fn list<T>(&mut self, mut read: impl FnMut(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        let len = u32::from_le_bytes(self.array()?);
        let mut items = Vec::new();
        for _ in 0..len {
            items.push(read(self)?);
        }
        Some(items)
    }

    pub(super) fn text(&mut self) -> Option<String> {
        String::from_utf8(self.counted()?).ok()
    }

    pub(super) fn duration(&mut self) -> Option<Duration> {
        self.number().map(Duration::from_micros)
    }

    pub(super) fn refusal(&mut self) -> Option<Refusal> {
        Some(match self.byte()? {
            1 => Refusal::OtherRun { store: self.text()? },
            2 => Refusal::OtherRestart { store: self.number()? },
            3 => Refusal::OtherWorldSize { store: self.size()? },
            4 => Refusal::RankTaken,
            5 => Refusal::RankGone,
            8 => Refusal::RankLeft,
            6 => Refusal::OtherPurpose { listener: self.text()? },
            7 => Refusal::OtherEndpoint { listener: self.text()? },
            _ => return None,
        })
    }

    pub(super) fn why(&mut self) -> Option<Why> {
        Some(match self.byte()? {
            1 => Why::Closed,
            2 => Why::Silent { after: self.duration()? },
            3 => Why::TooLong { len: self.size()?, max: self.size()? },
            4 => Why::Forged,
            5 => Why::NotUnderstood,
            6 => Why::WrongToken,
            7 => Why::System { message: self.text()? },
            8 => Why::OtherVersion { theirs: self.byte()? },
            9 => Why::OtherPurpose,
            10 => Why::OtherEndpoint,
            _ => return None,
        })
    }

    pub(super) fn broken(&mut self) -> Option<Broken> {
        Some(match self.byte()? {
            1 => Broken::SameRank { rank: self.size()? },
            2 => Broken::WorldSize { rank: self.size()?, world_size: self.size()? },
            3 => Broken::GaveUp { rank: self.size()?, after: self.duration()? },
            4 => Broken::Full { max: self.size()? },
            _ => return None,
        })
    }
}
