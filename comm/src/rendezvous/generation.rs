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

/// Time for the store to name the late ranks of a gather.
const ANSWER: Duration = Duration::from_secs(1);

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
            None => self.hopeless(view, || format!("{key:?} was set")).map(Err),
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
    /// [`Error::Late`] with the ranks that had not arrived after `within`, with rank 0 if its store does not answer; [`Error::Left`] with a rank that never will; else as
    /// [`set`](Generation::set) and [`wait`](Generation::wait).
    pub fn all_gather(&self, name: &str, value: &[u8], within: Duration) -> Result<Vec<Vec<u8>>, Error> {
        limit("name", name.len(), MAX_KEY)?;
        limit("value", value.len(), MAX_VALUE)?;
        self.ready()?;
        let ticket = self.member.enter(self.number, name, value);
        let ticket = ticket.map_err(|why| Failure::Lost { rank: 0, why })?;
        PendingGather { generation: self, name, ticket }.wait(within)
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

    /// Returns the error for which no operation of all ranks can succeed any more: a failure, a lost rank, or one that has left.
    pub(crate) fn departure(&self) -> Option<Error> {
        let left = |rank| Error::Left { rank, awaited: "all ranks had met".to_owned() };
        self.member.shared.read(|view| {
            let failed = || view.failure(self.number).map(Error::from);
            self.gone(view).or_else(failed).or_else(|| view.any_left().map(left))
        })
    }

    fn put(&self, key: Vec<u8>, value: &[u8]) -> Result<(), Error> {
        limit("value", value.len(), MAX_VALUE)?;
        self.send(&Message::Set { generation: self.number, key, value: value.to_vec() })
    }

    /// Checks that messages to the store are possible.
    fn ready(&self) -> Result<(), Error> {
        self.member.shared.read(|view| self.gone(view)).map_or(Ok(()), Err)
    }

    fn send(&self, message: &Message) -> Result<(), Error> {
        self.ready()?;
        let rank = 0;
        self.member.send(message).map_err(|why| Failure::Lost { rank, why }.into())
    }

    /// Returns the reason why messages to the store are no longer possible, if any.
    fn gone(&self, view: &StoreView) -> Option<Error> {
        let left = || Error::Left { rank: 0, awaited: "this rank was done".to_owned() };
        let lost = || view.lost().filter(|_| view.over).map(Error::from);
        let gone = self.member.trouble(view).or_else(lost).or_else(|| view.store_left().then(left));
        gone.or_else(|| self.retired(view))
    }

    /// Returns the reason why waiting is pointless, if any.
    fn hopeless(&self, view: &StoreView, awaited: impl Fn() -> String) -> Option<Error> {
        let failed = || view.failure(self.number).map(Error::from);
        let left = || view.store_left().then(|| Error::Left { rank: 0, awaited: awaited() });
        let over = self.member.trouble(view).or_else(failed).or_else(left);
        over.or_else(|| self.retired(view))
    }

    fn retired(&self, view: &StoreView) -> Option<Error> {
        let (generation, oldest) = (self.number, view.oldest());
        (generation < oldest).then_some(Error::OldGeneration { generation, oldest })
    }
}

/// Gather that this rank has entered.
struct PendingGather<'a> {
    generation: &'a Generation,
    name: &'a str,
    ticket: u64,
}

impl PendingGather<'_> {
    fn wait(&self, within: Duration) -> Result<Vec<Vec<u8>>, Error> {
        let shared = &self.generation.member.shared;
        let result = shared.wait_edit(within, |view| self.result(view).map(Some), |_| None);
        let result = result.unwrap_or_else(|| self.ask(within));
        shared.edit(|view| view.abandon(self.ticket));
        result
    }

    /// Returns the values, or the reason why they cannot come, once one of them is known.
    fn result(&self, view: &mut StoreView) -> Option<Result<Vec<Vec<u8>>, Error>> {
        let awaited = || format!("it came to {:?}", self.name);
        match view.take_result(self.ticket) {
            Some(Ok(values)) => Some(Ok(values)),
            Some(Err(rank)) => Some(Err(Error::Left { rank, awaited: awaited() })),
            None => self.generation.hopeless(view, awaited).map(Err),
        }
    }

    /// Asks the store for the ranks that are late.
    fn ask(&self, after: Duration) -> Result<Vec<Vec<u8>>, Error> {
        let (member, number) = (&self.generation.member, self.generation.number);
        let late = |missing| {
            let (name, generation) = (self.name.to_owned(), number);
            Err(Error::Late { name, generation, missing, after })
        };
        self.generation.send(&Message::Ask { generation: number, name: self.name.to_owned() })?;
        let look = |view: &mut StoreView| {
            self.result(view).or_else(|| view.take_absent(number, self.name).map(late))
        };
        // A store that does not answer is the fault of rank 0.
        member.shared.wait_edit(ANSWER, look, |_| late(vec![0]))
    }
}

fn limit(what: &'static str, len: usize, max: usize) -> Result<(), Error> {
    if len > max { Err(Error::TooLarge { what, len, max }) } else { Ok(()) }
}
