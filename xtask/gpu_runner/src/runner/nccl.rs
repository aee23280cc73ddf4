//! Search for the NCCL library: first in the loader's path, then in python3's packages.

use super::clock::Clock;
use super::logs::Scratch;
use super::machine::answer;
use super::plan::installed;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Test program that probes for NCCL, and its test that prints the result.
const PROBE: (&str, &str) = ("nccl/meshstep-comm-suite", "nccl::processes::what_is_probed_is_printed");

/// Python code that prints the folder of the NCCL library installed with torch.
const OF_PYTHON: &str = "import nvidia.nccl; print(list(nvidia.nccl.__path__)[0] + '/lib')";

/// Returns the environment that NCCL tests need, or `None` if there is no libnccl.so.2. An unusable library counts as
/// found, so that its tests run and report the fault.
pub(crate) fn search(bundle: &Path, scratch: &Scratch, clock: &Clock) -> Option<Vec<(String, OsString)>> {
    let found = |env: Vec<(String, OsString)>| {
        let probe: (PathBuf, Vec<OsString>) =
            (bundle.join(PROBE.0), ["--exact", PROBE.1, "--nocapture"].map(OsString::from).into());
        let said = answer(probe, env.clone(), scratch, clock).unwrap_or_default();
        (!said.contains("probed: Err(NoLibrary")).then_some(env)
    };
    found(Vec::new()).or_else(|| found(vec![("LD_LIBRARY_PATH".to_owned(), of_python(scratch, clock)?)]))
}

/// Returns the loader's path with the folder of python3's NCCL in front.
fn of_python(scratch: &Scratch, clock: &Clock) -> Option<OsString> {
    let args = ["-c", OF_PYTHON].map(OsString::from).into();
    let folder = answer((installed("python3")?, args), Vec::new(), scratch, clock)?;
    let before = std::env::var_os("LD_LIBRARY_PATH").filter(|path| !path.is_empty());
    let folders = [PathBuf::from(folder.trim())].into_iter();
    let rest: Vec<PathBuf> = before.iter().flat_map(|path| std::env::split_paths(path)).collect();
    std::env::join_paths(folders.chain(rest)).ok()
}
