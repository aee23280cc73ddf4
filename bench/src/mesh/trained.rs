//! What a run on one mesh came to, put together from its ranks.

use anyhow::{Result, ensure};
use meshstep_parallel3d::{Axis, Mesh, Parameter};
use serde::Serialize;

use super::Run;
use super::rank::Done;
use crate::train::compare::Finals;

/// One network trained on one mesh, at one stage.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Trained {
    /// The mesh.
    #[serde(serialize_with = "as_text")]
    pub(crate) mesh: Mesh,
    /// 0 to 3.
    pub(crate) stage: u8,
    /// The mean loss of all tokens at every step, in nats.
    pub(crate) losses: Vec<f64>,
    /// The norm of the whole gradient at every step.
    pub(crate) norms: Vec<f64>,
    /// Wall time of a step, in milliseconds.
    pub(crate) ms_per_step: f64,
    /// Bytes the optimizer sent per step, on the rank that sent most.
    pub(crate) sent: u64,
    /// Bytes the layers sent per step along tp and along cp, on the rank that sent most.
    pub(crate) sent_by_layers: [u64; 2],
    /// The most bytes the optimizer held, on the rank that had most.
    pub(crate) peak: u64,
    /// The parameters it ended with, whole.
    #[serde(skip)]
    pub(crate) finals: Finals,
}

impl Trained {
    /// From what the ranks brought home; an error where copies of one thing differ between them.
    pub(super) fn of(run: &Run, mesh: &Mesh, stage: u8, done: &[Done]) -> Result<Self> {
        let steps = done.iter().map(|done| done.losses.len()).min().unwrap_or(0);
        let most = |value: &dyn Fn(&Done) -> u64| done.iter().map(value).max().unwrap_or(0);
        let per_step = |value: &dyn Fn(&Done) -> u64| most(value) / steps as u64;
        let params = run.model.parameters().iter().enumerate();
        Ok(Self {
            mesh: mesh.clone(),
            stage,
            losses: all_losses(mesh, done)?,
            norms: norms(done)?,
            ms_per_step: done.iter().map(|done| done.seconds).fold(0.0, f64::max) * 1e3 / steps as f64,
            sent: per_step(&|done| done.sent),
            sent_by_layers: [0, 1].map(|axis| per_step(&|done: &Done| done.sent_by_layers[axis])),
            peak: most(&|done| done.peak),
            finals: params.map(|(i, param)| whole(param, i, done)).collect::<Result<_>>()?,
        })
    }
}

fn all_losses(mesh: &Mesh, done: &[Done]) -> Result<Vec<f64>> {
    let ranks: Vec<Vec<f64>> = done.iter().map(|rank| rank.losses.clone()).collect();
    let before = done.iter().take(1).flat_map(|rank| &rank.before).copied();
    Ok(before.chain(losses(&mesh.to_string(), &ranks)?).collect())
}

fn as_text<S: serde::Serializer>(mesh: &Mesh, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(mesh)
}

/// The mean over all tokens at every step, of which ranks along tp have the same.
pub(super) fn losses(mesh: &str, ranks: &[Vec<f64>]) -> Result<Vec<f64>> {
    let mesh: Mesh = mesh.parse()?;
    ensure!(mesh.world_size() == ranks.len(), "{mesh} is not of {} ranks", ranks.len());
    let mut counted = Vec::new();
    for (rank, losses) in ranks.iter().enumerate() {
        let at = mesh.coordinate(rank)?;
        let first = at.clone().with(Axis::Tp, 0);
        ensure!(ranks[mesh.rank(&first)] == *losses, "the loss at {at} is not that at {first}");
        if at.is_first(Axis::Tp) {
            counted.push(losses);
        }
    }
    let steps = ranks.iter().map(Vec::len).min().unwrap_or(0);
    Ok((0..steps).map(|t| counted.iter().map(|rank| rank[t]).sum()).collect())
}

/// The same on every rank.
fn norms(done: &[Done]) -> Result<Vec<f64>> {
    let first = done.first().map(|rank| rank.norms.clone()).unwrap_or_default();
    match done.iter().find(|rank| rank.norms != first) {
        Some(rank) => anyhow::bail!("the norms at {} are not those at {}", rank.at, done[0].at),
        None => Ok(first),
    }
}

/// Parameter `i` from the ranks that hold parts of it.
fn whole(param: &Parameter, i: usize, done: &[Done]) -> Result<(String, Vec<f32>)> {
    let mut all: Vec<Option<f32>> = vec![None; param.shape.iter().product()];
    for rank in done {
        let (held, values) = &rank.finals[i];
        for (&place, &value) in held.iter().zip(values) {
            let known = *all[place].get_or_insert(value);
            let same = known.to_bits() == value.to_bits();
            ensure!(same, "{}[{place}] is {value:e} at {}, and {known:e} elsewhere", param.name, rank.at);
        }
    }
    let found: Option<Vec<f32>> = all.into_iter().collect();
    match found {
        Some(values) => Ok((param.name.clone(), values)),
        None => anyhow::bail!("no rank holds some elements of {}", param.name),
    }
}
