//! `train`: trains the same network with one ZeRO stage after the other, and checks that the results agree.

pub(crate) mod checkpoints;
pub(crate) mod compare;
mod over_slots;
mod rank;
pub(crate) mod replica;
pub(crate) mod rules;
pub(crate) mod signals;
pub(crate) mod trainer;

use std::fmt;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use meshstep_shard::{Preemption, SlotRuns};

use crate::args::train::{Optimizer, Train};
use crate::corpus::{Corpus, Text, byte_entropy};
use crate::gpt::{Config, Param, VOCAB};
use crate::memory::Seen;
use crate::ranks::Ranks;
use crate::report::{Peak, Report, StageReport};
use checkpoints::Checkpoints;
use compare::{Finals, digest};
use rank::Done;
pub(crate) use rank::stage_named;
use signals::Signals;

/// Maximum size of the text; a run reads only a small part, and more would take time to load.
pub(crate) const CORPUS_CAP: usize = 8 << 20;

/// Default number of gradient buckets.
pub(crate) const BUCKETS: usize = 16;

/// Returns the default number of gradient buckets. Ranks share the matrices of a bucket whole, so that Muon's stay in one.
fn buckets(optimizer: Optimizer) -> usize {
    if optimizer == Optimizer::Muon { 1 } else { BUCKETS }
}

/// A run that is ready to start, shared by all stages and ranks.
#[derive(Debug)]
pub(crate) struct Run {
    ranks: Ranks,
    asked: Train,
    model: Config,
    text: String,
    corpus: Corpus,
    byte_entropy: f64,
    bucket: usize,
    checkpoints: Option<Checkpoints>,
    preemption: Preemption,
    /// True to take an ordinary mean over the micro-batches of slots.
    ordinary: bool,
}

impl Run {
    /// Loads the text and sets defaults; the default corpus is found from `manifest`, and results go to `folder`.
    pub(crate) fn prepare(asked: &Train, manifest: &Path, folder: &Path) -> Result<Self> {
        ensure!(
            asked.stage != Some(3),
            "stage 3 needs a network that gathers its parameters; add --mesh, such as dp=4"
        );
        asked.check_ranks()?;
        let model = Config::default();
        let text = match &asked.corpus {
            Some(path) => Text::from_path(path, CORPUS_CAP)?,
            None => Text::from_dependencies(manifest, CORPUS_CAP)?,
        };
        let (Train { seed, steps, batch, optimizer, .. }, ranks) = (asked, asked.ranks());
        let job = format!(
            "{steps} steps of {optimizer:?}, {ranks} ranks with {batch} sequences each, seed {seed}, {text}"
        );
        Ok(Self {
            checkpoints: Checkpoints::of(asked, folder, job)?,
            ranks: Ranks::Threads,
            preemption: Preemption::new(),
            ordinary: false,
            asked: asked.clone(),
            model,
            corpus: Corpus::new(&text.bytes, model.context)?,
            byte_entropy: byte_entropy(&text.bytes),
            bucket: asked.bucket.unwrap_or(param_count(&model).div_ceil(buckets(*optimizer))),
            text: text.to_string(),
        })
    }

    /// Returns the run with these ranks instead of threads.
    pub(crate) fn among(self, ranks: Ranks) -> Self {
        Run { ranks, ..self }
    }

    /// Returns the run as one that ends at a step boundary when a signal asks it to.
    pub(crate) fn ended_by(self, signals: &Signals) -> Self {
        Run { preemption: signals.preemption().clone(), ..self }
    }

    /// Trains every requested stage.
    pub(crate) fn train(&self) -> Result<Report> {
        let (mut stages, mut difference) = (Vec::new(), None);
        let mut first: Option<(String, Finals)> = None;
        for stage in self.asked.stages() {
            let (report, finals) = self.stage(stage)?;
            stages.push(report);
            for (rank, finals) in finals.into_iter().enumerate() {
                let name = format!("rank {rank} of stage {stage}");
                let (first_name, first) = first.get_or_insert_with(|| (name.clone(), finals.clone()));
                difference =
                    difference.or_else(|| compare::first_difference((first_name, first), (&name, &finals)));
            }
        }
        Ok(self.report(stages, difference))
    }

    /// Returns the slots of each rank, if there are slots.
    fn slots(&self) -> Option<SlotRuns> {
        SlotRuns::even(self.asked.slots?, self.asked.ranks()).ok()
    }

    /// Trains one stage on all ranks. Returns its report and the final parameters of each rank; [`Stopped`](signals::Stopped) as an
    /// error if a signal asked the run to end.
    fn stage(&self, stage: u8) -> Result<(StageReport, Vec<Finals>)> {
        let (steps, ranks, tokens) = (self.asked.steps, self.asked.ranks(), self.tokens_per_step());
        let name = format!("stage {stage}");
        let progress = self.ranks.progress(name.clone(), steps, ranks, tokens);
        let ran = self.ranks.run(ranks, |comm| rank::train(self, stage, comm, &progress));
        progress.finish();
        let ran = ran.with_context(|| name.clone())?;
        let done = all_or_cause(ran.results).context(name)?;
        if let Some(done) = done.iter().find(|done| done.preempted) {
            let steps = done.before.len() + done.losses.len();
            return Err(checkpoints::stopped(steps, self.checkpoints.as_ref()).into());
        }
        let report = summary(stage, &done, ran.process);
        Ok((report, done.into_iter().map(|done| done.finals).collect()))
    }

    fn tokens_per_step(&self) -> usize {
        self.asked.slots.unwrap_or(self.asked.ranks()) * self.asked.batch * self.model.context
    }

    fn report(&self, stages: Vec<StageReport>, difference: Option<String>) -> Report {
        let (train_bytes, held_out_bytes) = self.corpus.lens();
        Report {
            asked: self.asked.clone(),
            model: self.model,
            params: param_count(&self.model),
            bucket: self.bucket,
            corpus: self.text.clone(),
            train_bytes,
            held_out_bytes,
            byte_entropy: self.byte_entropy,
            uniform: libm::log(VOCAB as f64),
            stages,
            difference,
        }
    }
}

impl fmt::Display for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Train { steps, batch, .. }, ranks) = (&self.asked, self.asked.ranks());
        let Config { layers, heads, width, context } = self.model;
        let params = param_count(&self.model);
        writeln!(f, "text: {}", self.text)?;
        writeln!(
            f,
            "network: {params} parameters; {layers} layers, {heads} heads, width {width}, context {context}"
        )?;
        write!(
            f,
            "run: {steps} steps on {ranks} ranks with {batch} sequences each, buckets of {}",
            self.bucket
        )
    }
}

fn param_count(model: &Config) -> usize {
    model.params().iter().map(Param::len).sum()
}

/// Returns the results of all ranks, or the error that caused the errors of the other ranks.
pub(crate) fn all_or_cause<T>(results: Vec<Result<T>>) -> Result<Vec<T>> {
    let (mut done, mut errors) = (Vec::new(), Vec::new());
    for (rank, result) in results.into_iter().enumerate() {
        match result {
            Ok(result) => done.push(result),
            Err(error) => errors.push(error.context(format!("rank {rank}"))),
        }
    }
    errors.sort_by_key(is_consequence);
    errors.into_iter().next().map_or(Ok(done), Err)
}

/// A rank that fails leaves the group, so the collectives of the other ranks fail.
fn is_consequence(error: &anyhow::Error) -> bool {
    use meshstep_candle::parallel::{self, LayerError};
    use meshstep_parallel3d::Error as OnMesh;
    let in_layer = || error.downcast_ref().and_then(parallel::cause);
    matches!(trainer::cause(error), Some(meshstep_shard::Error::Comm(_)))
        || matches!(error.downcast_ref(), Some(OnMesh::Shard(meshstep_shard::Error::Comm(_))))
        || matches!(in_layer(), Some(LayerError::Comm(_)))
}

/// Combines the results of a stage's ranks. The digest is that of rank 0, with which the others are compared.
fn summary(stage: u8, done: &[Done], process: Seen) -> StageReport {
    let ranks = done.len() as f64;
    let mean = |value: &dyn Fn(&Done) -> f64| done.iter().map(value).sum::<f64>() / ranks;
    let steps = done.iter().map(|done| done.losses.len()).min().unwrap_or(0);
    let before = done.iter().take(1).flat_map(|done| &done.before).copied();
    let most = |value: fn(&Peak) -> u64| done.iter().map(|done| value(&done.peak)).max().unwrap_or(0);
    StageReport {
        stage,
        losses: before.chain((0..steps).map(|t| mean(&|done| done.losses[t]))).collect(),
        held_out: mean(&|done| done.held_out),
        skipped: done.iter().map(|done| done.skipped).max().unwrap_or(0),
        ms_per_step: done.iter().map(|done| done.seconds).fold(0.0, f64::max) * 1e3 / steps.max(1) as f64,
        peak: Peak {
            params: most(|peak| peak.params),
            grads: most(|peak| peak.grads),
            buckets: most(|peak| peak.buckets),
            state: most(|peak| peak.state),
            framework: most(|peak| peak.framework),
        },
        wire_bytes: done.iter().map(|done| done.sent).max().unwrap_or(0) as f64 / steps.max(1) as f64,
        digest: digest(done.iter().take(1).map(|done| &done.finals)),
        process,
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use clap::Parser as _;
    use meshstep_cases::{long, tried};
    use meshstep_shard::Error;

    use super::*;
    use crate::cli::{Cli, Command};

    /// Prepares a run of a small network on this file's own text. In short runs few sequences are held out.
    fn run(options: &str) -> Run {
        let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/src/train/mod.rs");
        let words =
            ["meshstep-bench", "train", "--corpus", corpus].into_iter().chain(options.split_whitespace());
        let Command::Train(mut asked) = Cli::parse_from(words).command else { panic!("not train") };
        if !long() {
            asked.held_out = 3;
        }
        let run = Run::prepare(&asked, Path::new("nowhere"), Path::new("nowhere")).unwrap();
        Run { model: Config { layers: 2, heads: 2, width: 16, ..run.model }, bucket: 1000, ..run }
    }

    /// Prepares the same on short sequences, except in long runs.
    pub(crate) fn short(options: &str) -> Run {
        let run = run(options);
        if long() {
            return run;
        }
        let context = 8;
        let corpus = Corpus::new(include_bytes!("mod.rs"), context).unwrap();
        Run { model: Config { context, ..run.model }, corpus, ..run }
    }

    #[test]
    fn every_stage_ends_with_the_same_bits_and_keeps_what_it_should() {
        let all = ["--ranks 3 --steps 3 --batch 1", "--ranks 2 --steps 2 --batch 2 --optimizer sgd"];
        for (_, options) in all.into_iter().enumerate().filter(|(i, _)| tried(*i, 1)) {
            let report = run(options).train().unwrap();
            assert_eq!(report.difference, None, "{options}");
            let [zero, one, two] = report.stages.as_slice() else { panic!("{:?}", report.stages) };
            assert_eq!((&zero.losses, zero.held_out), (&two.losses, two.held_out));
            let ranks = report.asked.ranks() as u64;
            assert_eq!(one.peak.state.div_ceil(64), (zero.peak.state / ranks).div_ceil(64));
            assert_eq!((one.peak.grads, two.peak.state), (zero.peak.grads, one.peak.state));
            assert!(two.peak.grads * ranks <= zero.peak.grads + 64 * 4 * ranks * 100);
            assert!(zero.losses.last() < zero.losses.first(), "{:?}", zero.losses);
        }
    }

    #[test]
    fn muon_beside_adamw_ends_with_the_same_bits_at_every_stage() {
        let finals = |optimizer: &str| {
            let run = short(&format!("--ranks 3 --steps 3 --batch 1 --optimizer {optimizer}"));
            let report = run.train().unwrap();
            assert_eq!((report.difference, report.stages.len()), (None, 3), "{optimizer}");
            report.stages.into_iter().next().unwrap()
        };
        let (muon, adamw) = (finals("muon"), finals("adamw"));
        assert!(muon.losses[0] == adamw.losses[0] && muon.losses[2] != adamw.losses[2]);
        // One moment of the matrices of hidden layers instead of two: 12 width^2 elements a layer.
        let (hidden, states) = (2 * 12 * 16 * 16 * 4, [muon.peak.state, adamw.peak.state]);
        assert!(states[0] + hidden <= states[1], "{states:?}");
    }

    #[test]
    fn slots_give_one_curve_on_any_number_of_ranks() {
        let mut run = short("--slots 4 --ranks 1,2,3,4 --steps 3 --batch 1");
        let compared = run.over_slots(4).unwrap();
        assert_eq!(compared.difference, None);
        let shown = compared.to_string();
        // Ten ranks in all at each of three stages; three ranks cannot have equally many slots.
        assert!(shown.contains("all 30 ranks' parameters over slots have the same bits"), "{shown}");
        let mean = |line: &&str| line.trim_start().starts_with("2 ") && line.contains('%');
        let two = shown.lines().find(mean).unwrap();
        assert!(!two.contains(" 0.0 %"), "ordinary means round differently: {shown}");
        let words = ["meshstep-bench", "train", "--ranks", "1,2"];
        let Command::Train(asked) = Cli::parse_from(words).command else { panic!("not train") };
        let nowhere = Path::new("nowhere");
        let refused = Run::prepare(&asked, nowhere, nowhere).unwrap_err().to_string();
        assert!(refused.contains("--slots"), "{refused}");
        let words = ["meshstep-bench", "train", "--ranks", "5", "--slots", "4"];
        let Command::Train(asked) = Cli::parse_from(words).command else { panic!("not train") };
        assert!(Run::prepare(&asked, nowhere, nowhere).unwrap_err().to_string().contains("below"));
    }

    #[test]
    fn another_seed_ends_elsewhere_and_the_same_seed_at_the_same_place() {
        let finals = |seed: u64| {
            let run = short(&format!("--ranks 2 --steps 2 --batch 1 --seed {seed}"));
            run.stage(2).unwrap().1.swap_remove(0)
        };
        let (first, again, other) = (finals(1), finals(1), finals(2));
        assert_eq!(compare::first_difference(("a", &first), ("b", &again)), None);
        assert!(compare::first_difference(("a", &first), ("b", &other)).is_some());
    }

    #[test]
    fn the_error_told_is_the_one_that_the_others_follow_from() {
        let left = || Err(Error::Comm(meshstep_comm::Error::Aborted { rank: 1 }).into());
        let error =
            all_or_cause::<Done>(vec![left(), Err(anyhow::anyhow!("out of paper")), left()]).unwrap_err();
        assert_eq!(format!("{error:#}"), "rank 1: out of paper");
    }

    #[test]
    fn a_run_that_goes_on_is_the_one_that_never_stopped() {
        let dir = tempfile::tempdir().unwrap();
        let at = |options: &str| {
            let dir = dir.path().display();
            short(&format!("--stage 2 --ranks 3 --steps 5 --batch 1 --checkpoints {dir} {options}"))
                .train()
                .unwrap()
        };
        let (whole, first) = (at(""), at("--save-every 2 --until 3"));
        let resumed = at("--resume");
        let bits = |report: &Report| -> Vec<u64> {
            let stage = &report.stages[0];
            stage.losses.iter().chain([&stage.held_out]).map(|value| value.to_bits()).collect()
        };
        assert_eq!(bits(&resumed), bits(&whole));
        assert_eq!(bits(&first)[..3], bits(&whole)[..3]);
    }

    #[test]
    fn a_run_that_is_asked_to_end_saves_where_it_is_and_goes_on_there() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("checkpoints");
        let of = |options: &str| {
            let folder = folder.display();
            short(&format!("--stage 1 --ranks 2 --steps 4 --batch 1 --checkpoints {folder} {options}"))
        };
        let whole = of("").train().unwrap();
        let asked = |options: &str| {
            let run = of(options);
            run.preemption.request();
            run.train().unwrap_err().downcast::<signals::Stopped>().unwrap()
        };
        assert_eq!(asked(""), signals::Stopped { steps: 1, saved: None });
        assert!(!folder.exists());
        // One step each time, and none of them is a multiple of three but the third.
        for (steps, options) in [(1, "--save-every 3"), (2, "--save-every 3 --resume")] {
            assert_eq!(asked(options), signals::Stopped { steps, saved: Some(folder.clone()) });
        }
        // Without --save-every the last checkpoint stays what it is.
        assert_eq!(asked("--resume"), signals::Stopped { steps: 3, saved: None });
        let resumed = of("--resume").train().unwrap();
        let bits = |report: &Report| (report.stages[0].losses.clone(), report.stages[0].digest.clone());
        assert_eq!(bits(&resumed), bits(&whole));
        // Asked in the last step, the run reports when it goes on.
        for steps in [3, 4] {
            assert_eq!(asked("--save-every 9 --resume").steps, steps);
        }
        let reported = of("--resume").train().unwrap();
        assert_eq!(bits(&reported), bits(&whole));
        assert_eq!(reported.stages[0].held_out.to_bits(), whole.stages[0].held_out.to_bits());
        assert!(reported.stages[0].ms_per_step.is_finite() && reported.stages[0].wire_bytes.is_finite());
    }
}
