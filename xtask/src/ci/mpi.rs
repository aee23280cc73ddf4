//! Step `mpi`: lints comm with its feature `mpi`, and runs the tests under `mpirun` with the system's libraries.

use super::steps::{Setting, Task, counted, with};
use crate::cmd::Cmd;
use anyhow::{Context, ensure};
use std::fmt;

/// An MPI library as Debian packages it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Library {
    packages: &'static str,
    compiler: &'static str,
    launcher: &'static str,
}

const OPEN_MPI: Library = Library {
    packages: "libopenmpi-dev openmpi-bin libclang-dev",
    compiler: "mpicc.openmpi",
    launcher: "mpirun.openmpi",
};
const MPICH: Library = Library {
    packages: "libmpich-dev mpich libclang-dev",
    compiler: "mpicc.mpich",
    launcher: "mpirun.mpich",
};

/// Returns the tasks: Open MPI, and in a long run also MPICH. No other step enables the feature, so only this one needs a library.
pub(super) fn tasks(setting: &Setting) -> Vec<Task> {
    let libraries: &[Library] = if setting.long { &[OPEN_MPI, MPICH] } else { &[OPEN_MPI] };
    libraries.iter().flat_map(|library| library.tasks(setting)).collect()
}

impl Library {
    fn tasks(self, setting: &Setting) -> [Task; 4] {
        // A target folder for each library, as their bindings differ.
        let target = setting.target.join(self.compiler).to_string_lossy().into_owned();
        let cargo = |line: &str, rest: &str| {
            let cmd =
                Cmd::cargo(&format!("{line} -p meshstep-comm --features mpi {rest}")).dir(&setting.root);
            let cmd = cmd.env("CARGO_TARGET_DIR", &target).env("MPICC", self.compiler);
            with(Task::Run(counted(cmd, setting)), "MPIRUN", self.launcher)
        };
        [
            Task::MpiPackages(self),
            cargo("clippy", "--all-targets -- -D warnings"),
            cargo("test", "--lib mpi::"),
            cargo("test", "--test mpi"),
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
