//! Two ranks as processes: a test program, started twice, each time with a role. On one GPU the ranks share it: NCCL allows that
//! for ranks of different hosts, which these claim to be.

use crate::Run;
use crate::gpus::devices;
use meshstep_comm::nccl::{self, Nccl, UniqueId};
use meshstep_comm::{Communicator, loopback};
use meshstep_shard::Options;
use meshstep_tensor::Queue;
use meshstep_tensor::cuda::{Device, Stream};
use std::fmt::Debug;
use std::io::{BufRead as _, BufReader, Read as _, Write as _, stdin};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

/// Name of a role, its communicator's deadline, and the work of a rank.
pub type Role = (&'static str, fn() -> Duration, fn(&Rank));

/// Test of each program that runs the role of a rank.
pub const TEST: &str = "cuda::pair::one_of_two_ranks";

/// Longer than any role takes in which both ranks stay.
pub fn minute() -> Duration {
    Duration::from_secs(60)
}

/// A rank of the pair, in its own process.
#[derive(Debug)]
pub struct Rank {
    comm: Arc<Nccl>,
    queue: Queue,
}

impl Rank {
    /// Returns the rank's number.
    pub fn number(&self) -> usize {
        self.comm.rank()
    }

    /// Returns the communicator of both ranks.
    pub fn comm(&self) -> Arc<dyn Communicator> {
        Arc::clone(&self.comm) as _
    }

    /// Returns the run on this rank's GPU.
    pub fn on_gpu(&self, run: &Run) -> Run {
        Run { options: Options { queue: self.queue.clone(), ..run.options.clone() }, ..run.clone() }
    }

    /// Does the same work on this rank and on loopback's rank of the same number, checks that the results are equal, and returns
    /// them.
    pub fn same<T: PartialEq + Send>(
        &self,
        run: &Run,
        case: &dyn Debug,
        body: impl Fn(Arc<dyn Communicator>, &Run) -> T + Sync,
    ) -> T {
        let own = body(self.comm(), &self.on_gpu(run));
        let mut loopback = loopback::spawn(2, |comm| body(comm, run)).unwrap();
        assert!(own == loopback.swap_remove(self.number()), "{case:?} ends apart from loopback");
        own
    }
}

/// Runs the role of a rank, if this process was given one. A test of the name [`TEST`] calls it.
#[expect(clippy::print_stdout, reason = "the other process waits for this line")]
pub fn play(roles: &[Role]) {
    let (Ok(role), Ok(id)) = (std::env::var("PAIR_ROLE"), std::env::var("PAIR_ID")) else { return };
    let rank: usize = std::env::var("PAIR_RANK").unwrap().parse().unwrap();
    let (_, deadline, body) = roles.iter().find(|(name, _, _)| *name == role).unwrap();
    let mut bytes = [0; UniqueId::LEN];
    for (i, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&id[2 * i..2 * i + 2], 16).unwrap();
    }
    let device = Device::open(rank % devices()).unwrap();
    let options = nccl::Options { deadline: deadline(), check: false, ..nccl::Options::default() };
    let comm = nccl::init(&UniqueId::from_bytes(bytes), rank, 2, &device, options).unwrap();
    let queue = Queue::cuda(Stream::new(&device).unwrap());
    body(&Rank { comm: Arc::new(comm), queue });
    println!("rank {rank} has finished its role");
}

/// Tells the test that this rank has finished the common part; rank 1 then waits until rank 0 has too.
#[expect(clippy::print_stdout, reason = "the test waits for this line")]
pub fn ready(rank: usize) {
    println!("\nready");
    if rank == 1 {
        assert_ne!(stdin().lock().read_line(&mut String::new()).unwrap(), 0, "the test has ended");
    }
}

/// A process of the pair. Dropping the handle kills the process.
#[derive(Debug)]
pub struct Process {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Process {
    fn start(role: &str, id: &str, rank: usize, variables: &[(&str, &str)]) -> Self {
        let rank = rank.to_string();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", TEST, "--nocapture"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        command.envs([("PAIR_ROLE", role), ("PAIR_ID", id), ("PAIR_RANK", &rank)]);
        command.envs([("NCCL_HOSTID", rank.as_str()), ("NCCL_SOCKET_IFNAME", "lo")]);
        let mut child = command.envs(variables.iter().copied()).spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Process { child, output }
    }

    /// Returns once the rank has printed a line with this end.
    pub fn wait_for(&mut self, end: &str) {
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

    /// Lets a rank 1 that waits in [`ready`] continue.
    pub fn go(&mut self) {
        writeln!(self.child.stdin.as_ref().unwrap(), "go").unwrap();
    }

    /// Kills the process with SIGKILL.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Returns true if the rank finished its role, and its output.
    pub fn end(mut self) -> (bool, String) {
        let mut said = String::new();
        self.output.read_to_string(&mut said).unwrap();
        (self.child.wait().unwrap().success() && said.contains("has finished its role"), said)
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
pub fn pair(role: &str, variables: &[(&str, &str)]) -> Option<[Process; 2]> {
    if devices() == 0 {
        return None;
    }
    let id: String = UniqueId::new().unwrap().as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    Some([0, 1].map(|rank| Process::start(role, &id, rank, variables)))
}

/// Starts both ranks, and lets rank 1 continue once both are ready; `None` without a device.
pub fn ready_pair(role: &str) -> Option<[Process; 2]> {
    let mut processes = pair(role, &[])?;
    processes.iter_mut().for_each(|process| process.wait_for("ready"));
    processes[1].go();
    Some(processes)
}

/// Starts both ranks, and checks that the role succeeds.
pub fn finish(role: &str, variables: &[(&str, &str)]) {
    let processes = pair(role, variables);
    for (rank, process) in processes.into_iter().flatten().enumerate() {
        let (well, said) = process.end();
        assert!(well, "rank {rank} of {role:?}:\n{said}");
    }
}
