//! What goes into the bundle: which programs, how cargo builds them, and where it says it put them.

use crate::cmd::Cmd;
use anyhow::{Context, bail};
use cargo_metadata::{Artifact, Message};
use std::path::{Path, PathBuf};

/// A program of a package. It runs where there is neither the source nor cargo.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Program {
    pub(crate) package: &'static str,
    pub(crate) features: &'static str,
    /// As cargo is asked for it: `--test NAME`, or `--bench NAME` for what measures.
    pub(crate) flag: &'static str,
    pub(crate) target: &'static str,
    /// Needs NCCL, which a GPU's driver does not bring.
    pub(crate) nccl: bool,
}

/// Every program of the bundle: the test programs, of which `run.sh` runs the modules `cuda` and `nccl`, then what measures.
pub(crate) const PROGRAMS: &[Program] = &[
    Program { package: "meshstep-tensor", features: "cuda", flag: "--test", target: "suite", nccl: false },
    Program { package: "meshstep-optim", features: "cuda", flag: "--test", target: "suite", nccl: false },
    Program { package: "meshstep-comm", features: "nccl", flag: "--test", target: "suite", nccl: true },
    Program { package: "meshstep-shard", features: "cuda", flag: "--test", target: "suite", nccl: true },
    Program {
        package: "meshstep-bench-cases",
        features: "cuda",
        flag: "--bench",
        target: "gpu",
        nccl: false,
    },
];

impl Program {
    /// Where it is in the bundle; `run.sh` runs what is in `tests`, in `nccl` if it finds NCCL, then in `bench`.
    pub(crate) fn place(&self) -> PathBuf {
        let folder = match self.flag {
            "--test" if self.nccl => "nccl",
            "--test" => "tests",
            _ => "bench",
        };
        Path::new(folder).join(format!("{}-{}", self.package, self.target))
    }

    /// Builds it, stripped, and says on stdout where it is.
    pub(crate) fn build(&self, root: &Path) -> Cmd {
        let fixed = "test --release --no-run --message-format json-render-diagnostics";
        let cmd = Cmd::cargo(&format!(
            "{fixed} -p {} --features {} {} {}",
            self.package, self.features, self.flag, self.target
        ));
        cmd.env("CARGO_PROFILE_RELEASE_STRIP", "symbols").dir(root)
    }

    /// The executable, from what cargo has said.
    pub(crate) fn executable(&self, said: &str) -> anyhow::Result<PathBuf> {
        let messages = Message::parse_stream(said.as_bytes());
        let mut found = Vec::new();
        for message in messages {
            if let Message::CompilerArtifact(artifact) = message.context("cargo's answer is cut off")?
                && self.is_made_by(&artifact)
            {
                found.extend(artifact.executable);
            }
        }
        match &found[..] {
            [one] => Ok(one.into()),
            _ => bail!(
                "cargo built {} programs for {} {}, where one is expected",
                found.len(),
                self.flag,
                self.target
            ),
        }
    }

    fn is_made_by(&self, artifact: &Artifact) -> bool {
        let kinds = artifact.target.kind.iter().map(ToString::to_string);
        artifact.target.name == self.target && kinds.into_iter().any(|kind| self.flag == format!("--{kind}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace::Workspace;
    use std::collections::HashSet;

    const CUDA: Program =
        Program { package: "meshstep-tensor", features: "cuda", flag: "--test", target: "cuda", nccl: false };

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
        let bench = Program { flag: "--bench", ..CUDA };
        assert_eq!(bench.executable(&said).unwrap(), Path::new("/w/bench"));
        let none = Program { target: "gone", ..CUDA }.executable(&said).unwrap_err().to_string();
        assert!(none.contains("0 programs for --test gone"), "{none}");
    }

    #[test]
    fn programs_have_places_of_their_own_and_packages_that_exist() {
        let workspace = Workspace::find().unwrap();
        let places: HashSet<PathBuf> = PROGRAMS.iter().map(Program::place).collect();
        assert_eq!(places.len(), PROGRAMS.len());
        for program in PROGRAMS {
            assert!(workspace.members.iter().any(|member| member.name == program.package), "{program:?}");
            assert!(["--test", "--bench"].contains(&program.flag), "{program:?}");
        }
        assert_eq!(CUDA.place(), Path::new("tests/meshstep-tensor-cuda"));
        assert_eq!(Program { flag: "--bench", ..CUDA }.place(), Path::new("bench/meshstep-tensor-cuda"));
        assert_eq!(Program { nccl: true, ..CUDA }.place(), Path::new("nccl/meshstep-tensor-cuda"));
    }

    #[test]
    fn what_is_built_is_stripped() {
        let shown = CUDA.build(Path::new("/w")).to_string();
        assert_eq!(
            shown,
            "cd /w && CARGO_PROFILE_RELEASE_STRIP=symbols cargo test --release --no-run --message-format \
             json-render-diagnostics -p meshstep-tensor --features cuda --test cuda"
        );
    }
}
