//! A rank's communication thread: takes operations in order, meets the others, moves portions.

use super::lane::{Lane, Task};
use super::meeting::Seat;
use super::moves;
use super::shared::{View, exchange};
use crate::Error;
use crate::faults::{Fault, Faults};
use meshstep_tensor::Buffer;
use std::sync::Arc;

/// Runs until the rank has left and everything it started is done.
pub(super) fn run(seat: &Seat, lane: &Lane, faults: &Faults) {
    let mut views = Vec::with_capacity(seat.group.world_size());
    while let Some(task) = lane.next() {
        let result = perform(seat, lane, faults, &task, &mut views);
        lane.finish(&task, result);
    }
    seat.group.depart(seat.rank, lane.started());
}

fn perform(
    seat: &Seat,
    lane: &Lane,
    faults: &Faults,
    task: &Task,
    views: &mut Vec<View>,
) -> Result<Option<Seat>, Arc<Error>> {
    let after = task.op.deadline().unwrap_or(seat.group.timeout());
    for fault in faults.at(seat.rank, task.called.op_number) {
        match fault {
            Fault::Delay(by) => seat.group.pause(seat.group.clock().now().saturating_add(by))?,
            Fault::CorruptInput => lane.with_buffer(task, flip_a_bit),
            Fault::Drop => {
                seat.group.pause(seat.group.clock().now().saturating_add(after))?;
                return Err(seat.group.miss(seat.rank, task.called, after));
            }
            Fault::CorruptResult => {}
        }
    }
    let formed = exchange(seat, task.called, task.view, after, views, moves::perform)?;
    if faults.at(seat.rank, task.called.op_number).any(|fault| fault == Fault::CorruptResult) {
        lane.with_buffer(task, flip_a_bit);
    }
    Ok(formed)
}

/// Flips a bit in the middle of a buffer, as a damaged wire would.
fn flip_a_bit(buffer: &mut Buffer) {
    let middle = buffer.bytes() / 2;
    let mut slice = buffer.as_mut();
    if let Some(byte) = slice.bytes_mut().ok().and_then(|bytes| bytes.get_mut(middle)) {
        *byte ^= 1 << 6;
    }
}
