//! What backends of CPU ranks share: the queue of a rank's operations, its threads, its communicator, and the comparison of calls.

pub(crate) mod chunk_writer;
pub(crate) mod faults;
pub(crate) mod fold;
pub(crate) mod lane;
pub(crate) mod rank;
pub(crate) mod seat;
pub(crate) mod segments;
pub(crate) mod split_groups;
pub(crate) mod thread_end;
pub(crate) mod threads;
pub(crate) mod verdict;
pub(crate) mod worker;
