//! Registered buffers of ranks that share memory: what is read in place, what is refused, and what failures leave.

use crate::backends::{Backend, Way};
use meshstep_comm::{Clock, Communicator, Error, Faults, Op, Reduction, loopback};
use meshstep_tensor::{Buffer, Category, DType, Meter, Queue};
use std::sync::Arc;
use std::time::Duration;

const LEN: usize = 100_000;
const RANKS: usize = 3;

fn allocate(comm: &dyn Communicator, len: usize, meter: &Meter) -> Buffer {
    comm.zeroed_on(&Queue::cpu(), len, DType::F32, (meter, Category::Grads), &[]).unwrap()
}

fn config(faults: Faults, timeout: Duration) -> loopback::Config {
    loopback::Config { ranks: RANKS, timeout, clock: Clock::real(), faults }
}

/// Runs `body` on ranks that share memory.
fn spawn<T: Send>(body: impl Fn(Arc<dyn Communicator>) -> T + Sync) -> Vec<T> {
    let config = config(Faults::none(), Duration::from_secs(20));
    Backend::Tcp(Way::SharedMemory).spawn_with(config, body).unwrap()
}

/// Reduces a buffer with this rank's values and returns the first and the last element.
fn reduced(comm: &dyn Communicator, buffer: &mut Buffer) -> [f32; 2] {
    buffer.typed_mut::<f32>().unwrap().fill(1.0 + comm.rank() as f32);
    comm.all_reduce(buffer, Reduction::Sum).unwrap();
    let values = buffer.typed::<f32>().unwrap();
    [values[0], values[values.len() - 1]]
}

#[test]
fn only_memory_of_the_communicator_is_registered_once_and_whole() {
    let found = spawn(|comm| {
        let meter = Meter::new();
        let mut own = allocate(&*comm, LEN, &meter);
        let plain = Buffer::zeroed(LEN, DType::F32, &meter, Category::Grads).unwrap();
        let small = allocate(&*comm, 10, &meter);
        let mut part = allocate(&*comm, LEN, &meter);
        let rest = part.split_off(LEN / 2).unwrap();
        let mut mixed = if comm.rank() == 1 { plain.as_slice().len() } else { 0 };
        mixed += usize::from(comm.register(&plain).unwrap());
        let registered = [&own, &own, &small, &part, &rest].map(|buffer| comm.register(buffer).unwrap());
        assert_eq!(reduced(&*comm, &mut own), [6.0; 2]);
        assert_eq!(reduced(&*comm, &mut part), [6.0; 2]);
        assert_eq!(meter.live(Category::Grads), (3 * LEN as u64 + 10) * 4);
        (registered, mixed % LEN)
    });
    assert_eq!(found, [([true, false, false, false, false], 0); RANKS]);
}

#[test]
fn memory_that_one_rank_lacks_travels_for_all() {
    spawn(|comm| {
        let meter = Meter::new();
        let plain = || Buffer::zeroed(LEN, DType::F32, &meter, Category::Grads).unwrap();
        let mut buffer = if comm.rank() == 2 { plain() } else { allocate(&*comm, LEN, &meter) };
        assert!(!comm.register(&buffer).unwrap());
        assert_eq!(reduced(&*comm, &mut buffer), [6.0; 2]);
        // Registered memory of two ranks at most: the third one's is not.
        let mut other = allocate(&*comm, LEN, &meter);
        assert!(comm.register(&other).unwrap());
        let mut chosen = if comm.rank() == 0 { plain() } else { other.take() };
        assert_eq!(reduced(&*comm, &mut chosen), [6.0; 2]);
    });
}

#[test]
fn other_lengths_are_refused_on_every_rank_and_the_group_goes_on() {
    let errors = spawn(|comm| {
        let meter = Meter::new();
        let mut buffer = allocate(&*comm, LEN + comm.rank() / 2, &meter);
        let error = comm.register(&buffer).unwrap_err();
        let mut part = buffer.split_off(comm.rank() / 2).unwrap();
        assert_eq!(reduced(&*comm, &mut part), [6.0; 2]);
        error
    });
    let bytes = [LEN, LEN, LEN + 1].map(|len| 4 * len as u64).to_vec();
    assert_eq!(errors, vec![Error::UnlikeMemory { bytes }; RANKS]);
}

#[test]
fn buffers_come_and_go_and_those_that_outlive_the_group_keep_their_values() {
    let kept = spawn(|comm| {
        let meter = Meter::new();
        let mut waiting = Vec::new();
        for round in 0..40 {
            let mut buffer = allocate(&*comm, LEN, &meter);
            assert!(comm.register(&buffer).unwrap(), "round {round}");
            assert_eq!(reduced(&*comm, &mut buffer), [6.0; 2]);
            waiting.push(allocate(&*comm, LEN / 4, &meter));
        }
        // More allocations than can wait for their registration: the rest is plain memory, and works.
        waiting.extend((0..300).map(|_| allocate(&*comm, LEN / 4, &meter)));
        let first = comm.register(&waiting[0]).unwrap();
        let last = comm.register(waiting.last().unwrap()).unwrap();
        assert_eq!((first, last), (true, false));
        assert_eq!(reduced(&*comm, waiting.last_mut().unwrap()), [6.0; 2]);
        reduced(&*comm, &mut waiting[0]);
        waiting.swap_remove(0)
    });
    for mut buffer in kept {
        let values = buffer.typed_mut::<f32>().unwrap();
        assert!(values.iter().all(|x| *x == 6.0));
        values.fill(2.0);
    }
}

#[test]
fn started_operations_on_parts_of_one_buffer_run_while_the_caller_writes_another_part() {
    spawn(|comm| {
        let (meter, queue) = (Meter::new(), Queue::cpu());
        let mut left = allocate(&*comm, 4 * LEN, &meter);
        assert!(comm.register(&left).unwrap());
        left.typed_mut::<f32>().unwrap().fill(1.0 + comm.rank() as f32);
        let mut right = left.split_off(2 * LEN).unwrap();
        for round in 0..20 {
            let started = comm.start(Op::all_reduce(Reduction::Max), left, &queue).unwrap();
            right.typed_mut::<f32>().unwrap().fill(round as f32);
            let result;
            (left, result) = started.wait(&queue);
            result.unwrap();
            assert!(left.typed::<f32>().unwrap().iter().all(|x| *x == 3.0));
        }
    });
}

#[test]
fn a_rank_that_leaves_out_an_operation_in_place_costs_a_typed_error_within_the_deadline() {
    let within = Duration::from_millis(1500);
    let results =
        Backend::Tcp(Way::SharedMemory).spawn_with(config(Faults::none().drop_op(1, 4), within), |comm| {
            let mut buffer = allocate(&*comm, LEN, &Meter::new());
            assert!(comm.register(&buffer).unwrap());
            reduced(&*comm, &mut buffer);
            let result = [0; 3].map(|_| comm.all_reduce(&mut buffer, Reduction::Sum));
            // The memory is this rank's own again, whatever the others do.
            buffer.typed_mut::<f32>().unwrap().fill(5.0);
            std::thread::sleep(within); // the others may still read
            assert!(buffer.typed::<f32>().unwrap().iter().all(|x| *x == 5.0));
            result
        });
    for [first, second, third] in results.unwrap() {
        let failed = [first, second].into_iter().find_map(Result::err).unwrap();
        assert!(matches!(&failed, Error::Timeout { missing, .. } if missing == &[1]), "{failed:?}");
        assert!(matches!(third, Err(Error::Poisoned { .. })), "{third:?}");
    }
}

#[test]
fn refused_registrations_leave_nothing_behind() {
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let grown = spawn(|comm| {
        let meter = Meter::new();
        let mut before = 0;
        for round in 0..300 {
            let plain = || Buffer::zeroed(LEN, DType::F32, &meter, Category::Grads).unwrap();
            let refused = if comm.rank() == 1 { plain() } else { allocate(&*comm, LEN, &meter) };
            assert!(!comm.register(&refused).unwrap());
            assert!(comm.register(&allocate(&*comm, LEN, &meter)).unwrap());
            drop(refused);
            comm.barrier().unwrap();
            before = if round == 0 { descriptors() } else { before };
        }
        comm.barrier().unwrap();
        let grown = descriptors().saturating_sub(before);
        comm.split(Some(0), 0).unwrap().unwrap().barrier().unwrap();
        grown
    });
    assert!(grown.iter().all(|grown| *grown < 50), "{grown:?}");
}

#[test]
fn an_allocation_waits_for_no_operation() {
    spawn(|comm| {
        let (meter, queue) = (Meter::new(), Queue::cpu());
        let other = comm.split(Some(0), 0).unwrap().unwrap();
        let mut buffer = allocate(&*comm, LEN, &meter);
        if comm.rank() == 0 {
            let started = comm.start(Op::all_reduce(Reduction::Sum), buffer, &queue).unwrap();
            std::thread::sleep(Duration::from_millis(100)); // the communication thread begins
            allocate(&*comm, LEN, &meter);
            other.barrier().unwrap();
            started.wait(&queue).1.unwrap();
        } else {
            other.barrier().unwrap();
            comm.all_reduce(&mut buffer, Reduction::Sum).unwrap();
        }
    });
}

#[test]
fn a_group_registers_as_soon_as_it_is_split() {
    let refused = spawn(|comm| {
        let refused = |_: &i32| {
            let group = comm.split(Some(0), 0).unwrap().unwrap();
            !group.register(&allocate(&*group, LEN, &Meter::new())).unwrap()
        };
        (0..100).filter(refused).count()
    });
    assert_eq!(refused, [0; RANKS]);
}

#[test]
fn lengths_on_both_sides_of_the_least_one_are_refused_alike() {
    let errors = spawn(|comm| {
        let buffer = allocate(&*comm, if comm.rank() == 0 { 10 } else { LEN }, &Meter::new());
        comm.register(&buffer).unwrap_err()
    });
    assert!(errors.iter().all(|error| matches!(error, Error::UnlikeMemory { .. })), "{errors:?}");
}
