//! Delayed means of moments: finite, never negative for squares, and equal to the result of an exchange without delay.

use meshstep_comm::loopback;
use meshstep_local::{
    Fragment, LocalError, LocalOptimizer, LocalPlan, ParamSpec, Placement, Slots, Timing, What, Workers,
};
use meshstep_optim::{
    Adagrad, Adam, AdamW, Error, Flat, Isa, Lion, Momentum, RmsProp, Rule, Scalars, Segment, Sgd, StateSlot,
};
use meshstep_shard::{Groups, Optimizer, Options, Step, StepArgs};
use meshstep_tensor::{DType, Layout, Queue};
use std::sync::Arc;

/// Adam with PyTorch's names for its state, and a given declaration of the second moment.
#[derive(Clone, Debug)]
struct Named {
    adam: AdamW,
    second: StateSlot,
}

impl Rule for Named {
    fn name(&self) -> &'static str {
        "named"
    }

    fn state(&self) -> &'static [&'static str] {
        &["exp_avg", "exp_avg_sq"]
    }

    fn check(&self) -> Result<(), Error> {
        self.adam.check()
    }

    fn each_hyperparameter(&self, each: &mut dyn FnMut(&'static str, f64)) {
        self.adam.each_hyperparameter(each);
    }

    fn slot(&self, slot: usize) -> StateSlot {
        if slot == 1 { self.second } else { self.adam.slot(slot) }
    }

    fn update_on(
        &self,
        isa: Isa,
        flat: Flat<'_, '_>,
        segments: &[Segment],
        scalars: &Scalars,
        queue: &Queue,
    ) -> Result<(), Error> {
        self.adam.update_on(isa, flat, segments, scalars, queue)
    }
}

fn adam() -> AdamW {
    AdamW { beta2: 0.9, ..AdamW::default() }
}

/// Gradients of two workers, of which one has large ones at first.
fn gradient(worker: usize, step: u64) -> f32 {
    let size = if worker == 0 && step < 19 { 16.0 } else { 0.01 };
    size * if step.is_multiple_of(3) { -1.0 } else { 1.0 }
}

/// Returns each worker's state vectors, of one element, and its parameter after each step. No exchange fails.
fn train(rules: &Groups, plan: &LocalPlan, steps: u64) -> Vec<Vec<Vec<f32>>> {
    loopback::spawn(2, |world| {
        let worker = world.rank();
        let (comm, workers) = Workers::split(world, worker as u32).unwrap();
        let layout = Layout::builder().param("x", &[1], DType::F32).build().unwrap();
        let inner = Optimizer::new(comm, layout, rules.clone(), |_, _| Ok(()), Options::default()).unwrap();
        let mut local = LocalOptimizer::new(inner, workers, plan.clone()).unwrap();
        let mut seen = Vec::new();
        for step in 0..steps {
            let mb = local.micro_batch(1).unwrap();
            mb.grad("x", &[gradient(worker, step)][..]).unwrap();
            mb.finish().unwrap();
            let done = local.step(StepArgs { lr: 0.01, ..StepArgs::default() }).unwrap();
            assert_eq!(done.exchanged.failed, [], "worker {worker}, step {step}");
            let state = local.state("x").unwrap();
            let mut all: Vec<f32> =
                state.slots.iter().map(|(_, slot)| slot.typed::<f32>().unwrap()[0]).collect();
            all.push(local.param("x").unwrap().typed::<f32>().unwrap()[0]);
            seen.push(all);
        }
        seen
    })
    .unwrap()
}

fn late(delay: u64) -> LocalPlan {
    LocalPlan::local_adam(20).with(|f| f.timing.delay = delay)
}

#[test]
fn second_moments_stay_positive_and_everything_finite() {
    let named = Named { adam: adam(), second: adam().slot(1) };
    for rules in [Groups::new(adam()), Groups::new(named)] {
        for (worker, steps) in train(&rules, &late(15), 60).into_iter().enumerate() {
            for (step, seen) in steps.iter().enumerate() {
                assert!(seen.iter().all(|x| x.is_finite()), "worker {worker}, step {step}: {seen:?}");
                assert!(seen[1] >= 0.0, "worker {worker}, step {step}: {seen:?}");
            }
        }
    }
}

/// Checks that a delayed mean gives the same values as one without delay.
fn comes_to_the_same(rule: impl Rule + Clone + 'static) {
    let of = |slots| Fragment::mean(What::State(slots), Timing::every(20));
    let both = [Slots::First, Slots::Second].into_iter().filter(|slots| !slots.of(&rule).is_empty());
    let both = LocalPlan::new(both.map(of).collect());
    for placement in [Placement::Before, Placement::After] {
        let plan = both.clone().placed(placement);
        let at_once = train(&Groups::new(rule.clone()), &plan, 60);
        for delay in [1, 7, 19] {
            let late = train(&Groups::new(rule.clone()), &plan.clone().with(|f| f.timing.delay = delay), 60);
            for (late, at_once) in late.iter().zip(&at_once) {
                // Only steps after the arrival.
                for step in (20..60).filter(|step| step % 20 >= delay as usize) {
                    let (late, at_once) = (&late[step], &at_once[step]);
                    for (a, b) in late.iter().zip(at_once).take(rule.state().len()) {
                        let off = (a - b).abs() / b.abs().max(1e-3);
                        assert!(off < 1e-4, "{rule:?}, {delay} late, step {step}: {late:?}, not {at_once:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn where_gradients_do_not_depend_on_parameters_nothing_shows_that_a_mean_was_late() {
    let sgd = |form| Sgd { momentum: 0.9, form, ..Sgd::default() };
    comes_to_the_same(adam());
    comes_to_the_same(Lion::default());
    comes_to_the_same(sgd(Momentum::PyTorch));
    comes_to_the_same(sgd(Momentum::LrInside));
    comes_to_the_same(sgd(Momentum::Average { debias: true }));
    comes_to_the_same(RmsProp { centered: true, ..RmsProp::default() });
    comes_to_the_same(Adagrad::default());
    comes_to_the_same(Adagrad { initial_accumulator_value: 0.5, ..Adagrad::default() });
    comes_to_the_same(Named { adam: adam(), second: adam().slot(1) });
}

fn refused(rule: impl Rule + 'static, plan: &LocalPlan) -> LocalError {
    let param = ParamSpec {
        name: "x".to_owned(),
        len: 4,
        whole: 4,
        position: 0,
        values: DType::F32,
        state: DType::F32,
        rule: Arc::new(rule),
    };
    plan.check(&[param]).unwrap_err()
}

#[test]
fn what_cannot_be_merged_late_is_refused() {
    let amsgrad = || Adam { amsgrad: true, ..Adam::default() };
    assert_eq!(
        refused(amsgrad(), &late(3)).to_string(),
        "fragment 2 has a delay of 3, and rule adam's state \"vmax\" is a maximum, which cannot be merged late; name the \
         other state vectors in fragments of their own (Slots::Named), and give \"vmax\" a delay of 0"
    );
    // The fix that the error suggests.
    let of = |name: &str, delay| {
        let timing = Timing { delay, ..Timing::every(20) };
        Fragment::mean(What::State(Slots::Named(name.to_owned())), timing)
    };
    let apart = LocalPlan::new(vec![of("m", 3), of("v", 3), of("vmax", 0)]);
    for steps in train(&Groups::new(amsgrad()), &apart, 60) {
        assert!(steps.iter().flatten().all(|x| x.is_finite()));
    }
    for keeps in [f64::NAN, -0.5, f64::INFINITY] {
        let second = StateSlot::average(keeps).of_squares();
        let error = refused(Named { adam: adam(), second }, &late(3));
        assert!(matches!(error, LocalError::Keeps { fragment: 2, slot: "exp_avg_sq", .. }), "{error}");
        let second = StateSlot::average(0.9).at_first(keeps).of_squares();
        let error = refused(Named { adam: adam(), second }, &late(3));
        assert!(matches!(error, LocalError::Keeps { fragment: 2, slot: "exp_avg_sq", .. }), "{error}");
    }
}
