//! Ranks as threads: a body runs on each of them, and a panic of one reaches the others.

use super::rank::{End, GroupRank};
use super::seat::RankSeat;
use crate::sync::{Mutex, on_threads};
use crate::{Communicator, Error};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Runs `body` on each rank, on its own thread, and returns the results by rank, or the error of the rank that panicked first.
pub(crate) fn spawn<S: RankSeat, T: Send>(
    handles: Vec<GroupRank<S>>,
    body: impl Fn(Arc<dyn Communicator>) -> T + Sync,
) -> Result<Vec<T>, Error> {
    let first_panic = Mutex::new(None);
    let run = |handle: GroupRank<S>| {
        let (rank, life) = (handle.rank(), handle.life());
        life.watch();
        let result = catch_unwind(AssertUnwindSafe(|| body(Arc::new(handle))));
        let panicked = result.as_ref().err().map(|payload| message(payload.as_ref()));
        if let Some(message) = panicked.clone() {
            first_panic.lock().get_or_insert(Error::Panicked { rank, message });
        }
        life.end(&panicked.map_or(End::Left, End::Panicked));
        result.ok()
    };
    let results = on_threads(handles, run);
    if let Some(error) = first_panic.lock().take() {
        return Err(error);
    }
    let result = |(rank, result): (usize, std::io::Result<Option<T>>)| match result {
        Ok(Some(value)) => Ok(value),
        Ok(None) => Err(Error::Panicked { rank, message: message(&()) }),
        Err(error) => Err(Error::NoThread { rank, message: error.to_string() }),
    };
    results.into_iter().enumerate().map(result).collect()
}

/// Returns the message of a panic.
pub(crate) fn message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().copied();
    let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("no message").to_owned()
}
