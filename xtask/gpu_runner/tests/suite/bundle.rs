//! Test fixture: a bundle of shell scripts, and its runs.

use serde_json::Value;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Shell command that lists the tests of a fake test program.
pub(crate) const LIST: &str = "printf 'cuda::a: test\\nother::x: test\\nnccl::b: test\\ncuda::c: test\\n'";

/// Returns a fake test program. `case` is an arm of the shell's `case` on a test's name; tests without an arm pass.
pub(crate) fn tests_with(case: &str) -> String {
    format!(
        "case \"$*\" in *--list*) {LIST}; exit 0;; esac\n\
         [ \"$REQUIRE_GPU\" = 1 ] || exit 9\n\
         shift 4\n\
         for name in \"$@\"; do\n\
         printf 'test %s ... ' \"$name\"\n\
         case $name in {case}\n *) echo ok;; esac\n\
         done\n\
         echo 'test result: ok. 1 passed; 0 failed;'"
    )
}

/// A program that ignores SIGTERM, starts a child in another session, and keeps running.
pub(crate) const STAYS: &str = "trap '' TERM; setsid sleep 97 & sleep 98 & sleep 99; sleep 99";

pub(crate) struct Bundle {
    folder: PathBuf,
    name: String,
}

impl Bundle {
    /// Creates a bundle. `programs` maps paths to bodies of shell scripts.
    pub(crate) fn new(name: &str, programs: &[(&str, &str)]) -> Bundle {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("gpu-runner").join(name);
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap();
        let runner = Path::new(env!("CARGO_BIN_EXE_gpu-runner"));
        fs::hard_link(runner, folder.join("gpu-runner")).unwrap();
        fs::write(folder.join("commit"), "0123, changed\n").unwrap();
        fs::write(folder.join("gpu_torch.py"), "import sys\nprint('torch writes into', sys.argv[1])\n")
            .unwrap();
        fs::create_dir_all(folder.join("scratch")).unwrap();
        let bundle = Bundle { folder, name: name.to_owned() };
        bundle.program("run.sh", include_str!("../../run.sh").trim_start_matches("#!/bin/sh\n"));
        programs.iter().for_each(|(path, body)| bundle.program(path, body));
        bundle
    }

    fn program(&self, path: &str, body: &str) {
        let path = self.folder.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, format!("#!/bin/sh\n{body}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    pub(crate) fn command(&self, mode: &str, env: &[(&str, &str)]) -> Command {
        let mut command = Command::new("sh");
        command.arg(self.path("run.sh")).args(mode.split_whitespace());
        for name in ["LIMIT", "DEADLINE", "TEST_LIMIT", "MESHSTEP_STANDIN", "GPU_BENCH_SECONDS"] {
            command.env_remove(name);
        }
        command.env("OUT", self.path("out")).env("TMPDIR", self.path("scratch"));
        command.env("MARK", self.mark()).envs(env.iter().copied());
        command.stdin(Stdio::null());
        command
    }

    /// Runs a mode to its end.
    pub(crate) fn run(&self, mode: &str, env: &[(&str, &str)]) -> Ran {
        let (started, scratch) = (Instant::now(), self.scratch_folders());
        let output = self.command(mode, env).output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let printed = text(&output.stdout) + &text(&output.stderr);
        self.check_files();
        let json = self.results();
        assert_eq!(self.scratch_folders(), scratch, "the run left a scratch folder");
        Ran { code: output.status.code(), printed, json, took: started.elapsed() }
    }

    fn scratch_folders(&self) -> usize {
        fs::read_dir(self.path("scratch")).unwrap().count()
    }

    pub(crate) fn start(&self, mode: &str, env: &[(&str, &str)]) -> Child {
        self.command(mode, env).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    }

    /// Returns the current content of results.json, or null if there is no such file.
    pub(crate) fn results(&self) -> Value {
        let text = fs::read(self.path("out/results.json")).unwrap_or_else(|_| b"null".to_vec());
        serde_json::from_slice(&text).unwrap()
    }

    /// Checks that the results folder has at most six files and no temporary file.
    pub(crate) fn check_files(&self) {
        let Ok(entries) = fs::read_dir(self.path("out")) else { return };
        let names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        assert!(names.len() <= 6, "{names:?}");
        assert!(!names.iter().any(|name| name.ends_with(".part")), "{names:?}");
    }

    /// Returns the names in logs.tar.
    pub(crate) fn logs(&self) -> Vec<String> {
        let mut archive = tar::Archive::new(fs::File::open(self.path("out/logs.tar")).unwrap());
        let path = |entry: tar::Entry<'_, _>| entry.path().unwrap().to_string_lossy().into_owned();
        archive.entries().unwrap().map(|entry| path(entry.unwrap())).collect()
    }

    /// Waits until the row of a program has this verdict.
    pub(crate) fn wait_for(&self, program: &str, verdict: &str) {
        let until = Instant::now() + Duration::from_secs(6);
        while row(&self.results(), program)["verdict"] != verdict {
            assert!(Instant::now() < until, "{:#}", self.results());
            sleep(Duration::from_millis(10));
        }
    }

    fn mark(&self) -> String {
        format!("gpu-runner-test-{}-{}", self.name, std::process::id())
    }

    /// Returns the command lines of all processes started by this bundle's runs.
    fn processes(&self) -> Vec<String> {
        let mark = format!("MARK={}", self.mark()).into_bytes();
        let entries = fs::read_dir("/proc").unwrap().flatten();
        let environ = |entry: &fs::DirEntry| fs::read(entry.path().join("environ")).unwrap_or_default();
        let ours = entries.filter(|entry| environ(entry).split(|&byte| byte == 0).any(|own| own == mark));
        ours.map(|entry| fs::read_to_string(entry.path().join("cmdline")).unwrap_or_default()).collect()
    }

    /// Waits until the number of processes is between `least` and `most`.
    pub(crate) fn wait_for_processes(&self, least: usize, most: usize) {
        let until = Instant::now() + Duration::from_secs(5);
        loop {
            let processes = self.processes();
            if (least..=most).contains(&processes.len()) {
                return;
            }
            assert!(Instant::now() < until, "{processes:?}");
            sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Bundle {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            let _ = fs::remove_dir_all(&self.folder);
        }
    }
}

/// A run that has ended.
pub(crate) struct Ran {
    pub(crate) code: Option<i32>,
    pub(crate) printed: String,
    pub(crate) json: Value,
    pub(crate) took: Duration,
}

impl Ran {
    pub(crate) fn row(&self, program: &str) -> &Value {
        let row = row(&self.json, program);
        assert!(!row.is_null(), "no row {program}: {:#}\n{}", self.json, self.printed);
        row
    }

    pub(crate) fn verdicts(&self) -> Vec<(&str, &str)> {
        let rows = self.json["rows"].as_array().unwrap();
        rows.iter().map(|row| (row["program"].as_str().unwrap(), row["verdict"].as_str().unwrap())).collect()
    }
}

fn row<'a>(json: &'a Value, program: &str) -> &'a Value {
    let rows = json["rows"].as_array().map(Vec::as_slice).unwrap_or_default();
    rows.iter().find(|row| row["program"] == program).unwrap_or(&Value::Null)
}
