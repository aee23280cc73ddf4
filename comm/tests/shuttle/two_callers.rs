//! Two threads of one rank start operations and do not wait for them: the rank's own thread runs them, also if the first one was still
//! being begun when it looked.

use crate::{DEADLINE, run_seeds};
use meshstep_comm::{Clock, Op, loopback};
use meshstep_tensor::{Buffer, Category, DType, Meter, Queue};
use shuttle::sync::{Condvar, Mutex};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

fn nothing() -> Buffer {
    Buffer::zeroed(0, DType::F32, &Meter::new(), Category::Grads).unwrap()
}

/// Rank 0 starts two barriers from two threads, which wait for them only when rank 1 has waited for both. No time passes.
fn simulate(_seed: u64) {
    let ended = Arc::new(AtomicBool::new(false));
    let over = Arc::clone(&ended);
    let world = shuttle::thread::spawn(move || {
        let config =
            loopback::Config { timeout: DEADLINE, clock: Clock::manual(), ..loopback::Config::new(2) };
        let (left, other) = (Mutex::new(false), Condvar::new());
        let results = loopback::spawn_with(config, |comm| {
            if comm.rank() == 1 {
                (0..2).for_each(|_| comm.barrier().unwrap());
                *left.lock().unwrap() = true;
                return other.notify_all();
            }
            let start = || {
                let started = comm.start(Op::barrier(), nothing(), &Queue::cpu()).unwrap();
                let mut left = left.lock().unwrap();
                while !*left {
                    left = other.wait(left).unwrap();
                }
                drop(left);
                started.wait(&Queue::cpu()).1.unwrap();
            };
            shuttle::thread::scope(|scope| {
                scope.spawn(start);
                start();
            });
        });
        over.store(true, SeqCst);
        results.unwrap();
    });
    // This thread runs when no other can.
    shuttle::thread::yield_now();
    assert!(ended.load(SeqCst), "an operation is left that no thread runs");
    world.join().unwrap();
}

#[test]
fn operations_that_nobody_waits_for_are_run() {
    run_seeds(meshstep_cases::cases(300, 20_000), simulate);
}
