//! A launch of shell scripts; a mark in the environment of the processes counts them.

use std::io::{BufRead, BufReader, Lines, Read};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Longest time that anything here takes on a busy machine.
const BOUND: Duration = Duration::from_secs(30);

/// A running launch.
pub(crate) struct Launched {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
    /// Value of a variable that the ranks and their children inherit.
    mark: String,
}

/// Result of a launch.
pub(crate) struct Finished {
    pub(crate) status: ExitStatus,
    pub(crate) stdout: Vec<String>,
    pub(crate) stderr: String,
    pub(crate) mark: String,
}

/// Starts `ranks` shells with the same script.
pub(crate) fn start(ranks: usize, script: &str) -> Launched {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let mark = format!("launch-test-{}-{}", std::process::id(), NEXT.fetch_add(1, Relaxed));
    let ranks = ranks.to_string();
    let mut child = Command::new(env!("CARGO_BIN_EXE_meshstep"))
        .args(["launch", "-n", &ranks, "--", "/bin/sh", "-c", script])
        .env("LAUNCH_TEST_MARK", &mark)
        .env("MESHSTEP_TOKEN_FILE", "/of/an/earlier/job")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    Launched { child, lines, mark }
}

/// Starts shells with the same script, and waits for their end.
pub(crate) fn run(ranks: usize, script: &str) -> Finished {
    start(ranks, script).finish()
}

impl Launched {
    /// Waits until every one of `ranks` ranks has printed `word`.
    pub(crate) fn all_say(&mut self, ranks: usize, word: &str) {
        let mut missing: Vec<String> = (0..ranks).map(|rank| format!("[{rank}] {word}")).collect();
        while !missing.is_empty() {
            let line = self.lines.next().unwrap().unwrap();
            missing.retain(|expected| *expected != line);
        }
    }

    /// Sends a signal to the launcher alone, named as `kill` names it.
    pub(crate) fn signal(&self, signal: &str) {
        let done = Command::new("kill").args([signal, &self.child.id().to_string()]).status().unwrap();
        assert!(done.success());
    }

    /// Waits for the end of the launcher.
    pub(crate) fn finish(mut self) -> Finished {
        let begin = Instant::now();
        let stdout = self.lines.by_ref().map(Result::unwrap).collect();
        let mut stderr = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
        let status = self.child.wait().unwrap();
        assert!(begin.elapsed() < BOUND, "{:?}: {stderr}", begin.elapsed());
        Finished { status, stdout, stderr, mark: self.mark.clone() }
    }

    /// Number of the launcher's process.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Value that the processes of this launch have in their environment.
    pub(crate) fn mark(&self) -> &str {
        &self.mark
    }
}

impl Drop for Launched {
    fn drop(&mut self) {
        // Most launches have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the processes with a mark, without the launcher itself.
pub(crate) fn marked(mark: &str, launcher: Option<u32>) -> Vec<u32> {
    let entry = format!("LAUNCH_TEST_MARK={mark}");
    let ids = std::fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| entry.unwrap().file_name().to_str().and_then(|name| name.parse::<u32>().ok()));
    let has = |id: &u32| {
        let environ = std::fs::read(format!("/proc/{id}/environ")).unwrap_or_default();
        environ.split(|&byte| byte == 0).any(|found| found == entry.as_bytes())
    };
    ids.filter(|id| Some(*id) != launcher).filter(has).collect()
}

/// Waits until no process has the mark. A process that was killed needs a moment to disappear.
pub(crate) fn no_orphan(mark: &str) {
    let begin = Instant::now();
    while !marked(mark, None).is_empty() {
        assert!(begin.elapsed() < BOUND, "orphans: {:?}", marked(mark, None));
        std::thread::sleep(Duration::from_millis(10));
    }
}
