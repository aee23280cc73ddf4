//! After warm-up, streams allocate nothing.

use super::common::{LONG, on_ranks};
use crate::p2p::transport::{Source, Target, Transport};
use crate::tcp::Encrypt;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::time::{Duration, Instant};

struct Counting;

thread_local! {
    /// Allocations of a thread that counts them.
    static ALLOCATIONS: Cell<Option<usize>> = const { Cell::new(None) };
}

// SAFETY: every call is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // A thread at its end has no counter.
        let _ = ALLOCATIONS.try_with(|count| count.set(count.get().map(|count| count + 1)));
        // SAFETY: the caller's guarantee about `layout` is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: `ptr` came from `System.alloc` with this layout.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Sends `bytes` to the other rank and receives as many, half of them straight into memory.
fn swap(transport: &mut dyn Transport, bytes: &[u8], into: &mut [u8]) {
    let (peer, until) = (1 - transport.rank(), Instant::now() + LONG);
    let (mut written, mut read) = (0, 0);
    while written < bytes.len() || read < into.len() {
        assert!(Instant::now() < until);
        let mut moved = transport.progress().unwrap();
        let len = transport.write(Target::Rank(peer), &bytes[written..]).unwrap();
        written += len;
        moved |= len > 0;
        if read < into.len() / 2 {
            let arrived = transport.arrived(Source::Rank(peer));
            let len = arrived.len().min(into.len() - read);
            into[read..read + len].copy_from_slice(&arrived[..len]);
            transport.consume(Source::Rank(peer), len);
            read += len;
        } else {
            read += transport.read(Source::Rank(peer), &mut into[read..]).unwrap();
        }
        if !moved {
            transport.wait(Duration::from_millis(10)).unwrap();
        }
    }
}

#[test]
fn streams_allocate_nothing_after_warm_up() {
    for encrypt in [Encrypt::Never, Encrypt::Always] {
        let counts = on_ranks(2, "127.0.0.1", encrypt, |mut world| {
            let transport = world.transport();
            let (bytes, mut into) = (vec![7; 1_000_000], vec![0; 1_000_000]);
            let mut rounds = |rounds, lens: &[usize]| {
                for _ in 0..rounds {
                    lens.iter().for_each(|len| swap(transport, &bytes[..*len], &mut into[..*len]));
                }
            };
            let lens = [1, 8, 1000, 5000, 200_000, 1_000_000];
            rounds(3, &lens);
            ALLOCATIONS.set(Some(0));
            rounds(10, &lens);
            let count = ALLOCATIONS.replace(None);
            // Short writes leave with this call.
            world.transport().progress().unwrap();
            world.generation().barrier("end", LONG).unwrap();
            count
        });
        assert_eq!(counts, [Some(0); 2], "{encrypt:?}");
    }
}

#[test]
fn allocations_are_counted() {
    ALLOCATIONS.set(Some(0));
    drop(std::hint::black_box(vec![1u8; 100]));
    assert_eq!(ALLOCATIONS.replace(None), Some(1));
}
