//! Values, barriers and failures of one generation of a group.

use super::message::Message;
use super::store::Member;
use super::view::StoreView;
use super::{Error, Failure};
use std::sync::Arc;
use std::time::Duration;

/// Longest key or name, in bytes.
const MAX_KEY: usize = 256;
/// Longest value, in bytes.
const MAX_VALUE: usize = 16 * 1024;
/// Longest failure text, in bytes.
const MAX_TEXT: usize = 4096;

/// Messages between the ranks of a [`Store`](super::Store) about one generation of a communicator.
///
/// Every wait ends early with [`Error::Failed`] when a failure of this generation is published or a rank is lost.
#[derive(Clone, Debug)]
pub struct Generation {
    member: Arc<Member>,
    number: u64,
}

impl Generation {
    pub(super) fn new(member: Arc<Member>, number: u64) -> Self {
        Generation { member, number }
    }

    /// Number of the generation.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Sets `key` to `value` in the store, which forwards it to all ranks; the last of several values counts. Returns before the
    /// value arrives anywhere, including this rank.
    ///
    /// # Errors
    /// [`Error::TooLarge`] for a key above 256 bytes or a value above 16 KiB; the error that ended the store.
    pub fn set(&self, key: &str, value: &[u8]) -> Result<(), Error> {
        limit("key", key.len(), MAX_KEY)?;
        self.put([b"set ", key.as_bytes()].concat(), value)
    }

    /// Returns the value of `key` if it has arrived at this rank.
    pub fn get(&self, key: &str) -> Option<Vec<u8>> {
        self.member.shared.read(|view| view.value(self.number, &[b"set ", key.as_bytes()].concat()).cloned())
    }

    /// Waits for the value of `key`.
    ///
    /// # Errors
    /// [`Error::NotSet`] after `within`, [`Error::Failed`], [`Error::Left`] when rank 0 left; the error that ended the store.
    pub fn wait(&self, key: &str, within: Duration) -> Result<Vec<u8>, Error> {
        let bytes = [b"set ", key.as_bytes()].concat();
        let look = |view: &StoreView| match view.value(self.number, &bytes) {
            Some(value) => Some(Ok(value.clone())),
            None => self.hopeless(view, &[], || format!("{key:?} was set")).map(Err),
        };
        let late = |_: &StoreView| {
            Err(Error::NotSet { key: key.to_owned(), generation: self.number, after: within })
        };
        self.member.shared.wait(within, look, late)
    }

    /// Gathers one value of every rank, in the order of ranks. Every rank calls it with the same name; a later call with that
    /// name is a separate gather.
    ///
    /// # Errors
    /// [`Error::Late`] with the ranks that had not arrived after `within`; [`Error::Left`] with a rank that never will; else as
    /// [`set`](Generation::set) and [`wait`](Generation::wait).
    pub fn all_gather(&self, name: &str, value: &[u8], within: Duration) -> Result<Vec<Vec<u8>>, Error> {
        limit("name", name.len(), MAX_KEY)?;
        let turn = {
            let mut gathered = self.member.gathered.lock();
            let turn = gathered.entry((self.number, name.to_owned())).or_default();
            *turn += 1;
            *turn
        };
        let key = |rank: usize| format!("gather {turn} {rank} {name}").into_bytes();
        self.put(key(self.member.rank), value)?;
        let keys: Vec<Vec<u8>> = (0..self.member.world_size).map(key).collect();
        self.collect(name, &keys, within)
    }

    fn collect(&self, name: &str, keys: &[Vec<u8>], within: Duration) -> Result<Vec<Vec<u8>>, Error> {
        let missing = |view: &StoreView| -> Vec<usize> {
            (0..keys.len()).filter(|&rank| view.value(self.number, &keys[rank]).is_none()).collect()
        };
        let look = |view: &StoreView| match missing(view) {
            missing if missing.is_empty() => {
                Some(Ok(keys.iter().filter_map(|key| view.value(self.number, key).cloned()).collect()))
            }
            missing => self.hopeless(view, &missing, || format!("it came to {name:?}")).map(Err),
        };
        let late = |view: &StoreView| {
            let (name, generation, missing) = (name.to_owned(), self.number, missing(view));
            Err(Error::Late { name, generation, missing, after: within })
        };
        self.member.shared.wait(within, look, late)
    }

    /// Waits until every rank has called it.
    ///
    /// # Errors
    /// As for [`all_gather`](Generation::all_gather).
    pub fn barrier(&self, name: &str, within: Duration) -> Result<(), Error> {
        self.all_gather(name, &[], within).map(drop)
    }

    /// Reports to every rank that this one failed in this generation; a text above 4 KiB is cut.
    ///
    /// # Errors
    /// The error that ended the store: then the others see this rank as lost.
    pub fn fail(&self, text: &str) -> Result<(), Error> {
        let text = text[..text.floor_char_boundary(MAX_TEXT)].to_owned();
        self.send(&Message::Fail { rank: self.member.rank, generation: self.number, text })
    }

    /// Returns the first failure that concerns this generation: one published in it, or the loss of a rank.
    pub fn failure(&self) -> Option<Failure> {
        self.member.shared.read(|view| view.failure(self.number).cloned())
    }

    /// Waits for such a failure. Returns `None` if there was none after `within`, or if none can arrive because this rank's store
    /// was dropped or rank 0 left.
    pub fn wait_failure(&self, within: Duration) -> Option<Failure> {
        let look = |view: &StoreView| match view.failure(self.number) {
            Some(failure) => Some(Some(failure.clone())),
            None => (view.closed || view.over).then_some(None),
        };
        self.member.shared.wait(within, look, |_| None)
    }

    fn put(&self, key: Vec<u8>, value: &[u8]) -> Result<(), Error> {
        limit("value", value.len(), MAX_VALUE)?;
        self.send(&Message::Set { generation: self.number, key, value: value.to_vec() })
    }

    fn send(&self, message: &Message) -> Result<(), Error> {
        if let Some(error) = self.member.shared.read(|view| self.gone(view)) {
            return Err(error);
        }
        let rank = 0;
        self.member.send(message).map_err(|why| Failure::Lost { rank, why }.into())
    }

    /// Returns the reason why messages to the store are no longer possible, if any.
    fn gone(&self, view: &StoreView) -> Option<Error> {
        let left = || Error::Left { rank: 0, awaited: "this rank was done".to_owned() };
        let lost = || view.lost().filter(|_| view.over).map(Error::from);
        self.member.trouble(view).or_else(lost).or_else(|| view.left(&[]).map(|_| left()))
    }

    /// Returns the reason why waiting for these ranks, or for any rank, is pointless, if any.
    fn hopeless(&self, view: &StoreView, missing: &[usize], awaited: impl Fn() -> String) -> Option<Error> {
        let failed = || view.failure(self.number).map(Error::from);
        let left = || view.left(missing).map(|rank| Error::Left { rank, awaited: awaited() });
        self.member.trouble(view).or_else(failed).or_else(left)
    }
}

fn limit(what: &'static str, len: usize, max: usize) -> Result<(), Error> {
    if len > max { Err(Error::TooLarge { what, len, max }) } else { Ok(()) }
}
