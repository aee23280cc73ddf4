//! Observers of reductions: what they see is the result, each element once.

use crate::backends::{BACKENDS, Backend, Way};
use meshstep_comm::{Communicator, Faults, Op, ReduceObserver, Reduction, loopback};
use meshstep_tensor::{Buffer, Category, DType, Meter, Queue, Slice};
use std::sync::{Arc, Mutex};

const LEN: usize = 420_000;

/// Values by element, and how often each was seen.
#[derive(Debug)]
struct Seen(Mutex<Vec<(f32, u32)>>);

impl ReduceObserver for Seen {
    fn see(&self, first: usize, values: Slice<'_>) {
        let mut seen = self.0.lock().unwrap();
        for (seen, &value) in seen[first..].iter_mut().zip(values.typed::<f32>().unwrap()) {
            *seen = (value, seen.1 + 1);
        }
    }
}

fn registered(comm: &Arc<dyn Communicator>) -> Buffer {
    let counted = (&Meter::new(), Category::Grads);
    let buffer = comm.zeroed_on(&Queue::cpu(), LEN, DType::F32, counted, &[]).unwrap();
    comm.register(&buffer).unwrap();
    buffer
}

/// Reduces three times. Returns how many elements of the chunk were seen the last time, and the number of that operation.
fn seen(comm: &Arc<dyn Communicator>, op: Op) -> (usize, u64) {
    let (n, rank, queue) = (comm.world_size(), comm.rank(), Queue::cpu());
    let (mut buffer, chunk) = (registered(comm), rank * LEN / n..(rank + 1) * LEN / n);
    let mut found = (0, 0);
    for round in 0..3 {
        let values = buffer.typed_mut::<f32>().unwrap().iter_mut().enumerate();
        values.for_each(|(i, x)| *x = ((i + rank + round) % 1000) as f32);
        let observer = Arc::new(Seen(Mutex::new(vec![(0.0, 0); LEN])));
        let number = comm.stats().total().operations;
        let flight = comm.start_observed(op, buffer, &queue, Arc::clone(&observer) as _).unwrap();
        let (back, result) = flight.wait(&queue);
        (buffer, _) = (back, result.unwrap());
        let (seen, reduced) = (observer.0.lock().unwrap(), buffer.typed::<f32>().unwrap());
        for (i, &(value, times)) in seen.iter().enumerate() {
            assert!(times <= u32::from(chunk.contains(&i)), "element {i} of rank {rank}, {times} times");
            assert!(times == 0 || value.to_bits() == reduced[i].to_bits(), "element {i} of rank {rank}");
        }
        found = (seen.iter().filter(|(_, times)| *times == 1).count(), number);
    }
    found
}

#[test]
fn each_element_of_the_chunk_is_seen_at_most_once_with_its_result() {
    for &backend in BACKENDS {
        for (op, n) in [(Op::reduce_scatter(Reduction::Sum), 3), (Op::all_reduce(Reduction::Mean), 4)] {
            let found = backend.spawn(n, |comm| seen(&comm, op)).unwrap();
            // In memory that processes share all of it is seen.
            if backend == Backend::Tcp(Way::SharedMemory) {
                assert!(found.iter().all(|(found, _)| *found == LEN / n), "{backend:?} {found:?}");
            }
        }
    }
}

/// An operation whose result is corrupted afterwards is not seen before.
#[test]
fn corrupted_operations_have_no_observer() {
    let run = |faults| {
        let config = loopback::Config { faults, ..loopback::Config::new(2) };
        let seen = |comm: Arc<dyn Communicator>| seen(&comm, Op::reduce_scatter(Reduction::Sum));
        Backend::Tcp(Way::SharedMemory).spawn_with(config, seen).unwrap()
    };
    let sound = run(Faults::none());
    assert!(sound.iter().all(|(found, _)| *found == LEN / 2), "{sound:?}");
    let number = sound[1].1;
    assert_eq!(run(Faults::none().corrupt_result(1, number)), [(LEN / 2, number), (0, number)]);
}
