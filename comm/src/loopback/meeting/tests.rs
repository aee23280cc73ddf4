//! Operations that overlap: when a thread that moves bytes stops, and which bytes a deadline counts.

use super::super::shared::{View, move_bytes};
use super::MeetingGroup;
use crate::group::seat::Besides;
use crate::{Action, Called, Clock, Error, Reduction};
use meshstep_tensor::{Buffer, Category, DType, Meter};
use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(10);
/// Elements that many portions share.
const LARGE: usize = 1 << 20;

fn group(ranks: usize) -> (Arc<MeetingGroup>, Clock) {
    let clock = Clock::manual();
    (MeetingGroup::new(ranks, clock.clone(), TIMEOUT), clock)
}

/// Posts an operation on `buffer`, which outlives it.
fn post(group: &MeetingGroup, rank: usize, op_number: u64, action: Action, buffer: &Buffer) -> Called {
    let called = Called { op_number, action, len: buffer.len(), dtype: buffer.dtype(), by: None };
    group.post(rank, called, View::of(buffer, action, Besides::Nothing)).unwrap();
    called
}

fn buffer(len: usize, value: f32) -> Buffer {
    Buffer::from_slice(&vec![value; len], &Meter::new(), Category::Staging).unwrap()
}

fn has_work(group: &MeetingGroup) -> bool {
    group.state.lock().transfers.has_work(false)
}

#[test]
fn a_thread_that_stops_between_portions_leaves_the_rest_to_the_others() {
    let (group, _) = group(2);
    let buffers = [buffer(LARGE, 1.0), buffer(LARGE, 2.0)];
    let sum = Action::AllReduce(Reduction::Sum);
    let called = [0, 1].map(|rank| post(&group, rank, 0, sum, &buffers[rank]));
    let mut share = group.state.lock().transfers.join(false).expect("two ranks have met");
    let left = Cell::new(3);
    let stops = || left.replace(left.get() - 1) == 0;
    let found = move_bytes(&mut share, 2, &stops);
    assert_eq!((found, share.drained), (Some(0), false));
    assert!(group.state.lock().transfers.leave(share, found).is_none(), "portions are left");
    assert!(!group.is_ready(0, TIMEOUT) && has_work(&group));
    for rank in [0, 1] {
        group.collect(rank, called[rank], TIMEOUT).unwrap();
        assert!(buffers[rank].typed::<f32>().unwrap().iter().all(|&value| value == 3.0));
    }
}

#[test]
fn no_other_thread_moves_a_chunk_that_its_rank_writes() {
    let (group, clock) = group(2);
    let buffers = [buffer(LARGE, 1.0), buffer(LARGE, 2.0)];
    for (rank, besides) in [Besides::Writer(None), Besides::Nothing].into_iter().enumerate() {
        let (action, buffer) = (Action::AllGather, &buffers[rank]);
        let called = Called { op_number: 0, action, len: LARGE, dtype: buffer.dtype(), by: None };
        group.post(rank, called, View::of(buffer, action, besides)).unwrap();
    }
    assert!(group.work(1, false, None));
    let values = |rank: usize| buffers[rank].typed::<f32>().unwrap();
    assert!(values(0)[LARGE / 2..].iter().all(|&value| value == 2.0), "rank 1's chunk has arrived");
    assert!(values(1)[..LARGE / 2].iter().all(|&value| value == 2.0), "rank 0 still writes its own");
    assert!(!group.is_ready(1, TIMEOUT) && !has_work(&group));
    let called = Called { op_number: 0, action: Action::AllGather, len: LARGE, dtype: DType::F32, by: None };
    let late = group.state.lock().late(1, called, TIMEOUT);
    let Error::Timeout { arrived, missing, .. } = late else { panic!("{late}") };
    assert_eq!((arrived, missing), (vec![1], vec![0]));
    // Its deadline ends the operation though rank 0 never ends its chunk; another failure does not.
    group.fail(Error::Aborted { rank: 1 });
    assert!(!group.is_ready(1, TIMEOUT));
    clock.advance(TIMEOUT);
    group.collect(1, called, TIMEOUT).unwrap_err();
    assert!(group.is_ready(0, TIMEOUT));
}

#[test]
fn a_chunk_that_its_rank_has_sent_is_not_copied_again() {
    let (group, _) = group(2);
    let buffers = [buffer(LARGE, 1.0), buffer(LARGE, 2.0)];
    for (rank, buffer) in buffers.iter().enumerate() {
        let (action, dtype) = (Action::AllGather, buffer.dtype());
        let called = Called { op_number: 0, action, len: LARGE, dtype, by: None };
        group.post(rank, called, View::of(buffer, action, Besides::Writer(None))).unwrap();
    }
    {
        let mut state = group.state.lock();
        let transfer = state.posts[0].met.front().and_then(|met| met.transfer).unwrap();
        assert!(state.transfers.stop_writing(transfer, 0).is_none(), "rank 1 still writes");
    }
    assert!(group.work(0, false, None));
    let values = |rank: usize| buffers[rank].typed::<f32>().unwrap();
    assert!(values(0).iter().all(|&value| value == 1.0) && values(1).iter().all(|&value| value == 2.0));
}

#[test]
fn a_waiting_thread_returns_its_result_before_it_moves_all_of_anothers_bytes() {
    let (group, _) = group(3);
    let [from, to] = [1.0, 2.0].map(|value| buffer(64 << 20, value));
    let [small, received] = [3.0, 4.0].map(|value| buffer(8, value));
    let called = post(&group, 2, 0, Action::Send { to: 0 }, &small);
    post(&group, 0, 0, Action::Send { to: 1 }, &from);
    post(&group, 1, 0, Action::Recv { from: 0 }, &to);
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| group.collect(2, called, TIMEOUT));
        std::thread::sleep(Duration::from_millis(1));
        // Completes the operation that rank 2 waits for. No other thread moves the large one.
        post(&group, 0, 1, Action::Recv { from: 2 }, &received);
        waits.join().unwrap().unwrap();
        assert!(has_work(&group), "rank 2 has moved bytes to the end of an operation that is not its own");
    });
    assert_eq!(received.typed::<f32>().unwrap(), [3.0; 8]);
}

#[test]
fn a_thread_whose_deadline_has_passed_moves_no_bytes_of_others() {
    let (group, clock) = group(3);
    let [from, to, none] = [LARGE, LARGE, 0].map(|len| buffer(len, 1.0));
    let called = post(&group, 2, 0, Action::Barrier, &none);
    post(&group, 0, 0, Action::Send { to: 1 }, &from);
    post(&group, 1, 0, Action::Recv { from: 0 }, &to);
    clock.advance(TIMEOUT);
    assert!(group.work(2, false, Some(TIMEOUT)) && has_work(&group));
    let error = group.collect(2, called, TIMEOUT).unwrap_err();
    assert!(matches!(*error, Error::Timeout { .. }), "{error}");
}

#[test]
fn a_deadline_does_not_count_the_bytes_of_the_operation_before() {
    let (group, clock) = group(2);
    let (buffers, none) = ([buffer(LARGE, 1.0), buffer(LARGE, 2.0)], buffer(0, 0.0));
    let sum = Action::AllReduce(Reduction::Sum);
    let first = post(&group, 0, 0, sum, &buffers[0]);
    let second = post(&group, 0, 1, Action::Barrier, &none);
    post(&group, 1, 0, sum, &buffers[1]);
    // The bytes take longer than the deadline.
    clock.advance(TIMEOUT * 2);
    group.collect(0, first, TIMEOUT).unwrap();
    assert!(!group.is_ready(0, TIMEOUT), "the second operation is late before its turn came");
    clock.advance(TIMEOUT);
    let error = group.collect(0, second, TIMEOUT).unwrap_err();
    assert!(matches!(*error, Error::Timeout { .. }), "{error}");
}
