//! Programs of the bundle: how cargo builds them, and how to find the built file in cargo's messages.

use crate::cmd::Cmd;
use anyhow::{Context, bail};
use cargo_metadata::{Artifact, Message};
use std::path::{Path, PathBuf};

/// A program of a package. It must run without the source and without cargo.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Program {
    pub(crate) package: &'static str,
    /// Features, separated by commas; empty for no feature.
    pub(crate) features: &'static str,
    pub(crate) target: Target,
}

/// Cargo target of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// `--test NAME`.
    Test(&'static str),
    /// `--test NAME`, for tests that need NCCL, which the GPU driver does not include.
    NcclTest(&'static str),
    /// `--bench NAME`.
    Bench(&'static str),
    /// `--bench NAME`, for the benchmark of whole models, which needs NCCL.
    StagesBench(&'static str),
    /// `--bench NAME`, for a benchmark that needs no GPU.
    CpuBench(&'static str),
    /// `--bin NAME`.
    Bin(&'static str),
}

/// Every program of the bundle: the test programs, the benchmarks, and last the runner. `run.sh` takes the unpacked runner
/// as a sign that the archive is fully unpacked.
pub(crate) const PROGRAMS: &[Program] = &[
    Program { package: "meshstep-tensor", features: "cuda", target: Target::Test("suite") },
    Program { package: "meshstep-optim", features: "cuda", target: Target::Test("suite") },
    Program { package: "meshstep-comm", features: "nccl", target: Target::NcclTest("suite") },
    Program { package: "meshstep-shard", features: "cuda", target: Target::NcclTest("suite") },
    Program { package: "meshstep-checkpoint", features: "cuda", target: Target::NcclTest("suite") },
    Program { package: "meshstep-local", features: "cuda,checkpoint", target: Target::NcclTest("suite") },
    Program { package: "meshstep-bench-cases", features: "cuda", target: Target::Bench("gpu") },
    Program { package: "meshstep-bench-cases", features: "cuda", target: Target::StagesBench("stages") },
    Program { package: "meshstep-bench-cases", features: "cuda", target: Target::CpuBench("ranks") },
    Program { package: "meshstep-gpu-runner", features: "", target: Target::Bin("gpu-runner") },
];

impl Target {
    fn name(self) -> &'static str {
        match self {
            Target::Test(name)
            | Target::NcclTest(name)
            | Target::Bench(name)
            | Target::StagesBench(name)
            | Target::CpuBench(name)
            | Target::Bin(name) => name,
        }
    }

    /// Returns the name of the target's kind in cargo.
    fn kind(self) -> &'static str {
        match self {
            Target::Test(_) | Target::NcclTest(_) => "test",
            Target::Bench(_) | Target::StagesBench(_) | Target::CpuBench(_) => "bench",
            Target::Bin(_) => "bin",
        }
    }

    /// Returns the optimisation level. Test programs are built for size, because they measure nothing.
    fn opt_level(self) -> &'static str {
        match self {
            Target::Bench(_) | Target::StagesBench(_) | Target::CpuBench(_) => "3",
            Target::Test(_) | Target::NcclTest(_) | Target::Bin(_) => "s",
        }
    }
}

impl Program {
    /// Returns the path in the bundle: the runner beside `run.sh`, tests in `tests` or `nccl`, benchmarks in `bench`,
    /// `stages` or `cpu`.
    pub(crate) fn place(&self) -> PathBuf {
        let folder = match self.target {
            Target::Bin(name) => return name.into(),
            Target::Test(_) => "tests",
            Target::NcclTest(_) => "nccl",
            Target::Bench(_) => "bench",
            Target::StagesBench(_) => "stages",
            Target::CpuBench(_) => "cpu",
        };
        Path::new(folder).join(format!("{}-{}", self.package, self.target.name()))
    }

    /// Returns the command that builds the stripped program and prints its path on stdout.
    pub(crate) fn build(&self, root: &Path) -> Cmd {
        let command = if let Target::Bin(_) = self.target { "build" } else { "test --no-run" };
        let features =
            if self.features.is_empty() { String::new() } else { format!(" --features {}", self.features) };
        let cmd = Cmd::cargo(&format!(
            "{command} --release --message-format json-render-diagnostics -p {}{features} --{} {}",
            self.package,
            self.target.kind(),
            self.target.name()
        ));
        cmd.env("CARGO_PROFILE_RELEASE_STRIP", "symbols")
            .env("CARGO_PROFILE_RELEASE_OPT_LEVEL", self.target.opt_level())
            .dir(root)
    }

    /// Finds the executable in cargo's messages.
    pub(crate) fn executable(&self, said: &str) -> anyhow::Result<PathBuf> {
        let messages = Message::parse_stream(said.as_bytes());
        let mut found = Vec::new();
        for message in messages {
            if let Message::CompilerArtifact(artifact) = message.context("cannot read cargo's messages")?
                && self.is_made_by(&artifact)
            {
                found.extend(artifact.executable);
            }
        }
        match &found[..] {
            [one] => Ok(one.into()),
            _ => bail!(
                "cargo built {} programs for --{} {}, but exactly one is expected",
                found.len(),
                self.target.kind(),
                self.target.name()
            ),
        }
    }

    fn is_made_by(&self, artifact: &Artifact) -> bool {
        let mut kinds = artifact.target.kind.iter().map(ToString::to_string);
        artifact.target.name == self.target.name() && kinds.any(|kind| kind == self.target.kind())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace::Workspace;
    use std::collections::HashSet;

    const CUDA: Program =
        Program { package: "meshstep-tensor", features: "cuda", target: Target::Test("cuda") };

    fn runner() -> &'static Program {
        PROGRAMS.last().unwrap()
    }

    fn artifact(name: &str, kind: &str, executable: &str) -> String {
        format!(
            r#"{{"reason":"compiler-artifact","package_id":"path+file:///w/tensor#0.1.0","manifest_path":"/w/Cargo.toml",
            "target":{{"kind":["{kind}"],"crate_types":["bin"],"name":"{name}","src_path":"/w/x.rs","edition":"2024",
            "doc":false,"doctest":false,"test":true}},"profile":{{"opt_level":"3","debuginfo":0,"debug_assertions":false,
            "overflow_checks":false,"test":true}},"features":["cuda"],"filenames":[],"executable":{executable},"fresh":true}}"#
        )
        .replace('\n', "")
            + "\n"
    }

    #[test]
    fn the_program_is_the_one_of_its_kind_and_name() {
        let said = artifact("meshstep_tensor", "lib", "null")
            + &artifact("cuda", "bench", "\"/w/bench\"")
            + &artifact("cuda", "test", "\"/w/cuda-1\"")
            + &artifact("other", "test", "\"/w/other\"")
            + "{\"reason\":\"build-finished\",\"success\":true}\n";
        assert_eq!(CUDA.executable(&said).unwrap(), Path::new("/w/cuda-1"));
        let bench = Program { target: Target::Bench("cuda"), ..CUDA };
        assert_eq!(bench.executable(&said).unwrap(), Path::new("/w/bench"));
        let none =
            Program { target: Target::Test("gone"), ..CUDA }.executable(&said).unwrap_err().to_string();
        assert!(none.contains("0 programs for --test gone"), "{none}");
    }

    #[test]
    fn programs_have_places_of_their_own_and_packages_that_exist() {
        let workspace = Workspace::find().unwrap();
        let places: HashSet<PathBuf> = PROGRAMS.iter().map(Program::place).collect();
        assert_eq!(places.len(), PROGRAMS.len());
        for program in PROGRAMS {
            assert!(workspace.members.iter().any(|member| member.name == program.package), "{program:?}");
        }
        assert_eq!(CUDA.place(), Path::new("tests/meshstep-tensor-cuda"));
        assert_eq!(
            Program { target: Target::Bench("cuda"), ..CUDA }.place(),
            Path::new("bench/meshstep-tensor-cuda")
        );
        let stages = Program { target: Target::StagesBench("cuda"), ..CUDA };
        assert_eq!(stages.place(), Path::new("stages/meshstep-tensor-cuda"));
        let cpu = Program { target: Target::CpuBench("cuda"), ..CUDA };
        assert_eq!(cpu.place(), Path::new("cpu/meshstep-tensor-cuda"));
        let nccl = Program { target: Target::NcclTest("cuda"), ..CUDA };
        assert_eq!(nccl.place(), Path::new("nccl/meshstep-tensor-cuda"));
        assert_eq!(runner().place(), Path::new("gpu-runner"), "the runner must be last, and beside run.sh");
    }

    #[test]
    fn what_is_built_is_stripped_and_only_the_benchmark_is_fast() {
        let shown = CUDA.build(Path::new("/w")).to_string();
        assert_eq!(
            shown,
            "cd /w && CARGO_PROFILE_RELEASE_STRIP=symbols CARGO_PROFILE_RELEASE_OPT_LEVEL=s \
             cargo test --no-run --release --message-format \
             json-render-diagnostics -p meshstep-tensor --features cuda --test cuda"
        );
        let bench = Program { target: Target::Bench("gpu"), ..CUDA }.build(Path::new("/w")).to_string();
        assert!(bench.contains("OPT_LEVEL=3 cargo test") && bench.ends_with("--bench gpu"), "{bench}");
        let runner = runner().build(Path::new("/w")).to_string();
        assert!(runner.contains(" cargo build --release "), "{runner}");
        assert!(runner.ends_with("-p meshstep-gpu-runner --bin gpu-runner"), "{runner}");
    }
}
