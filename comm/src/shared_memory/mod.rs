//! Transport between processes of one host: each rank writes to memory of its own, which its peers map read-only.
//!
//! | item | meaning |
//! |---|---|
//! | [`MemoryListener`] | socket of a rank: gives its card, and connects it with the ranks of other cards |
//! | [`RingBytes`] | sizes of the rings |
//! | [`MeetError`] | reason why ranks do not share memory |
//!
//! # Memory
//!
//! A rank has one memfd for each of its groups: a ring for each other rank, a common ring that all others read, the positions up to
//! which it has written these, and the positions up to which it has read its peers' rings. A ring is mapped twice in a row, so
//! that its bytes are contiguous. Pages that are not used cost no memory. The memory has no name in any file system, and the
//! kernel frees it with the last process that has it.
//!
//! A registered buffer is a memfd of its own, which the peers map and read where it lies. A rank writes its own buffers alone: the
//! others get descriptors that can only be read. When the
//! buffer is dropped, its pages are freed, also where peers still have them mapped.
//!
//! # Sleep
//!
//! A rank without news says in its region that it sleeps, looks once more, and waits in epoll for its eventfd and for the sockets of
//! its peers. A peer that publishes something reads that word and rings the eventfd if needed. The socket of a process that dies
//! reaches its end. Published bytes stay readable. The loss is reported when they are consumed, or when a rank is about to sleep
//! and can do nothing with them: once, by
//! [`progress`](crate::p2p::transport::Transport::progress) or [`wait`](crate::p2p::transport::Transport::wait). Writes to it, and
//! reads when nothing is left, fail from then on; writes to the audience go on for the other readers.
//!
//! # Trust
//!
//! - The name of a listener can be listed by every user of the host. Strangers are kept out by the user of the other process and by
//!   the secrets of the cards, which both ranks of a pair must prove. So cards may go to ranks of the job alone.
//! - A peer cannot write this rank's memory. It can write its own while this rank reads it: the bytes of a faulty peer are its
//!   own fault, like the bytes of a faulty peer on a socket. But this rank holds references to bytes between the two positions,
//!   which an honest peer leaves alone; a peer that rewrites them breaks Rust's rules in this process. A process with the job's
//!   token is trusted not to.
//! - Positions of a peer are compared with the possible ones, and sizes and seals of its memory before it is mapped. So no peer can
//!   cause an access outside of a mapping, or SIGBUS by shrinking its memory. The kernel still raises SIGBUS where it has no
//!   memory left for a page of shared memory.
//!
//! # Limits
//!
//! - Linux 5.1. On other systems [`MemoryListener::open`] returns [`MeetError::Unsupported`].
//! - Ranks need the same user and the same network namespace.
//! - Each pair of ranks of each group has a socket and an eventfd: 64 ranks need 130 descriptors for a group. A buffer that can be
//!   registered has a descriptor until it is; of 256 such buffers no more are made.
//! - A split needs the agreement of its members before: one that has not made the group itself is a loss.

mod error;
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
mod linux;
mod rings;
#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
mod unsupported;

pub(crate) use error::{MeetError, RegionFault};
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
pub(crate) use linux::MemoryListener;
pub(crate) use rings::RingBytes;
#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
pub(crate) use unsupported::MemoryListener;
