//! Two ranks as processes: this program, started twice with a role each. If there is only one GPU the ranks share it: NCCL allows
//! that for ranks on different hosts, which these claim to be.

mod failures;
mod rebuild;
mod results;

use crate::nccl::bench::{Rank, available, options, patient, stand_in};
use meshstep_comm::nccl::{self, Options, UniqueId};
use meshstep_tensor::cuda::{self, Device};
use std::io::{BufRead as _, BufReader, Read as _, Write as _, stdin};
use std::net::TcpListener;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

/// Name of a role, and the work of a rank of this number.
type Role = (&'static str, fn(usize));

const ROLES: &[Role] = &[
    ("collectives", |rank| results::collectives(join(rank, patient()))),
    ("groups", |rank| results::groups(join(rank, patient()))),
    ("order", |rank| results::order(join(rank, patient()))),
    ("graphs", |rank| results::graphs(join(rank, patient()))),
    ("plan", |rank| failures::plan(join(rank, options(deadline())))),
    ("sums until failure", |rank| failures::sums_until_failure(join(rank, options(deadline())))),
    ("sleeps", |rank| failures::sleeps(join(rank, options(deadline())))),
    ("exits", |rank| failures::exits(join(rank, options(deadline())))),
    ("aborts", |rank| failures::aborts(join(rank, options(deadline())))),
    ("is alone", failures::is_alone),
    ("rebuilds", rebuild::rebuilds),
];

/// Deadline of operations that fail. The first operations of a real NCCL connect the ranks, which takes longer.
pub(super) fn deadline() -> Duration {
    Duration::from_secs(if stand_in(1) { 1 } else { 5 })
}

/// Device of a rank: one device may have both.
fn device(rank: usize) -> usize {
    rank % cuda::probe().unwrap().devices
}

/// Creates this process's communicator, with the id that both ranks were given.
fn join(rank: usize, options: Options) -> Rank {
    let id = std::env::var("PAIR_ID").unwrap();
    let mut bytes = [0; UniqueId::LEN];
    for (i, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&id[2 * i..2 * i + 2], 16).unwrap();
    }
    let device = Device::open(device(rank)).unwrap();
    Rank::new(Arc::new(nccl::init(&UniqueId::from_bytes(bytes), rank, 2, &device, options).unwrap()))
}

/// Runs the role of a rank, if this process was given one.
#[test]
fn one_of_two_ranks() {
    let Ok(role) = std::env::var("PAIR_ROLE") else { return };
    let rank: usize = std::env::var("RANK").unwrap().parse().unwrap();
    let (_, body) = ROLES.iter().find(|(name, _)| *name == role).unwrap();
    body(rank);
    println!("rank {rank} has finished its role");
}

/// Reports to the test that this rank is done with the common part, and waits on rank 1 until rank 0 is done too.
fn ready(rank: usize) {
    println!("\nready");
    if rank == 1 {
        assert_ne!(stdin().lock().read_line(&mut String::new()).unwrap(), 0, "the test has ended");
    }
}

/// Process of the pair, killed on drop.
struct Process {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Process {
    fn start(rank: usize, variables: &[(&str, &str)]) -> Self {
        let (number, device) = (rank.to_string(), device(rank).to_string());
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "nccl::pair::one_of_two_ranks", "--nocapture"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        command.envs([("RANK", number.as_str()), ("WORLD_SIZE", "2"), ("LOCAL_RANK", &device)]);
        command.envs([("NCCL_HOSTID", number.as_str()), ("NCCL_SOCKET_IFNAME", "lo")]);
        let mut child = command.envs(variables.iter().copied()).spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Process { child, output }
    }

    /// Returns once the rank has printed a line with this ending.
    fn wait_for(&mut self, end: &str) {
        let mut line = String::new();
        while !line.trim_end().ends_with(end) {
            line.clear();
            assert_ne!(
                self.output.read_line(&mut line).unwrap(),
                0,
                "a rank ended before it printed {end:?}"
            );
        }
    }

    /// Releases a rank 1 that waits in [`ready`].
    fn go(&mut self) {
        writeln!(self.child.stdin.as_ref().unwrap(), "go").unwrap();
    }

    /// Ends the process by SIGKILL.
    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Returns true if the rank finished its role and its process ended well, with its output and its exit status.
    fn end(mut self) -> (bool, String) {
        let mut said = String::new();
        self.output.read_to_string(&mut said).unwrap();
        let status = self.child.wait().unwrap();
        let well = status.success() && said.contains("has finished its role");
        (well, format!("{said}\n{status}"))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // A process that has ended already cannot be killed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts both ranks; `None` without a device.
fn pair(role: &str, variables: &[(&str, &str)]) -> Option<[Process; 2]> {
    if !available(1) {
        return None;
    }
    let id: String = UniqueId::new().unwrap().as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let common =
        [("PAIR_ROLE", role), ("PAIR_ID", &id), ("MASTER_ADDR", "127.0.0.1"), ("MESHSTEP_PORT", &port)];
    Some([0, 1].map(|rank| Process::start(rank, &[&common, variables].concat())))
}

/// Starts both ranks, and releases rank 1 once both are ready; `None` without a device.
fn ready_pair(role: &str) -> Option<[Process; 2]> {
    let mut processes = pair(role, &[])?;
    processes.iter_mut().for_each(|process| process.wait_for("ready"));
    processes[1].go();
    Some(processes)
}

/// Runs both ranks to the end of this role. Returns their output; nothing without a device.
fn finish(role: &str, variables: &[(&str, &str)]) -> Option<[String; 2]> {
    let mut rank = 0;
    let ended = pair(role, variables)?.map(|process| {
        let (well, said) = process.end();
        assert!(well, "rank {rank} of {role:?}:\n{said}");
        rank += 1;
        said
    });
    Some(ended)
}
