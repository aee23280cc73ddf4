//! A test binary started again as a process of its own, which takes orders on stdin and answers in lines on stdout.

use std::io::{BufRead, BufReader, Lines, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// A child process that runs one test of this binary. It is killed when it is dropped.
#[derive(Debug)]
pub struct Process {
    child: Child,
    orders: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Process {
    /// Starts this binary with one test and these environment variables.
    pub fn start(test: &str, variables: &[(&str, &str)]) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture", "--test-threads=1"])
            .envs(variables.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let orders = child.stdin.take().unwrap();
        Process { child, orders, lines }
    }

    /// Number of the process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Writes an order, which is a line on the child's stdin.
    pub fn order(&mut self, order: &str) {
        writeln!(self.orders, "{order}").unwrap();
    }

    /// Waits for the next line that begins with one of these prefixes, and returns the line.
    pub fn says_one_of(&mut self, prefixes: &[&str]) -> String {
        let mut lines = self.lines.by_ref().map(Result::unwrap);
        let line = lines.find(|line| prefixes.iter().any(|prefix| line.starts_with(prefix)));
        line.unwrap_or_else(|| panic!("it ended without saying {prefixes:?}"))
    }

    /// Waits for the next line that begins with `prefix`, and returns the line.
    pub fn says(&mut self, prefix: &str) -> String {
        self.says_one_of(&[prefix])
    }

    /// Sends a signal, named as `kill` names it.
    pub fn signal(&self, signal: &str) {
        let done = Command::new("kill").args([signal, &self.child.id().to_string()]).status().unwrap();
        assert!(done.success());
    }

    /// Stops the child, and returns when all of its threads have stopped.
    pub fn stop(&self) {
        self.signal("-STOP");
        let tasks = std::path::PathBuf::from(format!("/proc/{}/task", self.child.id()));
        let stopped = |task: &Path| {
            let stat = std::fs::read_to_string(task.join("stat")).unwrap();
            stat.rsplit(')').next().unwrap().trim_start().starts_with('T')
        };
        while !std::fs::read_dir(&tasks).unwrap().all(|task| stopped(&task.unwrap().path())) {
            std::thread::yield_now();
        }
    }

    /// Waits until the child has ended, and returns its exit status.
    pub fn wait(&mut self) -> ExitStatus {
        self.child.wait().unwrap()
    }

    /// Waits until the child has ended, at most for this time, and returns its exit status.
    pub fn ends_within(&mut self, time: Duration) -> Option<ExitStatus> {
        let begin = Instant::now();
        while begin.elapsed() < time {
            if let Some(status) = self.child.try_wait().unwrap() {
                return Some(status);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        None
    }

    /// Kills the child, and waits until it has ended.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Most children have ended already. A stopped child is killed too.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns a free address on loopback. On Linux each call gets an address of its own out of 127.0.0.0/8.
pub fn free_addr() -> SocketAddr {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let (pid, next) = (std::process::id(), NEXT.fetch_add(1, Relaxed));
    let ip = match cfg!(target_os = "linux") {
        true => Ipv4Addr::new(127, 1 + (pid % 250) as u8, (pid / 250 % 250) as u8, 1 + (next % 250) as u8),
        false => Ipv4Addr::LOCALHOST,
    };
    TcpListener::bind((ip, 0)).unwrap().local_addr().unwrap()
}

/// Variable with the role of a rank.
const ROLE: &str = "MESHSTEP_TEST_ROLE";

/// Returns the role of this process, if [`launched`] has started it as a rank.
pub fn role() -> Option<String> {
    std::env::var(ROLE).ok()
}

/// Runs one test of this binary on `ranks` processes with torchrun's variables and a role, and returns the results of each rank. A
/// rank prints each result on a line that begins with `result `, and at last a line `end`.
pub fn launched(test: &str, ranks: usize, role: &str) -> Vec<Vec<String>> {
    let store = free_addr();
    let (world_size, ip, port) = (ranks.to_string(), store.ip().to_string(), store.port().to_string());
    let start = |rank: usize| {
        let rank = rank.to_string();
        let place = [("RANK", &rank), ("LOCAL_RANK", &rank), ("WORLD_SIZE", &world_size)];
        let master = [("MASTER_ADDR", &ip), ("MESHSTEP_PORT", &port)];
        let variables = place.into_iter().chain(master).map(|(name, value)| (name, value.as_str()));
        Process::start(test, &variables.chain([(ROLE, role)]).collect::<Vec<_>>())
    };
    let mut processes: Vec<Process> = (0..ranks).map(start).collect();
    processes.iter_mut().map(Process::results).collect()
}

impl Process {
    /// Returns what follows `result ` in the lines before `end`.
    fn results(&mut self) -> Vec<String> {
        let mut results = Vec::new();
        loop {
            let line = self.says_one_of(&["result ", "end"]);
            match line.strip_prefix("result ") {
                Some(result) => results.push(result.to_owned()),
                None => break,
            }
        }
        assert!(self.wait().success(), "the process of a rank fails after its end");
        results
    }
}
