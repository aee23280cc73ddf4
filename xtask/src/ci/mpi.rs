//! Step `mpi`: lints what the feature `mpi` compiles, and runs the tests under `mpirun` with the system's libraries.

use super::apt;
use super::task::{ALL, Setting, Task, counted, with};
use crate::cmd::Cmd;
use std::path::{Path, PathBuf};
use std::{fmt, fs};

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
    fn tasks(self, setting: &Setting) -> Vec<Task> {
        let cargo = |line: &str| {
            let cmd = Cmd::cargo(line).dir(&setting.root).env("MPICC", self.compiler);
            let cmd = match self.target {
                Some(folder) => cmd.env("CARGO_TARGET_DIR", &setting.target.join(folder).to_string_lossy()),
                None => cmd,
            };
            with(Task::Run(counted(cmd, setting)), "MPIRUN", self.launcher)
        };
        let mut tasks = vec![Task::MpiPackages(self)];
        if self.target.is_some() {
            // Nothing is built here yet, so only the libraries are.
            tasks.push(cargo("test -p meshstep-comm --features mpi --test mpi"));
            tasks.push(cargo("test -p meshstep-shard --features mpi --test suite mpi::"));
            return tasks;
        }
        // The features of the other steps and `mpi`, so that their dependencies are not built a second time.
        let all = format!("{ALL},meshstep-bench/mpi");
        tasks.extend([
            cargo(&format!("clippy {all} --lib --bins --test mpi -- -D warnings")),
            cargo("test -p meshstep-comm --features mpi,nccl --lib mpi::"),
            cargo(&format!("test {all} --test mpi")),
            cargo("test -p meshstep-shard --features cuda,mpi --test suite mpi::"),
        ]);
        tasks
    }

    /// Installs the packages if the compiler, the launcher or libclang is missing, which needs root.
    pub(super) fn install(self) -> anyhow::Result<()> {
        let found = |program| Cmd::built(program, "--version").silent().is_ok();
        if found(self.compiler) && found(self.launcher) && has_libclang() {
            return Ok(());
        }
        apt::install(self.packages, &format!("{}, {} or libclang is missing", self.compiler, self.launcher))
    }
}

/// Returns true if libclang, which the bindings' generator loads, lies where LIBCLANG_PATH says or in a usual folder.
fn has_libclang() -> bool {
    let is_libclang =
        |name: &str| name.starts_with("libclang") && name.contains(".so") && !name.contains("cpp");
    let names = |folder: &Path| -> Vec<String> {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
    };
    let in_usr_lib = names(Path::new("/usr/lib"));
    let folders = in_usr_lib
        .iter()
        .map(|name| Path::new("/usr/lib").join(name))
        .flat_map(|folder| [folder.join("lib"), folder]);
    let usual = ["/usr/lib", "/usr/lib64", "/usr/local/lib"].map(PathBuf::from);
    std::env::var_os("LIBCLANG_PATH").is_some()
        || folders.chain(usual).any(|folder| names(&folder).iter().any(|name| is_libclang(name)))
}

impl fmt::Display for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "install {} unless {}, {} and libclang are there",
            self.packages, self.compiler, self.launcher
        )
    }
}
