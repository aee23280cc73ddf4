//! Tests of the other fields of a trace: ranks, weights, missing gradients, clipping, groups, schedules, problems.

use safetensors::tensor::Dtype::{BF16, F32, F64};
use serde_json::{Value, json};

use super::made::Made;
use super::*;

/// Gradients of rank 0, 1, ... in one step; `None` for a rank without one.
type Step<'g> = &'g [Option<[f64; 2]>];

/// Creates a trace of SGD with momentum 0.5 and learning rate 0.1 on two parameters: `w` with the gradients of `steps`, and
/// `v` with the gradient (1, -1) except in step 2, in which no rank has one.
fn made(steps: &[Step<'_>], spec: &[(&str, Value)], combine: impl Fn(usize, Step<'_>) -> [f64; 2]) -> Made {
    let mut made = Made::new(json!({"name": "sgd", "lr": 0.1, "momentum": 0.5}));
    made.spec["tolerance"] = json!({"rtol": 1e-14, "atol": 1e-15});
    made.spec["steps"] = json!(steps.len());
    made.spec["ranks"] = json!(steps[0].len());
    spec.iter().for_each(|(field, value)| made.spec[*field] = value.clone());
    let (mut w, mut v, mut bw, mut bv) = ([1.0, 2.0], [3.0, 4.0], [0.0; 2], [0.0; 2]);
    made.put("param/w", F64, &[2], &w);
    made.put("param/v", F64, &[2], &v);
    for (t, step) in (1..).zip(steps) {
        for (rank, grad) in step.iter().enumerate() {
            if let Some(grad) = grad {
                made.put(&format!("grad/{t}/{rank}/w"), F64, &[2], grad);
            }
        }
        let has_v = t != 2;
        if has_v {
            made.put(&format!("grad/{t}/v"), F64, &[2], &[1.0, -1.0]);
        }
        let (gw, gv) = (combine(t, step), combine(t, &vec![Some([1.0, -1.0]); step.len()]));
        for i in 0..2 {
            bw[i] = 0.5 * bw[i] + gw[i];
            w[i] -= 0.1 * bw[i];
            if has_v {
                bv[i] = 0.5 * bv[i] + gv[i];
                v[i] -= 0.1 * bv[i];
            }
        }
        made.put(&format!("expect/{t}/w"), F64, &[2], &w);
        made.put(&format!("expect/{t}/v"), F64, &[2], &v);
        made.put(&format!("expect_state/{t}/v/momentum"), F64, &[2], &bv);
    }
    made
}

fn agrees(what: &str, made: &Made) {
    for asked in settings() {
        let difference =
            replay(&made.bytes(), asked).unwrap_or_else(|why| panic!("{what}, {asked:?}: {why}"));
        assert_eq!(difference.worst, None, "{what}, {asked:?}");
    }
}

const STEPS: &[Step<'_>] = &[
    &[Some([1.0, 2.0]), Some([3.0, -1.0]), Some([0.5, 0.25])],
    &[None, Some([3.0, 1.0]), None],
    &[Some([4.0, 4.0]), None, Some([-8.0, 1.0])],
];

fn sum(step: Step<'_>, weights: &[f64]) -> [f64; 2] {
    let terms =
        step.iter().zip(weights).filter_map(|(grad, weight)| grad.map(|grad| grad.map(|g| weight * g)));
    terms.fold([0.0; 2], |sum, term| [sum[0] + term[0], sum[1] + term[1]])
}

#[test]
fn ranks_are_combined_as_the_trace_says_and_missing_gradients_are_zeros_or_left_alone() {
    agrees("mean", &made(STEPS, &[], |_, step| sum(step, &[1.0; 3]).map(|g| g / 3.0)));
    agrees("sum", &made(STEPS, &[("reduce", json!("sum"))], |_, step| sum(step, &[1.0; 3])));
    let weights = [[1.0, 2.0, 5.0], [3.0, 1.0, 0.0], [0.0, 7.0, 2.0]];
    let weighted =
        |t: usize, step: Step<'_>| sum(step, &weights[t - 1]).map(|g| g / weights[t - 1].iter().sum::<f64>());
    let mut made = made(STEPS, &[("reduce", json!("weighted"))], weighted);
    for (t, weights) in (1..).zip(&weights) {
        made.put(&format!("weight/{t}"), F64, &[3], weights);
    }
    agrees("weighted", &made);
    made.put("weight/2", F64, &[3], &[0.5, 1.0, 1.0]);
    assert!(matches!(replay(&made.bytes(), Asked::default()), Err(Reason::Weight { rank: 0, .. })));
}

/// Also if the trace has the only rank's gradients and weights explicitly.
#[test]
fn a_trace_of_one_rank_is_every_ranks() {
    let steps: &[Step<'_>] = &[&[Some([1.0, 2.0])], &[Some([3.0, 1.0])], &[Some([-8.0, 1.0])]];
    let mut made = made(steps, &[("reduce", json!("weighted"))], |_, step| step[0].unwrap());
    (1..=3).for_each(|t| made.put(&format!("weight/{t}"), F64, &[1], &[5.0]));
    for ranks in 1..=3 {
        for asked in settings() {
            let asked = Asked { ranks: Some(ranks), ..asked };
            let difference = replay(&made.bytes(), asked).unwrap_or_else(|why| panic!("{asked:?}: {why}"));
            assert_eq!(difference.worst, None, "{asked:?}");
        }
    }
}

type Norm = fn(&[f64]) -> f64;

#[test]
fn clipping_is_by_the_norm_of_all_gradients() {
    let steps: &[Step<'_>] = &[&[Some([3.0, -4.0])], &[Some([0.1, 0.2])], &[Some([-30.0, 5.0])]];
    let norms: [(Value, Norm); 4] = [
        (json!(1.0), |all| all.iter().map(|g| g.abs()).sum()),
        (json!(2.0), |all| all.iter().map(|g| g * g).sum::<f64>().sqrt()),
        (json!(3.0), |all| all.iter().map(|g| g.abs().powi(3)).sum::<f64>().cbrt()),
        (json!("inf"), |all| all.iter().fold(0.0, |most, g| g.abs().max(most))),
    ];
    for (kind, norm) in norms {
        let clip = [("clip", json!({"max_norm": 2.5, "norm_type": kind}))];
        let of_step = |t: usize| {
            let mut all = steps[t - 1][0].unwrap().to_vec();
            all.extend(if t == 2 { [0.0; 2] } else { [1.0, -1.0] });
            norm(&all)
        };
        let clipped = |t: usize, step: Step<'_>| {
            let coef = (2.5 / (of_step(t) + 1e-6)).min(1.0);
            step[0].unwrap().map(|g| coef * g)
        };
        let mut made = made(steps, &clip, clipped);
        (1..=3).for_each(|t| made.put(&format!("expect_norm/{t}"), F64, &[], &[of_step(t)]));
        agrees(&kind.to_string(), &made);
        made.put("expect_norm/1", F64, &[], &[of_step(1) * 1.001]);
        assert_eq!(replay(&made.bytes(), Asked::default()).unwrap().outside, 1);
    }
}

#[test]
fn groups_and_schedules_override_the_optimizer() {
    let mut made = Made::new(json!({"name": "sgd", "lr": 0.1}));
    made.spec["steps"] = json!(3);
    made.spec["lrs"] = json!([0.1, 0.2, 0.05]);
    made.spec["groups"] = json!([{"params": ["b"], "lr": 0.3, "weight_decay": 0.5}]);
    made.spec["tolerance"] = json!({"rtol": 1e-14, "atol": 0.0});
    let (mut a, mut b) = (1.0, 2.0);
    made.put("param/a", F64, &[1], &[a]);
    made.put("param/b", F64, &[1], &[b]);
    for (t, lr) in [(1, 0.1), (2, 0.2), (3, 0.05)] {
        let g = 0.7 + f64::from(t);
        a -= lr * g;
        b -= 3.0 * lr * (g + 0.5 * b);
        for (name, value) in [("a", a), ("b", b)] {
            made.put(&format!("grad/{t}/{name}"), F64, &[1], &[g]);
            made.put(&format!("expect/{t}/{name}"), F64, &[1], &[value]);
        }
    }
    agrees("groups and lrs", &made);
}

#[test]
fn parameters_may_be_numbers_or_empty() {
    let mut made = Made::new(json!({"name": "sgd", "lr": 0.5}));
    made.spec["steps"] = json!(1);
    for (name, shape) in [("one", &[][..]), ("none", &[0, 3][..])] {
        let of = |value: f64| vec![value; shape.iter().product()];
        made.put(&format!("param/{name}"), F32, shape, &of(3.0));
        made.put(&format!("grad/1/{name}"), F32, shape, &of(2.0));
        made.put(&format!("expect/1/{name}"), F32, shape, &of(2.0));
    }
    agrees("a number and nothing", &made);
}

#[test]
fn sixteen_bits_have_a_master_and_take_gradients_of_either_type() {
    for grads in [BF16, F32] {
        let mut made = Made::new(json!({"name": "sgd", "lr": 0.001}));
        made.spec["steps"] = json!(4);
        made.spec["tolerance"] = json!({"rtol": 0.0, "atol": 1e-6});
        made.put("param/w", BF16, &[2], &[1.0, -2.0]);
        // Each step alone would be lost in bf16.
        (1..=4).for_each(|t| made.put(&format!("grad/{t}/w"), grads, &[2], &[1.0, -1.0]));
        made.put("expect_state/4/w/master", F32, &[2], &[0.996, -1.996]);
        made.put("expect/4/w", BF16, &[2], &[0.99609375, -1.9921875]);
        agrees("bf16", &made);
    }
}

#[test]
fn a_problem_is_evaluated_by_any_rule_and_any_number_of_ranks() {
    let a = [[1.0, 2.0], [-0.5, 1.5], [3.0, 0.25], [0.75, -1.0], [2.0, 2.0]];
    let b = [1.0, -2.0, 0.5, 4.0, 0.0];
    let mut made = Made::new(json!({"name": "sgd", "lr": 0.1}));
    made.spec["steps"] = json!(5);
    made.spec["problem"] = json!({"name": "least_squares"});
    made.spec["tolerance"] = json!({"rtol": 1e-13, "atol": 1e-15});
    let mut x = [0.3, -0.4];
    made.put("param/x", F64, &[2], &x);
    made.put("data/A", F64, &[5, 2], a.as_flattened());
    made.put("data/b", F64, &[5], &b);
    for t in 1..=5 {
        let residual = |row: usize| a[row][0] * x[0] + a[row][1] * x[1] - b[row];
        let loss = (0..5).map(|row| residual(row).powi(2)).sum::<f64>() / 10.0;
        let g = [0, 1].map(|i| (0..5).map(|row| residual(row) * a[row][i]).sum::<f64>() / 5.0);
        x = [x[0] - 0.1 * g[0], x[1] - 0.1 * g[1]];
        made.put(&format!("expect_loss/{t}"), F64, &[], &[loss]);
        made.put(&format!("expect_evals/{t}"), F64, &[], &[t.into()]);
        made.put(&format!("expect/{t}/x"), F64, &[2], &x);
    }
    for ranks in 1..=6 {
        for asked in settings() {
            let asked = Asked { ranks: Some(ranks), ..asked };
            assert_eq!(replay(&made.bytes(), asked).unwrap().worst, None, "{asked:?}");
        }
    }
    made.put("expect_evals/5", F64, &[], &[6.0]);
    assert_eq!(
        replay(&made.bytes(), Asked::default()).unwrap().outside,
        1,
        "evaluations must be compared exactly"
    );
    made.tensors.remove("data/b");
    assert!(matches!(replay(&made.bytes(), Asked::default()), Err(Reason::MissingTensor { .. })));
}
