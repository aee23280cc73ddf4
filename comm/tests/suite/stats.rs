//! Operations and bytes, as the loopback backend counts them, against the formulas of a ring.

use meshstep_comm::{Error, Kind, Reduction, Traffic, loopback};
use meshstep_tensor::{Buffer, Category, DType, Meter};

fn zeros(len: usize, dtype: DType) -> Buffer {
    Buffer::zeroed(len, dtype, &Meter::new(), Category::Grads).unwrap()
}

#[test]
fn each_kind_counts_what_a_ring_would_send() {
    for n in 1..=5u64 {
        let world_size = n as usize;
        let stats = loopback::spawn(world_size, |comm| {
            let even = &mut zeros(6 * world_size, DType::F64);
            comm.reduce_scatter(even, Reduction::Sum).unwrap();
            comm.all_gather(even).unwrap();
            comm.all_to_all(even).unwrap();
            comm.all_reduce(&mut zeros(7, DType::BF16), Reduction::Mean).unwrap();
            comm.all_reduce(&mut zeros(7, DType::BF16), Reduction::Max).unwrap();
            comm.broadcast(&mut zeros(9, DType::F32), world_size / 2).unwrap();
            comm.barrier().unwrap();
            comm.stats()
        });
        let stats = stats.unwrap();
        let (whole, all_reduced, broadcast) = (48 * n, 2 * 7 * 2, 9 * 4);
        for kind in [Kind::ReduceScatter, Kind::AllGather, Kind::AllToAll] {
            let expected = Traffic { operations: 1, bytes: whole * (n - 1) / n };
            assert!(stats.iter().all(|stats| stats.of(kind) == expected), "{kind:?} on {n}");
        }
        let sum = |kind| stats.iter().map(|stats| stats.of(kind).bytes).sum::<u64>();
        assert_eq!(sum(Kind::AllReduce), 2 * (n - 1) * all_reduced);
        assert_eq!(sum(Kind::Broadcast), (n - 1) * broadcast);
        assert!(stats.iter().all(|stats| stats.of(Kind::AllReduce).operations == 2));
        assert!(stats.iter().all(|stats| stats.of(Kind::Barrier) == Traffic { operations: 1, bytes: 0 }));
        assert!(stats.iter().all(|stats| stats.total().operations == 7));
        // The last rank of the ring that begins at the root sends nothing.
        let last = (world_size / 2 + world_size - 1) % world_size;
        assert_eq!(stats[last].of(Kind::Broadcast).bytes, 0);
    }
}

#[test]
fn pairs_count_on_both_ends_and_failures_on_none() {
    let stats = loopback::spawn(2, |comm| {
        let buffer = &mut zeros(3, DType::U64);
        if comm.rank() == 0 {
            comm.send(buffer, 1).unwrap()
        } else {
            comm.recv(buffer, 0).unwrap()
        }
        let refused = comm.all_gather(buffer);
        assert!(matches!(refused, Err(Error::Uneven { .. })));
        let failed = if comm.rank() == 0 { comm.barrier() } else { comm.broadcast(buffer, 0) };
        assert!(failed.is_err());
        comm.stats()
    });
    let stats = stats.unwrap();
    let one = |bytes| Traffic { operations: 1, bytes };
    assert_eq!((stats[0].of(Kind::Send), stats[0].total()), (one(24), one(24)));
    assert_eq!((stats[1].of(Kind::Recv), stats[1].total()), (one(0), one(0)));
}
