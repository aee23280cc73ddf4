//! Collectives of OpenMPI, if it is installed.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail, ensure};

use meshstep_bench_cases::peers::Program;

/// Processes of OpenMPI that wait for commands.
#[derive(Debug)]
pub(crate) struct Mpi(Program);

impl Mpi {
    /// Compiles the program into `folder` and starts it as `ranks` processes.
    pub(crate) fn start(folder: &Path, ranks: usize) -> Result<Self> {
        let (source, program) =
            (Path::new(crate::FOLDER).join("peers/collectives.c"), folder.join("collectives"));
        let mut compile = Command::new("mpicc");
        let output = compile.arg("-O2").arg("-o").arg(&program).arg(source).output();
        let output = output.context("cannot start mpicc; install openmpi-bin and libopenmpi-dev")?;
        ensure!(output.status.success(), "mpicc: {}", String::from_utf8_lossy(&output.stderr));
        let mut start = Command::new("mpirun");
        let ranks = ranks.to_string();
        start.args(["--oversubscribe", "-n", ranks.as_str()]).arg(&program);
        // In a container all processes may run as root, which OpenMPI allows only with both variables.
        start.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
        Ok(Mpi(Program::start("OpenMPI", start.stderr(Stdio::null()))?))
    }

    /// Prepares an operation on `bytes` bytes on each rank.
    pub(crate) fn case(&mut self, operation: &str, bytes: usize) -> Result<()> {
        let answer = self.0.ask(&format!("case {operation} {bytes}"))?;
        ensure!(answer == "ready", "OpenMPI answered {answer} instead of `ready`");
        Ok(())
    }

    /// Runs the operation once and returns its seconds.
    pub(crate) fn run(&mut self) -> Result<f64> {
        let answer = self.0.ask("run")?;
        match answer.strip_prefix("seconds ").map(str::parse) {
            Some(Ok(seconds)) => Ok(seconds),
            _ => bail!("OpenMPI answered {answer} instead of `seconds`"),
        }
    }
}
