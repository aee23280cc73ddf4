//! `train --device cuda`: a burn transformer on one GPU, trained by `meshstep-burn`'s example `cuda`. This path has not been run on a GPU
//! yet.

use super::driver;
use crate::cmd::Cmd;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Parser, ValueEnum};
use std::fmt;
use std::process::ExitCode;

/// Option that chooses the device.
const DEVICE: &str = "--device";

/// Train a transformer of burn on one NVIDIA GPU, with burn's AdamW and with the sharded optimizer, and compare losses and
/// times. Fails if the losses differ. The first build takes minutes and downloads LLVM. Compiled, but not yet run on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Parser)]
#[command(
    name = "cargo xtask train --device cuda",
    bin_name = "cargo xtask train --device cuda",
    max_term_width = 100
)]
struct GpuTrain {
    /// Optimizer steps
    #[arg(long, default_value_t = 40, value_parser = clap::value_parser!(u32).range(2..=1_000_000))]
    steps: u32,
    /// Sequences of a step
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    batch: u32,
    /// Tokens of a sequence
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    tokens: u32,
    /// Width of the network
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    width: u32,
    /// Layers of the network
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1024))]
    layers: u32,
    /// Place of the sharded optimizer
    #[arg(long, value_enum, default_value_t = Place::Gpu)]
    place: Place,
}

/// Places of the optimizer beside a module on the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Place {
    /// The module's GPU, with NCCL
    Gpu,
    /// The host
    Cpu,
    /// None: burn's AdamW alone
    Burn,
}

/// Device that the arguments of `train` ask for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Training {
    /// The trainer on CPUs, with these arguments.
    Cpu(Vec<String>),
    /// The trainer on a GPU, with these arguments.
    Gpu(Vec<String>),
}

/// Arguments of `train` that contradict its device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// No such device.
    Device { asked: String },
    /// An option that the trainer on a GPU does not have.
    NotOnGpu { option: String },
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refused::Device { asked } => write!(f, "--device {asked:?} is unknown; use cpu or cuda"),
            Refused::NotOnGpu { option } => write!(
                f,
                "train --device cuda has no {option}; it has --steps, --batch, --tokens, --width, --layers and --place. \
                 The trainer on CPUs, --device cpu, has the options of `train --help`"
            ),
        }
    }
}

impl std::error::Error for Refused {}

impl Training {
    /// Takes the device out of the arguments; the last one counts, and none is the CPU.
    pub(crate) fn of(args: &[String]) -> Result<Self, Refused> {
        let (mut device, mut rest, mut words) = ("cpu", Vec::new(), args.iter());
        while let Some(word) = words.next() {
            if word == DEVICE {
                device = words.next().map_or("", String::as_str);
            } else if let Some(value) = word.strip_prefix("--device=") {
                device = value;
            } else {
                rest.push(word.clone());
            }
        }
        match device {
            "cpu" => Ok(Training::Cpu(rest)),
            "cuda" => Ok(Training::Gpu(rest)),
            asked => Err(Refused::Device { asked: asked.to_owned() }),
        }
    }
}

/// Builds and runs the training, if there is a GPU.
pub(crate) fn run(args: &[String]) -> anyhow::Result<ExitCode> {
    let asked = match parse(args) {
        Ok(asked) => asked,
        Err(error) => return Err(refused(&error).map_or_else(|| error.exit(), anyhow::Error::from)),
    };
    // Before the build, which takes minutes.
    driver::gpus().map_err(|missing| anyhow::Error::from(missing).context("train --device cuda"))?;
    command(&asked).become_it()
}

/// Checks arguments without running anything; a request for help passes.
pub(super) fn check(args: &[String]) -> Result<(), String> {
    match parse(args) {
        Err(error) if error.kind() != ErrorKind::DisplayHelp => {
            Err(refused(&error).map_or_else(|| error.to_string(), |refused| refused.to_string()))
        }
        _ => Ok(()),
    }
}

fn parse(args: &[String]) -> Result<GpuTrain, clap::Error> {
    GpuTrain::try_parse_from(std::iter::once("train").chain(args.iter().map(String::as_str)))
}

/// Returns the refusal of an option that the trainer does not have; `None` for help and bad values, which clap explains.
fn refused(error: &clap::Error) -> Option<Refused> {
    match (error.kind(), error.get(ContextKind::InvalidArg)) {
        (ErrorKind::UnknownArgument, Some(ContextValue::String(option))) => {
            Some(Refused::NotOnGpu { option: option.clone() })
        }
        _ => None,
    }
}

fn command(asked: &GpuTrain) -> Cmd {
    let GpuTrain { steps, batch, tokens, width, layers, place } = asked;
    let place = place.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned());
    Cmd::cargo("run --release -p meshstep-burn --features cuda --example cuda --")
        .arg(&place)
        .arg(&format!("{width}"))
        .arg(&format!("{layers}"))
        .arg(&format!("{batch}"))
        .arg(&format!("{tokens}"))
        .arg(&format!("{steps}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    fn words(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn the_device_is_taken_out_of_the_arguments_and_the_cpu_is_the_default() {
        for (typed, expected) in [
            ("--steps 3", Training::Cpu(words("--steps 3"))),
            ("--device cpu --steps 3", Training::Cpu(words("--steps 3"))),
            ("--steps 3 --device cuda --width 8", Training::Gpu(words("--steps 3 --width 8"))),
            ("--device=cuda --help", Training::Gpu(words("--help"))),
            ("--device cuda --device cpu", Training::Cpu(Vec::new())),
        ] {
            assert_eq!(Training::of(&words(typed)), Ok(expected), "{typed}");
        }
        for typed in ["--device tpu", "--device=", "--steps 3 --device"] {
            let error = Training::of(&words(typed)).unwrap_err().to_string();
            assert!(error.contains("use cpu or cuda"), "{error}");
        }
    }

    #[test]
    fn options_are_the_examples_arguments_in_its_order() {
        GpuTrain::command().debug_assert();
        let of = |typed: &str| command(&parse(&words(typed)).unwrap()).to_string();
        let begin = "cargo run --release -p meshstep-burn --features cuda --example cuda --";
        assert_eq!(of(""), format!("{begin} gpu 256 4 16 64 40"));
        let all = of("--steps 5 --batch 3 --tokens 7 --width 128 --layers 2 --place cpu");
        assert_eq!(all, format!("{begin} cpu 128 2 3 7 5"));
        assert!(of("--place burn").contains(" burn 256 "));
    }

    #[test]
    fn options_of_the_trainer_on_cpus_are_refused_by_name() {
        for (typed, option) in [
            ("--stage 2", "--stage"),
            ("--steps 3 --mesh tp=2", "--mesh"),
            ("--save-every 50 --resume", "--save-every"),
            ("--optimizer sgd", "--optimizer"),
            ("extra", "extra"),
        ] {
            let refused = refused(&parse(&words(typed)).unwrap_err());
            assert_eq!(refused, Some(Refused::NotOnGpu { option: option.to_owned() }), "{typed}");
        }
        // clap explains bad values and prints the help.
        for (typed, text) in
            [("--steps 1", "2..=1000000"), ("--place moon", "gpu, cpu, burn"), ("--help", "not yet run")]
        {
            let error = parse(&words(typed)).unwrap_err();
            assert!(refused(&error).is_none() && error.to_string().contains(text), "{error}");
        }
    }

    /// The example reads its arguments by position; this is their order there.
    #[test]
    fn the_example_still_has_these_arguments() {
        let example = include_str!("../../../parallel3d/burn/examples/cuda.rs");
        assert!(example.contains("[width, layers, batch, tokens, _]: [usize; 5]"));
        assert!(example.contains("[256, 4, 16, 64, 40]"));
    }
}
