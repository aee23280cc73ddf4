//! Announcements of streams. A rank that opens a stream chooses its tag and announces it, and the reader posts receives under it. So
//! groups need no communicator of MPI: its creation would wait for every member. The library's reductions do need one: a group's
//! first rank chooses the tag of its creation, and announces it too.

use super::Reductions;
use super::calls::{CallFault, Calls, Requests};
use super::identity::GroupId;
use super::tiles::{TILE, TILES, Tiles};
use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Tag of announcements. Streams have higher ones.
pub(super) const TAG: c_int = 0;

/// Bytes of an announcement.
pub(super) const LEN: usize = 5 * size_of::<u64>();

/// Format of messages: a number that changes with them, and the length of a tile.
const FORMAT: u64 = 0x4d53_4d50_0002_0000_u64 ^ TILE as u64;

/// Returns the format of ranks with these reductions: ranks with different ones would wait for each other.
fn format(reductions: Reductions) -> u64 {
    match reductions {
        Reductions::Ours => FORMAT,
        Reductions::Library => FORMAT ^ 1 << 32,
    }
}

/// Announcements that have arrived in this process, for all groups.
#[derive(Debug)]
pub(super) struct Announcements {
    pub(super) reductions: Reductions,
    /// Highest tag that the library has.
    last_tag: c_int,
    /// Creation tag of the next group that this process leads.
    next_creation: AtomicU64,
    /// Number of ranks of the job.
    world_size: u64,
    inbox: Mutex<AnnouncementInbox>,
}

/// Tags that one rank of a group has announced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StreamTags {
    /// Tag of the stream's messages.
    pub(super) stream: c_int,
    /// Creation tag of the group; without meaning unless the rank is the group's first.
    pub(super) creation: u64,
}

#[derive(Debug)]
struct AnnouncementInbox {
    requests: Requests,
    tiles: Tiles,
    /// Tags of each stream that was announced and not yet opened, by group and rank in the job.
    tags: HashMap<(GroupId, usize), StreamTags>,
    /// Tag of the stream that this process opens next.
    next_tag: c_int,
    format: u64,
    /// Rank with an announcement of another format.
    unlike: Option<usize>,
}

/// Returns an announcement.
fn announcement(format: u64, group: GroupId, tags: StreamTags) -> [u8; LEN] {
    let [high, low] = group.words();
    let mut bytes = [0; LEN];
    let words = [format, high, low, tags.stream as u64, tags.creation];
    for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
        place.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

/// Returns the group and the tags of an announcement, or `None` if it has another format.
fn parse(bytes: &[u8], expected: u64) -> Option<(GroupId, StreamTags)> {
    let bytes: &[u8; LEN] = bytes.try_into().ok()?;
    let mut words = [0; 5];
    for (word, bytes) in words.iter_mut().zip(bytes.as_chunks::<8>().0) {
        *word = u64::from_le_bytes(*bytes);
    }
    let [format, high, low, stream, creation] = words;
    let tags = StreamTags { stream: c_int::try_from(stream).ok()?, creation };
    (format == expected).then_some((GroupId::of_words([high, low]), tags))
}

impl Announcements {
    /// Posts receives of announcements, on a rank of a job of `world_size`; `last_tag` is the highest tag that the library has.
    pub(super) fn new(
        calls: &Calls,
        [rank, world_size]: [usize; 2],
        last_tag: c_int,
        reductions: Reductions,
    ) -> Result<Self, CallFault> {
        let (requests, tags) = (Requests::default(), HashMap::new());
        let mut inbox = AnnouncementInbox {
            requests,
            tiles: Tiles::new(),
            tags,
            next_tag: TAG + 1,
            format: format(reductions),
            unlike: None,
        };
        inbox.requests.grow(TILES);
        for tile in 0..TILES {
            inbox.post(calls, tile)?;
        }
        let (next_creation, inbox) = (AtomicU64::new(rank as u64), Mutex::new(inbox));
        Ok(Announcements { reductions, last_tag, next_creation, world_size: world_size as u64, inbox })
    }

    /// Returns the announcement of a stream.
    pub(super) fn announcement(&self, group: GroupId, tags: StreamTags) -> [u8; LEN] {
        announcement(format(self.reductions), group, tags)
    }

    /// Returns the creation tag of a new group, of which this process is the first rank. No two groups of a job have the same: the
    /// tags of each process have its rank as their remainder.
    pub(super) fn new_creation_tag(&self) -> u64 {
        self.next_creation.fetch_add(self.world_size, Ordering::Relaxed)
    }

    /// Returns a creation tag as MPI takes it.
    pub(super) fn creation_tag(&self, tag: u64) -> Result<c_int, CallFault> {
        let taken = c_int::try_from(tag).ok().filter(|tag| *tag <= self.last_tag);
        taken.ok_or_else(|| {
            let last = self.last_tag;
            let message =
                format!("the library's tags end at {last}, and the group has {tag}; restart the job");
            CallFault { call: "MPI_Comm_create_group", message }
        })
    }

    /// Returns a tag for a new stream of this process. No two streams have the same.
    pub(super) fn new_tag(&self) -> Result<c_int, CallFault> {
        let mut inbox = self.inbox();
        let (tag, last) = (inbox.next_tag, self.last_tag);
        if tag > last {
            let message = format!("all {last} tags of the library are in use; restart the job");
            return Err(CallFault { call: "opening a stream", message });
        }
        inbox.next_tag += 1;
        Ok(tag)
    }

    /// Receives what has arrived.
    pub(super) fn receive(&self, calls: &Calls) -> Result<(), CallFault> {
        self.inbox().receive(calls)
    }

    /// Returns the tags of the stream of `group` from `rank` of the job, once, if it has been announced.
    pub(super) fn take(&self, group: GroupId, rank: usize) -> Result<Option<StreamTags>, CallFault> {
        let mut inbox = self.inbox();
        if inbox.unlike == Some(rank) {
            let message = "its messages have another format; run the same build with the same \
                           mpi::Options::reductions on every rank";
            let message = message.to_owned();
            return Err(CallFault { call: "opening a stream", message });
        }
        Ok(inbox.tags.remove(&(group, rank)))
    }

    /// Asks for the end of the posted receives, and returns true once they have ended.
    pub(super) fn end(&self, calls: &Calls) -> Result<bool, CallFault> {
        let mut inbox = self.inbox();
        (0..TILES).try_for_each(|slot| calls.cancel(&mut inbox.requests, slot))?;
        calls.test(&mut inbox.requests, |_| {})?;
        Ok(inbox.requests.are_free())
    }

    /// Returns the inbox, also after a panic (decision 119): each announcement is complete before it is added.
    fn inbox(&self) -> MutexGuard<'_, AnnouncementInbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for AnnouncementInbox {
    /// Leaks the memory of receives that have not ended.
    fn drop(&mut self) {
        if !self.requests.are_free() {
            std::mem::forget(std::mem::replace(&mut self.tiles, Tiles::new()));
        }
    }
}

impl AnnouncementInbox {
    fn receive(&mut self, calls: &Calls) -> Result<(), CallFault> {
        let mut arrived = [const { None }; TILES];
        calls.test(&mut self.requests, |ended| {
            arrived[ended.slot] = Some((ended.source, ended.len, ended.result));
        })?;
        for (tile, (source, len, result)) in
            arrived.into_iter().enumerate().filter_map(|(tile, a)| Some((tile, a?)))
        {
            result?;
            // SAFETY: the message has arrived, and the receive is posted again below.
            match parse(unsafe { &self.tiles.bytes(tile)[..len] }, self.format) {
                Some((group, tags)) => {
                    self.tags.insert((group, source), tags);
                }
                None => self.unlike = Some(source),
            }
            self.post(calls, tile)?;
        }
        Ok(())
    }

    fn post(&mut self, calls: &Calls, tile: usize) -> Result<(), CallFault> {
        // SAFETY: the tile is read only after its message has arrived, and the memory is leaked if the receive has not ended.
        unsafe { calls.receive(self.tiles.whole(tile), (None, TAG), &mut self.requests, tile) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_announcement_is_read_as_it_was_written() {
        let group = GroupId::WORLD.split(7);
        let ours = format(Reductions::Ours);
        let tags = StreamTags { stream: 0x7fff_ffff, creation: 1 << 40 };
        let mut bytes = announcement(ours, group, tags);
        assert_eq!(parse(&bytes, ours), Some((group, tags)));
        assert_eq!(parse(&bytes, format(Reductions::Library)), None, "other reductions");
        assert_eq!(parse(&bytes[..24], ours), None);
        bytes[0] ^= 1;
        assert_eq!(parse(&bytes, ours), None, "another format");
    }
}
