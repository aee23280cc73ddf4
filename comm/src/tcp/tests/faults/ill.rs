//! Transport of a rank that writes wrong frames: garbage between two frames, an end within one, silence, late ones.

use super::schedule::{Dice, FrameFault, FrameKind};
use crate::p2p::transport::{Lost, Source, Target, Transport, Waker, WindowAllocator, Windows};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Transport with a fault.
#[derive(Debug)]
pub(super) struct Ill {
    inner: Box<dyn Transport>,
    fault: FrameFault,
    written: usize,
    state: State,
    /// True if the last write was taken completely, so that the next one begins a frame.
    between: bool,
}

#[derive(Debug)]
enum State {
    Well,
    /// These bytes come before the next ones for the target.
    Garbage(Target, Vec<u8>),
    Mute,
    Stalled(Instant),
    /// The fault is over.
    Done,
}

impl Ill {
    pub(super) fn new(inner: Box<dyn Transport>, fault: FrameFault) -> Self {
        Ill { inner, fault, written: 0, state: State::Well, between: true }
    }

    /// Begins the fault if the write reaches its byte; returns the part that is still well.
    fn begin(&mut self, to: Target, bytes: &[u8]) -> usize {
        let left = self.fault.at.saturating_sub(self.written);
        match (self.fault.kind, &self.state) {
            (FrameKind::Garbage(seed), State::Well)
                if left == 0 && self.between && bytes.starts_with(b"ms") =>
            {
                let mut dice = Dice::new(seed);
                let garbage = (0..9 + dice.below(90)).map(|_| dice.next() as u8).collect();
                self.state = State::Garbage(to, garbage);
            }
            (FrameKind::Mute, State::Well) if left < bytes.len() => {
                self.state = State::Mute;
                return left;
            }
            (FrameKind::Close, State::Well) if left < bytes.len() => {
                self.state = State::Done;
                return left;
            }
            (FrameKind::Stall(pause), State::Well) if left < bytes.len() => {
                self.state = State::Stalled(Instant::now() + pause);
                return left;
            }
            _ => {}
        }
        bytes.len()
    }

    /// Writes the garbage for the target; returns true if none is left.
    fn write_garbage(&mut self, to: Target) -> Result<bool, Lost> {
        if let State::Garbage(target, garbage) = &mut self.state
            && *target == to
        {
            let len = self.inner.write(to, garbage)?;
            garbage.drain(..len);
            if !garbage.is_empty() {
                return Ok(false);
            }
            self.state = State::Done;
        }
        Ok(true)
    }
}

impl Transport for Ill {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world_size(&self) -> usize {
        self.inner.world_size()
    }

    fn audience(&self) -> &[usize] {
        self.inner.audience()
    }

    fn write(&mut self, to: Target, bytes: &[u8]) -> Result<usize, Lost> {
        match self.state {
            State::Mute => return Ok(bytes.len()),
            State::Stalled(until) if Instant::now() < until => return Ok(0),
            _ => {}
        }
        let was_well = matches!(self.state, State::Well);
        let well = self.begin(to, bytes);
        if !self.write_garbage(to)? {
            return Ok(0);
        }
        let len = self.inner.write(to, &bytes[..well])?;
        self.written += len;
        self.between = len == bytes.len();
        if was_well && matches!(self.state, State::Done) && self.fault.kind == FrameKind::Close {
            self.inner.close();
        }
        // A mute rank takes the rest of the frame that it has cut.
        let mute = matches!(self.state, State::Mute) && len == well;
        Ok(if mute { bytes.len() } else { len })
    }

    fn progress(&mut self) -> Result<bool, Lost> {
        self.inner.progress()
    }

    fn arrived(&self, from: Source) -> &[u8] {
        self.inner.arrived(from)
    }

    fn consume(&mut self, from: Source, len: usize) {
        self.inner.consume(from, len);
    }

    fn read(&mut self, from: Source, into: &mut [u8]) -> Result<usize, Lost> {
        self.inner.read(from, into)
    }

    fn wait(&mut self, at_most: Duration) -> Result<(), Lost> {
        self.inner.wait(at_most)
    }

    fn waker(&self) -> Arc<dyn Waker> {
        self.inner.waker()
    }

    fn split(&mut self, members: &[usize], channel: u64) -> Result<Box<dyn Transport>, Lost> {
        self.inner.split(members, channel)
    }

    fn window_allocator(&self) -> Option<Arc<dyn WindowAllocator>> {
        self.inner.window_allocator()
    }

    fn windows(&mut self) -> Option<&mut dyn Windows> {
        self.inner.windows()
    }

    fn close(&mut self) {
        self.inner.close();
    }
}
