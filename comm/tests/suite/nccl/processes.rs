//! Ranks as processes: this program, started again with a role.

use crate::nccl::bench::{Rank, alone, options, stand_in};
use meshstep_comm::nccl;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

const DEADLINE: Duration = Duration::from_millis(500);

/// Starts a test of this program as a separate process.
fn child(test: &str, variables: &[(&str, &str)]) -> Child {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", test, "--nocapture"]).stdout(Stdio::piped());
    child.envs(variables.iter().copied()).spawn().unwrap()
}

/// Starts ranks as a launcher does; returns the output and the success of each.
fn launched(world_size: usize, variables: &[(&str, &str)]) -> Vec<(String, bool)> {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let start = |rank: usize| {
        let (rank, world_size) = (rank.to_string(), world_size.to_string());
        let place = [("RANK", rank.as_str()), ("WORLD_SIZE", &world_size), ("LOCAL_RANK", &rank)];
        let master = [("MASTER_ADDR", "127.0.0.1"), ("MESHSTEP_PORT", port.as_str()), ("NCCL_TEST_JOB", "1")];
        child("nccl::processes::a_rank_of_a_job", &[place.as_slice(), &master, variables].concat())
    };
    let children: Vec<Child> = (0..world_size).map(start).collect();
    let ended = children.into_iter().map(|child| {
        let output = child.wait_with_output().unwrap();
        (String::from_utf8(output.stdout).unwrap(), output.status.success())
    });
    ended.collect()
}

/// Role of a rank in a launched process: a sum and, if that fails, another one on a new communicator.
#[test]
fn a_rank_of_a_job() {
    if std::env::var_os("NCCL_TEST_JOB").is_none() {
        return;
    }
    let device = std::env::var("NCCL_TEST_DEVICE").ok().map(|ordinal| ordinal.parse().unwrap());
    let options = nccl::Options { device, ..options(Duration::from_secs(3)) };
    let job = match nccl::Job::from_env(options) {
        Ok(job) => job,
        Err(error) => return println!("no job: {error}"),
    };
    println!("device {}", job.device().ordinal());
    for attempt in 0..2 {
        let comm = Arc::new(job.communicator().unwrap());
        let rank = Rank::new(comm);
        match rank.sum(1.0 + job.environment().rank as f32) {
            Ok(sum) => return println!("attempt {attempt}: {sum}"),
            Err(error) => println!("attempt {attempt}: {error}"),
        }
        assert_eq!(rank.meter.live_total(), 0);
    }
}

#[test]
fn ranks_of_a_launcher_meet_and_meet_again_after_a_failure() {
    let _alone = alone();
    if !stand_in(3) {
        return;
    }
    for (said, ended_well) in launched(3, &[]) {
        assert!(ended_well && said.contains("attempt 0: 6\n"), "{said}");
    }
    // Rank 1's first operation fails in NCCL; the others get the failure from the store, or from their own operation.
    for (said, ended_well) in launched(3, &[("MESHSTEP_STANDIN_NCCL", "error 1 0 6")]) {
        assert!(ended_well && said.contains("attempt 0: ") && said.contains("attempt 1: 6\n"), "{said}");
    }
    // No other rank joins, or there is no such device.
    for (name, value, told) in [
        ("WORLD_SIZE", "9", "had not joined"),
        ("MESHSTEP_STANDIN_DEVICES", "0", "no GPU"),
        ("RANK", "5", "RANK"),
        ("NCCL_TEST_DEVICE", "8", "local rank 0 has no GPU 8: 8 are visible"),
    ] {
        let (said, ended_well) = &launched(1, &[(name, value)])[0];
        assert!(*ended_well && said.contains("no job: ") && said.contains(told), "{name}={value}: {said}");
    }
}

/// SLURM's `--gpus-per-task=1` shows each rank one GPU, and torchrun all of them; an option chooses another.
#[test]
fn a_rank_takes_the_visible_gpu_or_the_one_of_its_number_or_the_chosen_one() {
    let _alone = alone();
    if !stand_in(8) {
        return;
    }
    for (name, value, devices) in [
        ("MESHSTEP_STANDIN_DEVICES", "1", ["device 0\n", "device 0\n"]),
        ("MESHSTEP_STANDIN_DEVICES", "2", ["device 0\n", "device 1\n"]),
        ("NCCL_TEST_DEVICE", "5", ["device 5\n", "device 5\n"]),
    ] {
        for ((said, ended_well), device) in launched(2, &[(name, value)]).into_iter().zip(devices) {
            assert!(ended_well && said.contains(device), "{name}={value}: {said}");
            assert!(said.contains("attempt 0: 3\n"), "{name}={value}: {said}");
        }
    }
    let third = [("RANK", "2"), ("WORLD_SIZE", "3"), ("LOCAL_RANK", "2"), ("MESHSTEP_STANDIN_DEVICES", "2")];
    let (said, _) = &launched(1, &third)[0];
    assert!(said.contains("no job: local rank 2 has no GPU 2: 2 are visible"), "{said}");
    assert!(said.contains("nccl::Options::device"), "{said}");
}

/// Returns the output of a process with these variables set.
fn probed_with(name: &str, value: Option<&str>) -> String {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "nccl::processes::what_is_probed_is_printed", "--nocapture"]);
    match value {
        Some(value) => child.env(name, value),
        None => child.env_remove(name),
    };
    String::from_utf8(child.output().unwrap().stdout).unwrap()
}

#[test]
fn what_is_probed_is_printed() {
    println!("probed: {:?}", nccl::probe());
}

#[test]
fn unusable_libraries_are_distinguished() {
    let _alone = alone();
    if !stand_in(1) {
        return;
    }
    for (name, value, told) in [
        ("MESHSTEP_STANDIN", None, "libnccl.so.2 is a stand-in"),
        ("MESHSTEP_STANDIN", Some("yes"), "is a stand-in"),
        ("LD_LIBRARY_PATH", None, "neither libnccl.so.2 nor libnccl.so can be loaded"),
    ] {
        let said = probed_with(name, value);
        // A machine with a real NCCL finds it without the path.
        let real = name == "LD_LIBRARY_PATH" && said.contains("stand_in: false");
        assert!(said.contains(told) || real, "{name}={value:?}: {said}");
    }
}

/// The default last resort is tested in a process that it may end.
#[test]
fn a_process_that_nccl_does_not_let_go_of() {
    if std::env::var_os("NCCL_TEST_STUCK").is_none() {
        return;
    }
    crate::nccl::bench::plan("hang 0 0");
    crate::nccl::bench::plan("abort 60000");
    let abort_within = Duration::from_millis(100);
    let options = nccl::Options { abort_within, ..options(DEADLINE) };
    crate::nccl::bench::ranks(2, &options, |comm| Rank::new(comm).sum(1.0).is_ok());
}

#[test]
fn the_process_exits_where_not_even_an_abort_ends() {
    let _alone = alone();
    if !stand_in(2) {
        return;
    }
    let begun = Instant::now();
    let mut stuck = Command::new(std::env::current_exe().unwrap());
    stuck.args(["--exact", "nccl::processes::a_process_that_nccl_does_not_let_go_of", "--nocapture"]);
    let output = stuck.env("NCCL_TEST_STUCK", "1").output().unwrap();
    assert!(!output.status.success() && begun.elapsed() < DEADLINE + Duration::from_secs(3));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(
        said.contains("NCCL cannot be ended (operation 0, all_reduce(sum) of 1 f32, had not ended"),
        "{said}"
    );
}
