//! One rank's operations in a group: calls are compared, then bytes move.

use super::cause::{OpWindow, Relay, WireCall};
use super::failure::{Failure, Stop};
use super::group::P2pGroup;
use super::hosts::Hosts;
use super::in_place::{InPlace, write_all};
use super::inbox::Inbox;
use super::links::Links;
use super::memory::OpMemory;
use super::pace::{Pace, STALL};
use super::small::{self, is_small, payload};
use super::transfer::Transfer;
use super::transport::Transport;
use crate::group::chunk_writer::ChunkWriter;
use crate::group::split_groups;
use crate::group::verdict::{self, Party, Stand, Verdict, verdict};
use crate::sync::yields;
use crate::{Action, Called, Error};
use std::{thread::yield_now, time::Duration};

/// Turns without progress before the rank sleeps, and its longest sleep: other groups and a manual clock are looked at in between.
const YIELDS: u32 = 6;
const NAP: Duration = Duration::from_millis(25);
/// State of one rank in a group. One thread at a time uses it.
#[derive(Debug)]
pub(super) struct Engine {
    pub(super) links: Links,
    pub(super) failure: Failure,
    pub(super) transfer: Transfer,
    pub(super) in_place: InPlace,
    pub(super) stands: Vec<Stand>,
    /// Number of each rank's operation that this rank is in with it.
    pub(super) numbers: Vec<u64>,
    /// True for each rank if this rank has relayed its call in the running operation.
    relayed: Vec<bool>,
    /// Number of this rank's operation, the running one or the next.
    pub(super) at: u64,
    /// Collectives that this rank has begun.
    pub(super) collectives: u64,
    pub(super) left: bool,
}

/// Group that a split has formed: its members and the number of its channel.
pub(super) type Formed = Option<(Vec<usize>, u64)>;

/// A running operation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Running<'a> {
    pub(super) group: &'a P2pGroup,
    pub(super) called: Called,
    pub(super) deadline: Duration,
    pub(super) after: Duration,
}

impl Engine {
    pub(super) fn new(transport: Box<dyn Transport>, hosts: Hosts) -> Self {
        let links = Links::new(transport, hosts);
        let n = links.world_size();
        Engine {
            links,
            failure: Failure::default(),
            transfer: Transfer::default(),
            in_place: InPlace::default(),
            stands: vec![Stand::Idle; n],
            numbers: vec![0; n],
            relayed: vec![false; n],
            at: 0,
            collectives: 0,
            left: false,
        }
    }

    /// Runs one operation; the caller turns a failure into the group's.
    ///
    /// # Safety
    /// The memory is this operation's own until this returns, or, if it fails, until the outboxes have abandoned it.
    pub(super) unsafe fn run(
        &mut self,
        running: Running<'_>,
        memory: &OpMemory,
        mut writer: Option<&mut ChunkWriter<'_>>,
    ) -> Result<Formed, Stop> {
        let called = &running.called;
        self.at = called.op_number;
        self.relayed.fill(false);
        self.in_place.clear();
        let window = self.window_of(called, memory);
        if window.is_none() || is_small(called, self.links.world_size()) {
            write_all(called, writer.take())?;
        }
        // SAFETY: the caller's promise: nothing writes to the buffer while the call is copied.
        unsafe { self.post(called, (window, writer.is_some()), memory) };
        let party = self.agree(running)?;
        let formed = self.form(called);
        // SAFETY: the caller's promise.
        unsafe { self.exchange(running, party, window, memory, writer) }?;
        self.at = called.op_number + 1;
        Ok(formed)
    }

    /// Writes the call to the ranks that it concerns, with a small operation's bytes.
    ///
    /// # Safety
    /// The operation of `memory` runs, and nothing writes to the buffer meanwhile.
    unsafe fn post(
        &mut self,
        called: &Called,
        (window, writes): (Option<OpWindow>, bool),
        memory: &OpMemory,
    ) {
        let (me, n, collectives) = (self.links.rank, self.links.world_size(), self.collectives);
        let put = |out: &mut Vec<u8>, to: Option<usize>| {
            let range = payload(called, n, me, to);
            WireCall { called: *called, collectives, payload: range.len(), window, writes }.put(out);
            // SAFETY: the caller's promise.
            out.extend_from_slice(unsafe { memory.slice(range) });
        };
        match called.action.peer() {
            Some(peer) if self.links.outboxes[peer].has_ended() => {}
            Some(peer) => put(self.links.outboxes[peer].frames(), Some(peer)),
            None => {
                self.links.tell_all(put);
                self.collectives += 1;
            }
        }
    }

    /// Waits until the calls of all ranks of the operation agree.
    fn agree(&mut self, running: Running<'_>) -> Result<Party, Stop> {
        let (me, n, called) = (self.links.rank, self.links.world_size(), &running.called);
        let mut idle = 0;
        loop {
            let moved = self.links.poll();
            if called.action.peer().is_some_and(|peer| self.links.peers[peer].common.call.is_some()) {
                // Its call of the send or the receive, on its own stream, may have come between the looks at the two.
                self.links.poll();
            }
            running.group.take_raised()?;
            if self.has_failed_before() {
                return Err(Stop::Heard);
            }
            // A collective has counted itself.
            self.stand(called, self.collectives - u64::from(called.action.peer().is_none()));
            match verdict(&self.stands, me) {
                Verdict::Fail(error) => return Err(Stop::Found(error)),
                Verdict::Go(party) if party.ranks(n).any(|rank| rank == me) => return Ok(party),
                _ => {}
            }
            self.look_for_lost(called.action.peer())?;
            self.relay(called);
            if running.group.clock.now() >= running.deadline {
                let error = verdict::timeout(&self.stands, me, *called, running.after);
                return Err(Stop::Found(error));
            }
            self.rest(running, moved, &mut idle);
        }
    }

    /// Gives the processor away if nothing moved: for a short time without sleep, then until something moves.
    pub(super) fn rest(&mut self, running: Running<'_>, moved: bool, idle: &mut u32) {
        *idle = if moved { 0 } else { *idle + 1 };
        match *idle {
            0 => {}
            1 => yields::until(|| self.links.poll()),
            2..=YIELDS => yield_now(),
            _ => {
                running.group.look_above();
                let left = running.group.clock.sleep_for(running.deadline).unwrap_or(NAP);
                self.links.wait(left.clamp(Duration::from_millis(1), NAP));
            }
        }
    }

    /// Writes down the state of each rank as this one knows it, `begun` collectives after the beginning.
    pub(super) fn stand(&mut self, called: &Called, begun: u64) {
        let pair = called.action.peer().is_some();
        for peer in self.links.others() {
            let links = &self.links.peers[peer];
            self.stands[peer] = match (links.call(), links.notes.left) {
                (Some(call), _) if call.collectives <= begun => Stand::Waiting(call.called),
                (None, Some(left)) if pair || left.collectives <= begun => Stand::Left(left.op_number),
                _ => Stand::Idle,
            };
        }
        self.stands[self.links.rank] = Stand::Waiting(*called);
        for peer in self.links.others() {
            let links = &self.links.peers[peer];
            let Some(call) = links.call() else { continue };
            for relay in links.notes.relays.iter().filter(|relay| relay.within == call.called.op_number) {
                if let Some(stand @ Stand::Idle) = self.stands.get_mut(relay.of) {
                    *stand = Stand::Waiting(relay.called);
                }
            }
        }
    }

    /// Tells the rank that this one waits for in a send or a receive which ranks wait for this one, so that a circle is found.
    fn relay(&mut self, called: &Called) {
        let Some(to) = called.action.peer() else { return };
        for of in 0..self.stands.len() {
            let waits = of != to && of != self.links.rank && self.stands[of].peer().is_some();
            if let (true, false, Stand::Waiting(theirs)) = (waits, self.relayed[of], self.stands[of]) {
                self.relayed[of] = true;
                let relay = Relay { within: called.op_number, of, called: theirs };
                if !self.links.outboxes[to].has_ended() {
                    relay.put(self.links.outboxes[to].frames());
                }
            }
        }
    }

    /// Fails if a rank of the operation can send nothing more, or cannot receive this rank's call.
    fn look_for_lost(&self, peer: Option<usize>) -> Result<(), Stop> {
        let lost = |rank: &usize| {
            let links = &self.links.peers[*rank];
            let incomplete = links.inbox_with_call().and_then(Inbox::payload).is_none();
            let silent = incomplete && self.links.is_dry(*rank);
            let unaware = links.lost.is_some() && links.in_audience && !self.links.common.is_idle();
            peer.is_none_or(|peer| peer == *rank) && (silent || unaware)
        };
        match self.links.others().find(lost) {
            Some(rank) => Err(self.lost(rank)),
            None if self.links.peers[self.links.rank].lost.is_some() => Err(self.lost(self.links.rank)),
            None => Ok(()),
        }
    }

    pub(super) fn lost(&self, rank: usize) -> Stop {
        let why = self.links.peers[rank].lost.as_ref();
        Stop::Found(Error::Lost { rank, why: why.map_or_else(String::new, ToString::to_string) })
    }

    /// Returns this rank's group of a split.
    fn form(&self, called: &Called) -> Formed {
        let Action::Split { .. } = called.action else { return None };
        let asked = |stand: &Stand| match stand.collective().map(|called| called.action) {
            Some(Action::Split { color, key }) => (color, key),
            _ => (None, 0),
        };
        let places = split_groups::places(&self.stands.iter().map(asked).collect::<Vec<_>>());
        let mine = places[self.links.rank]?;
        let mut members = vec![0; mine.world_size];
        for (rank, place) in places.iter().enumerate() {
            if let Some(place) = place.filter(|place| place.group == mine.group) {
                members[place.rank] = rank;
            }
        }
        Some((members, self.collectives))
    }

    /// Moves the bytes of an operation that all its ranks have agreed on.
    ///
    /// # Safety
    /// As for [`run`](Engine::run).
    unsafe fn exchange(
        &mut self,
        running: Running<'_>,
        party: Party,
        window: Option<OpWindow>,
        memory: &OpMemory,
        writer: Option<&mut ChunkWriter<'_>>,
    ) -> Result<(), Stop> {
        if running.called.action.is_done_alone(self.links.world_size()) {
            return Ok(());
        }
        let small = is_small(&running.called, self.links.world_size());
        let in_place = !small && self.opens_in_place(window, party);
        self.note_calls(&running.called, party, small);
        if in_place {
            self.transfer.clear();
            // SAFETY: the caller's promise.
            return unsafe { self.exchange_in_place(running, party, memory, writer) };
        }
        write_all(&running.called, writer)?;
        if !small && self.links.transport.system_reduction(&running.called).is_some() {
            self.transfer.clear();
            // SAFETY: the caller's promise.
            return unsafe { self.reduce_by_system(running, party, memory) };
        }
        let (mut idle, mut pace) = (0, Pace::start());
        loop {
            let moved = self.links.poll();
            // SAFETY: the caller's promise.
            let stepped = !small && unsafe { self.transfer.step(&mut self.links, memory) };
            if self.has_all(small, party) && self.links.is_flushed() {
                break;
            }
            self.look_at_party(running, party, small)?;
            pace.note(moved || stepped);
            self.look_at_clock(running, party, small, &mut pace)?;
            self.rest(running, moved || stepped, &mut idle);
        }
        if small {
            // SAFETY: the caller's promise; every payload has arrived.
            unsafe { small::finish(&self.links, &running.called, memory, &mut self.transfer.tiles) };
            self.others_of(party).for_each(|peer| self.links.peers[peer].take_call());
        }
        Ok(())
    }

    /// Writes down the factors and numbers of the ranks' calls, and takes these unless their bytes came with them.
    fn note_calls(&mut self, called: &Called, party: Party, small: bool) {
        let factor = |stand: &Stand| match stand {
            Stand::Waiting(called) => called.action.factor(),
            _ => 1.0,
        };
        self.transfer.tiles.factors.clear();
        self.transfer.tiles.factors.extend(self.stands.iter().map(factor));
        for peer in self.others_of(party) {
            self.numbers[peer] = self.links.peers[peer].call().map_or(0, |call| call.called.op_number);
            if !small {
                self.links.peers[peer].take_call();
            }
        }
        if small {
            self.transfer.clear();
        } else {
            self.transfer.plan(&self.links, called);
        }
    }

    pub(super) fn others_of(&self, party: Party) -> impl Iterator<Item = usize> + use<> {
        let me = self.links.rank;
        party.ranks(self.links.world_size()).filter(move |rank| *rank != me)
    }

    fn has_all(&self, small: bool, party: Party) -> bool {
        if !small {
            return self.transfer.is_done();
        }
        let arrived =
            |peer: usize| self.links.peers[peer].inbox_with_call().and_then(Inbox::payload).is_some();
        self.others_of(party).all(arrived)
    }

    fn needs_from(&self, small: bool, peer: usize) -> bool {
        self.needs_bytes(small, peer) || !small && self.in_place.needs_from(&self.links, peer)
    }

    fn needs_bytes(&self, small: bool, peer: usize) -> bool {
        let payload = || self.links.peers[peer].inbox_with_call().and_then(Inbox::payload);
        if small { payload().is_none() } else { self.transfer.needs_from(peer) }
    }

    /// Fails if a rank of the operation has failed in it, or is lost.
    pub(super) fn look_at_party(&self, running: Running<'_>, party: Party, small: bool) -> Result<(), Stop> {
        for peer in self.others_of(party) {
            let links = &self.links.peers[peer];
            if links.notes.failed.as_ref().is_some_and(|(at, _)| *at <= self.numbers[peer]) {
                return Err(Stop::Heard);
            }
            let silent = self.links.is_dry(peer) && self.needs_from(small, peer);
            if silent || links.lost.is_some() && self.transfer.needs_to(&self.links, peer) {
                return Err(self.lost(peer));
            }
        }
        if self.links.peers[running.group.rank].lost.is_some() {
            return Err(self.lost(running.group.rank));
        }
        Ok(())
    }

    /// Fails a transfer that stands still after its deadline or after an abort, or trickles on after its deadline.
    pub(super) fn look_at_clock(
        &self,
        running: Running<'_>,
        party: Party,
        small: bool,
        pace: &mut Pace,
    ) -> Result<(), Stop> {
        if pace.stands_still() {
            running.group.take_raised()?;
        }
        let grace = if !small && self.transfer.waits_for_relays() { STALL } else { Duration::ZERO };
        if running.group.clock.now() < running.deadline.saturating_add(grace) || !pace.is_over() {
            return Ok(());
        }
        let needs = |rank| {
            let in_place = !small && self.in_place.waits_for(&self.links, rank);
            let from = in_place || self.needs_bytes(small, rank) || !small && self.transfer.misses(rank);
            from || self.transfer.needs_to(&self.links, rank)
        };
        let stuck = |rank: &usize| *rank != self.links.rank && needs(*rank);
        let (missing, arrived) = party.ranks(self.links.world_size()).partition(stuck);
        let Running { called, after, .. } = running;
        let op_number = called.op_number;
        let error = Error::Timeout { op_number, called: Box::new(called), arrived, missing, after };
        Err(Stop::Found(error))
    }

    /// Returns true if a rank has failed, unless it has completed the operation that its call here is for.
    fn has_failed_before(&self) -> bool {
        self.links.others().any(|peer| {
            let links = &self.links.peers[peer];
            let Some((at, _)) = &links.notes.failed else { return false };
            links.call().is_none_or(|call| *at <= call.called.op_number)
        })
    }
}
