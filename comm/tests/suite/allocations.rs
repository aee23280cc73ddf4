//! After warm-up, starting and waiting allocate nothing, on any thread.

use crate::backends::{BACKENDS, Backend};
use meshstep_cases::cases;
use meshstep_comm::{InFlight, Op, Reduction};
use meshstep_tensor::{Buffer, Category, DType, Meter, Queue, SliceMut};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};

struct Counting;

static COUNTS: AtomicBool = AtomicBool::new(false);
static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if COUNTS.load(SeqCst) {
            ALLOCATIONS.fetch_add(1, SeqCst);
        }
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

fn ops(rank: usize) -> [Op; 7] {
    let pair = if rank == 0 { Op::send(1) } else { Op::recv(0) };
    [
        Op::all_reduce(Reduction::Mean),
        Op::reduce_scatter(Reduction::Sum),
        Op::all_gather(),
        Op::all_to_all(),
        Op::broadcast(1),
        Op::barrier(),
        pair,
    ]
}

fn round(comm: &dyn meshstep_comm::Communicator, buffers: &mut [Option<Buffer>], flying: &mut Vec<InFlight>) {
    let queue = Queue::cpu();
    for (i, buffer) in buffers.iter_mut().enumerate() {
        let op = ops(comm.rank())[i % 7];
        flying.push(comm.start(op, buffer.take().unwrap(), &queue).unwrap());
    }
    for (buffer, started) in buffers.iter_mut().zip(flying.drain(..)) {
        let (back, result) = started.wait(&queue);
        result.unwrap();
        *buffer = Some(back);
    }
}

/// Variable that is set in the counting process.
const ALONE: &str = "MESHSTEP_TEST_ALONE";

/// Runs in a separate process, because the count covers all threads and would include other tests.
#[test]
fn starting_and_waiting_allocate_nothing() {
    if std::env::var_os(ALONE).is_some() {
        BACKENDS.iter().copied().for_each(count);
        return check_counter();
    }
    let mut child = std::process::Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "allocations::starting_and_waiting_allocate_nothing", "--nocapture"]);
    let ran = child.env(ALONE, "1").output().unwrap();
    let told = String::from_utf8_lossy(&ran.stdout);
    assert!(
        ran.status.success() && told.contains("1 passed"),
        "{told}{}",
        String::from_utf8_lossy(&ran.stderr)
    );
}

fn count(backend: Backend) {
    let edge = Barrier::new(2);
    let rounds = backend.rounds(cases(30, 100));
    let counted = backend.spawn(2, |comm| {
        let buffer = |_| Buffer::zeroed(4096, DType::F32, &Meter::new(), Category::Grads).unwrap();
        let mut buffers: Vec<_> = (0..14).map(|i| Some(buffer(i))).collect();
        let mut flying = Vec::with_capacity(14);
        let mut blocking = buffer(0);
        let (mut lent, mut kept) = ([1f32; 4096], buffer(0));
        let mut large = Buffer::zeroed(1 << 16, DType::F32, &Meter::new(), Category::Grads).unwrap();
        let mut both = |rounds| {
            for _ in 0..rounds {
                round(&*comm, &mut buffers, &mut flying);
                comm.all_reduce(&mut blocking, Reduction::Sum).unwrap();
                // Large enough to be moved by all ranks; the other buffers are moved by one.
                comm.all_reduce(&mut large, Reduction::Sum).unwrap();
                let (one, two) = lent.split_at_mut(1000);
                let mut slices = [SliceMut::from(one), SliceMut::from(two)];
                let (back, found) = comm.all_reduce_keeping(Reduction::Mean, None, &mut slices, kept.take());
                assert_eq!(found, Ok(0));
                kept = back;
                comm.barrier().unwrap();
            }
        };
        both(10);
        // The test harness's thread allocates a little whenever it runs, so one of several windows is enough.
        let mut fewest = usize::MAX;
        for _ in 0..3 {
            edge.wait();
            ALLOCATIONS.store(0, SeqCst);
            COUNTS.store(true, SeqCst);
            edge.wait();
            both(rounds);
            edge.wait();
            COUNTS.store(false, SeqCst);
            fewest = fewest.min(ALLOCATIONS.load(SeqCst));
            edge.wait();
        }
        assert_eq!(fewest, 0, "{backend:?}");
    });
    counted.unwrap();
}

/// Checks the counter itself.
fn check_counter() {
    COUNTS.store(true, SeqCst);
    drop(std::hint::black_box(Box::new(1)));
    COUNTS.store(false, SeqCst);
    assert!(ALLOCATIONS.load(SeqCst) > 0);
}
