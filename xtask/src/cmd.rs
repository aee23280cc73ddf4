//! A command as a value: it can be printed in shell syntax, compared in a test, and run.

use anyhow::{Context, ensure};
use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;
use std::process::{Command, ExitCode, ExitStatus, Stdio};

/// A program with its arguments, environment and working folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Cmd {
    program: Program,
    args: Vec<String>,
    envs: Vec<(String, String)>,
    dir: Option<PathBuf>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Program {
    /// The cargo that started xtask.
    Cargo,
    /// An executable, usually one built by the workspace.
    Built(PathBuf),
}

impl Cmd {
    /// Creates a cargo command. `line` holds the arguments, separated by spaces; add an argument that contains a space with
    /// [`Cmd::arg`].
    pub(crate) fn cargo(line: &str) -> Self {
        Self::new(Program::Cargo, line)
    }

    /// Creates a command like [`Cmd::cargo`], for an executable.
    pub(crate) fn built(program: impl Into<PathBuf>, line: &str) -> Self {
        Self::new(Program::Built(program.into()), line)
    }

    fn new(program: Program, line: &str) -> Self {
        let args = line.split_whitespace().map(str::to_owned).collect();
        Self { program, args, envs: Vec::new(), dir: None }
    }

    pub(crate) fn arg(mut self, arg: &str) -> Self {
        self.args.push(arg.to_owned());
        self
    }

    pub(crate) fn env(mut self, name: &str, value: &str) -> Self {
        self.envs.push((name.to_owned(), value.to_owned()));
        self
    }

    pub(crate) fn dir(mut self, dir: impl Into<PathBuf>) -> Self {
        self.dir = Some(dir.into());
        self
    }

    /// Becomes the command, so that signals reach it and its end is xtask's; returns its exit code where a process cannot do that.
    pub(crate) fn become_it(&self) -> anyhow::Result<ExitCode> {
        #[cfg(unix)]
        {
            let failed = std::os::unix::process::CommandExt::exec(&mut self.command());
            Err(failed).with_context(|| format!("cannot start: {self}"))
        }
        #[cfg(not(unix))]
        {
            let status = self.status(Stdio::inherit())?;
            Ok(ExitCode::from(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1)))
        }
    }

    /// Runs the command without stdin, so that it cannot wait for input.
    pub(crate) fn run_unattended(&self) -> anyhow::Result<ExitStatus> {
        self.status(Stdio::null())
    }

    /// Runs the command without stdin, and fails if it does.
    pub(crate) fn succeed(&self) -> anyhow::Result<()> {
        let status = self.run_unattended()?;
        ensure!(status.success(), "{status}\ncommand:      {self}");
        Ok(())
    }

    /// Runs the command without stdin, and discards its output.
    pub(crate) fn silent(&self) -> anyhow::Result<ExitStatus> {
        let mut command = self.command();
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.status().with_context(|| format!("cannot start: {self}"))
    }

    /// Returns the command's stdout if it succeeds, and `None` otherwise; discards its stderr.
    pub(crate) fn output(&self) -> anyhow::Result<Option<String>> {
        let output = self
            .command()
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .output()
            .with_context(|| format!("cannot start: {self}"))?;
        Ok(output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned()))
    }

    /// Returns the command's stdout, and passes its stderr through; a failed command is an error.
    pub(crate) fn captured(&self) -> anyhow::Result<String> {
        let mut command = self.command();
        command.stdin(Stdio::null()).stderr(Stdio::inherit());
        let output = command.output().with_context(|| format!("cannot start: {self}"))?;
        ensure!(output.status.success(), "{}\ncommand:      {self}", output.status);
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Returns the exit status and the stderr of the command, and prints the stderr after the command has ended.
    pub(crate) fn status_and_stderr(&self) -> anyhow::Result<(ExitStatus, String)> {
        let mut command = self.command();
        command.stdin(Stdio::null()).stdout(Stdio::inherit());
        let output =
            command.stderr(Stdio::piped()).output().with_context(|| format!("cannot start: {self}"))?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        eprint!("{said}");
        Ok((output.status, said))
    }

    fn status(&self, stdin: Stdio) -> anyhow::Result<ExitStatus> {
        self.command().stdin(stdin).status().with_context(|| format!("cannot start: {self}"))
    }

    fn command(&self) -> Command {
        let mut command = Command::new(match &self.program {
            // `cargo run` sets CARGO to its own path.
            Program::Cargo => std::env::var_os("CARGO").unwrap_or_else(|| OsString::from("cargo")),
            Program::Built(path) => path.clone().into(),
        });
        // `cargo run` describes xtask's package in these variables; the started command must not see them.
        for (name, _) in std::env::vars_os().filter(|(name, _)| describes_a_package(name)) {
            command.env_remove(name);
        }
        command.args(&self.args).envs(self.envs.iter().map(|(name, value)| (name, value)));
        if let Some(dir) = &self.dir {
            command.current_dir(dir);
        }
        command
    }
}

fn describes_a_package(name: &std::ffi::OsStr) -> bool {
    let prefixes = ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_", "CARGO_PRIMARY_"];
    name.to_str().is_some_and(|name| prefixes.iter().any(|prefix| name.starts_with(prefix)))
}

impl fmt::Display for Cmd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(dir) = &self.dir {
            write!(f, "cd {} && ", quoted(&dir.to_string_lossy()))?;
        }
        for (name, value) in &self.envs {
            write!(f, "{name}={} ", quoted(value))?;
        }
        match &self.program {
            Program::Cargo => f.write_str("cargo")?,
            Program::Built(path) => f.write_str(&quoted(&path.to_string_lossy()))?,
        }
        self.args.iter().try_for_each(|arg| write!(f, " {}", quoted(arg)))
    }
}

/// Quotes a word for a shell.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,+@".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prints_what_a_shell_can_run() {
        let cmd = Cmd::cargo("doc --no-deps").arg("it's").env("RUSTDOCFLAGS", "-D warnings").dir("a b");
        assert_eq!(cmd.to_string(), r"cd 'a b' && RUSTDOCFLAGS='-D warnings' cargo doc --no-deps 'it'\''s'");
        assert_eq!(Cmd::built("a b/c", "d").to_string(), "'a b/c' d");
        assert_eq!(quoted(""), "''");
    }

    #[test]
    fn only_a_successful_command_has_output() {
        assert!(Cmd::cargo("--version").output().unwrap().unwrap().starts_with("cargo "));
        assert_eq!(Cmd::cargo("--no-such-option").output().unwrap(), None);
        assert!(Cmd::cargo("--version").captured().unwrap().starts_with("cargo "));
        let error = Cmd::cargo("--no-such-option").captured().unwrap_err().to_string();
        assert!(error.contains("cargo --no-such-option"), "{error}");
    }

    #[test]
    fn a_failure_is_returned_with_its_stderr() {
        let (status, said) = Cmd::cargo("--no-such-option").status_and_stderr().unwrap();
        assert!(!status.success() && said.contains("--no-such-option"), "{said}");
    }
}
