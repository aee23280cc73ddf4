//! `train --mesh`: trains one network on different meshes with the same data, and checks that the results agree.

mod network;
mod parameters;
mod pass;
mod rank;
mod table;
mod trained;
mod verdict;

use std::fmt;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use meshstep_parallel3d::{Axis, Mesh, Model};
use meshstep_shard::Preemption;

pub(crate) use table::{digests, table};
pub(crate) use trained::Trained;
pub(crate) use verdict::Verdict;

use parameters::Unit;

use crate::args::train::Train;
use crate::corpus::{Corpus, Text};
use crate::gpt::{Config, Param};
use crate::ranks::Ranks;
use crate::train::checkpoints::{self, Checkpoints};
use crate::train::signals::Signals;
use crate::train::{BUCKETS, CORPUS_CAP, all_or_cause};

/// Sequences of a step on all ranks together, for every mesh.
const ROWS: usize = 8;

/// Size of a network that eight threads on two cores train for a few hundred steps in a minute; eight ranks along any axis
/// divide all of its extents.
const SIZES: Config = Config { layers: 2, heads: 8, width: 64, context: 64 };

/// A run that is ready to start, shared by all meshes, stages and ranks.
#[derive(Debug)]
pub(crate) struct Run {
    ranks: Ranks,
    asked: Train,
    sizes: Config,
    rows: usize,
    units: Vec<Unit>,
    model: Model,
    text: String,
    corpus: Corpus,
    bucket: usize,
    checkpoints: Option<Checkpoints>,
    preemption: Preemption,
}

impl Run {
    /// Loads the text and sets defaults; the default corpus is found from `manifest`, and results go to `folder`.
    pub(crate) fn prepare(asked: &Train, manifest: &Path, folder: &Path) -> Result<Self> {
        let text = match &asked.corpus {
            Some(path) => Text::from_path(path, CORPUS_CAP)?,
            None => Text::from_dependencies(manifest, CORPUS_CAP)?,
        };
        Self::of(asked, SIZES, ROWS, &text, folder)
    }

    fn of(asked: &Train, sizes: Config, rows: usize, text: &Text, folder: &Path) -> Result<Self> {
        asked.meshes().iter().try_for_each(|mesh| check(&sizes, rows, mesh))?;
        let (units, model) = parameters::of(&sizes)?;
        let bucket = (model.len() as usize).div_ceil(BUCKETS);
        let job = format!("{} steps of {rows} sequences, seed {}, {text}", asked.steps, asked.seed);
        Ok(Self {
            checkpoints: Checkpoints::of(asked, folder, job)?,
            ranks: Ranks::Threads,
            preemption: Preemption::new(),
            asked: asked.clone(),
            sizes,
            rows,
            units,
            model,
            corpus: Corpus::new(&text.bytes, sizes.context)?,
            text: text.to_string(),
            bucket: asked.bucket.unwrap_or(bucket),
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

    /// Trains every requested stage on every mesh.
    pub(crate) fn train(&self) -> Result<Vec<Trained>> {
        let meshes = self.asked.meshes();
        let runs =
            meshes.iter().flat_map(|mesh| self.asked.stages().into_iter().map(move |stage| (mesh, stage)));
        runs.map(|(mesh, stage)| self.on(mesh, stage).with_context(|| format!("stage {stage} on {mesh}")))
            .collect()
    }

    fn on(&self, mesh: &Mesh, stage: u8) -> Result<Trained> {
        let ranks = mesh.world_size();
        let name = format!("{mesh} stage {stage}");
        let progress = self.ranks.progress(name, self.asked.steps, ranks, self.tokens());
        let ran = self.ranks.run(ranks, |world| rank::train(self, mesh, stage, world, &progress));
        progress.finish();
        let done = all_or_cause(ran?.results)?;
        if let Some(done) = done.iter().find(|done| done.preempted) {
            let steps = done.before.len() + done.losses.len();
            return Err(checkpoints::stopped(steps, self.checkpoints.as_ref()).into());
        }
        Trained::of(self, mesh, stage, &done)
    }

    fn params(&self) -> impl Iterator<Item = &Param> {
        self.units.iter().flat_map(|unit| &unit.params)
    }

    /// Returns the tokens of a step on all ranks together.
    fn tokens(&self) -> usize {
        self.rows * self.sizes.context
    }
}

impl fmt::Display for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Config { layers, heads, width, context } = self.sizes;
        writeln!(f, "text: {}", self.text)?;
        writeln!(
            f,
            "network: {} parameters; {layers} layers, {heads} heads, width {width}, context {context}; no biases",
            self.model.len()
        )?;
        write!(f, "run: {} steps of {} sequences on every mesh", self.asked.steps, self.rows)
    }
}

/// Rejects sizes that do not divide among the ranks of `mesh`.
fn check(sizes: &Config, rows: usize, mesh: &Mesh) -> Result<()> {
    let [pp, dp, cp, tp] = [Axis::Pp, Axis::Dp, Axis::Cp, Axis::Tp].map(|axis| mesh.degree(axis));
    let Config { heads, context, .. } = *sizes;
    ensure!(pp == 1, "{mesh}: the network is not split into pipeline stages; leave pp out");
    ensure!(rows.is_multiple_of(dp), "{mesh}: {dp} ranks along dp do not divide {rows} sequences");
    ensure!(heads.is_multiple_of(tp), "{mesh}: {tp} ranks along tp do not divide {heads} heads");
    let parts = cp * tp;
    ensure!(
        context.is_multiple_of(parts),
        "{mesh}: {parts} ranks along cp and tp do not divide {context} tokens"
    );
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests;
