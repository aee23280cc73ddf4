//! A process that dies, sleeps, exits, aborts or is missing: the other gets a typed error in time.

use crate::nccl::bench::{Rank, alone, options, stand_in};
use crate::nccl::pair::{Process, deadline, device, finish, pair, ready, ready_pair};
use meshstep_comm::nccl::{self, UniqueId};
use meshstep_comm::{Communicator as _, Error, Reduction};
use meshstep_tensor::cuda::Device;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Time after a deadline until a rank has its error.
const GRACE: Duration = Duration::from_secs(2);

/// The stand-in's plan takes effect in one of these operations, or in none.
pub(super) fn plan(rank: Rank) {
    let begun = Instant::now();
    println!("\nresult: {:?}", exchange(&rank));
    assert!(begun.elapsed() < deadline() + GRACE);
    assert_eq!(rank.meter.live_total(), 0);
}

fn exchange(rank: &Rank) -> Result<Vec<f32>, Error> {
    let (me, comm) = (rank.comm.rank() as f32, rank.dyn_comm());
    let mut sum = rank.buffer(&[1.0 + me, 5.0]);
    comm.all_reduce(&mut sum, Reduction::Sum)?;
    let mut gathered = rank.buffer(&[me + 7.0; 2]);
    comm.all_gather(&mut gathered)?;
    let mut swapped = rank.buffer(&[10.0 + me, 20.0 + me]);
    comm.all_to_all(&mut swapped)?;
    comm.barrier()?;
    Ok([sum, gathered, swapped].iter().flat_map(|buffer| rank.read::<f32>(buffer)).collect())
}

/// Checks the first error of a rank, which arrives in time; every later call has the same cause, and no memory is left.
fn until_failure(rank: &Rank) -> Error {
    let (error, after) = loop {
        let begun = Instant::now();
        if let Err(error) = rank.sum(1.0) {
            break (error.cause().clone(), begun.elapsed());
        }
    };
    assert!(after < deadline() + GRACE, "{error:?} after {after:?}");
    assert_eq!(*rank.sum(1.0).unwrap_err().cause(), error);
    assert_eq!(rank.meter.live_total(), 0);
    error
}

/// Checks the error of a rank after its peer is gone. NCCL may notice that by itself; the stand-in does not.
fn assert_left_alone(error: &Error) {
    let noticed = matches!(error, Error::Nccl { .. }) && !stand_in(1);
    assert!(matches!(error, Error::Stuck { .. }) || noticed, "{error:?}");
}

pub(super) fn sums_until_failure(rank: Rank) {
    assert_eq!(rank.sum(1.0), Ok(2.0));
    ready(rank.comm.rank());
    assert_left_alone(&until_failure(&rank));
}

/// Rank 1 reaches its second sum after the other's deadline.
pub(super) fn sleeps(rank: Rank) {
    assert_eq!(rank.sum(1.0), Ok(2.0));
    if rank.comm.rank() == 1 {
        sleep(2 * deadline());
    }
    assert_left_alone(&until_failure(&rank));
}

/// Rank 1 exits after its first sum without leaving the group.
pub(super) fn exits(rank: Rank) {
    assert_eq!(rank.sum(1.0), Ok(2.0));
    ready(rank.comm.rank());
    if rank.comm.rank() == 1 {
        std::process::exit(3);
    }
    assert_left_alone(&until_failure(&rank));
}

/// Rank 1 aborts after its first sum.
pub(super) fn aborts(rank: Rank) {
    let pair = rank.comm.split(Some(0), 0).unwrap().unwrap();
    assert_eq!(rank.sum(1.0), Ok(2.0));
    ready(rank.comm.rank());
    if rank.comm.rank() == 0 {
        return assert_left_alone(&until_failure(&rank));
    }
    rank.comm.abort();
    assert_eq!(until_failure(&rank), Error::Aborted { rank: 1 });
    assert_eq!(*pair.barrier().unwrap_err().cause(), Error::Aborted { rank: 1 });
}

/// Rank 0 waits for a rank 1 that has another id, and rank 1 for a rank 0.
pub(super) fn is_alone(rank: usize) {
    let (id, device) = (UniqueId::new().unwrap(), Device::open(device(rank)).unwrap());
    let begun = Instant::now();
    let error = nccl::init(&id, rank, 2, &device, options(deadline())).unwrap_err();
    assert_eq!(error, Error::NotJoined { rank, world_size: 2, after: deadline() });
    assert!(begun.elapsed() < deadline() + GRACE);
}

#[test]
fn a_process_that_is_killed_is_an_error_in_the_other() {
    let _alone = alone();
    let Some([first, mut second]) = ready_pair("sums until failure") else { return };
    second.kill();
    let (well, said) = first.end();
    assert!(well, "{said}");
    assert!(!second.end().0);
}

#[test]
fn a_process_that_exits_is_an_error_in_the_other() {
    let _alone = alone();
    let Some([first, second]) = ready_pair("exits") else { return };
    let (well, said) = first.end();
    assert!(well, "{said}");
    assert!(!second.end().0);
}

#[test]
fn a_process_that_comes_too_late_is_an_error_in_both() {
    let _alone = alone();
    finish("sleeps", &[]);
}

#[test]
fn a_process_that_aborts_is_an_error_in_the_other() {
    let _alone = alone();
    let Some(processes) = ready_pair("aborts") else { return };
    for (well, said) in processes.map(Process::end) {
        assert!(well, "{said}");
    }
}

#[test]
fn a_process_that_never_comes_is_not_waited_for_beyond_the_deadline() {
    let _alone = alone();
    finish("is alone", &[]);
}

/// Runs both ranks, one of them with a plan of the stand-in.
fn planned(plan: &str) -> [(bool, String); 2] {
    pair("plan", &[("MESHSTEP_STANDIN_NCCL", plan)]).unwrap().map(Process::end)
}

#[test]
fn the_death_of_a_process_is_an_error_in_the_others() {
    let _alone = alone();
    if !stand_in(2) {
        return;
    }
    let [alive, dead] = planned("die 1 1");
    assert!(!dead.0 && !dead.1.contains("result"), "{}", dead.1);
    assert!(alive.0 && alive.1.contains("result: Err(operation 1, "), "{}", alive.1);
}

#[test]
fn an_error_in_one_process_ends_both() {
    let _alone = alone();
    if !stand_in(2) {
        return;
    }
    let [stuck, broken] = planned("error 1 2 6");
    assert!(broken.0 && broken.1.contains("failed with remote process exited (6)"), "{}", broken.1);
    assert!(stuck.0 && stuck.1.contains("result: Err(operation 2, "), "{}", stuck.1);
}

#[test]
fn without_a_plan_both_processes_have_their_results() {
    let _alone = alone();
    let Some([first, second]) = finish("plan", &[]) else { return };
    let told = "result: Ok([3.0, 10.0, 7.0, 8.0, ";
    assert!(first.contains(&format!("{told}10.0, 11.0])")), "{first}");
    assert!(second.contains(&format!("{told}20.0, 21.0])")), "{second}");
}
