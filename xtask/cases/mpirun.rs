//! A test program under `mpirun`, and the processes that are left of its job.

use std::fs;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Variable with the scenario, set for ranks.
pub const SCENARIO: &str = "MESHSTEP_MPI_SCENARIO";
/// Variable with the number of the job, by which its processes are found.
const JOB: &str = "MESHSTEP_MPI_JOB";
/// A job that runs longer is ended.
const TOO_LONG: Duration = Duration::from_secs(90);

/// End of a job.
#[derive(Debug)]
pub struct Ended {
    /// Ranks of the job.
    pub ranks: usize,
    /// True if the launcher's exit code is 0.
    pub success: bool,
    /// Time that the job took.
    pub took: Duration,
    /// Lines of all ranks and of the launcher.
    pub output: String,
    /// Processes that were left a second later.
    pub orphans: usize,
}

/// Variables by which Open MPI 4 runs more ranks than cores, and as the root of a container. MPICH needs none.
const OPEN_MPI: [(&str, &str); 3] = [
    ("OMPI_MCA_rmaps_base_oversubscribe", "1"),
    ("OMPI_ALLOW_RUN_AS_ROOT", "1"),
    ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"),
];

/// Runs a scenario of this program under `mpirun`, with these arguments; MPIRUN names another launcher.
pub fn launch(scenario: &str, ranks: usize, args: &[&str]) -> Ended {
    let mut command = Command::new(std::env::var("MPIRUN").unwrap_or_else(|_| "mpirun".to_owned()));
    command.args(["-n", &ranks.to_string()]).arg(std::env::current_exe().unwrap()).args(args).envs(OPEN_MPI);
    end(command, scenario, ranks)
}

/// Runs a scenario without a launcher.
pub fn launch_alone(scenario: &str) -> Ended {
    end(Command::new(std::env::current_exe().unwrap()), scenario, 1)
}

fn end(mut command: Command, scenario: &str, ranks: usize) -> Ended {
    static JOBS: AtomicU32 = AtomicU32::new(0);
    let job = format!("{}-{}", std::process::id(), JOBS.fetch_add(1, Ordering::Relaxed));
    let file = std::env::temp_dir().join(format!("meshstep-mpi-{job}"));
    let output = fs::File::create(&file).unwrap();
    command.env(SCENARIO, scenario).env(JOB, &job).env("RUST_BACKTRACE", "0").stdin(Stdio::null());
    command.stdout(output.try_clone().unwrap()).stderr(output);
    let began = Instant::now();
    let child = command.spawn();
    let success = success(&mut child.unwrap_or_else(|error| panic!("cannot run {command:?}: {error}")));
    let took = began.elapsed();
    let output = fs::read_to_string(&file).unwrap_or_default();
    let _ = fs::remove_file(&file);
    Ended { ranks, success, took, output, orphans: left(&job) }
}

fn success(child: &mut Child) -> bool {
    let began = Instant::now();
    while began.elapsed() < TOO_LONG {
        if let Some(status) = child.try_wait().unwrap() {
            return status.success();
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    false
}

/// Number of processes with this job in their environment, once they had a second to end.
fn left(job: &str) -> usize {
    let began = Instant::now();
    loop {
        let count = processes(&format!("{JOB}={job}"));
        if count == 0 || began.elapsed() > Duration::from_secs(1) {
            return count;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn processes(variable: &str) -> usize {
    let environments = fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path().join("environ"));
    let has =
        |environment: &Vec<u8>| environment.split(|&byte| byte == 0).any(|one| one == variable.as_bytes());
    environments.filter_map(|path| fs::read(path).ok()).filter(has).count()
}
