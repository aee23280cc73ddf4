//! Means in which workers count differently, against their exact sums.

use crate::common::cases;
use crate::means::half_ulp;
use meshstep_comm::loopback;
use meshstep_local::{Fragment, LocalOptimizer, LocalPlan, Slots, Timing, Weights, What, Workers};
use meshstep_optim::{ExactSum, Sgd};
use meshstep_shard::{NonFinite, Optimizer, Options, Step, StepArgs};
use meshstep_tensor::{DType, Layout, SliceMut};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

const LEN: usize = 200;

/// A worker's gradients, which are its moves from 0 and its first moments, and its tokens.
#[derive(Clone, Debug)]
struct Worker {
    grads: Vec<f32>,
    tokens: u64,
    joins: bool,
}

/// Returns each worker's parameter and moment after its first step, at which all exchange.
fn meet(plan: &LocalPlan, workers: &[Worker]) -> Vec<[Vec<f32>; 2]> {
    let ends = loopback::spawn(workers.len(), |world| {
        let Worker { grads, tokens, joins } = &workers[world.rank()];
        let worker = world.rank() as u32;
        let (comm, between) = Workers::split(world, worker).unwrap();
        let layout = Layout::builder().param("x", &[LEN], DType::F32).build().unwrap();
        let options = Options { non_finite: NonFinite::Propagate, ..Options::default() };
        let zeros = |_: &_, mut x: SliceMut<'_>| x.zero();
        let rule = Sgd { momentum: 0.5, ..Sgd::default() };
        let inner = Optimizer::new(comm, layout, rule, zeros, options).unwrap();
        let mut local = LocalOptimizer::new(inner, between, plan.clone()).unwrap();
        if *joins {
            local.enter();
        }
        let mb = local.micro_batch(*tokens).unwrap();
        mb.grad("x", &grads[..]).unwrap();
        mb.finish().unwrap();
        let done = local.step(StepArgs { lr: 1.0, ..StepArgs::default() }).unwrap();
        assert_eq!((done.exchanged.merged, done.exchanged.failed), (vec![0, 1], vec![]));
        let moment = local.state("x").unwrap().slots[0].1.typed::<f32>().unwrap().to_vec();
        [local.param("x").unwrap().typed::<f32>().unwrap().to_vec(), moment]
    });
    ends.unwrap()
}

fn plan(weights: [Weights; 2]) -> LocalPlan {
    let of = |(what, weights)| Fragment { weights, ..Fragment::mean(what, Timing::every(1)) };
    LocalPlan::new([What::Params, What::State(Slots::First)].into_iter().zip(weights).map(of).collect())
}

/// Draws two to five workers. The last of those that count in the second fragment mostly cancels the others' values, down to 22
/// bits below; a worker that counts in none may have any values.
fn workers(rng: &mut StdRng, weights: [Weights; 2]) -> Vec<Worker> {
    let n = rng.random_range(2..=5);
    let mut worker = |i: usize| {
        let (first, most) = (i == 0, 10u64.pow(rng.random_range(1..=9)));
        let tokens = if !first && rng.random_bool(0.1) { 0 } else { rng.random_range(1..=most) };
        Worker { grads: vec![0.0; LEN], tokens, joins: !first && rng.random_bool(0.2) }
    };
    let mut all: Vec<Worker> = (0..n).map(&mut worker).collect();
    let shares: Vec<[u64; 2]> = all.iter().map(|worker| weights.map(|of| counts(worker, of))).collect();
    let last = shares.iter().rposition(|share| share[1] > 0).unwrap();
    for i in 0..LEN {
        let mut others = 0.0;
        for (w, share) in shares.iter().enumerate() {
            let size = rng.random_range(1.0f32..2.0) * 2f32.powi(rng.random_range(-6..6));
            all[w].grads[i] = match share {
                [0, 0] => [f32::NAN, f32::INFINITY, -1e30][rng.random_range(0..3)],
                _ if rng.random_bool(0.5) => -size,
                _ => size,
            };
            if w != last && share[1] > 0 {
                others += share[1] as f64 * f64::from(all[w].grads[i]);
            }
        }
        if rng.random_bool(0.7) && others != 0.0 {
            let left = rng.random_range(0.5..1.0) * 2f64.powi(-rng.random_range(1..=22));
            all[last].grads[i] = (-others / shares[last][1] as f64 * (1.0 + left)) as f32;
        }
    }
    all
}

/// Returns the weight of a worker in a fragment of these weights.
fn counts(worker: &Worker, weights: Weights) -> u64 {
    match weights {
        _ if worker.joins => 0,
        Weights::Uniform => 1,
        Weights::Tokens => worker.tokens,
    }
}

#[test]
fn a_mean_is_the_exact_one_to_half_an_ulp() {
    let (uniform, tokens) = (Weights::Uniform, Weights::Tokens);
    let mut rng = StdRng::seed_from_u64(7);
    let (count, mut cancelled) = (cases(40, 40) as usize, 0);
    for weights in [[tokens, tokens], [uniform, uniform], [uniform, tokens], [tokens, uniform]] {
        for case in 0..count {
            let workers = workers(&mut rng, weights);
            let ends = meet(&plan(weights), &workers);
            for (f, sign) in [-1.0, 1.0].into_iter().enumerate() {
                let count = |worker: &Worker| counts(worker, weights[f]);
                let total = workers.iter().map(count).sum::<u64>() as f64;
                for i in 0..LEN {
                    let after = ends[0][f][i];
                    let all = ends.iter().map(|end| end[f][i].to_bits());
                    assert!(all.clone().all(|bits| bits == after.to_bits()), "{:?}", all.collect::<Vec<_>>());
                    let (mut off, mut size) = (ExactSum::new(), 0.0);
                    for worker in workers.iter().filter(|worker| count(worker) > 0) {
                        let (share, x) = (count(worker) as f64, sign * f64::from(worker.grads[i]));
                        off.add_product(share, x);
                        size += share * x.abs();
                    }
                    off.add_product(-total, f64::from(after));
                    // Shares are rounded too: by a sixteenth of it if all but 22 bits cancel.
                    let most = half_ulp(after) * (1.0 + 1.0 / 16.0);
                    let off = off.to_f64().abs() / total;
                    assert!(
                        off <= most,
                        "{weights:?}, {case}, {f}, {i}: {off:e} {most:e} {after:e} {workers:?}"
                    );
                    cancelled += usize::from(f64::from(after.abs()) * total < 1e-4 * size);
                }
            }
        }
    }
    // With few cases chance may remove some.
    let least = if count == 40 { 5000 } else { 60 * count };
    assert!(cancelled > least, "{cancelled}");
}
