//! Bounded streams between the threads of a group, and the bells that wake their readers and writers.

use crate::p2p::hosts::Hosts;
use crate::p2p::transport::Waker;
use crate::sync::real::{Condvar, Mutex};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// ThreadStreams of one group.
#[derive(Debug)]
pub(super) struct Pipes {
    pub(super) ranks: usize,
    pub(super) room: usize,
    pub(super) hosts: Hosts,
    pipes: Vec<Pipe>,
    bells: Vec<Arc<Bell>>,
    split: Mutex<HashMap<(u64, Vec<usize>), Joining>>,
}

/// Group that not all of its members have joined.
#[derive(Debug)]
struct Joining {
    pipes: Arc<Pipes>,
    joined: usize,
}

#[derive(Debug, Default)]
pub(super) struct Pipe {
    state: Mutex<PipeState>,
}

#[derive(Debug, Default)]
struct PipeState {
    bytes: VecDeque<u8>,
    closed: bool,
}

impl Pipes {
    pub(super) fn new(ranks: usize, room: usize, hosts: Hosts) -> Arc<Self> {
        let pipes = (0..2 * ranks * ranks).map(|_| Pipe::default()).collect();
        let bells = (0..ranks).map(|_| Arc::<Bell>::default()).collect();
        Arc::new(Pipes { ranks, room, hosts, pipes, bells, split: Mutex::default() })
    }

    /// Returns the streams of `members`; each of them calls this once.
    pub(super) fn join(&self, members: &[usize], channel: u64) -> Arc<Self> {
        let mut split = self.split.lock();
        let key = (channel, members.to_vec());
        let hosts = || self.hosts.split(members);
        let new = || Joining { pipes: Pipes::new(members.len(), self.room, hosts()), joined: 0 };
        let joining = split.entry(key.clone()).or_insert_with(new);
        joining.joined += 1;
        let (pipes, all) = (Arc::clone(&joining.pipes), joining.joined == members.len());
        if all {
            split.remove(&key);
        }
        pipes
    }

    /// The stream from a rank to another one; with `common`, the other one's copy of the common stream.
    pub(super) fn pipe(&self, from: usize, to: usize, common: bool) -> &Pipe {
        &self.pipes[(from * self.ranks + to) * 2 + usize::from(common)]
    }

    pub(super) fn bell(&self, rank: usize) -> &Arc<Bell> {
        &self.bells[rank]
    }
}

impl Pipe {
    /// Bytes that fit now; `None` if the reader has closed the stream.
    pub(super) fn room(&self, most: usize) -> Option<usize> {
        let state = self.state.lock();
        (!state.closed).then(|| most - state.bytes.len())
    }

    pub(super) fn put(&self, bytes: &[u8], most: usize) {
        let mut state = self.state.lock();
        let len = state.bytes.len();
        state.bytes.reserve_exact(most - len);
        state.bytes.extend(bytes);
    }

    /// Moves at most `most` bytes behind `into`, and returns their number, or `None` if no more will come.
    pub(super) fn take(&self, into: &mut Vec<u8>, most: usize) -> Option<usize> {
        let mut state = self.state.lock();
        let len = most.min(state.bytes.len());
        into.extend(state.bytes.drain(..len));
        (len > 0 || !state.closed || !state.bytes.is_empty()).then_some(len)
    }

    pub(super) fn close(&self) {
        self.state.lock().closed = true;
    }
}

/// Wakes the thread of a rank.
#[derive(Debug, Default)]
pub(super) struct Bell {
    rung: Mutex<u64>,
    changed: Condvar,
}

impl Bell {
    /// Waits until the bell has rung more than `seen` times, at most `at_most`, and returns how often it has rung.
    pub(super) fn wait(&self, seen: u64, at_most: Duration) -> u64 {
        let rung = self.rung.lock();
        if *rung != seen { *rung } else { *self.changed.wait(rung, Some(at_most)) }
    }
}

impl Waker for Bell {
    fn wake(&self) {
        *self.rung.lock() += 1;
        self.changed.notify_all();
    }
}
