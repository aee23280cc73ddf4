//! Alignment of workers' updates between exchanges, on a quadratic with noisy gradients.

use crate::common::hash;
use meshstep_comm::loopback;
use meshstep_local::{LocalOptimizer, LocalPlan, Workers};
use meshstep_optim::{AdamW, Moments, QhAdamW};
use meshstep_shard::{Groups, Optimizer, Options, Step, StepArgs};
use meshstep_tensor::{DType, Layout, Slice, SliceMut};

const LEN: usize = 256;
const WORKERS: usize = 4;
const PERIOD: u64 = 32;
const ROUNDS: u64 = 12;

/// Draws a normal number from these keys, by Box and Muller.
fn normal(keys: &[u64]) -> f64 {
    let uniform = |i: u64| {
        let bits = hash(&[keys, &[i]].concat());
        ((bits >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    };
    (-2.0 * uniform(0).ln()).sqrt() * (std::f64::consts::TAU * uniform(1)).cos()
}

/// Returns the mean cosine between a worker's update over a round and the workers' mean update, after a few rounds.
fn alignment(rules: impl Into<Groups>, plan: &LocalPlan) -> f64 {
    let rules = rules.into();
    let updates = loopback::spawn(WORKERS, |world| {
        let worker = world.rank();
        let (comm, between) = Workers::split(world, worker as u32).unwrap();
        let layout = Layout::builder().param("x", &[LEN], DType::F64).build().unwrap();
        let first = |_: &_, mut x: SliceMut<'_>| x.copy_from(Slice::from(&[0.8; LEN][..]));
        let inner = Optimizer::new(comm, layout, rules.clone(), first, Options::default()).unwrap();
        let mut local = LocalOptimizer::new(inner, between, plan.clone()).unwrap();
        let x = |local: &LocalOptimizer| local.param("x").unwrap().typed::<f64>().unwrap().to_vec();
        let mut updates = Vec::new();
        let mut from = x(&local);
        for step in 0..ROUNDS * PERIOD {
            let before = x(&local);
            let grad = |(i, x): (usize, &f64)| {
                let curvature = 0.5 + 1.5 * i as f64 / (LEN - 1) as f64;
                curvature * x + 12.0 * normal(&[worker as u64, step, i as u64])
            };
            let grads: Vec<f64> = before.iter().enumerate().map(grad).collect();
            let mb = local.micro_batch(1).unwrap();
            mb.grad("x", &grads[..]).unwrap();
            mb.finish().unwrap();
            let told = local.step(StepArgs { lr: 1e-3, ..StepArgs::default() }).unwrap();
            // Before the round's last update, as the exchange after it removes the difference.
            if (step + 1) % PERIOD == PERIOD - 1 {
                let now = x(&local);
                updates.push(now.iter().zip(&from).map(|(a, b)| a - b).collect::<Vec<f64>>());
            }
            if !told.exchanged.merged.is_empty() {
                from = x(&local);
            }
        }
        updates
    });
    let updates = updates.unwrap();
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let mut cosines = Vec::new();
    for round in 4..ROUNDS as usize {
        let mean: Vec<f64> =
            (0..LEN).map(|i| updates.iter().map(|u| u[round][i]).sum::<f64>() / WORKERS as f64).collect();
        for update in updates.iter().map(|u| &u[round]) {
            cosines.push(dot(update, &mean) / (dot(update, update) * dot(&mean, &mean)).sqrt());
        }
    }
    cosines.iter().sum::<f64>() / cosines.len() as f64
}

#[test]
fn slow_moments_align_workers() {
    let adam = AdamW { weight_decay: 0.0, ..AdamW::default() };
    let local_adam = alignment(adam, &LocalPlan::local_adam(PERIOD));
    let slow = QhAdamW { moments: Moments::one(0.999, 0.9), weight_decay: 0.0, ..QhAdamW::default() };
    let mt_dao = alignment(slow, &LocalPlan::mt_dao(PERIOD, &[Some(PERIOD)], Some(PERIOD)));
    println!("cosine with the mean update: Local Adam {local_adam:.3}, MT-DAO {mt_dao:.3}");
    assert!(local_adam <= 0.75, "{local_adam}");
    assert!(mt_dao >= 0.93, "{mt_dao}");
}
