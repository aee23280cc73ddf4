//! Operations that fail: one typed error on every rank, and no process that stays.

use crate::collectives::Comm;
use crate::passed;
use meshstep_cases::mpirun::Ended;
use meshstep_comm::mpi::{self, Options, World};
use meshstep_comm::{Error, Op, Reduction};
use meshstep_tensor::{Buffer, Category, Meter, Queue};
use std::time::Duration;

/// Rank that the launcher gave to this process, before MPI tells it.
pub(crate) fn launched_rank() -> usize {
    let rank = ["OMPI_COMM_WORLD_RANK", "PMI_RANK"].into_iter().find_map(|name| std::env::var(name).ok());
    rank.expect("a launcher's variable").parse().unwrap()
}

pub(crate) fn stop_this_process() {
    let stop = std::process::Command::new("kill").args(["-STOP", &std::process::id().to_string()]).status();
    panic!("kill returned {stop:?}, and the process goes on");
}

fn floats(len: usize) -> Buffer {
    Buffer::from_slice(&vec![1.5f32; len], &Meter::new(), Category::Grads).unwrap()
}

fn all_reduce(comm: &Comm, within: Duration) -> Result<(), Error> {
    comm.run(Op::all_reduce(Reduction::Sum).within(within), &mut floats(100_000))
}

fn away(time: Duration) {
    std::thread::sleep(time);
}

/// Ends the world after an error that every rank has; a new one is refused.
fn end(comm: Comm, error: &Error) {
    println!("error: {error}");
    drop(comm);
    let again = mpi::world(&Options::default()).unwrap_err();
    assert!(matches!(again, mpi::Error::AfterFailure { .. }), "{again}");
}

/// Every rank has the same error, handles it, and ends as it should.
pub(crate) fn one_error(ended: &Ended) {
    passed(ended);
    let errors: Vec<&str> = ended.output.lines().filter(|line| line.starts_with("error: ")).collect();
    assert!(errors.len() == ended.ranks && errors.iter().all(|e| *e == errors[0]), "{}", ended.output);
}

pub(crate) fn mismatch(world: World) {
    let comm = world.communicator();
    drop(world);
    let op = if comm.rank() == 0 { Op::all_gather() } else { Op::all_reduce(Reduction::Sum) };
    let error = comm.run(op, &mut floats(64)).unwrap_err();
    assert!(matches!(error, Error::Mismatch { op_number: 0, .. }), "{error}");
    end(comm, &error);
}

fn is_late(error: &Error) -> bool {
    matches!(error, Error::Timeout { missing, .. } if *missing == [1])
}

/// Rank 1 comes after the deadline, and gets the others' error.
pub(crate) fn late_but_comes(world: World) {
    let comm = world.communicator();
    drop(world);
    comm.barrier().unwrap();
    if comm.rank() == 1 {
        away(Duration::from_millis(1500));
    }
    let error = all_reduce(&comm, Duration::from_secs(1)).unwrap_err();
    assert!(is_late(&error), "{error}");
    end(comm, &error);
}

/// Rank 1 does not come. The others have a typed error, and their end ends the job.
pub(crate) fn late(world: World) {
    let comm = world.communicator();
    drop(world);
    comm.barrier().unwrap();
    if comm.rank() == 1 {
        away(Duration::from_secs(60));
    }
    let error = all_reduce(&comm, Duration::from_secs(1)).unwrap_err();
    assert!(is_late(&error), "{error}");
    println!("error: {error}");
    drop(comm);
    println!("a rank survived MPI_Abort");
}

/// Rank 1 is stopped in the midst of operations, as by a machine that hangs.
pub(crate) fn stopped(world: World) {
    let comm = world.communicator();
    drop(world);
    all_reduce(&comm, Duration::from_secs(20)).unwrap();
    if comm.rank() == 1 {
        stop_this_process();
    }
    let error = all_reduce(&comm, Duration::from_secs(1)).unwrap_err();
    assert!(is_late(&error), "{error}");
    println!("error: {error}");
    drop(comm);
    println!("a rank survived MPI_Abort");
}

pub(crate) fn ended_by_abort(ended: &Ended) {
    assert!(!ended.success && ended.took < Duration::from_secs(20), "{:?}\n{}", ended.took, ended.output);
    // mpirun may continue a stopped rank before it ends it.
    let errors = ended.output.lines().filter(|line| line.starts_with("error: ")).count();
    assert!(errors + 1 >= ended.ranks, "{}", ended.output);
    assert!(ended.output.contains("MPI_Abort ends the job: not every rank came"), "{}", ended.output);
    assert!(!ended.output.contains("survived"), "{}", ended.output);
}

/// Rank 1 aborts while the others wait for it.
pub(crate) fn aborted(world: World) {
    let comm = world.communicator();
    drop(world);
    comm.barrier().unwrap();
    if comm.rank() == 1 {
        away(Duration::from_millis(100));
        comm.abort();
    }
    let error = all_reduce(&comm, Duration::from_secs(20)).unwrap_err();
    assert!(matches!(error, Error::Aborted { rank: 1 }), "{error}");
    end(comm, &error);
}

/// An abort of a group ends that group and no other.
pub(crate) fn aborted_group(world: World) {
    let comm = world.communicator();
    let group = comm.split(Some(0), 0).unwrap().unwrap();
    if comm.rank() == 1 {
        group.abort();
    }
    let error = all_reduce(&group, Duration::from_secs(20)).unwrap_err();
    assert!(matches!(error, Error::Aborted { rank: 1 }), "{error}");
    all_reduce(&comm, Duration::from_secs(20)).unwrap();
    // Rank 0 comes to the end later than a failed job would wait.
    if comm.rank() == 0 {
        away(Duration::from_secs(3));
    }
}

/// Rank 1 leaves before an operation of the others.
pub(crate) fn left(world: World) {
    let comm = world.communicator();
    drop(world);
    comm.barrier().unwrap();
    if comm.rank() != 1 {
        let error = all_reduce(&comm, Duration::from_secs(20)).unwrap_err();
        assert!(matches!(error, Error::Left { rank: 1, .. }), "{error}");
    }
}

/// Rank 1 panics while the others wait for it.
pub(crate) fn panicked(world: World) {
    let comm = world.communicator();
    drop(world);
    comm.barrier().unwrap();
    if comm.rank() == 1 {
        panic!("a test");
    }
    let error = all_reduce(&comm, Duration::from_secs(20)).unwrap_err();
    assert!(matches!(error, Error::Panicked { rank: 1, .. }), "{error}");
    println!("error: {error}");
}

pub(crate) fn one_panicked(ended: &Ended) {
    assert!(!ended.success && ended.took < Duration::from_secs(20), "{:?}\n{}", ended.took, ended.output);
    let errors = ended.output.lines().filter(|line| line.starts_with("error: ")).count();
    assert_eq!(errors, ended.ranks - 1, "{}", ended.output);
}

/// Rank 1 is killed in the midst of operations.
pub(crate) fn killed(world: World) {
    let comm = world.communicator();
    for round in 0.. {
        if (comm.rank(), round) == (1, 20) {
            let kill =
                std::process::Command::new("kill").args(["-9", &std::process::id().to_string()]).status();
            panic!("kill returned {kill:?}");
        }
        if let Err(error) = all_reduce(&comm, Duration::from_secs(20)) {
            println!("error: {error}");
            away(Duration::from_secs(60));
            println!("this rank hangs");
        }
    }
}

/// A started operation is the last handle: MPI ends when it has been waited for.
pub(crate) fn started_is_the_last(options: Options) {
    let world = mpi::world(&options).unwrap();
    let (comm, queue) = (world.communicator(), Queue::cpu());
    let n = comm.world_size();
    let started = comm.start(Op::all_reduce(Reduction::Sum), floats(50_000), &queue);
    let started = started.map_err(|(_, error)| error).unwrap();
    drop((world, comm));
    assert_eq!(mpi::world(&options).unwrap_err(), mpi::Error::SecondWorld);
    let (sums, result) = started.wait(&queue);
    result.unwrap();
    assert!(sums.typed::<f32>().unwrap().iter().all(|sum| *sum == 1.5 * n as f32));
    assert_eq!(mpi::world(&options).unwrap_err(), mpi::Error::Finalized);
}

/// A group outlives its world.
pub(crate) fn group_is_the_last(options: Options) {
    let world = mpi::world(&options).unwrap();
    let group = world.communicator().split(Some(0), 0).unwrap().unwrap();
    drop(world);
    all_reduce(&group, Duration::from_secs(20)).unwrap();
    assert_eq!(mpi::world(&options).unwrap_err(), mpi::Error::SecondWorld);
    drop(group);
    assert_eq!(mpi::world(&options).unwrap_err(), mpi::Error::Finalized);
}
