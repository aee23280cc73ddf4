//! After a failure ranks meet again under a new generation, through a rendezvous that also carries their failures.

use crate::nccl::bench::{Rank, alone, available, options, patient, plan, stand_in};
use meshstep_comm::nccl::{self, Exchange, Options};
use meshstep_comm::{Communicator, Error};
use meshstep_tensor::cuda::Device;
use std::collections::HashMap;
use std::sync::{Arc, Barrier, Condvar, Mutex};
use std::time::{Duration, Instant};

/// Rendezvous of threads.
#[derive(Debug, Default)]
struct Board {
    notes: Mutex<HashMap<String, Vec<u8>>>,
    changed: Condvar,
    failures: Mutex<Vec<(usize, String)>>,
}

impl Exchange for Board {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), Error> {
        self.notes.lock().unwrap().insert(key.to_owned(), value.to_vec());
        self.changed.notify_all();
        Ok(())
    }

    fn get(&self, key: &str, within: Duration) -> Result<Vec<u8>, Error> {
        let notes = self.notes.lock().unwrap();
        let missing = |notes: &mut HashMap<String, Vec<u8>>| !notes.contains_key(key);
        let (notes, _) = self.changed.wait_timeout_while(notes, within, missing).unwrap();
        let late = Error::NotJoined { rank: 1, world_size: 2, after: within };
        notes.get(key).cloned().ok_or(late)
    }

    fn publish_failure(&self, rank: usize, message: &str) {
        self.failures.lock().unwrap().push((rank, message.to_owned()));
    }

    fn failure(&self) -> Option<(usize, String)> {
        self.failures.lock().unwrap().first().cloned()
    }
}

/// Runs `body` on each of `n` ranks, as threads that join by themselves.
fn threads<T: Send>(n: usize, body: impl Fn(usize, Device) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let start = |rank| {
            scope.spawn({
                let body = &body;
                move || body(rank, Device::open(rank).unwrap())
            })
        };
        let threads: Vec<_> = (0..n).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn a_rebuilt_communicator_works() {
    let _alone = alone();
    if !stand_in(3) {
        return;
    }
    let plans = ["error 0 1 6", "hang 2 1", "hang 1 0", "error 2 2 1"];
    let boards: Vec<Arc<Board>> = (0..=plans.len()).map(|_| Arc::default()).collect();
    let sums = threads(3, |rank, device| {
        let mut sums = Vec::new();
        for (generation, board) in boards.iter().enumerate() {
            // Only rank 0 changes the plan, and no rank goes on before it has joined.
            if let (0, Some(text)) = (rank, plans.get(generation)) {
                plan(text);
            }
            let exchange = Arc::clone(board) as Arc<dyn Exchange>;
            let options = options(Duration::from_millis(300));
            let comm = nccl::join(exchange, generation as u64, rank, 3, &device, options).unwrap();
            let rank = Rank::new(Arc::new(comm));
            let begun = Instant::now();
            let failed = (0..10).find_map(|_| rank.sum(1.0).err());
            assert_eq!(failed.is_some(), generation < plans.len(), "generation {generation}: {failed:?}");
            assert!(begun.elapsed() < Duration::from_millis(2300));
            if failed.is_none() {
                sums.push(rank.sum(1.0).unwrap());
            }
            assert_eq!(rank.meter.live_total(), 0);
        }
        sums
    });
    assert_eq!(sums, vec![vec![3.0]; 3]);
}

#[test]
fn ranks_join_through_a_rendezvous_and_report_failures_to_it() {
    let _alone = alone();
    if !stand_in(2) {
        return;
    }
    plan("error 1 2 2");
    let board: Arc<Board> = Arc::default();
    threads(2, |rank, device| {
        let comm = nccl::join(Arc::clone(&board) as _, 7, rank, 2, &device, patient()).unwrap();
        let rank = Rank::new(Arc::new(comm));
        assert_eq!(rank.sum(2.0), Ok(4.0));
        // One rank may see the failure before the end of the second sum.
        rank.sum(3.0).and_then(|_| rank.sum(1.0)).unwrap_err();
    });
    assert!(board.notes.lock().unwrap().contains_key("nccl/7"));
    let begun = Instant::now();
    while board.failure().is_none() {
        assert!(begun.elapsed() < Duration::from_secs(2), "a failure is published");
    }
    let (rank, message) = board.failure().unwrap();
    assert!(rank < 2 && message.contains("unhandled system error (2)"), "{rank}: {message}");
}

#[test]
fn a_failure_elsewhere_ends_operations_here() {
    let _alone = alone();
    if !available(2) {
        return;
    }
    let (board, all_have_come) = (Arc::<Board>::default(), Barrier::new(2));
    let begun = Instant::now();
    let errors = threads(2, |rank, device| {
        let comm = nccl::join(Arc::clone(&board) as _, 0, rank, 2, &device, patient()).unwrap();
        all_have_come.wait();
        if rank == 1 {
            // As a rank of another process does.
            board.publish_failure(5, "the disk is full");
        }
        let rank = Rank::new(Arc::new(comm));
        (0..1_000_000).find_map(|_| rank.sum(1.0).err()).unwrap()
    });
    for error in errors {
        assert_eq!(error, Error::Remote { rank: 5, message: "the disk is full".to_owned() });
    }
    assert!(begun.elapsed() < Duration::from_secs(5));
}

#[test]
fn bytes_that_are_no_id_are_refused() {
    let _alone = alone();
    if !available(1) {
        return;
    }
    let board = Arc::new(Board::default());
    board.set("nccl/0", &[1, 2, 3]).unwrap();
    let device = Device::open(0).unwrap();
    let refused = nccl::join(Arc::clone(&board) as _, 0, 1, 2, &device, Options::default());
    assert_eq!(refused.unwrap_err(), Error::BadId { given: 3, needed: 128 });
    assert_eq!(refused_by_rank(&device, 3, 3), Error::InvalidRank { rank: 3, world_size: 3 });
    assert_eq!(refused_by_rank(&device, 0, 0), Error::ZeroRanks);
}

fn refused_by_rank(device: &Device, rank: usize, world_size: usize) -> Error {
    let id = nccl::UniqueId::new().unwrap();
    assert_eq!(nccl::UniqueId::from_bytes(*id.as_bytes()), id);
    let comm = nccl::init(&id, rank, world_size, device, Options::default());
    comm.map(|comm| comm.rank()).unwrap_err()
}

#[test]
fn ranks_that_contradict_each_other_do_not_come_together() {
    let _alone = alone();
    if !stand_in(2) {
        return;
    }
    let within = Duration::from_millis(300);
    // Both claim to be rank 0 of two; one claims a world of three.
    for [(a, of_a), (b, of_b)] in [[(0, 2), (0, 2)], [(0, 2), (1, 3)]] {
        let id = nccl::UniqueId::new().unwrap();
        let errors = threads(2, |thread, device| {
            let (rank, world_size) = if thread == 0 { (a, of_a) } else { (b, of_b) };
            nccl::init(&id, rank, world_size, &device, options(within)).map(drop).unwrap_err()
        });
        let refused = |error: &Error| matches!(error, Error::Nccl { function: "ncclCommInitRankConfig", .. });
        let waited =
            |error: &Error| matches!(error, Error::NotJoined { rank: 0 | 1, after, .. } if *after == within);
        assert!(errors.iter().any(refused) && errors.iter().any(waited), "{errors:?}");
    }
}
