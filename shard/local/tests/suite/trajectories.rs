//! Two workers on quadratics follow trajectories computed by another program.

use meshstep_comm::loopback;
use meshstep_local::{LocalOptimizer, LocalPlan, Placement, Workers};
use meshstep_optim::{AdamW, Moments, QhAdamW, QhAdopt, Sgd, UncorrectedAdam};
use meshstep_shard::{Groups, Optimizer, Options, Step, StepArgs};
use meshstep_tensor::{DType, Layout, Slice};

/// Written by `bench/python/local_reference.py`, which explains the lines.
const TRAJECTORIES: &str = include_str!("data/trajectories.txt");

fn expected(name: &str) -> Vec<[f64; 2]> {
    let line = TRAJECTORIES.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(" = "));
    let pair = |pair: &str| {
        let (a, b) = pair.split_once(',').unwrap();
        [a, b].map(|x| x.parse().unwrap())
    };
    line.unwrap().split(' ').map(pair).collect()
}

/// Returns both workers' x after each step, of one f64 parameter.
fn follow(
    rules: &Groups,
    plan: &LocalPlan,
    (start, lr, steps): (f64, f64, usize),
    gradient: impl Fn(usize, f64) -> f64 + Sync,
) -> Vec<[f64; 2]> {
    let both = loopback::spawn(2, |world| {
        let worker = world.rank();
        let (comm, workers) = Workers::split(world, worker as u32).unwrap();
        let layout = Layout::builder().param("x", &[1], DType::F64).build().unwrap();
        let first = |_: &_, mut x: meshstep_tensor::SliceMut<'_>| x.copy_from(Slice::from(&[start][..]));
        let inner = Optimizer::new(comm, layout, rules.clone(), first, Options::default()).unwrap();
        let mut local = LocalOptimizer::new(inner, workers, plan.clone()).unwrap();
        let x = |local: &LocalOptimizer| local.param("x").unwrap().typed::<f64>().unwrap()[0];
        let mut out = Vec::new();
        for _ in 0..steps {
            let grad = gradient(worker, x(&local));
            let mb = local.micro_batch(1).unwrap();
            mb.grad("x", &[grad][..]).unwrap();
            mb.finish().unwrap();
            let _ = local.step(StepArgs { lr, ..StepArgs::default() }).unwrap();
            out.push(x(&local));
        }
        out
    });
    let both = both.unwrap();
    both[0].iter().zip(&both[1]).map(|(&a, &b)| [a, b]).collect()
}

fn quadratic(worker: usize, x: f64) -> f64 {
    [0.5, 2.0][worker] * (x - [0.0, 1.0][worker])
}

#[track_caller]
fn assert_close(name: &str, found: &[[f64; 2]]) {
    let expected = expected(name);
    assert_eq!(found.len(), expected.len(), "{name}");
    for (step, (found, expected)) in found.iter().zip(&expected).enumerate() {
        for (a, b) in found.iter().zip(expected) {
            assert!((a - b).abs() <= 1e-12, "{name}, step {step}: {found:?}, expected {expected:?}");
        }
    }
}

fn delayed(tau: u64) -> LocalPlan {
    LocalPlan::local_adam(5).with(|f| f.timing.delay = tau)
}

#[test]
fn every_method_follows_its_formulas() {
    let plain = UncorrectedAdam { beta2: 0.99, lambda: 1e-3, ..UncorrectedAdam::default() };
    let clipped = UncorrectedAdam { clip: 1.5, ..plain.clone() };
    let adam = AdamW { beta2: 0.99, weight_decay: 0.0, ..AdamW::default() };
    let qh = |moments| QhAdamW { moments, beta2: 0.99, weight_decay: 0.0, ..QhAdamW::default() };
    let two = Moments::new(&[(0.9, 0.3), (0.99, 0.5)]).unwrap();
    let adopt = QhAdopt { moments: Moments::one(0.95, 0.9), beta2: 0.99, ..QhAdopt::default() };
    let table: Vec<(&str, Groups, LocalPlan)> = vec![
        ("des-loc before", plain.clone().into(), LocalPlan::des_loc(4, 12, 24).placed(Placement::Before)),
        ("des-loc before, clipped", clipped.into(), LocalPlan::des_loc(2, 3, 5).placed(Placement::Before)),
        ("des-loc after", plain.clone().into(), LocalPlan::des_loc(4, 12, 24)),
        ("des-loc corrected", adam.clone().into(), LocalPlan::des_loc(4, 12, 24)),
        ("local adam", adam.into(), LocalPlan::local_adam(5)),
        ("qhadamw", qh(Moments::one(0.95, 0.7)).into(), LocalPlan::mt_dao(4, &[Some(8)], Some(16))),
        ("qhadamw, two moments", qh(two).into(), LocalPlan::mt_dao(3, &[Some(6), Some(9)], Some(12))),
        ("qhadopt", adopt.into(), LocalPlan::mt_dao(4, &[Some(8)], Some(16))),
        ("delayed 0", plain.clone().into(), delayed(0)),
        ("delayed 1", plain.clone().into(), delayed(1)),
        ("delayed 3", plain.into(), delayed(3)),
    ];
    for (name, rules, plan) in table {
        assert_close(name, &follow(&rules, &plan, (5.0, 0.05, 40), quadratic));
    }
    let sgd = Sgd::default().into();
    assert_close("outer nesterov", &follow(&sgd, &LocalPlan::diloco(5), (5.0, 0.02, 40), quadratic));
}

#[test]
fn nesterov_over_a_constant_difference() {
    let found = follow(&Sgd::default().into(), &LocalPlan::diloco(1), (0.0, 1.0, 3), |_, _| 1.0);
    assert_close("constant difference", &found);
    for (found, known) in found.iter().zip([-1.33, -3.227, -5.6343]) {
        assert!((found[0] - known).abs() < 1e-12 && found[0] == found[1], "{found:?}");
    }
}

#[test]
fn a_delayed_moment_is_the_one_that_was_averaged_at_once() {
    // If gradients do not depend on parameters, a delay does not change the result.
    let momentum = Sgd { momentum: 0.9, ..Sgd::default() };
    let gradient = |worker: usize, _: f64| [1.0, -3.0][worker];
    let plan = |delay| {
        let mut plan = LocalPlan::des_loc(4, 4, None).with(|f| f.timing.delay = delay);
        plan.fragments.remove(0);
        plan
    };
    let of = |delay| {
        let both = loopback::spawn(2, |world| {
            let worker = world.rank();
            let (comm, workers) = Workers::split(world, worker as u32).unwrap();
            let layout = Layout::builder().param("x", &[1], DType::F64).build().unwrap();
            let options = Options::default();
            let inner = Optimizer::new(comm, layout, momentum.clone(), |_, _| Ok(()), options).unwrap();
            let mut local = LocalOptimizer::new(inner, workers, plan(delay)).unwrap();
            for _ in 0..11 {
                let mb = local.micro_batch(1).unwrap();
                mb.grad("x", &[gradient(worker, 0.0)][..]).unwrap();
                mb.finish().unwrap();
                let _ = local.step(StepArgs { lr: 0.1, ..StepArgs::default() }).unwrap();
            }
            local.state("x").unwrap().slots[0].1.typed::<f64>().unwrap()[0]
        });
        both.unwrap()
    };
    let at_once = of(0);
    assert!((at_once[0] - at_once[1]).abs() > 1.0, "{at_once:?}");
    for delay in [1, 3] {
        for (late, at_once) in of(delay).iter().zip(&at_once) {
            assert!((late - at_once).abs() < 1e-12, "{delay}: {late}, {at_once}");
        }
    }
}
