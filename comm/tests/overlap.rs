//! A started operation runs while its caller computes and waits for nothing.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use meshstep_comm::{Op, Reduction, loopback};
use meshstep_tensor::{Buffer, Category, DType, Meter, Queue};
use std::time::{Duration, Instant};

#[test]
fn a_started_operation_ends_while_the_caller_computes() {
    let sums = loopback::spawn(4, |comm| {
        let values = vec![comm.rank() as f32; 1 << 18];
        let buffer = Buffer::from_slice(&values, &Meter::new(), Category::Grads).unwrap();
        let queue = Queue::cpu();
        let started = comm.start(Op::all_reduce(Reduction::Sum), buffer, &queue).unwrap();
        let (begun, mut work) = (Instant::now(), 1u64);
        while !started.is_done() {
            work = std::hint::black_box(work.wrapping_mul(0x5851_F42D_4C95_7F2D) + 1);
            assert!(begun.elapsed() < Duration::from_secs(30), "it does not run by itself");
        }
        let (buffer, result) = started.wait(&queue);
        result.unwrap();
        buffer.typed::<f32>().unwrap().iter().sum::<f32>()
    });
    assert_eq!(sums.unwrap(), [6.0 * (1 << 18) as f32; 4]);
}

#[test]
fn operations_run_in_the_order_in_which_they_were_started() {
    loopback::spawn(3, |comm| {
        let queue = Queue::cpu();
        let one = |value: u64| Buffer::from_slice(&[value], &Meter::new(), Category::Grads).unwrap();
        let started: Vec<_> =
            (0..100).map(|i| comm.start(Op::all_reduce(Reduction::Sum), one(i), &queue).unwrap()).collect();
        // Waited for from the last to the first: by then all of them are done, and none was mixed up.
        let mut last = true;
        for (i, started) in started.into_iter().enumerate().rev() {
            assert!(last || started.is_done(), "a later operation ended before operation {i}");
            let (buffer, result) = started.wait(&queue);
            result.unwrap();
            assert_eq!(buffer.typed::<u64>().unwrap(), [3 * i as u64]);
            last = false;
        }
    })
    .unwrap();
}

#[test]
fn a_buffer_comes_back_only_when_no_rank_writes_to_it_any_more() {
    let len = 1 << 19;
    loopback::spawn(4, |comm| {
        let mut buffer = Buffer::zeroed(len, DType::U64, &Meter::new(), Category::Grads).unwrap();
        for round in 1..40 {
            buffer.typed_mut::<u64>().unwrap().fill(round);
            comm.all_reduce(&mut buffer, Reduction::Sum).unwrap();
            // Whoever is first to return sees every portion, whichever rank moved it, and may write at once.
            assert!(buffer.typed::<u64>().unwrap().iter().all(|&sum| sum == 4 * round), "round {round}");
        }
    })
    .unwrap();
}
