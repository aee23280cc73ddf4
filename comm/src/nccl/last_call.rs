//! The call that ends a communicator, and the threads that NCCL leaves behind.
//!
//! NCCL ends a non-blocking communicator on a thread of its own. The call returns before, with success, and the handle must not be
//! used after it. A new communicator that begins meanwhile, or a process that exits, meets a half-ended one: on an H200 with NCCL
//! 2.28.9 both crashed and hung. NCCL's threads inherit the name of the thread that calls it, so the call runs on a thread with a name
//! that nothing else has, and its end is the end of all threads with this name.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

/// First and longest pause between two looks at the threads.
const PAUSES: [Duration; 2] = [Duration::from_micros(500), Duration::from_millis(8)];

/// Runs the last call for a communicator. Returns when NCCL is done with it, which may be never: callers use
/// [`with_deadline::run`](super::with_deadline::run).
pub(super) fn run(call: impl Fn() -> c_int + Sync) -> c_int {
    static CALLS: AtomicU32 = AtomicU32::new(0);
    // The system keeps 15 bytes of a name.
    let name = format!("nccl-end-{}", CALLS.fetch_add(1, Relaxed) % 1_000_000);
    let body = || {
        let code = call();
        wait_for_heirs(&name);
        code
    };
    thread::scope(|scope| match thread::Builder::new().name(name.clone()).spawn_scoped(scope, body) {
        Ok(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
        // If the system gives no thread, the communicator still ends, and nothing waits for that.
        Err(_) => call(),
    })
}

/// Waits until this thread is the only one with this name.
fn wait_for_heirs(name: &str) {
    let [mut pause, longest] = PAUSES;
    let mut alone = 0;
    // Twice: a thread that starts another one and ends may hide it from one look.
    while alone < 2 {
        alone = if threads(name) > 1 { 0 } else { alone + 1 };
        if alone == 0 {
            thread::sleep(pause);
            pause = longest.min(2 * pause);
        }
    }
}

/// Returns the number of this process's threads with a name; 0 if the system does not list them.
fn threads(name: &str) -> usize {
    let Ok(tasks) = std::fs::read_dir("/proc/self/task") else { return 0 };
    let named = |task: std::io::Result<std::fs::DirEntry>| {
        let comm = std::fs::read_to_string(task.ok()?.path().join("comm")).ok()?;
        (comm.trim_end() == name).then_some(())
    };
    tasks.filter_map(named).count()
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;
    use std::time::Instant;

    const SHORT: Duration = Duration::from_millis(60);

    /// A thread that is started without a name has that of the starting thread.
    #[test]
    fn the_last_call_ends_with_the_threads_that_it_leaves_behind() {
        let done = Arc::new(AtomicBool::new(false));
        let begun = Instant::now();
        let code = run(|| {
            let done = Arc::clone(&done);
            // NCCL starts its threads through the system, without a name.
            thread::spawn(move || {
                thread::sleep(SHORT);
                done.store(true, Relaxed);
            });
            7
        });
        assert_eq!(code, 7);
        assert!(done.load(Relaxed) && begun.elapsed() >= SHORT, "{:?}", begun.elapsed());
    }

    #[test]
    fn threads_are_counted_by_name() {
        let (gate, name) = (Arc::new(AtomicBool::new(false)), "counted-thread");
        let named = || {
            let open = Arc::clone(&gate);
            let wait = move || {
                while !open.load(Relaxed) {
                    thread::sleep(PAUSES[0]);
                }
            };
            thread::Builder::new().name(name.to_owned()).spawn(wait).unwrap()
        };
        assert_eq!(threads(name), 0);
        let both = [named(), named()];
        while threads(name) < 2 {
            thread::sleep(PAUSES[0]);
        }
        gate.store(true, Relaxed);
        for thread in both {
            thread.join().unwrap();
        }
        wait_for_heirs(name);
    }
}
