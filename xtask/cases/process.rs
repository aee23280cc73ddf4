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
