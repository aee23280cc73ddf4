//! NCCL allocations and their windows.

use crate::nccl::bench::{Rank, alone, available, nccl_function, options, patient, ranks, stand_in, windows};
use meshstep_comm::nccl::{self, Ability, Nccl, Options, Unavailable};
use meshstep_comm::{Communicator, Error, Op, Reduction};
use meshstep_tensor::{Buffer, Category, DType};
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::{Arc, Barrier};
use std::time::Duration;

fn with_windows(options: Options) -> Options {
    Options { windows: true, ..options }
}

/// Returns true if this NCCL has windows; an older one refuses the option.
fn has_windows() -> bool {
    if nccl::probe().unwrap().abilities.contains(&Ability::Windows) {
        return true;
    }
    let refused = nccl::spawn(&[0], with_windows(patient()), |_| ()).unwrap_err();
    assert!(matches!(refused, Error::NoNccl(Unavailable::TooOld { needed: 22_700, .. })), "{refused}");
    false
}

fn room(rank: &Rank, len: usize) -> Buffer {
    rank.comm.zeroed_on(&rank.queue, len, DType::F32, (&rank.meter, Category::Grads), &[]).unwrap()
}

fn fill(rank: &Rank, buffer: &mut Buffer, value: f32) {
    let values = vec![value; buffer.len()];
    rank.queue.upload(values[..].into(), buffer.as_mut()).unwrap();
    rank.queue.synchronize().unwrap();
}

#[test]
fn registered_buffers_are_reduced_and_gathered_and_freed() {
    let _alone = alone();
    if !available(2) || !has_windows() {
        return;
    }
    ranks(2, &with_windows(patient()), |comm| {
        let rank = Rank::new(comm);
        let (mut one, two) = (room(&rank, 1000), room(&rank, 3));
        assert_eq!(rank.read::<f32>(&one), [0.0; 1000]);
        assert_eq!(rank.meter.live_total(), 4012);
        rank.comm.register(&one).unwrap();
        rank.comm.register(&two).unwrap();
        fill(&rank, &mut one, 1.0 + rank.comm.rank() as f32);
        // A part of the buffer is sent too, and joins the rest again.
        let mut rest = one.split_off(100).unwrap();
        rank.dyn_comm().all_reduce(&mut rest, Reduction::Sum).unwrap();
        rank.dyn_comm().all_gather(&mut one).unwrap();
        let one = one.join(rest).unwrap();
        let found = rank.read::<f32>(&one);
        assert_eq!(
            (&found[..50], &found[50..100], &found[100..]),
            (&[1.0; 50][..], &[2.0; 50][..], &[3.0; 900][..])
        );
        drop(one);
        assert_eq!(rank.meter.live_total(), 12);
        // The communicator is dropped before this buffer.
        let Rank { comm, meter, queue } = rank;
        drop(comm);
        assert_eq!(two.len(), 3);
        drop((two, queue));
        assert_eq!(meter.live_total(), 0);
    });
    if stand_in(2) {
        assert_eq!(windows(), (0, 0));
    }
}

#[test]
fn windows_end_before_their_communicator_and_their_memory_after_it() {
    let _alone = alone();
    if !stand_in(2) || !has_windows() {
        return;
    }
    let barrier = Barrier::new(2);
    let kept = ranks(2, &with_windows(patient()), |comm| {
        let rank = Rank::new(comm);
        let buffers = [room(&rank, 64), room(&rank, 5000)];
        for buffer in &buffers {
            assert_eq!(rank.comm.register(buffer), Ok(true));
        }
        barrier.wait();
        assert_eq!(windows(), (4, 4));
        barrier.wait();
        buffers
    });
    assert_eq!(windows(), (0, 4));
    drop(kept);
    assert_eq!(windows(), (0, 0));
}

/// All ranks get the same error, nothing is registered, and they continue.
#[test]
fn memory_that_does_not_go_together_is_refused_on_every_rank() {
    let _alone = alone();
    if !stand_in(2) || !has_windows() {
        return;
    }
    ranks(2, &with_windows(patient()), |comm| {
        let rank = Rank::new(comm);
        let me = rank.comm.rank();
        let (long, short, plain) = (room(&rank, 5000), room(&rank, 10), rank.buffer(&[1f32; 10]));
        // In another order on each rank.
        let [first, second] = if me == 0 { [&long, &short] } else { [&short, &long] };
        assert_eq!(rank.comm.register(first), Err(Error::UnlikeMemory { bytes: vec![20_480, 4096] }));
        assert_eq!(rank.comm.register(second), Err(Error::UnlikeMemory { bytes: vec![4096, 20_480] }));
        // One rank has memory of another kind; all ranks have registered theirs already.
        let odd = if me == 0 { &short } else { &plain };
        assert_eq!(rank.comm.register(odd), Err(Error::UnlikeMemory { bytes: vec![4096, 0] }));
        assert_eq!(rank.comm.register(&short), Ok(true));
        assert_eq!(rank.comm.register(&short), Err(Error::UnlikeMemory { bytes: vec![0, 0] }));
        assert_eq!(rank.comm.register(&long), Ok(true));
        assert_eq!(rank.sum(1.5), Ok(3.0));
    });
    assert_eq!(windows(), (0, 0));
}

#[test]
fn without_the_option_memory_is_the_drivers() {
    let _alone = alone();
    if !stand_in(1) {
        return;
    }
    ranks(1, &patient(), |comm| {
        let rank = Rank::new(comm);
        let buffer = room(&rank, 10);
        assert_eq!((rank.comm.register(&buffer), windows()), (Ok(false), (0, 0)));
    });
}

#[test]
fn a_failure_ends_windows_and_frees_their_memory() {
    let _alone = alone();
    if !stand_in(2) || !has_windows() {
        return;
    }
    let errors = ranks(2, &with_windows(options(Duration::from_millis(500))), |comm| {
        let rank = Rank::new(comm);
        let mut buffer = room(&rank, 100);
        rank.comm.register(&buffer).unwrap();
        if rank.comm.rank() == 0 {
            return None;
        }
        // The other rank has left, or is about to.
        let told = rank.dyn_comm().all_reduce(&mut buffer, Reduction::Sum).unwrap_err();
        assert!(rank.comm.register(&room(&rank, 5)).is_err());
        Some(told)
    });
    assert!(errors[0].is_none() && errors[1].is_some(), "{errors:?}");
    assert_eq!(windows(), (0, 0));
}

/// A rank misses a registration.
#[test]
fn a_registration_has_a_deadline() {
    let _alone = alone();
    if !stand_in(2) || !has_windows() {
        return;
    }
    let barrier = Barrier::new(2);
    let told = ranks(2, &with_windows(options(Duration::from_millis(300))), |comm| {
        let rank = Rank::new(comm);
        let buffer = room(&rank, 100);
        let told = (rank.comm.rank() == 0).then(|| rank.comm.register(&buffer).unwrap_err());
        barrier.wait();
        told
    });
    assert!(matches!(told[0], Some(Error::Stuck { .. })), "{told:?}");
    assert_eq!(windows(), (0, 0));
}

type Alloc = extern "C" fn(*mut *mut c_void, usize) -> c_int;
type Free = extern "C" fn(*mut c_void) -> c_int;

/// Misuses that the stand-in refuses, so that the tests above can detect them.
#[test]
fn the_stand_in_notices_misuse() {
    let _alone = alone();
    if !stand_in(1) || !has_windows() {
        return;
    }
    ranks(1, &with_windows(patient()), |comm: Arc<Nccl>| {
        let (alloc, free) = (nccl_function::<Alloc>("ncclMemAlloc"), nccl_function::<Free>("ncclMemFree"));
        comm.device().make_current().unwrap();
        let mut own = null_mut();
        assert_eq!((alloc(&mut own, 4096), free(own), free(own)), (0, 0, 4), "freed twice");
        let rank = Rank::new(comm);
        let buffer = room(&rank, 10);
        rank.comm.register(&buffer).unwrap();
        let start = buffer.as_ptr().as_ptr().cast();
        assert_eq!(free(start), 5, "freed before its window has ended");
    });
    assert_eq!(windows(), (0, 0));
}

#[test]
fn an_operation_on_a_registered_buffer_is_captured() {
    let _alone = alone();
    if !stand_in(2) || !has_windows() {
        return;
    }
    ranks(2, &with_windows(patient()), |comm| {
        let rank = Rank::new(comm);
        let mut buffer = room(&rank, 10);
        rank.comm.register(&buffer).unwrap();
        fill(&rank, &mut buffer, 1.0);
        let stream = rank.queue.stream().unwrap().clone();
        let graph = rank.comm.capture(&stream, || -> Result<(), Error> {
            assert!(rank.comm.register(&room_in_capture(&rank)).is_err());
            let sum = Op::all_reduce(Reduction::Sum);
            let started = rank.comm.start(sum, buffer.take(), &rank.queue).map_err(|(_, error)| error)?;
            let (back, ended) = started.wait(&rank.queue);
            buffer = back;
            ended
        });
        let graph = graph.unwrap();
        // SAFETY: the memory lives until the rank's values have been read.
        unsafe { graph.launch(&stream) }.unwrap();
        assert_eq!(rank.read::<f32>(&buffer), [2.0; 10]);
    });
    assert_eq!(windows(), (0, 0));
}

/// A buffer that is invisible to a capture.
fn room_in_capture(rank: &Rank) -> Buffer {
    Buffer::zeroed(0, DType::F32, &rank.meter, Category::Staging).unwrap()
}
