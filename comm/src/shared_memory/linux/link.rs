//! Unix socket between two ranks: messages with file descriptors, and notice of the other's end.

use super::layout::Layout;
use rustix::io::{Errno, Result};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

/// First bytes of every message; the last one is the version of regions and messages.
const MAGIC: u64 = u64::from_be_bytes(*b"msshmem\x01");
const WORDS: usize = 7;
const PROOF: usize = 32;
const LEN: usize = WORDS * 8 + PROOF;
/// Largest number of descriptors of a message: memory, bell, socket.
const MAX_FILES: usize = 3;

/// Introduction of one rank to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Intro {
    pub(super) channel: u64,
    pub(super) from: usize,
    pub(super) to: usize,
    pub(super) layout: Layout,
    /// Secrets of both cards; zeros between ranks that are linked already.
    pub(super) proof: [u8; PROOF],
}

impl Intro {
    fn words(&self) -> [u64; WORDS] {
        let Layout { world_size, rings } = self.layout;
        let sizes = [world_size, rings.single, rings.common, self.from, self.to].map(|word| word as u64);
        let [world_size, single, common, from, to] = sizes;
        [MAGIC, self.channel, world_size, single, common, from, to]
    }

    /// Returns true if `letter` says the same.
    pub(super) fn equals(&self, letter: &Letter) -> bool {
        self.words() == letter.words && self.proves(letter)
    }

    /// Returns true if `letter` contains both secrets.
    pub(super) fn proves(&self, letter: &Letter) -> bool {
        let differing = self.proof.iter().zip(&letter.proof).fold(0, |all, (a, b)| all | (a ^ b));
        differing == 0
    }
}

/// Received introduction, not yet compared with the expected one.
#[derive(Debug)]
pub(super) struct Letter {
    words: [u64; WORDS],
    proof: [u8; PROOF],
    pub(super) files: Vec<OwnedFd>,
}

impl Letter {
    /// Returns the rank that the letter names as its sender.
    pub(super) fn from(&self) -> usize {
        usize::try_from(self.words[5]).unwrap_or(usize::MAX)
    }

    fn channel(&self) -> u64 {
        self.words[1]
    }

    fn decode(bytes: &[u8; LEN], files: Vec<OwnedFd>) -> Self {
        let (words, proof) = bytes.split_at(WORDS * 8);
        let mut letter = Letter { words: [0; WORDS], proof: [0; PROOF], files };
        for (word, bytes) in letter.words.iter_mut().zip(words.as_chunks().0) {
            *word = u64::from_le_bytes(*bytes);
        }
        letter.proof.copy_from_slice(proof);
        letter
    }
}

/// Result of a receive.
#[derive(Debug)]
pub(super) enum Received {
    Letter(Letter),
    /// A message that is no introduction.
    Garbage,
    /// The other process closed the socket or ended.
    PeerEnd,
    /// Nothing yet.
    Nothing,
}

/// Socket between two ranks of a group. Groups that are split from it share it until their members have met.
#[derive(Debug)]
pub(super) struct Link {
    socket: OwnedFd,
    /// Letters that a group took for others.
    inbox: Mutex<Vec<Letter>>,
}

impl Link {
    pub(super) fn new(socket: OwnedFd) -> Self {
        Link { socket, inbox: Mutex::default() }
    }

    pub(super) fn into_socket(self) -> OwnedFd {
        self.socket
    }

    pub(super) fn send(&self, intro: &Intro, files: &[BorrowedFd<'_>]) -> Result<()> {
        send(self.socket.as_fd(), intro, files)
    }

    /// Returns the letter for `channel`, or what else the socket has: nothing, or its end.
    pub(super) fn receive(&self, channel: u64) -> Result<Received> {
        let mut inbox = self.inbox.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = inbox.iter().position(|letter| letter.channel() == channel) {
            return Ok(Received::Letter(inbox.swap_remove(at)));
        }
        loop {
            match receive(self.socket.as_fd())? {
                Received::Letter(letter) if letter.channel() != channel => inbox.push(letter),
                received => return Ok(received),
            }
        }
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Sends one message with descriptors.
fn send(socket: BorrowedFd<'_>, intro: &Intro, files: &[BorrowedFd<'_>]) -> Result<()> {
    let mut bytes = [0; LEN];
    for (place, word) in bytes.as_chunks_mut().0.iter_mut().zip(intro.words()) {
        *place = word.to_le_bytes();
    }
    bytes[WORDS * 8..].copy_from_slice(&intro.proof);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(files)), "{} descriptors", files.len());
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, flags).map(drop)
}

/// Receives one message with its descriptors.
pub(super) fn receive(socket: BorrowedFd<'_>) -> Result<Received> {
    match receive_once(socket) {
        // The system reports once that the peer closed with unread messages; those that it sent before come after that.
        Err(Errno::CONNRESET) => receive_once(socket),
        received => received,
    }
}

fn receive_once(socket: BorrowedFd<'_>) -> Result<Received> {
    let mut bytes = [0; LEN];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let message = match recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags) {
        Err(Errno::AGAIN | Errno::INTR) => return Ok(Received::Nothing),
        result => result?,
    };
    let files: Vec<OwnedFd> = control
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(files) => Some(files),
            _ => None,
        })
        .flatten()
        .collect();
    let truncated = message.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC);
    Ok(match message.bytes {
        0 => Received::PeerEnd,
        LEN if !truncated => Received::Letter(Letter::decode(&bytes, files)),
        _ => Received::Garbage,
    })
}
