//! A run of processes: an arbiter, workers, what they have reported, and the checks of it.

use super::told::{self, Line, now};
use super::worker::ROLE;
use meshstep_cases::process::{Process, free_addr};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Longest time for anything to happen on a busy machine.
pub(super) const LONG: Duration = Duration::from_secs(40);

/// Fewest steps of a run: by then the model has converged.
const SHORTEST: u64 = 300;

/// A run with its folder; everything ends with it.
pub(super) struct Run {
    dir: tempfile::TempDir,
    plan: usize,
    pub(super) addrs: Vec<SocketAddr>,
    pub(super) workers: BTreeMap<u64, Process>,
}

impl Run {
    /// Creates a run of which the arbiters will be at `addrs` addresses.
    pub(super) fn new(plan: usize, addrs: usize) -> Self {
        let addrs = (0..addrs).map(|_| free_addr()).collect();
        Run { dir: tempfile::tempdir().unwrap(), plan, addrs, workers: BTreeMap::new() }
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn start(words: &[&str]) -> Process {
        Process::start("elastic::child", &[(ROLE, &words.join("|"))])
    }

    /// Starts an arbiter at address number `at` on a log of this name, and waits until it serves.
    pub(super) fn arbiter(&self, at: usize, log: &str, promote: bool) -> Process {
        let (addr, log, plan) = (self.addrs[at].to_string(), self.path(log), self.plan.to_string());
        let how = if promote { "promote" } else { "" };
        let mut process = Self::start(&["arbiter", &plan, &addr, log.to_str().unwrap(), how]);
        process.says("serving");
        process
    }

    /// Starts a standby of the arbiter at address number `at`, and waits until it has the log.
    pub(super) fn standby(&self, at: usize, log: &str) -> Process {
        let (addr, log) = (self.addrs[at].to_string(), self.path(log));
        let mut process = Self::start(&["standby", &addr, log.to_str().unwrap()]);
        process.says("followed");
        process
    }

    pub(super) fn worker(&mut self, id: u64) {
        let addrs: Vec<String> = self.addrs.iter().map(SocketAddr::to_string).collect();
        let (ip, told, stop) = (free_addr().ip().to_string(), self.told(id), self.path("stop"));
        let words = ["worker", &id.to_string(), &self.plan.to_string(), &addrs.join(","), &ip];
        let words = [&words[..], &[told.to_str().unwrap(), stop.to_str().unwrap()]].concat();
        self.workers.insert(id, Self::start(&words));
    }

    fn told(&self, id: u64) -> PathBuf {
        self.path(&format!("worker-{id}"))
    }

    pub(super) fn lines(&self, id: u64) -> Vec<(Duration, Line)> {
        told::read(&self.told(id))
    }

    /// Waits until worker `id` has reported, after time `since`, a line that `is` the right one; returns when.
    pub(super) fn until(&self, id: u64, since: Duration, what: &str, is: impl Fn(&Line) -> bool) -> Duration {
        let begin = Instant::now();
        loop {
            let lines = self.lines(id);
            let found = lines.iter().find(|(at, line)| *at >= since && is(line));
            if let Some((at, _)) = found {
                return *at;
            }
            assert!(begin.elapsed() < LONG, "worker {id} since {since:?}: no {what} in\n{}", self.report());
            sleep(Duration::from_millis(10));
        }
    }

    /// Waits until worker `id` has committed an exchange, after `since`, with members that are `right`; returns when.
    pub(super) fn committed(&self, id: u64, since: Duration, right: impl Fn(&[u64]) -> bool) -> Duration {
        let is = |line: &Line| matches!(line, Line::Exchanged { members, .. } if right(members));
        self.until(id, since, "such exchange", is)
    }

    /// Waits until all of these workers have committed such an exchange; returns when the last one has.
    pub(super) fn all_committed(
        &self,
        ids: impl IntoIterator<Item = u64>,
        since: Duration,
        right: impl Fn(&[u64]) -> bool,
    ) -> Duration {
        ids.into_iter().map(|id| self.committed(id, since, &right)).max().unwrap_or(since)
    }

    /// Lets the run end at an exchange that all workers still have before them, and checks what they have reported.
    pub(super) fn end(&mut self) {
        let steps = self.workers.keys().flat_map(|id| self.lines(*id)).map(|(_, line)| step(&line));
        let last = (steps.max().unwrap_or(0) + 100).max(SHORTEST);
        // Renamed, so that no worker reads half of it.
        std::fs::write(self.path("stop.new"), last.to_string()).unwrap();
        std::fs::rename(self.path("stop.new"), self.path("stop")).unwrap();
        let ids: Vec<u64> = self.workers.keys().copied().collect();
        for id in &ids {
            let ended = self.workers.get_mut(id).and_then(|worker| worker.ends_within(LONG));
            assert!(
                ended.is_some_and(|status| status.success()),
                "worker {id}: {ended:?}\n{}",
                self.report()
            );
        }
        self.check(&ids);
    }

    /// Checks that all members agree after every exchange, that the run has converged, and that all end with the same exchange.
    fn check(&self, ids: &[u64]) {
        let mut hashes = BTreeMap::new();
        let names = std::fs::read_dir(self.dir.path()).unwrap().map(|entry| entry.unwrap().file_name());
        let all = names.filter_map(|name| name.to_str()?.strip_prefix("worker-")?.parse().ok());
        for id in all {
            for (_, line) in self.lines(id) {
                let Line::Exchanged { step, epoch, hash, loss, .. } = line else { continue };
                let first = *hashes.entry(step).or_insert((epoch, hash));
                assert_eq!((epoch, hash), first, "worker {id}, step {step}\n{}", self.report());
                assert!(loss.is_finite() && loss < 1.5, "worker {id}, step {step}: {loss}");
            }
        }
        let ends: Vec<_> = ids.iter().map(|id| self.lines(*id)).collect();
        for lines in &ends {
            let [.., (_, Line::Exchanged { step, members, hash, loss, .. }), (_, Line::Done)] = &lines[..]
            else {
                panic!("{}", self.report())
            };
            let last = hashes.last_key_value().unwrap();
            assert_eq!((step, hash), (last.0, &last.1.1), "{}", self.report());
            assert!(members.len() == ids.len() && *loss < 0.05, "{members:?} {loss}\n{}", self.report());
        }
    }

    /// Returns the ends of all workers' files.
    fn report(&self) -> String {
        let of = |id: &u64| {
            let lines = self.lines(*id);
            let from = lines.len().saturating_sub(12);
            let lines: Vec<String> = lines[from..].iter().map(|line| format!("{line:?}")).collect();
            format!("worker {id} at {:?}:\n{}\n", now(), lines.join("\n"))
        };
        (0..8).map(|id| of(&id)).collect()
    }
}

fn step(line: &Line) -> u64 {
    match line {
        Line::Joined(step) | Line::Alone(step) | Line::Exchanged { step, .. } => *step,
        Line::Again(_) | Line::Ended(_) | Line::Done => 0,
    }
}
