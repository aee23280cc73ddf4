//! Step `mpi`: lints what the feature `mpi` compiles, and runs the tests under `mpirun` with the system's libraries.

use super::steps::{ALL, Setting, Task, counted, with};
use crate::cmd::Cmd;
use anyhow::{Context, ensure};
use std::fmt;

/// An MPI library as Debian packages it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Library {
    packages: &'static str,
    compiler: &'static str,
    launcher: &'static str,
    /// Folder in the target folder for builds with this library. A library of its own has one, as the bindings differ and cargo does
    /// not see which compiler they are from.
    target: Option<&'static str>,
}

const OPEN_MPI: Library = Library {
    packages: "libopenmpi-dev openmpi-bin libclang-dev",
    compiler: "mpicc.openmpi",
    launcher: "mpirun.openmpi",
    target: None,
};
const MPICH: Library = Library {
    packages: "libmpich-dev mpich libclang-dev",
    compiler: "mpicc.mpich",
    launcher: "mpirun.mpich",
    target: Some("mpich"),
};

/// Returns the tasks: Open MPI, and in a long run also MPICH. No other step enables the feature, so only this one needs a library.
pub(super) fn tasks(setting: &Setting) -> Vec<Task> {
    let libraries: &[Library] = if setting.long { &[OPEN_MPI, MPICH] } else { &[OPEN_MPI] };
    libraries.iter().flat_map(|library| library.tasks(setting)).collect()
}

impl Library {
    fn tasks(self, setting: &Setting) -> [Task; 4] {
        let cargo = |line: &str| {
            let cmd = Cmd::cargo(line).dir(&setting.root).env("MPICC", self.compiler);
            let cmd = match self.target {
                Some(folder) => cmd.env("CARGO_TARGET_DIR", &setting.target.join(folder).to_string_lossy()),
                None => cmd,
            };
            with(Task::Run(counted(cmd, setting)), "MPIRUN", self.launcher)
        };
        // The features of the other steps and `mpi`, so that their dependencies are not built a second time.
        let all = format!("{ALL},meshstep-bench/mpi,meshstep-shard/mpi");
        [
            Task::MpiPackages(self),
            cargo(&format!("clippy {all} --lib --bins --test mpi -- -D warnings")),
            cargo("test -p meshstep-comm --features mpi,nccl --lib mpi::"),
            cargo(&format!("test {all} --test mpi")),
        ]
    }

    /// Installs the packages if the compiler or the launcher is missing, which needs root.
    pub(super) fn install(self) -> anyhow::Result<()> {
        let found = |program| Cmd::built(program, "--version").silent().is_ok();
        if found(self.compiler) && found(self.launcher) {
            return Ok(());
        }
        let user = Cmd::built("id", "-u").output()?.unwrap_or_default();
        let missing =
            format!("{} or {} is missing: apt-get install {}", self.compiler, self.launcher, self.packages);
        ensure!(user.trim() == "0", "{missing}");
        let install = Cmd::built("apt-get", &format!("install -y {}", self.packages));
        let status =
            install.env("DEBIAN_FRONTEND", "noninteractive").run_unattended().context(missing.clone())?;
        ensure!(status.success(), "{missing}");
        Ok(())
    }
}

impl fmt::Display for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "install {} unless {} and {} are there", self.packages, self.compiler, self.launcher)
    }
}
