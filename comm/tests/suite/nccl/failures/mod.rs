//! Failures on one rank: a typed error on all, in time, and nothing left behind.

mod aborts;

use crate::nccl::bench::{Rank, alone, available, options, patient, plan, ranks, stand_in};
use meshstep_comm::nccl::{self, Nccl, Options};
use meshstep_comm::{Clock, Communicator, Error, Op, Reduction};
use meshstep_tensor::{Meter, Queue};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const DEADLINE: Duration = Duration::from_millis(400);

/// Time after a deadline until every rank has its error.
const GRACE: Duration = Duration::from_secs(2);

/// Sums until it fails. Returns the error, the number of sums, the time, and the rank's remaining memory.
fn until_failure(comm: Arc<Nccl>) -> (Error, u32, Instant, u64) {
    let rank = Rank::new(comm);
    let (error, sums) = (0..100).find_map(|i| rank.sum(1.0).err().map(|error| (error, i))).unwrap();
    let when = Instant::now();
    // No operation starts any more, and every later call returns the cause.
    let (buffer, refused) =
        rank.comm.start(Op::all_gather(), rank.buffer(&[1f32; 3]), &rank.queue).map(drop).unwrap_err();
    assert!(matches!(refused, Error::Poisoned { .. }), "{refused:?}");
    drop(buffer);
    for later in [rank.sum(1.0).unwrap_err(), rank.comm.split(None, 0).unwrap_err()] {
        let Error::Poisoned { cause } = &later else { panic!("{later:?}") };
        assert_eq!(**cause, error);
    }
    (error, sums, when, rank.meter.live_total())
}

/// Runs the plan on three ranks with options; all ranks have the same error within the time. Returns it.
fn all_fail(text: &str, mut options: Options, within: Duration) -> Error {
    plan(text);
    options.meter = Meter::new();
    let begun = Instant::now();
    let ends = ranks(3, &options, until_failure);
    assert_eq!(options.meter.live_total(), 0, "the communicators' own memory");
    for (error, sums, when, live) in &ends {
        // A rank may see the failure before the end of the sum before.
        assert!((3..=4).contains(sums), "{sums} sums");
        assert_eq!((error, *live), (&ends[0].0, 0));
        assert!(*when - begun < within, "{:?} is more than {within:?}", *when - begun);
    }
    ends[0].0.clone()
}

#[test]
fn an_asynchronous_error_reaches_all_ranks_at_once() {
    let _alone = alone();
    if !stand_in(3) {
        return;
    }
    // Long before any deadline.
    let error = all_fail("error 1 4 3", patient(), GRACE);
    let Error::Nccl { function: "ncclCommGetAsyncError", code: 3, name, .. } = &error else {
        panic!("{error:?}")
    };
    assert_eq!(name, "internal error");
}

#[test]
fn a_hang_ends_at_its_deadline() {
    let _alone = alone();
    if !stand_in(3) {
        return;
    }
    let error = all_fail("hang 2 4", options(DEADLINE), DEADLINE + GRACE);
    let Error::Stuck { op_number: 4, called, after } = &error else { panic!("{error:?}") };
    assert_eq!((called.to_string().as_str(), *after), ("all_reduce(sum) of 1 f32", DEADLINE));
}

#[test]
fn a_deadline_of_an_operation_is_its_own() {
    let _alone = alone();
    if !stand_in(2) {
        return;
    }
    plan("hang 0 0");
    let begun = Instant::now();
    ranks(2, &patient(), |comm| {
        let rank = Rank::new(comm);
        let op = Op::all_gather().within(DEADLINE);
        let started = rank.comm.start(op, rank.buffer(&[1f32, 2.0]), &rank.queue).unwrap();
        let (buffer, result) = started.wait(&Queue::cpu());
        assert!(matches!(result, Err(Error::Stuck { after: DEADLINE, .. })), "{result:?}");
        assert_eq!(buffer.len(), 2, "the buffer comes back");
    });
    assert!(begun.elapsed() < DEADLINE + GRACE);
}

#[test]
fn a_deadline_counts_from_when_the_work_before_is_done() {
    let _alone = alone();
    if !stand_in(2) {
        return;
    }
    // On this clock two hours pass while the second operation waits for the first, and none afterwards.
    let (clock, meter) = (Clock::manual(), Meter::new());
    let options = Options { clock: clock.clone(), meter, ..options(Duration::from_secs(3600)) };
    let late = Mutex::new(());
    let held = late.lock().unwrap();
    std::thread::scope(|scope| {
        let (late, options) = (&late, &options);
        let world = scope.spawn(move || {
            ranks(2, options, |comm| {
                let rank = Rank::new(comm);
                let first = (rank.comm.rank() == 0).then(|| {
                    let op = Op::barrier().within(Duration::from_secs(1 << 20));
                    let first = rank.comm.start(op, rank.buffer(&[0f32; 0]), &rank.queue).unwrap();
                    let second = rank.comm.start(Op::all_gather(), rank.buffer(&[0f32; 2]), &rank.queue);
                    (first, second.unwrap())
                });
                drop(late.lock().unwrap());
                if let Some((first, second)) = first {
                    let cpu = Queue::cpu();
                    return first.wait(&cpu).1.and(second.wait(&cpu).1);
                }
                rank.dyn_comm().barrier()?;
                rank.dyn_comm().all_gather(&mut rank.buffer(&[0f32; 2]))
            })
        });
        std::thread::sleep(Duration::from_millis(100));
        clock.advance(Duration::from_secs(7200));
        std::thread::sleep(Duration::from_millis(50));
        drop(held);
        assert_eq!(world.join().unwrap(), [Ok(()), Ok(())]);
    });
}

#[test]
fn nothing_ends_before_its_deadline_on_the_clock() {
    let _alone = alone();
    if !stand_in(2) {
        return;
    }
    plan("hang 1 0");
    let clock = Clock::manual();
    let options = Options { clock: clock.clone(), ..options(Duration::from_secs(3600)) };
    let ended = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let world = scope.spawn(|| {
            ranks(2, &options, |comm| {
                let result = Rank::new(comm).sum(1.0);
                ended.fetch_add(1, SeqCst);
                result
            })
        });
        std::thread::sleep(Duration::from_millis(150));
        clock.advance(Duration::from_secs(3599));
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(ended.load(SeqCst), 0);
        let begun = Instant::now();
        // Once is enough, unless the operation has begun late on this machine.
        while ended.load(SeqCst) < 2 && begun.elapsed() < 5 * GRACE {
            clock.advance(Duration::from_secs(1));
            std::thread::sleep(Duration::from_millis(20));
        }
        assert_eq!(ended.load(SeqCst), 2);
        for result in world.join().unwrap() {
            assert!(matches!(result, Err(Error::Stuck { .. })), "{result:?}");
        }
    });
}

#[test]
fn a_buffer_handed_to_a_queue_is_followed_by_the_error() {
    let _alone = alone();
    if !stand_in(2) {
        return;
    }
    plan("hang 1 0");
    let begun = Instant::now();
    ranks(2, &options(DEADLINE), |comm| {
        let rank = Rank::new(comm);
        let started = rank.comm.start(Op::all_reduce(Reduction::Sum), rank.buffer(&[1f32; 9]), &rank.queue);
        // No thread waits here, neither the host's nor the caller's.
        let (buffer, result) = started.unwrap().wait(&rank.queue);
        assert_eq!(result, Ok(()));
        // The queue continues once the operation has been ended.
        rank.queue.synchronize().unwrap();
        drop(buffer);
        assert_eq!(rank.meter.live_total(), 0);
        let told = rank.sum(1.0).unwrap_err();
        assert!(matches!(told, Error::Stuck { op_number: 0, .. }), "{told:?}");
        assert_eq!(rank.comm.stats().total().operations, 0, "an aborted operation does not count");
    });
    assert!(begun.elapsed() < DEADLINE + GRACE);
}

#[test]
fn forgotten_operations_are_released() {
    let _alone = alone();
    if !available(2) {
        return;
    }
    for trouble in [false, true] {
        if trouble && !stand_in(2) {
            continue;
        }
        if trouble {
            plan("hang 1 1");
        }
        // Time stands still until all handles are dropped, so a wait for time there would hang.
        let options = Options { clock: Clock::manual(), ..options(DEADLINE) };
        ranks(2, &options, |comm| {
            let rank = Rank::new(comm);
            let buffers = [(); 3].map(|()| rank.buffer(&[1f32; 500]));
            for buffer in buffers {
                let started = rank.comm.start(Op::all_gather(), buffer, &rank.queue);
                drop(started.map_err(|(_, error)| assert!(trouble, "{error:?}")));
            }
            let begun = Instant::now();
            while rank.meter.live_total() > 0 {
                assert!(begun.elapsed() < 5 * GRACE, "{:?}", rank.meter);
                options.clock.advance(DEADLINE / 4);
                std::thread::sleep(Duration::from_millis(2));
            }
        });
    }
}

#[test]
fn the_last_operations_are_written_down() {
    let _alone = alone();
    if !stand_in(2) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    plan("hang 1 2");
    let options = Options { flight_recorder: Some(folder.path().join("flight")), ..options(DEADLINE) };
    ranks(2, &options, |comm| {
        let rank = Rank::new(comm);
        assert_eq!((rank.sum(1.0), rank.sum(1.0)), (Ok(2.0), Ok(2.0)));
        rank.sum(1.0).unwrap_err();
    });
    let mut texts: Vec<String> = std::fs::read_dir(folder.path().join("flight"))
        .unwrap()
        .map(|entry| std::fs::read_to_string(entry.unwrap().path()).unwrap())
        .collect();
    texts.sort();
    assert_eq!(texts.len(), 2);
    for (rank, text) in texts.iter().enumerate() {
        let lines: Vec<&str> = text.lines().collect();
        assert!(
            lines[0].starts_with(&format!("rank {rank} of 2: operation 2, all_reduce(sum) of 1 f32")),
            "{text}"
        );
        assert!(!lines[2].contains("not seen") && lines[3].ends_with("ended not seen"), "{text}");
    }
}

#[test]
fn ranks_that_do_not_come_are_not_waited_for_beyond_the_deadline() {
    let _alone = alone();
    if !available(1) {
        return;
    }
    let device = meshstep_tensor::cuda::Device::open(0).unwrap();
    let begun = Instant::now();
    let id = nccl::UniqueId::new().unwrap();
    let error = nccl::init(&id, 0, 2, &device, options(DEADLINE)).unwrap_err();
    assert_eq!(error, Error::NotJoined { rank: 0, world_size: 2, after: DEADLINE });
    assert!(begun.elapsed() < DEADLINE + GRACE);
}
