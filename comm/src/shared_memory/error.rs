//! Errors of a meeting of ranks.

use super::RingBytes;

/// Ranks of one host cannot share memory. They can use sockets instead.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum MeetError {
    /// The system has no memory that can be sealed.
    #[error("this system has no memory with F_SEAL_FUTURE_WRITE (Linux 5.1 and later); use sockets")]
    Unsupported,
    /// The bytes of a rank are no card of this version.
    #[error("the card of rank {rank} has another version or is damaged; all ranks need the same build")]
    Card {
        /// The rank.
        rank: usize,
    },
    /// The cards do not contain this rank's at its place.
    #[error(
        "card {rank} of {world_size} is not the one of this listener; gather the cards in the order of the ranks"
    )]
    NotMine {
        /// This rank.
        rank: usize,
        /// Number of cards.
        world_size: usize,
    },
    /// Rings of impossible sizes.
    #[error("rings need a power of two between 64 KiB and 1 GiB, not {rings:?}")]
    Rings {
        /// The sizes.
        rings: RingBytes,
    },
    /// A process of another user answers under the name on the card.
    #[error("rank {rank} runs as another user; ranks that share memory need the same one")]
    OtherUser {
        /// The rank.
        rank: usize,
    },
    /// A rank closed its socket before the introductions.
    #[error("rank {rank} closed its socket: it ended, or has the cards of another group")]
    Gone {
        /// The rank.
        rank: usize,
    },
    /// A rank has another number of ranks or other rings.
    #[error("rank {rank} has other sizes of the group or its rings; give all ranks the same options")]
    Differs {
        /// The rank.
        rank: usize,
    },
    /// The memory of a rank is refused.
    #[error("rank {rank}: {why}")]
    Region {
        /// The rank.
        rank: usize,
        /// The reason.
        why: RegionFault,
    },
    /// Ranks did not come in time.
    #[error("ranks {ranks:?} did not come within the deadline; look at their logs")]
    Late {
        /// Ranks without an introduction.
        ranks: Vec<usize>,
    },
    /// The system refused a call.
    #[error("{what}: {message}")]
    System {
        /// The call.
        what: &'static str,
        /// The system's text.
        message: String,
    },
}

/// Memory that a peer sent and this rank refuses to map.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum RegionFault {
    /// The memory lacks a seal, so its owner could shrink it under its readers.
    #[error("its memory has the seals {found:#x}, not {needed:#x}")]
    Seals {
        /// Seals of the memory.
        found: u32,
        /// Seals of every region.
        needed: u32,
    },
    /// The memory has another size.
    #[error("its memory has {found} bytes, not {needed}")]
    Size {
        /// Bytes of the memory.
        found: i64,
        /// Bytes of every region of the group.
        needed: usize,
    },
    /// The system refused a call.
    #[error("its memory cannot be mapped: {message}")]
    System {
        /// The system's text.
        message: String,
    },
}

impl MeetError {
    /// Returns the error with the ranks of the world, of which `members` has the rank for each of this group.
    pub(crate) fn of_world(self, members: &[usize]) -> Self {
        let world = |rank: usize| members.get(rank).copied().unwrap_or(rank);
        match self {
            MeetError::Card { rank } => MeetError::Card { rank: world(rank) },
            MeetError::OtherUser { rank } => MeetError::OtherUser { rank: world(rank) },
            MeetError::Gone { rank } => MeetError::Gone { rank: world(rank) },
            MeetError::Differs { rank } => MeetError::Differs { rank: world(rank) },
            MeetError::Region { rank, why } => MeetError::Region { rank: world(rank), why },
            MeetError::Late { ranks } => MeetError::Late { ranks: ranks.into_iter().map(world).collect() },
            other => other,
        }
    }

    pub(super) fn system(what: &'static str, error: impl ToString) -> Self {
        MeetError::System { what, message: error.to_string() }
    }
}
