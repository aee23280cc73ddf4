//! Schedule-free AdamW follows its published program, where it trains and where it is evaluated.

use crate::common::{Memory, Random, Values, segment};
use crate::formulas::{STEPS, follow, follow_at, lr};
use meshstep_optim::{Isa, Rule, Scalars, ScheduleFreeAdamW};

/// The authors' reference program: x, y and z apart. The rate falls after the warm-up.
fn schedule_free(rule: ScheduleFreeAdamW, rate: fn(i32) -> f64) -> impl FnMut(f64, f64, i32) -> [f64; 2] {
    let (mut x, mut z, mut v) = (None, 0.0, 0f64);
    let (mut largest, mut weights) = (0f64, 0.0);
    move |y, g, t| {
        let g = if rule.maximize { -g } else { g };
        let sched = (f64::from(t) / rule.warmup_steps as f64).min(1.0);
        let lr = rate(t) * sched;
        largest = largest.max(lr);
        let weight = f64::from(t).powf(rule.r) * largest.powf(rule.weight_lr_power);
        weights += weight;
        if t == 1 {
            (x, z) = (Some(y), y);
        }
        z -= lr * rule.weight_decay * y;
        v = v * rule.beta2 + (1.0 - rule.beta2) * g * g;
        z -= lr * g / ((v / (1.0 - rule.beta2.powi(t))).sqrt() + rule.eps);
        let next = x.unwrap() * (1.0 - weight / weights) + z * (weight / weights);
        x = Some(next);
        [rule.beta1 * next + (1.0 - rule.beta1) * z, next]
    }
}

/// A rate that is constant in the longest warm-up below, and falls afterwards.
fn plateau(t: i32) -> f64 {
    lr(t.max(10))
}

#[test]
fn schedule_free_is_the_authors() {
    let plain = ScheduleFreeAdamW { eps: 1e-6, ..ScheduleFreeAdamW::default() };
    for (warmup_steps, r, weight_lr_power) in [(0, 0.0, 2.0), (10, 0.0, 2.0), (7, 0.75, 1.0), (10, 1.0, 0.0)]
    {
        for (beta1, beta2, weight_decay, maximize) in [(0.9, 0.99, 0.0, false), (0.5, 0.9, 0.1, true)] {
            let own = ScheduleFreeAdamW { beta1, beta2, weight_decay, maximize, ..plain.clone() };
            let rule = ScheduleFreeAdamW { warmup_steps, r, weight_lr_power, ..own };
            if r == 0.0 && warmup_steps == 0 {
                // Without a warm-up the rate may fall from the first step on.
                follow(&rule, &["z"], || {
                    let mut program = schedule_free(rule.clone(), lr);
                    Box::new(move |y, g, t| program(y, g, t)[0])
                });
            }
            follow_at(plateau, &rule, &["z"], || {
                let mut program = schedule_free(rule.clone(), plateau);
                Box::new(move |y, g, t| program(y, g, t)[0])
            });
        }
    }
}

#[test]
fn schedule_free_evaluates_at_the_average() {
    let rule = ScheduleFreeAdamW { warmup_steps: 5, r: 0.5, beta1: 0.8, ..ScheduleFreeAdamW::default() };
    let evaluation = rule.evaluation().unwrap();
    let values = |x: f64| Values::F64(vec![x]);
    let memory = |y, z| Memory {
        params: values(y),
        grads: values(0.0),
        state: vec![values(z), values(0.0)],
        copy: None,
        remainder: None,
    };
    let (mut random, mut program) = (Random::new(3), schedule_free(rule.clone(), plateau));
    let mut at = memory(0.3, f64::NAN);
    let mut y = 0.3;
    for t in 1..=STEPS {
        // Before the first update the points are one, and the state is not read.
        let mut there = at.clone();
        let scalars = Scalars { lr: plateau(t), ..Scalars::default() };
        there.update(&*evaluation, Isa::detect(), 0, &[segment(0..1, t as u64)], &scalars).unwrap();
        if t == 1 {
            assert_eq!(there.params.f64(), [0.3]);
        }
        let g = f64::from(random.unit() as f32);
        at.grads = values(g);
        at.update(&rule, Isa::detect(), 0, &[segment(0..1, t as u64)], &scalars).unwrap();
        let [next, x] = program(y, g, t);
        y = next;
        let mut there = at.clone();
        there.update(&*evaluation, Isa::detect(), 0, &[segment(0..1, t as u64 + 1)], &scalars).unwrap();
        assert!((there.params.f64()[0] - x).abs() < 1e-13, "t = {t}");
        assert_eq!(there.state[0].bits(), at.state[0].bits());
    }
}
