//! Checks a program's requirements on the machine that runs it: its shared libraries and its minimum version of glibc.

use anyhow::{Context, bail, ensure};
use std::path::Path;
use std::process::{Command, Stdio};

/// Newest glibc that a program may require: the version of RHEL 9. Ubuntu has a newer one from 22.04 on, Debian from 12 on.
/// A build on Debian 12 requires exactly this version.
pub(crate) const GLIBC: Version = Version(2, 34);

/// Libraries of glibc and the C compiler's runtime, which every machine has.
const EVERYWHERE: &[&str] = &[
    "libc.so.6",
    "libm.so.6",
    "libpthread.so.0",
    "libdl.so.2",
    "librt.so.1",
    "libgcc_s.so.1",
    "ld-linux-x86-64.so.2",
];

/// A version of glibc.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Version(pub(crate) u32, pub(crate) u32);

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.0, self.1)
    }
}

/// Returns the minimum glibc of a program; an error if the program needs a newer glibc or other libraries than every
/// machine has.
pub(crate) fn check(program: &Path) -> anyhow::Result<Version> {
    judge(&ask(program)?).with_context(|| program.display().to_string())
}

/// Returns readelf's report on the libraries of a program.
fn ask(program: &Path) -> anyhow::Result<String> {
    let mut readelf = Command::new("readelf");
    readelf.args(["--wide", "--dynamic", "--version-info"]).arg(program).env("LC_ALL", "C");
    let output = readelf
        .stdin(Stdio::null())
        .output()
        .context("cannot start readelf, which comes with the linker (binutils)")?;
    let problem = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "readelf cannot read {}: {problem}", program.display());
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn judge(said: &str) -> anyhow::Result<Version> {
    let strangers: Vec<&str> = libraries(said).filter(|library| !EVERYWHERE.contains(library)).collect();
    if !strangers.is_empty() {
        bail!("needs {}, which some machines lack; load it at run time", strangers.join(", "));
    }
    let newest = newest_glibc(said)?.context("requires no version of glibc")?;
    if newest > GLIBC {
        bail!("needs glibc {newest}, above {GLIBC}; build the bundle on an older system");
    }
    Ok(newest)
}

/// Returns the names in lines such as `(NEEDED)  Shared library: [libc.so.6]`.
fn libraries(said: &str) -> impl Iterator<Item = &str> {
    let needed = said.lines().filter(|line| line.contains("(NEEDED)"));
    needed.filter_map(|line| line.split_once('[')?.1.split(']').next())
}

/// Returns the newest version in lines such as `Name: GLIBC_2.34  Flags: none  Version: 5`.
fn newest_glibc(said: &str) -> anyhow::Result<Option<Version>> {
    let names =
        said.split("Name: GLIBC_").skip(1).map(|rest| rest.split_whitespace().next().unwrap_or_default());
    let versions =
        names.map(|name| version(name).with_context(|| format!("needs GLIBC_{name}, which is not a number")));
    Ok(versions.collect::<anyhow::Result<Vec<_>>>()?.into_iter().max())
}

/// Parses `2.34` or `2.2.5`; the third number is ignored.
fn version(name: &str) -> Option<Version> {
    let mut numbers = name.split('.').map(|number| number.parse().ok());
    Some(Version(numbers.next()??, numbers.next()??))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAID: &str = "
Dynamic section at offset 0x7d80 contains 26 entries:
  Tag        Type                         Name/Value
 0x0000000000000001 (NEEDED)             Shared library: [libgcc_s.so.1]
 0x0000000000000001 (NEEDED)             Shared library: [libc.so.6]
Version needs section '.gnu.version_r' contains 2 entries:
  0x0000: Version: 1  File: libc.so.6  Cnt: 3
  0x0010:   Name: GLIBC_2.9  Flags: none  Version: 5
  0x0020:   Name: GLIBC_2.28  Flags: none  Version: 4
  0x0030:   Name: GLIBC_2.2.5  Flags: none  Version: 3
  0x0040: Version: 1  File: libgcc_s.so.1  Cnt: 1
  0x0050:   Name: GCC_4.2.0  Flags: none  Version: 2
";

    #[test]
    fn the_newest_version_counts_as_numbers_do() {
        assert_eq!(judge(SAID).unwrap(), Version(2, 28));
    }

    #[test]
    fn the_limit_is_the_last_that_passes() {
        let with = |version: &str| judge(&SAID.replace("2.28", version));
        assert_eq!(with(&GLIBC.to_string()).unwrap(), GLIBC);
        let error = with(&Version(GLIBC.0, GLIBC.1 + 1).to_string()).unwrap_err().to_string();
        assert!(error.contains("needs glibc 2.35, above 2.34"), "{error}");
        assert!(with("3.0").is_err());
        assert!(format!("{:#}", with("ABI_DT_RELR").unwrap_err()).contains("GLIBC_ABI_DT_RELR"));
    }

    #[test]
    fn other_libraries_and_no_glibc_at_all_are_refused() {
        let error = judge(&SAID.replace("libgcc_s.so.1]", "libcuda.so.1]")).unwrap_err().to_string();
        assert!(error.contains("needs libcuda.so.1"), "{error}");
        assert!(judge("").is_err());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn reads_a_real_program() {
        let said = ask(&std::env::current_exe().unwrap()).unwrap();
        assert!(libraries(&said).any(|library| library == "libc.so.6"));
        assert!(newest_glibc(&said).unwrap().unwrap() >= Version(2, 2));
    }
}
