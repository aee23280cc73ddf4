//! `bench network`: training over slow networks. Wall time to the same held-out loss by every method, bytes that cross the links, and the rate
//! below which rare exchanges win.

mod contestants;
mod crossover;
mod fleet;
mod hosts;
mod measured;
mod namespaces;
mod report;
pub(crate) mod worker;

use std::io::{self, Write as _};
use std::path::Path;

use anyhow::{Context as _, Result};
use tempfile::NamedTempFile;

use contestants::{Contestant, Sizes, contestants};
use fleet::{Fleet, Places};
use measured::{Curve, Measured, Rate};

use crate::args::FOLDER;
use crate::corpus::Text;
use crate::measure::effort::Effort;
use crate::measure::record::{NETWORK, Section};
use crate::train::CORPUS_CAP;

const ABOUT: &str = "Workers are processes, each in a network namespace of its own behind a link whose rate the kernel limits in both \
                     directions (token bucket; no delay is added). All methods train the same network from the same seed on the same \
                     number of tokens. A method has the same losses to the bit at every rate; the held-out ones are measured at the \
                     fastest. Times are those of the slowest worker, without the measurement of held-out losses. The target is the \
                     highest of the methods' last losses, which all of them reach; the step at which a method reaches it is \
                     interpolated between two measured losses. An asterisk marks a time that is computed from whole periods of measured \
                     steps.";

/// Results of one method.
#[derive(Debug)]
struct Trained {
    contestant: Contestant,
    curve: Curve,
    /// Bytes over all links in the whole training, at the fastest rate.
    crossed: u64,
    /// By rate, the fastest first.
    at: Vec<(Rate, Measured)>,
}

pub(crate) fn run(effort: Effort) -> Result<Section> {
    namespaces::probe()?;
    let mut section = Section::new(NETWORK, ABOUT);
    let text = text()?;
    for workers in effort.pick(&[2][..], &[4, 2]) {
        let sizes = Sizes::of(effort, *workers);
        let trained = trainings(&sizes, text.path())?;
        report::add(&mut section, &sizes, &trained, effort)?;
    }
    hosts::add(&mut section, effort, text.path())?;
    Ok(section)
}

/// Writes the training text to a file, which all workers read.
fn text() -> Result<NamedTempFile> {
    let manifest = Path::new(FOLDER).join("Cargo.toml");
    let text = Text::from_dependencies(&manifest, CORPUS_CAP)?;
    let mut file = NamedTempFile::new().context("making a file for the training text")?;
    file.write_all(&text.bytes).context("writing the training text")?;
    Ok(file)
}

/// Trains by every method at every rate.
fn trainings(sizes: &Sizes, text: &Path) -> Result<Vec<Trained>> {
    let places = Places { namespaces: sizes.workers, each: 1 };
    let (fastest, slower) = sizes.rates.split_first().context("there is no rate")?;
    let mut fleet = Fleet::start(places, fastest.bits(), text)?;
    let train = |contestant: Contestant| {
        let name = contestant.name.clone();
        announce(sizes, *fastest, &name);
        Trained::at_the_fastest(contestant, &mut fleet, *fastest).context(name)
    };
    let mut all = contestants(sizes).into_iter().map(train).collect::<Result<Vec<_>>>()?;
    drop(fleet);
    let target = target(&all);
    for rate in slower {
        let mut fleet = Fleet::start(places, rate.bits(), text)?;
        for trained in &mut all {
            announce(sizes, *rate, &trained.contestant.name);
            trained.to(target, &mut fleet, *rate).with_context(|| trained.contestant.name.clone())?;
        }
    }
    Ok(all)
}

/// Prints a line about the next training: all of them take minutes.
fn announce(sizes: &Sizes, rate: Rate, name: &str) {
    // A closed stderr must not end the run.
    let _ = writeln!(io::stderr(), "{} workers at {rate}: {name}", sizes.workers);
}

/// Returns the held-out loss that all methods reach.
fn target(all: &[Trained]) -> f64 {
    all.iter().map(|trained| trained.curve.last()).fold(f64::NEG_INFINITY, f64::max)
}

impl Trained {
    /// Trains to the end, and measures held-out losses and bytes.
    fn at_the_fastest(contestant: Contestant, fleet: &mut Fleet, rate: Rate) -> Result<Self> {
        // Bytes of the first values are none of the training's.
        let before = Measured::take(fleet, &contestant.until(0))?;
        let measured = Measured::take(fleet, &contestant.case)?;
        let curve = Curve::of(&measured.workers)?;
        let crossed = measured.crossed - before.crossed;
        Ok(Trained { contestant, curve, crossed, at: vec![(rate, measured)] })
    }

    /// Trains until the target is reached, or at a slow rate for a few periods.
    fn to(&mut self, target: f64, fleet: &mut Fleet, rate: Rate) -> Result<()> {
        let case = self.contestant.towards(self.step_of(target), rate);
        let measured = Measured::take(fleet, &case)?;
        self.at[0].1.begins_with(&measured)?;
        self.at.push((rate, measured));
        Ok(())
    }

    /// Returns the step at which the target is reached.
    fn step_of(&self, target: f64) -> f64 {
        self.curve.step_of(target).unwrap_or(self.contestant.case.steps as f64)
    }

    /// Returns the seconds until the target at each rate.
    fn times(&self, target: f64) -> Vec<(Rate, f64)> {
        let step = self.step_of(target);
        self.at.iter().map(|(rate, measured)| (*rate, measured.seconds_at(step))).collect()
    }

    /// Returns the seconds until the target at a rate; NaN if it was not measured there.
    fn time(&self, target: f64, at: Rate) -> f64 {
        self.times(target).iter().find(|(rate, _)| *rate == at).map_or(f64::NAN, |(_, seconds)| *seconds)
    }

    fn planned(&self) -> u64 {
        self.at.first().map_or(0, |(_, measured)| measured.planned())
    }
}
