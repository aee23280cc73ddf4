//! Results of two processes: equal to those of threads as ranks.

use crate::nccl::bench::{Rank, alone, multiplies, seed, stand_in};
use crate::nccl::collectives::{check_every_type, check_large, trade_in_groups, use_own_factors};
use crate::nccl::graphs::replay;
use crate::nccl::overlap::{Without, line_up};
use crate::nccl::pair::finish;
use meshstep_comm::{Communicator as _, Reduction};
use std::sync::Arc;

/// Every collective, reduction and type, and large buffers.
pub(super) fn collectives(rank: Rank) {
    check_every_type(&rank);
    check_large(&rank);
    assert_eq!(rank.meter.live_total(), 0);
}

/// Groups of calls, and groups of ranks.
pub(super) fn groups(rank: Rank) {
    trade_in_groups(&rank);
    if multiplies() {
        use_own_factors(&rank);
    }
    // The keys reverse the order of the ranks.
    let turned = rank.comm.split(Some(7), -(rank.comm.rank() as i64)).unwrap().unwrap();
    assert_eq!((turned.rank(), turned.world_size()), (1 - rank.comm.rank(), 2));
    let mut buffer = rank.buffer(&[turned.rank() as f32, 0.0]);
    turned.broadcast(&mut buffer, 1).unwrap();
    assert_eq!(rank.read::<f32>(&buffer), [1.0, 0.0]);
    // Rank 1 is in no group.
    let own = rank.comm.split((rank.comm.rank() == 0).then_some(3), 0).unwrap();
    assert_eq!(own.map(|own| own.world_size()), [Some(1), None][rank.comm.rank()]);
    let mut buffer = rank.buffer(&[2f32]);
    turned.all_reduce(&mut buffer, Reduction::Sum).unwrap();
    assert_eq!((rank.read::<f32>(&buffer), rank.sum(1.0)), (vec![4.0], Ok(2.0)));
}

/// Work ordered by events alone.
pub(super) fn order(rank: Rank) {
    for order in 0..10 {
        if stand_in(1) {
            seed(order);
        }
        assert!(line_up(Arc::clone(&rank.comm), Without::Nothing), "order {order}");
    }
}

/// Graphs of operations.
pub(super) fn graphs(rank: Rank) {
    for order in 0..3 {
        if stand_in(1) {
            seed(order);
        }
        replay(Arc::clone(&rank.comm), order);
    }
}

#[test]
fn two_processes_exchange_what_threads_do() {
    let _alone = alone();
    finish("collectives", &[]);
}

#[test]
fn two_processes_form_groups() {
    let _alone = alone();
    finish("groups", &[]);
}

#[test]
fn events_keep_the_order_of_two_processes() {
    let _alone = alone();
    finish("order", &[]);
}

#[test]
fn two_processes_launch_graphs() {
    let _alone = alone();
    finish("graphs", &[]);
}
