//! Result of a run on one mesh, collected from its ranks.

use anyhow::{Result, ensure};
use meshstep_parallel3d::{Axis, Mesh, Parameter, elements};
use serde::Serialize;

use super::Run;
use super::rank::Done;
use crate::train::compare::{Finals, digest};

/// Training of the network on one mesh, at one stage.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Trained {
    /// Mesh of the run.
    #[serde(serialize_with = "as_text")]
    pub(crate) mesh: Mesh,
    /// ZeRO stage, 0 to 3.
    pub(crate) stage: u8,
    /// Mean loss of all tokens in each step, in nats.
    pub(crate) losses: Vec<f64>,
    /// Norm of the whole gradient in each step.
    pub(crate) norms: Vec<f64>,
    /// Wall time of a step in milliseconds.
    pub(crate) ms_per_step: f64,
    /// Maximum over the ranks of the bytes that the optimizer sent per step.
    pub(crate) sent: u64,
    /// Maximum over the ranks of the bytes that the layers sent per step, along tp and along cp.
    pub(crate) sent_by_layers: [u64; 2],
    /// Maximum over the ranks of the optimizer's peak bytes.
    pub(crate) peak: u64,
    /// Digest of the whole parameters at the end, names and bits.
    pub(crate) digest: String,
    /// Whole parameters at the end.
    #[serde(skip)]
    pub(crate) finals: Finals,
}

impl Trained {
    /// Collects the results of the ranks; fails if copies of a value differ between ranks.
    pub(super) fn of(run: &Run, mesh: &Mesh, stage: u8, done: &[Done]) -> Result<Self> {
        let steps = done.iter().map(|done| done.losses.len()).min().unwrap_or(0);
        let most = |value: &dyn Fn(&Done) -> u64| done.iter().map(value).max().unwrap_or(0);
        // A run that continues after its last step takes none.
        let taken = steps.max(1);
        let per_step = |value: &dyn Fn(&Done) -> u64| most(value) / taken as u64;
        let params = run.model.parameters().iter().enumerate();
        let finals = params.map(|(i, param)| whole(mesh, param, i, done)).collect::<Result<_>>()?;
        Ok(Self {
            mesh: mesh.clone(),
            stage,
            losses: all_losses(mesh, done)?,
            norms: norms(mesh, done)?,
            ms_per_step: done.iter().map(|done| done.seconds).fold(0.0, f64::max) * 1e3 / taken as f64,
            sent: per_step(&|done| done.sent),
            sent_by_layers: [0, 1].map(|axis| per_step(&|done: &Done| done.sent_by_layers[axis])),
            peak: most(&|done| done.peak),
            digest: digest([&finals]),
            finals,
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

/// Returns the mean loss over all tokens in each step; ranks along tp have the same losses.
pub(super) fn losses(mesh: &str, ranks: &[Vec<f64>]) -> Result<Vec<f64>> {
    let mesh: Mesh = mesh.parse()?;
    ensure!(mesh.world_size() == ranks.len(), "{mesh} does not have {} ranks", ranks.len());
    let mut counted = Vec::new();
    for (rank, losses) in ranks.iter().enumerate() {
        let at = mesh.coordinate(rank)?;
        let first = at.clone().with(Axis::Tp, 0);
        ensure!(ranks[mesh.rank(&first)] == *losses, "the loss at {at} differs from that at {first}");
        if at.is_first(Axis::Tp) {
            counted.push(losses);
        }
    }
    let steps = ranks.iter().map(Vec::len).min().unwrap_or(0);
    Ok((0..steps).map(|t| counted.iter().map(|rank| rank[t]).sum()).collect())
}

/// Returns the norms, after checking that they are equal on all ranks.
fn norms(mesh: &Mesh, done: &[Done]) -> Result<Vec<f64>> {
    let first = done.first().map(|rank| rank.norms.clone()).unwrap_or_default();
    if let Some(rank) = done.iter().position(|rank| rank.norms != first) {
        let [at, other] = [mesh.coordinate(rank)?, mesh.coordinate(0)?];
        anyhow::bail!("the norms at {at} differ from those at {other}");
    }
    Ok(first)
}

/// Assembles parameter `i` from the ranks that hold parts of it.
fn whole(mesh: &Mesh, param: &Parameter, i: usize, done: &[Done]) -> Result<(String, Vec<f32>)> {
    let mut all: Vec<Option<f32>> = vec![None; param.shape.iter().product()];
    for (rank, done) in done.iter().enumerate() {
        let at = mesh.coordinate(rank)?;
        let pieces = param.placement.pieces(&param.name, &param.shape, mesh, &at)?;
        for (place, &value) in elements(&param.shape, &pieces).into_iter().zip(&done.finals[i]) {
            let known = *all[place].get_or_insert(value);
            let same = known.to_bits() == value.to_bits();
            ensure!(same, "{}[{place}] is {value:e} at {at}, and {known:e} elsewhere", param.name);
        }
    }
    let found: Option<Vec<f32>> = all.into_iter().collect();
    match found {
        Some(values) => Ok((param.name.clone(), values)),
        None => anyhow::bail!("no rank holds some elements of {}", param.name),
    }
}
