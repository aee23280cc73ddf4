//! Watchdog: one thread for all communicators of the process, which polls their operations and ends all communicators when one
//! fails.
//!
//! A kernel of NCCL that waits for a missing rank never ends, and holds its memory and stream. So every wait here is bounded:
//! operations have deadlines, an abort has one too, and after that comes the last resort.

use super::core::Core;
use super::options::Options;
use super::with_deadline;
use crate::Error;
use meshstep_tensor::{Buffer, cuda};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

/// Poll interval while operations are in flight, and while there are none.
const SOON: Duration = Duration::from_millis(1);
const LATER: Duration = Duration::from_millis(20);
/// Poll interval of the rendezvous.
const ASK: Duration = Duration::from_millis(100);

/// Communicators that a failure concerns.
#[derive(Clone, Copy, Debug)]
pub(super) enum Scope {
    /// The ranks of one group in this process.
    Group,
    /// The ranks of the group and of all groups split from it, even if the group has failed before.
    Subgroups,
    /// Every communicator of the process: if one is stuck, others may wait for it on the same device.
    Process,
}

/// Number of failed groups that are remembered, for ranks that are still joining them.
const REMEMBERED: usize = 64;

#[derive(Debug)]
struct Registry {
    cores: Vec<Weak<Core>>,
    failed: VecDeque<(u64, Arc<Error>)>,
    running: bool,
}

static REGISTRY: Mutex<Registry> =
    Mutex::new(Registry { cores: Vec::new(), failed: VecDeque::new(), running: false });
static CHANGED: Condvar = Condvar::new();
/// Held while communicators are aborted.
static ENDING: Mutex<()> = Mutex::new(());

/// Watches a communicator for as long as it lives.
pub(super) fn watch(core: &Arc<Core>) -> Result<(), Error> {
    let mut registry = REGISTRY.lock().unwrap_or_else(PoisonError::into_inner);
    if !registry.running {
        let thread = thread::Builder::new().name("meshstep-nccl".to_owned()).spawn(run);
        thread.map_err(|error| Error::NoThread { rank: core.rank, message: error.to_string() })?;
        registry.running = true;
    }
    registry.cores.push(Arc::downgrade(core));
    CHANGED.notify_all();
    let failed = registry.failed.iter().find(|(group, _)| core.is_within(*group));
    let cause = failed.map(|(_, cause)| Arc::clone(cause));
    drop(registry);
    // The rank has joined a group that another rank has ended in the meantime.
    cause.map_or(Ok(()), |cause| {
        let _one_at_a_time = ENDING.lock().unwrap_or_else(PoisonError::into_inner);
        end(&core.options, &cause, vec![Arc::clone(core)]);
        Err(Error::Poisoned { cause })
    })
}

fn run() {
    let (mut asked, mut polite) = (Instant::now(), false);
    loop {
        let cores = wait_for_some();
        let ask = asked.elapsed() >= ASK;
        if ask {
            asked = Instant::now();
        }
        for core in &cores {
            if !std::mem::replace(&mut polite, true) && core.device().leave_captures_alone().is_err() {
                tracing::warn!("graphs that other threads capture may be spoilt by the watchdog");
            }
            let (error, released) = core.poll();
            drop_elsewhere(released);
            match error.or_else(|| if ask { told(core) } else { None }) {
                Some(error) if process_ends(&error) => return,
                Some(error) => trouble(core, error, Scope::Process),
                None => {}
            }
        }
        let busy = cores.iter().any(|core| core.is_busy());
        // Released before the sleep, so that the last owner frees a communicator, not this thread.
        drop(cores);
        thread::sleep(if busy { SOON } else { LATER });
    }
}

/// Returns true if the driver has shut down already, as when a process exits before its threads end.
fn process_ends(error: &Error) -> bool {
    const DEINITIALIZED: u32 = 4;
    matches!(
        error,
        Error::Buffer(meshstep_tensor::Error::Cuda(cuda::Error::Call { code: DEINITIALIZED, .. }))
    )
}

/// Waits until there are communicators and returns them.
fn wait_for_some() -> Vec<Arc<Core>> {
    let mut registry = REGISTRY.lock().unwrap_or_else(PoisonError::into_inner);
    loop {
        registry.cores.retain(|core| core.strong_count() > 0);
        let cores: Vec<_> = registry.cores.iter().filter_map(Weak::upgrade).collect();
        if !cores.is_empty() {
            return cores;
        }
        registry = CHANGED.wait(registry).unwrap_or_else(PoisonError::into_inner);
    }
}

/// Returns the failure that another process's rank has reported.
fn told(core: &Core) -> Option<Error> {
    let (rank, message) = core.options.exchange.as_ref()?.failure()?;
    Some(Error::Remote { rank, message })
}

/// Drops buffers on another thread: freeing device memory waits for its work, which may be stuck until the watchdog ends it.
fn drop_elsewhere(buffers: Vec<Buffer>) {
    if !buffers.is_empty() {
        // If the system gives no thread, the buffers are dropped with the closure.
        let _ = thread::Builder::new().spawn(move || drop(buffers));
    }
}

/// Ends all communicators in `scope`, the failed one among them. Returns when NCCL has released them, or the last resort was
/// called. Communicators that failed before are handled already, and ones created since are not concerned.
pub(super) fn trouble(origin: &Core, error: Error, scope: Scope) {
    let _one_at_a_time = ENDING.lock().unwrap_or_else(PoisonError::into_inner);
    let failed = origin.ledger().failed();
    if failed && !matches!(scope, Scope::Subgroups) {
        return;
    }
    let cause = Arc::new(error);
    let concerned = concerned(origin, scope, &cause);
    if !failed {
        publish(origin, &cause);
    }
    end(&origin.options, &cause, concerned);
}

/// Marks and aborts these communicators.
fn end(options: &Options, cause: &Arc<Error>, mut cores: Vec<Arc<Core>>) {
    // All are marked before the first is aborted, so that no rank takes an aborted operation for a successful one.
    cores.retain(|core| core.fail(cause));
    cores.iter().for_each(|core| report(core, cause));
    let aborts: Vec<_> = cores.into_iter().map(|core| move || abort(&core)).collect();
    let count = aborts.len();
    if with_deadline::run(&options.clock, options.abort_within, aborts).len() < count {
        options.last_resort.call(cause);
    }
}

/// Returns the communicators concerned, and remembers their groups for ranks that join later.
fn concerned(origin: &Core, scope: Scope, cause: &Arc<Error>) -> Vec<Arc<Core>> {
    let mut registry = REGISTRY.lock().unwrap_or_else(PoisonError::into_inner);
    let cores = registry.concerned(origin, scope);
    for core in &cores {
        if !registry.failed.iter().any(|(group, _)| *group == core.group) {
            registry.failed.push_back((core.group, Arc::clone(cause)));
        }
    }
    let forgotten = registry.failed.len().saturating_sub(REMEMBERED);
    registry.failed.drain(..forgotten);
    cores
}

impl Registry {
    fn concerned(&self, origin: &Core, scope: Scope) -> Vec<Arc<Core>> {
        let all = self.cores.iter().filter_map(Weak::upgrade);
        // A closing communicator has no operation in flight; it is ended if closing takes too long.
        let concerned = all.filter(|core| std::ptr::eq(&**core, origin) || !core.is_closing());
        match scope {
            Scope::Process => concerned.collect(),
            Scope::Group => concerned.filter(|core| core.group == origin.group).collect(),
            Scope::Subgroups => concerned.filter(|core| core.is_within(origin.group)).collect(),
        }
    }
}

/// Aborts NCCL's communicator, and ends the graphs of its operations, for which NCCL waits.
///
/// NCCL's call comes first and needs nothing of the driver: its first act lets NCCL's kernels end. A free of device memory on another
/// thread waits for these kernels, and holds off most calls of the driver until then.
fn abort(core: &Core) {
    thread::scope(|scope| {
        let aborts = thread::Builder::new().spawn_scoped(scope, || core.raw.abort());
        // An error here does no harm.
        let _ = core.device().make_current();
        core.drop_graphs();
        if aborts.is_err() {
            core.raw.abort();
        }
    });
}

/// Waits for the aborts of this process: NCCL may crash if it creates a communicator meanwhile, or if the process ends.
pub(super) fn wait_for_ends() {
    drop(ENDING.lock().unwrap_or_else(PoisonError::into_inner));
}

/// Finalizes and destroys a communicator, or aborts it if that takes too long.
pub(super) fn part(core: &Arc<Core>) {
    let options = &core.options;
    let leaver = Arc::clone(core);
    let leave = move || {
        let _ = leaver.device().make_current();
        let mut done = leaver.raw.finalize();
        while let Ok(false) = done {
            thread::sleep(SOON / 20);
            done = leaver.raw.state();
        }
        // No caller is left to receive an error, and there is nothing left to lose.
        if done.is_ok() { leaver.raw.destroy() } else { leaver.raw.abort() }
    };
    if !with_deadline::run(&options.clock, options.abort_within, vec![leave]).is_empty() {
        return;
    }
    let stuck =
        Error::NotJoined { rank: core.rank, world_size: core.world_size, after: options.abort_within };
    trouble(core, stuck, Scope::Group);
}

/// Logs the failure with the last operations of the rank.
fn report(core: &Core, cause: &Error) {
    let record = core.ledger().record();
    let (rank, world_size) = (core.rank, core.world_size);
    tracing::error!(rank, world_size, %cause, "a communicator has failed; its last operations:\n{record}");
    let Some(folder) = &core.options.flight_recorder else { return };
    let name = format!("rank{rank}of{world_size}-{:016x}-{}.txt", core.group, std::process::id());
    let text = format!("rank {rank} of {world_size}: {cause}\n{record}");
    if let Err(error) =
        std::fs::create_dir_all(folder).and_then(|()| std::fs::write(folder.join(&name), text))
    {
        tracing::error!(%error, folder = %folder.display(), "the last operations cannot be written");
    }
}

/// Reports the failure to other processes' ranks, without waiting for that.
fn publish(origin: &Core, cause: &Error) {
    // A failure from another process is known there.
    let (Some(exchange), false) = (origin.options.exchange.clone(), matches!(cause, Error::Remote { .. }))
    else {
        return;
    };
    let (rank, text) = (origin.rank, cause.to_string());
    let _ = thread::Builder::new().spawn(move || exchange.publish_failure(rank, &text));
}
