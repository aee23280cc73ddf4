//! Collectives of OpenMPI, if it is installed.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail, ensure};

use meshstep_bench_cases::peers::Program;

/// Settings to try, with their names: copies between processes by the kernel (CMA) or through shared memory, and waiting ranks that
/// give up their core or keep it.
const SETTINGS: [(&str, [(&str, &str); 2]); 4] = [
    ("CMA, yield", [(COPY, "cma"), (YIELD, "1")]),
    ("CMA, no yield", [(COPY, "cma"), (YIELD, "0")]),
    ("no CMA, yield", [(COPY, "none"), (YIELD, "1")]),
    ("no CMA, no yield", [(COPY, "none"), (YIELD, "0")]),
];
const COPY: &str = "OMPI_MCA_btl_vader_single_copy_mechanism";
const YIELD: &str = "OMPI_MCA_mpi_yield_when_idle";

/// Processes of OpenMPI that wait for commands.
#[derive(Debug)]
pub(crate) struct Mpi {
    program: Program,
    settings: &'static str,
}

impl Mpi {
    /// Compiles the program into `folder`, starts it as `ranks` processes with each of the settings, and keeps the settings that are
    /// fastest in `times` times an all_reduce of `bytes` bytes.
    pub(crate) fn best(folder: &Path, ranks: usize, (bytes, times): (usize, usize)) -> Result<Self> {
        let program = compile(folder)?;
        let mut best: Option<(f64, Self)> = None;
        for (settings, variables) in SETTINGS {
            let mut mpi = Self::start(&program, ranks, settings, &variables)?;
            let seconds = mpi.trial(bytes, times)?;
            if best.as_ref().is_none_or(|(least, _)| seconds < *least) {
                best = Some((seconds, mpi));
            }
        }
        best.map(|(_, mpi)| mpi).context("OpenMPI has no settings")
    }

    fn start(
        program: &Path,
        ranks: usize,
        settings: &'static str,
        variables: &[(&str, &str)],
    ) -> Result<Self> {
        let mut start = Command::new("mpirun");
        let ranks = ranks.to_string();
        start.args(["--oversubscribe", "-n", ranks.as_str()]).arg(program);
        // In a container all processes may run as root, which OpenMPI allows only with both variables.
        start.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
        start.envs(variables.iter().copied());
        Ok(Mpi { program: Program::start("OpenMPI", start.stderr(Stdio::null()))?, settings })
    }

    /// Returns the name of the settings.
    pub(crate) fn settings(&self) -> &'static str {
        self.settings
    }

    /// Returns the least seconds of a few rounds.
    fn trial(&mut self, bytes: usize, times: usize) -> Result<f64> {
        self.case("all_reduce", bytes, times)?;
        (0..TRIALS).try_fold(f64::INFINITY, |least, _| Ok(self.run()?.min(least)))
    }

    /// Prepares an operation on `bytes` bytes on each rank, which a run repeats `times` times. The operation `step` is a clipped step
    /// with so many bytes of parameters.
    pub(crate) fn case(&mut self, operation: &str, bytes: usize, times: usize) -> Result<()> {
        let answer = self.program.ask(&format!("case {operation} {bytes} {times}"))?;
        ensure!(answer == "ready", "OpenMPI answered {answer} instead of `ready`");
        Ok(())
    }

    /// Runs the operation as often as the case says, and returns the seconds of all.
    pub(crate) fn run(&mut self) -> Result<f64> {
        let answer = self.program.ask("run")?;
        match answer.strip_prefix("seconds ").map(str::parse) {
            Some(Ok(seconds)) => Ok(seconds),
            _ => bail!("OpenMPI answered {answer} instead of `seconds`"),
        }
    }
}

/// Rounds of each setting before one is chosen.
const TRIALS: usize = 4;

/// Compiles the program and returns its path.
fn compile(folder: &Path) -> Result<PathBuf> {
    let (source, program) =
        (Path::new(crate::args::FOLDER).join("peers/collectives.c"), folder.join("collectives"));
    let mut compile = Command::new("mpicc");
    let output = compile
        .args(["-O3", "-march=native", "-fno-math-errno"])
        .arg("-o")
        .arg(&program)
        .arg(source)
        .arg("-lm")
        .output();
    let output = output.context("cannot start mpicc; install openmpi-bin and libopenmpi-dev")?;
    ensure!(output.status.success(), "mpicc: {}", String::from_utf8_lossy(&output.stderr));
    Ok(program)
}
