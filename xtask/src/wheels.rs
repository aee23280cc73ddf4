//! Fetches pinned wheels with pip into a folder, checked by hash and independent of the caller's pip configuration.

use crate::cmd::Cmd;
use std::path::Path;

/// Returns the command that installs the wheels of `list`, each pinned by hash, into the folder `into`.
pub(crate) fn install(list: &Path, into: &Path) -> Cmd {
    let fixed = "install --quiet --no-deps --require-hashes --only-binary :all: --no-compile --timeout 30";
    pip(fixed).arg("--target").arg(&into.to_string_lossy()).arg("-r").arg(&list.to_string_lossy())
}

pub(crate) fn pip(line: &str) -> Cmd {
    let cmd = Cmd::built("python3", &format!("-m pip --disable-pip-version-check {line}"));
    cmd.env("PIP_USER", "0").env("PIP_REQUIRE_VIRTUALENV", "0").env("PIP_ROOT_USER_ACTION", "ignore")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_installed_without_a_hash_or_outside_the_target_folder() {
        let shown = install(Path::new("t/requirements.txt"), Path::new("t/x.part")).to_string();
        for part in ["--require-hashes", "--no-deps", "--target t/x.part -r t/requirements.txt"] {
            assert!(shown.contains(part), "{shown}");
        }
    }
}
