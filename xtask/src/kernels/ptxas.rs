//! ptxas, the assembler for one chip: reports the resources that each kernel uses on that chip.

use anyhow::{Context, bail};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Chips in the budget: A100 (sm_80), H100 and H200 (sm_90), B200 (sm_100).
pub(crate) const CHIPS: [&str; 3] = ["sm_80", "sm_90", "sm_100"];

/// Resource usage of one kernel on one chip.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) kernel: String,
    /// Registers of each thread.
    pub(crate) registers: u32,
    /// Bytes of local memory of each thread: spills, and arrays that do not fit into registers.
    pub(crate) local: u32,
    /// Bytes of shared memory of each block.
    pub(crate) shared: u32,
}

/// Returns the path of the machine code for a chip.
pub(crate) fn cubin(ptx: &Path, chip: &str) -> PathBuf {
    ptx.with_extension(format!("{chip}.cubin"))
}

/// Assembles a PTX file for a chip and returns the resource usage of its kernels.
pub(crate) fn measure(ptxas: &Path, ptx: &Path, chip: &str) -> anyhow::Result<Vec<Usage>> {
    let output = Command::new(ptxas)
        .args(["-v", "-arch", chip])
        .arg(ptx)
        .arg("-o")
        .arg(cubin(ptx, chip))
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot start {}", ptxas.display()))?;
    let said =
        String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        bail!("ptxas cannot assemble {} for {chip}\n{}", ptx.display(), beginning(&said));
    }
    parse(&said).with_context(|| format!("unexpected output of ptxas -v for {}\n{said}", ptx.display()))
}

/// Returns the first lines of ptxas's messages, which can be as many as lines of PTX.
fn beginning(said: &str) -> String {
    said.lines().take(12).collect::<Vec<_>>().join("\n")
}

/// Parses the output of `ptxas -v`. A function that is not inlined is counted with the kernel before it.
fn parse(said: &str) -> anyhow::Result<Vec<Usage>> {
    let mut all: Vec<Usage> = Vec::new();
    for line in said.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            let kernel = rest.split('\'').next().unwrap_or_default().to_owned();
            all.push(Usage { kernel, ..Usage::default() });
        } else if line.contains("bytes stack frame") || line.contains(": Used ") {
            let usage = all.last_mut().with_context(|| format!("usage line before any kernel: {line}"))?;
            for part in line.rsplit(": Used ").next().unwrap_or(line).split(',') {
                count(usage, part.trim())?;
            }
        }
    }
    match all.iter().find(|usage| usage.registers == 0) {
        Some(usage) => bail!("no register count of {}", usage.kernel),
        None if all.is_empty() => bail!("no kernel in the output"),
        None => Ok(all),
    }
}

/// Parses one of the comma-separated parts, such as `118 registers`.
fn count(usage: &mut Usage, part: &str) -> anyhow::Result<()> {
    let (number, what) = part.split_once(' ').with_context(|| format!("not a number: {part}"))?;
    let field = match what {
        "registers" => &mut usage.registers,
        "bytes smem" => &mut usage.shared,
        "bytes stack frame" | "bytes spill stores" | "bytes spill loads" => &mut usage.local,
        // Barriers, constants and the size of the call stack are not counted.
        _ => return Ok(()),
    };
    let number: u32 = number.parse().with_context(|| format!("not a number: {part}"))?;
    *field = number.max(*field);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAID: &str = "\
ptxas info    : 176 bytes gmem, 352 bytes cmem[4]
ptxas info    : Compiling entry function 'adam_bf16' for 'sm_80'
ptxas info    : Function properties for adam_bf16
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 118 registers, used 1 barriers, 4352 bytes smem, 464 bytes cmem[0]
ptxas info    : Compile time = 145.060 ms
ptxas info    : Compiling entry function 'tight' for 'sm_80'
ptxas info    : Function properties for tight
    16 bytes stack frame, 8 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 16 bytes cumulative stack size
ptxas info    : Compile time = 3066.179 ms
ptxas info    : Compiling entry function 'calls' for 'sm_80'
ptxas info    : Function properties for calls
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 39 registers, used 0 barriers
ptxas info    : Function properties for called
    160 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
";

    fn usage(kernel: &str, registers: u32, local: u32, shared: u32) -> Usage {
        Usage { kernel: kernel.to_owned(), registers, local, shared }
    }

    #[test]
    fn reads_what_ptxas_says() {
        let expected =
            [usage("adam_bf16", 118, 0, 4352), usage("tight", 32, 24, 0), usage("calls", 39, 160, 0)];
        assert_eq!(parse(SAID).unwrap(), expected);
    }

    #[test]
    fn what_cannot_be_read_is_an_error() {
        let bad = [
            "",
            "ptxas info    : Used 118 registers",
            "ptxas info    : Compiling entry function 'a' for 'sm_80'",
            "ptxas info    : Compiling entry function 'a' for 'sm_80'\nptxas info    : Used many registers",
        ];
        for said in bad {
            assert!(parse(said).is_err(), "{said:?}");
        }
    }
}
