//! `train --local`: workers that step alone and exchange parameters every few steps, with every method that a plan can
//! express. Each worker trains on its own part of the text; with `--chaos` workers leave and join.

mod beside;
mod company;
mod compare;
mod doubling;
mod elastic;
mod gate;
mod job;
mod link;
mod method;
mod report;
mod schedule;
mod seconds;
mod steps;
mod stopwatch;
#[cfg(test)]
pub(crate) mod tests;
pub(crate) mod timed;
mod trained;
pub(crate) mod tuning;
mod worker;

use std::fs;
use std::io::Write;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context as _, Result, bail, ensure};
use serde::Serialize;

use crate::args::local::{Asked, METHODS, Task};
use beside::Beside;
use compare::Losses;
use doubling::Doubled;
use job::{Common, Job};
use method::Method;
use schedule::Schedule;
use trained::Trained;

use crate::args::train::Train;
use crate::corpus::{Corpus, Text, byte_entropy};
use crate::gpt::{Config, Param};
use crate::measure::record::{self, Bar, Section};
use crate::measure::show::{html, terminal};
use crate::ranks::Ranks;
use crate::train::CORPUS_CAP;
use meshstep_bench_cases::machine::Machine;

/// Size of a network that four threads on two cores train nine times in a few minutes.
const SIZES: Config = Config { layers: 2, heads: 4, width: 64, context: 64 };

/// Number of seeds of tasks that compare methods, starting with the given seed.
const SEEDS: u64 = 3;

/// Result of a run: all bars hold, or some are missed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Holds,
    Missed,
}

/// A run that has passed all checks and is ready to start.
#[derive(Debug)]
pub(crate) struct Run {
    ranks: Ranks,
    asked: Train,
    task: Task,
    model: Config,
    methods: Vec<Method>,
    schedule: Schedule,
    /// Baseline with the same workers, for runs with changing workers.
    baseline: Option<Method>,
    /// Additional steps after which held-out losses are measured.
    marks: Vec<u64>,
    text: String,
    corpus: Corpus,
    entropy: f64,
    /// Number of sequences for held-out losses.
    held_out: usize,
}

/// Content of `local.json`.
#[derive(Debug, Serialize)]
struct Numbers<'a> {
    asked: &'a Train,
    local: &'a Asked,
    model: Config,
    params: usize,
    corpus: &'a str,
    byte_entropy: f64,
    seconds: f64,
    trained: &'a [Trained],
    /// Comparisons of methods with their baselines, if the baselines were trained.
    beside: &'a [Beside],
    /// Results of `compare`, by seed.
    compared: &'a [(u64, Losses)],
    /// Results of `doubling`, by seed.
    doubled: &'a [Doubled],
    bars: Vec<&'a Bar>,
    holds: bool,
}

/// Runs the training, prints the results, and writes `local.html` and `local.json` into `folder`.
pub(crate) fn run(
    asked: &Train,
    ranks: Ranks,
    manifest: &Path,
    folder: &Path,
    out: &mut impl Write,
) -> Result<Verdict> {
    let run = Run::prepare(asked, manifest)?.among(ranks)?;
    match asked.local.arbiter.is_empty() {
        false => elastic::run(&run, folder, out).map(|()| Verdict::Holds),
        true => run.report(folder, out),
    }
}

impl Run {
    /// Loads the text and sets defaults; the default corpus is found from `manifest`.
    pub(crate) fn prepare(asked: &Train, manifest: &Path) -> Result<Self> {
        let local = &asked.local;
        let task = local.local.context("--local names no method")?;
        local.check_flags(task)?;
        let steps = asked.steps as u64;
        let methods = match task {
            Task::All => METHODS.iter().map(|task| Method::of(*task, local, steps)).collect::<Result<_>>()?,
            Task::Compare => compare::methods(steps, asked.ranks())?,
            Task::Doubling => doubling::methods(local, steps)?,
            one => vec![Method::of(one, local, steps)?],
        };
        let schedule = match (local.chaos, methods.as_slice()) {
            (None, _) if task == Task::Doubling => doubling::schedule(asked.ranks(), steps, local.kx())?,
            (None, _) => Schedule::default(),
            (Some(seed), [Method { plan: Some(plan), .. }]) => {
                Schedule::draw(seed, asked.ranks(), steps, plan)?
            }
            (Some(_), _) => {
                bail!("--chaos needs one method with rare exchanges, such as --local des-loc")
            }
        };
        let baseline = local.chaos.and(methods.first()).and_then(Method::averaged_every_step);
        let marks = match task {
            Task::Doubling => doubling::half(steps, local.kx())?.into(),
            _ => Vec::new(),
        };
        let text = match &asked.corpus {
            Some(path) => Text::from_path(path, CORPUS_CAP)?,
            None => Text::from_dependencies(manifest, CORPUS_CAP)?,
        };
        let corpus = Corpus::new(&text.bytes, SIZES.context)?;
        let run = Run {
            ranks: Ranks::Threads,
            asked: asked.clone(),
            task,
            model: SIZES,
            methods,
            schedule,
            baseline,
            marks,
            corpus: if local.unlike { corpus.by_kind() } else { corpus },
            entropy: byte_entropy(&text.bytes),
            held_out: asked.held_out,
            text: text.to_string(),
        };
        // Reject plans that do not fit this network and texts that are too short before anything is trained.
        run.jobs().try_for_each(|job| job.map(drop))?;
        Ok(run)
    }

    /// Returns the run with these ranks instead of threads.
    pub(crate) fn among(self, ranks: Ranks) -> Result<Self> {
        ensure!(
            !ranks.are_processes() || self.schedule.events.is_empty(),
            "the workers of --chaos and --local doubling come and go as threads of one program; start it alone, or start \
             workers as processes with --arbiter"
        );
        Ok(Run { ranks, ..self })
    }

    /// Trains, prints and writes, as in [`run`].
    fn report(&self, folder: &Path, out: &mut impl Write) -> Result<Verdict> {
        if self.ranks.is_first() {
            fs::create_dir_all(folder)
                .with_context(|| format!("--out {}: making the folder", folder.display()))?;
        }
        self.head(out)?;
        let started = Instant::now();
        let trained = self.train(out)?;
        let compared = if self.task == Task::Compare { compare::by_seed(&trained)? } else { Vec::new() };
        let doubled = match self.task {
            Task::Doubling => doubling::losses(&trained, self.asked.local.kx())?,
            _ => Vec::new(),
        };
        let beside = self.beside(&trained)?;
        let mut sections = self.sections(&trained, &beside, folder);
        if self.task == Task::Compare {
            sections.push(compare::section(&compared, self.entropy));
        }
        if let [from, once] = self.marks[..] {
            sections.push(doubling::section(&doubled, self.asked.ranks(), [from, once], self.entropy));
        }
        sections.iter().try_for_each(|section| out.write_all(terminal::section(section).as_bytes()))?;
        for difference in trained.iter().filter_map(|run| run.difference.as_ref()) {
            writeln!(out, "parameters differ: {difference}")?;
        }
        for run in &trained {
            writeln!(out, "parameters of {} seed {}: {}", run.method, run.seed, run.digest)?;
        }
        let bars: Vec<&Bar> = sections.iter().flat_map(|section| &section.bars).collect();
        let holds = bars.iter().all(|bar| bar.holds());
        let seconds = started.elapsed().as_secs_f64();
        let numbers = Numbers {
            asked: &self.asked,
            local: &self.asked.local,
            model: self.model,
            params: self.params(),
            corpus: &self.text,
            byte_entropy: self.entropy,
            seconds,
            trained: &trained,
            beside: &beside,
            compared: &compared,
            doubled: &doubled,
            bars,
            holds,
        };
        if self.ranks.is_first() {
            crate::report::write_json(&numbers, &folder.join("local.json"))?;
            let summary = self.write_html(sections, seconds, folder)?;
            writeln!(out, "\n{summary}wrote local.html and local.json to {}", folder.display())?;
        }
        Ok(if holds { Verdict::Holds } else { Verdict::Missed })
    }

    fn seeds(&self) -> impl Iterator<Item = u64> {
        let several = matches!(self.task, Task::All | Task::Compare | Task::Doubling);
        let count = if several { SEEDS } else { 1 };
        (0..count).map(|i| self.asked.seed.wrapping_add(i))
    }

    /// Returns every training with its method's warnings.
    fn jobs(&self) -> impl Iterator<Item = Result<(Job<'_>, Vec<String>)>> {
        let common = self.common();
        let both = self.seeds().flat_map(|seed| self.methods.iter().map(move |method| (seed, method)));
        both.map(move |(seed, method)| Job::new(common, method, seed, self.schedule.clone()))
    }

    fn common(&self) -> Common<'_> {
        let (Train { steps, batch, .. }, workers) = (&self.asked, self.asked.ranks());
        let Run { model, ref corpus, held_out, ref marks, .. } = *self;
        let on_the_way = self.asked.seed;
        Common { model, corpus, steps: *steps, batch: *batch, workers, held_out, marks, on_the_way }
    }

    pub(crate) fn train(&self, out: &mut impl Write) -> Result<Vec<Trained>> {
        let mut trained = Vec::new();
        for job in self.jobs() {
            let (job, warnings) = job?;
            for warning in warnings {
                writeln!(out, "warning: {}: {warning}", job.method.task)?;
            }
            let label = format!("{} seed {}", job.method.task, job.seed);
            trained.push(job.train(&label, &self.ranks).with_context(|| label.clone())?);
        }
        if let (Some(baseline), Some(run)) = (&self.baseline, trained.first()) {
            // A joining worker starts with an exchange. The baseline has one in every step, so its workers join at the
            // recorded steps.
            let schedule =
                self.schedule.coming_at(|worker| run.workers.get(worker).map(|life| life.steps.start));
            let (job, _) = Job::new(self.common(), baseline, run.seed, schedule)?;
            let label = format!("{} seed {}", baseline.task, run.seed);
            trained.push(job.train(&label, &self.ranks).with_context(|| label.clone())?);
        }
        Ok(trained)
    }

    /// Compares methods with their baselines; empty if the baselines were not trained.
    fn beside(&self, trained: &[Trained]) -> Result<Vec<Beside>> {
        match (self.task, &self.baseline) {
            (Task::All, _) => beside::pairs(trained, beside::allowed),
            (_, Some(_)) => beside::pairs(trained, |_| beside::ALLOWED_IN_CHAOS),
            _ => Ok(Vec::new()),
        }
    }

    /// Prints the settings of the run.
    fn head(&self, out: &mut impl Write) -> Result<()> {
        let (Train { steps, batch, .. }, ranks) = (&self.asked, self.asked.ranks());
        let Config { layers, heads, width, context } = self.model;
        let (train, held_out) = self.corpus.lens();
        writeln!(out, "text: {}; {train} bytes for training, {held_out} held out", self.text)?;
        writeln!(
            out,
            "network: {} parameters; {layers} layers, {heads} heads, width {width}, context {context}",
            self.params()
        )?;
        writeln!(
            out,
            "run: {steps} steps of {ranks} workers with {batch} sequences each, every worker on its own part of the text"
        )?;
        writeln!(out, "seeds: {:?}", self.seeds().collect::<Vec<_>>())?;
        if self.asked.local.unlike {
            writeln!(out, "parts: text of different kinds, sorted by the share of letters")?;
        }
        let methods = self.methods.iter().chain(&self.baseline);
        methods.into_iter().try_for_each(|method| writeln!(out, "{}: {}", method.task, method.describe()))?;
        Ok(())
    }

    fn params(&self) -> usize {
        self.model.params().iter().map(Param::len).sum()
    }

    fn sections(&self, trained: &[Trained], beside: &[Beside], folder: &Path) -> Vec<Section> {
        let mut sections = vec![report::methods(trained, self.entropy)];
        sections.extend(seconds::sections(trained, folder));
        let unlike = self.asked.local.unlike;
        // All trainings have the same workers.
        if let Some(run) = trained.first() {
            sections.push(report::workers(run, unlike));
            if !self.schedule.events.is_empty() {
                sections.push(report::members(run, self.asked.local.chaos));
            }
        }
        if !beside.is_empty() {
            let about = beside::about(self.baseline.is_some(), unlike);
            sections.push(beside::section(beside, self.entropy, &about, !unlike));
        }
        sections
    }

    /// Writes the page. Returns a summary of the bars.
    fn write_html(&self, sections: Vec<Section>, seconds: f64, folder: &Path) -> Result<String> {
        let report = record::Report {
            format: record::FORMAT,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            machine: Machine::here(),
            quick: false,
            seconds,
            sections,
            left_out: Vec::new(),
        };
        let path = folder.join("local.html");
        fs::write(&path, html::report(&report, "Local training with Meshstep"))
            .with_context(|| format!("writing {}", path.display()))?;
        Ok(terminal::summary(&report))
    }
}
