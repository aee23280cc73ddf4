//! Streams between two ranks on loom's primitives: all orders of steps, and all values that a load may return. Bytes are cells, in which
//! loom finds a read beside a write.

mod primitives {
    pub(super) use loom::sync::atomic::{AtomicU64, Ordering, fence};
}

#[allow(clippy::duplicate_mod, dead_code, reason = "the models have no news of a peer's end")]
#[path = "sleep_word.rs"]
mod sleep_word;

use loom::cell::UnsafeCell;
use loom::sync::atomic::Ordering::{Acquire, Relaxed};
use loom::sync::atomic::{AtomicU64, fence};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;
use sleep_word::{News, fall_asleep, publish, tell, wake_up};

/// Ring of one byte from a writer to a reader, with both ranks' sleep words and bells.
#[derive(Default)]
struct Pair {
    byte: UnsafeCell<u8>,
    written: AtomicU64,
    acked: AtomicU64,
    sleeps: [AtomicU64; 2],
    bells: [RankBell; 2],
}

// SAFETY: the positions say which rank accesses the byte, and loom checks it.
unsafe impl Sync for Pair {}

/// Eventfd: a ring before a sleep ends it too.
#[derive(Default)]
struct RankBell(Mutex<bool>, Condvar);

impl RankBell {
    fn ring(&self) {
        *self.0.lock().unwrap() = true;
        self.1.notify_all();
    }

    fn sleep(&self) {
        let mut rung = self.0.lock().unwrap();
        while !*rung {
            rung = self.1.wait(rung).unwrap();
        }
        *rung = false;
    }
}

const WRITER: usize = 0;
const READER: usize = 1;

impl Pair {
    /// Waits until `is_there`, as `SharedMemory::sleep` does: a look follows the word, and the sleep follows the look.
    fn wait(&self, me: usize, for_room: bool, is_there: impl Fn() -> bool) {
        while !is_there() {
            fall_asleep(&self.sleeps[me], for_room);
            if !is_there() {
                self.bells[me].sleep();
            }
            wake_up(&self.sleeps[me]);
        }
    }

    fn tell(&self, peer: usize, rung: &mut u64, news: News) {
        tell(&self.sleeps[peer], rung, news, || self.bells[peer].ring());
    }

    fn write(&self, bytes: u8) {
        let mut rung = u64::MAX;
        for position in 0..bytes {
            self.wait(WRITER, true, || self.acked.load(Acquire) == u64::from(position));
            // SAFETY: the reader has acknowledged the byte before, and loom checks that its read is over.
            self.byte.with_mut(|byte| unsafe { *byte = position + 1 });
            publish(&self.written, u64::from(position) + 1);
            self.tell(READER, &mut rung, News::Bytes);
        }
    }

    fn read(&self, bytes: u8) {
        let mut rung = u64::MAX;
        for position in 0..bytes {
            self.wait(READER, false, || self.written.load(Acquire) > u64::from(position));
            // SAFETY: the writer has published the byte, and loom checks that its write is over.
            assert_eq!(self.byte.with(|byte| unsafe { *byte }), position + 1);
            publish(&self.acked, u64::from(position) + 1);
            self.tell(WRITER, &mut rung, News::Room);
        }
    }
}

/// No rank sleeps for ever, and no byte is read before it is written or written before it is read.
#[test]
fn bytes_arrive_and_nobody_sleeps_beside_news() {
    for (bytes, preemptions) in [(1, None), (2, Some(3))] {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = preemptions;
        model.check(move || {
            let pair = Arc::new(Pair::default());
            let reader = Arc::clone(&pair);
            let reader = thread::spawn(move || reader.read(bytes));
            pair.write(bytes);
            reader.join().unwrap();
        });
    }
}

/// Registered memory is read where it lies (`p2p::in_place`). A rank that fails publishes that before its caller writes the buffer again,
/// and a reader looks for failures after its reads and a fence: without a failure it has read the operation's values.
#[test]
fn a_read_without_a_failure_is_of_the_operations_values() {
    loom::model(|| {
        let shared = Arc::new((AtomicU64::new(1), AtomicU64::new(0)));
        let failing = Arc::clone(&shared);
        let failing = thread::spawn(move || {
            let (value, failure) = &*failing;
            publish(failure, 1);
            value.store(2, Relaxed);
        });
        let (value, failure) = &*shared;
        let read = value.load(Relaxed);
        // As at the end of `InPlace::step`.
        fence(loom::sync::atomic::Ordering::SeqCst);
        assert!(failure.load(Relaxed) == 1 || read == 1, "a later value without a failure");
        failing.join().unwrap();
    });
}
