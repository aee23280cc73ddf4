//! Start of this program under `mpirun`, and what is left of it.

use std::fs;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Variable with the scenario, set for ranks.
pub(crate) const SCENARIO: &str = "MESHSTEP_MPI_SCENARIO";
/// Variable with the number of the job, by which its processes are found.
const JOB: &str = "MESHSTEP_MPI_JOB";
/// A job that runs longer is ended.
const TOO_LONG: Duration = Duration::from_secs(90);

/// End of a job.
pub(crate) struct Ended {
    /// Ranks of the job.
    pub(crate) ranks: usize,
    pub(crate) success: bool,
    pub(crate) took: Duration,
    pub(crate) output: String,
    /// Processes that were left a second later.
    pub(crate) orphans: usize,
}

/// Runs a scenario under `mpirun`; MPIRUN names another launcher.
pub(crate) fn launch(scenario: &str, ranks: usize) -> Ended {
    let mpirun = std::env::var("MPIRUN").unwrap_or_else(|_| "mpirun".to_owned());
    let mut command = Command::new(&mpirun);
    let version = Command::new(&mpirun).arg("--version").output();
    let version = version.unwrap_or_else(|error| panic!("cannot run {mpirun}: {error}; install openmpi-bin"));
    if String::from_utf8_lossy(&version.stdout).contains("Open MPI") {
        // Flags of Open MPI alone: more ranks than cores, and the root of a container.
        command.args(["--oversubscribe", "--allow-run-as-root"]);
    }
    command.args(["-n", &ranks.to_string()]).arg(std::env::current_exe().unwrap());
    end(command, scenario, ranks)
}

/// Runs a scenario without a launcher.
pub(crate) fn launch_alone(scenario: &str) -> Ended {
    end(Command::new(std::env::current_exe().unwrap()), scenario, 1)
}

fn end(mut command: Command, scenario: &str, ranks: usize) -> Ended {
    static JOBS: AtomicU32 = AtomicU32::new(0);
    let job = format!("{}-{}", std::process::id(), JOBS.fetch_add(1, Ordering::Relaxed));
    let file = std::env::temp_dir().join(format!("meshstep-mpi-{job}"));
    let output = fs::File::create(&file).unwrap();
    command.env(SCENARIO, scenario).env(JOB, &job).env("RUST_BACKTRACE", "0").stdin(Stdio::null());
    command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    command.stdout(output.try_clone().unwrap()).stderr(output);
    let began = Instant::now();
    let success = success(&mut command.spawn().unwrap());
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
