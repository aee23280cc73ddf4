//! Exchange of registered memory between the ranks of a group, over the sockets of its pairs.

use super::group::SharedMemory;
use super::link::{Intro, Received};
use super::peer::system;
use super::split::NO_PROOF;
use crate::p2p::transport::{Lost, Transport, WindowPlace, Windows};
use crate::shared_memory::RegionFault;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;

/// Channel of the letters that bring registered memory; splits have smaller numbers.
const WINDOWS: u64 = 1 << 63;

impl Windows for SharedMemory {
    fn place(&self, start: NonNull<u8>) -> Option<WindowPlace> {
        self.windows.place(start)
    }

    fn offer(&mut self, start: NonNull<u8>, id: u64) -> bool {
        let offered = self.windows.offer(start, id).map_err(|error| error.to_string());
        let others = self.others();
        let sent = offered.and_then(|file| {
            let send = |rank| self.send_window(rank, id, &file).map_err(|lost| lost.to_string());
            others.into_iter().try_for_each(send)
        });
        sent.inspect_err(|why| tracing::warn!(%why, "memory was not offered")).is_ok()
    }

    fn accept(&mut self, id: u64, places: Option<&[WindowPlace]>) -> bool {
        // All letters are taken, also after a fault.
        let mapped = self.others().into_iter().map(|rank| {
            let file = self.receive_window(rank, id);
            let mapped = match (file, places) {
                (Ok(file), Some(places)) => self.windows.map(rank, id, file.as_fd(), places[rank]),
                (Err(fault), Some(_)) => Err(fault),
                (_, None) => return false,
            };
            mapped.inspect_err(|why| tracing::warn!(%why, rank, "memory of a rank was not mapped")).is_ok()
        });
        mapped.fold(true, |all, mapped| all & mapped)
    }

    fn forget(&mut self, id: u64) {
        self.windows.forget(id);
    }

    fn find(&self, address: NonNull<u8>) -> Option<(u64, usize)> {
        self.windows.find(address)
    }

    fn address(&self, rank: usize, id: u64, offset: usize) -> Option<NonNull<u8>> {
        self.windows.address((rank != self.rank()).then_some(rank), id, offset)
    }
}

impl SharedMemory {
    fn others(&self) -> Vec<usize> {
        self.audience().to_vec()
    }

    fn window_intro(&self, id: u64, from: usize, to: usize) -> Intro {
        Intro { channel: WINDOWS | id, from, to, layout: *self.layout(), proof: NO_PROOF }
    }

    fn send_window(&mut self, rank: usize, id: u64, file: &OwnedFd) -> Result<(), Lost> {
        let intro = self.window_intro(id, self.rank(), rank);
        let sent = self.peer_mut(rank)?.met_link()?.send(&intro, &[file.as_fd()]);
        sent.map_err(|error| Lost { peer: rank, why: system("sending memory", error.to_string()) })
    }

    /// Takes the memory that `rank` has sent as window `id`.
    fn receive_window(&mut self, rank: usize, id: u64) -> Result<OwnedFd, RegionFault> {
        let intro = self.window_intro(id, rank, self.rank());
        let fault = |message: String| RegionFault::System { message };
        let link = self.peer_mut(rank).and_then(|peer| peer.met_link());
        let link = link.map_err(|lost| fault(lost.to_string()))?;
        match link.receive(intro.channel).map_err(|error| fault(error.to_string()))? {
            Received::Letter(letter) if intro.equals(&letter) => {
                letter.files.into_iter().next().ok_or_else(|| fault("no descriptor came".to_owned()))
            }
            other => Err(fault(format!("instead of memory came {other:?}"))),
        }
    }
}
