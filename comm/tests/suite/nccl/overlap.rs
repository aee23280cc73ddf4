//! Work ordered by events alone, under a hundred orders of the streams; and its results without one of the events.

use crate::nccl::bench::{Rank, alone, available, patient, ranks, seed, stand_in};
use meshstep_comm::nccl::Nccl;
use meshstep_comm::{Communicator, Op, Reduction};
use meshstep_tensor::cuda::{Pinned, Stream};
use meshstep_tensor::{Category, Queue};
use std::sync::Arc;

const LEN: usize = 64;

/// The wait that is left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Without {
    Nothing,
    Before,
    After,
}

/// Returns true if all ranks got the right result.
fn overlapped(n: usize, without: Without) -> bool {
    ranks(n, &patient(), |comm| line_up(comm, without)).into_iter().all(|right| right)
}

/// Fills two buffers on one stream, reduces them, and copies them on another; no call waits on the host. Returns true if this
/// rank got the right result.
pub(crate) fn line_up(comm: Arc<Nccl>, without: Without) -> bool {
    let rank = Rank::new(comm);
    let later = Queue::cuda(Stream::new(rank.comm.device()).unwrap());
    let apart = Queue::cuda(Stream::new(rank.comm.device()).unwrap());
    let fill = |x: f32| {
        let host = Pinned::zeroed(rank.comm.device(), LEN * 4, &rank.meter, Category::Staging).unwrap();
        host.write(0, bytemuck::cast_slice(&[x; LEN])).unwrap();
        host
    };
    let (n, me) = (rank.comm.world_size(), rank.comm.rank() as f32);
    let hosts = [fill(me + 1.0), fill(me + 10.0)];
    let mut right = true;
    let mut started = Vec::new();
    let mut results: Vec<_> = (0..2).map(|_| rank.buffer(&[0f32; LEN])).collect();
    let filled: Vec<_> = (0..2).map(|_| rank.buffer(&[0f32; LEN])).collect();
    for (host, mut buffer) in hosts.iter().zip(filled) {
        rank.queue.stream().unwrap().copy_in(host, 0, buffer.as_mut()).unwrap();
        let after = if without == Without::Before { &Queue::cpu() } else { &rank.queue };
        started.push(rank.comm.start(Op::all_reduce(Reduction::Sum), buffer, after).unwrap());
    }
    let mut kept = Vec::new();
    for (one, result) in started.into_iter().zip(&mut results) {
        let (buffer, ended) = one.wait(if without == Without::After { &apart } else { &later });
        ended.unwrap();
        later.copy(buffer.as_slice(), result.as_mut()).unwrap();
        kept.push(buffer);
    }
    later.synchronize().unwrap();
    let ranks: f32 = (0..n).map(|rank| rank as f32).sum();
    for (result, base) in results.iter().zip([1.0, 10.0]) {
        right &= rank.read::<f32>(result) == [ranks + base * n as f32; LEN];
    }
    rank.queue.synchronize().unwrap();
    apart.synchronize().unwrap();
    right
}

#[test]
fn events_alone_keep_the_order() {
    let _alone = alone();
    if !available(2) {
        return;
    }
    for order in 0..if stand_in(2) { 100 } else { 3 } {
        if stand_in(2) {
            seed(order);
        }
        assert!(overlapped(2, Without::Nothing), "order {order}");
    }
}

#[test]
fn a_missing_wait_shows_under_the_stand_ins() {
    let _alone = alone();
    if !stand_in(2) {
        return;
    }
    for without in [Without::Before, Without::After] {
        let wrong = |order: &u64| {
            seed(*order);
            !overlapped(2, without)
        };
        let count = (0..100).filter(wrong).count();
        assert!(count >= 5, "without the wait {without:?}: wrong in {count} of 100 orders");
        println!("without the wait {without:?}: wrong in {count} of 100 orders");
    }
}
