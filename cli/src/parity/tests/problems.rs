//! Tests of the built-in problems: gradients against finite differences, and shares against the whole.

use safetensors::tensor::Dtype::F64;
use serde_json::{Value, json};

use super::super::problems::Rows;
use super::made::Made;
use super::*;

/// Creates a problem on four parameters, with seven rows of data unless it has none.
fn made(problem: Value, label: Option<&str>) -> Made {
    let mut made = Made::new(json!({"name": "lbfgs"}));
    made.spec["steps"] = json!(1);
    made.spec["problem"] = problem;
    made.put("param/x", F64, &[4], &[0.3, -0.7, 1.1, 0.2]);
    made.put("expect_evals/1", F64, &[], &[1.0]);
    if let Some(label) = label {
        let a: Vec<f64> = (0..28).map(|i| (f64::from(i) * 1.7).sin()).collect();
        let b: Vec<f64> = (0..7).map(|i| if i % 3 == 0 { 1.0 } else { -1.0 }).collect();
        made.put("data/A", F64, &[7, 4], &a);
        made.put(&format!("data/{label}"), F64, &[7], &b);
    }
    made
}

fn all() -> [Made; 4] {
    [
        made(json!({"name": "rosenbrock"}), None),
        made(json!({"name": "least_squares"}), Some("b")),
        made(json!({"name": "logistic"}), Some("y")),
        made(json!({"name": "logistic", "l2": 0.5}), Some("y")),
    ]
}

const X: [f64; 4] = [0.3, -0.7, 1.1, 0.2];

#[test]
fn gradients_are_the_losses_slopes() {
    for made in all() {
        let trace = Trace::parse(&made.bytes()).unwrap();
        let rows = Rows::of(&trace).unwrap().unwrap();
        let (_, grad) = rows.part(&X, 0, 1);
        for i in 0..4 {
            let at = |by: f64| {
                let mut x = X;
                x[i] += by;
                rows.part(&x, 0, 1).0
            };
            let slope = (at(1e-5) - at(-1e-5)) / 2e-5;
            assert!((slope - grad[i]).abs() < 1e-6, "{}: {slope} and {}", made.spec, grad[i]);
        }
    }
}

#[test]
fn losses_are_those_of_the_formulas() {
    let losses = all().map(|made| {
        let trace = Trace::parse(&made.bytes()).unwrap();
        Rows::of(&trace).unwrap().unwrap().part(&X, 0, 1).0
    });
    let a = |row: i32, i: i32| (f64::from(row * 4 + i) * 1.7).sin();
    let product = |row: i32| (0..4).map(|i| a(row, i) * X[i as usize]).sum::<f64>();
    let label = |row: i32| if row % 3 == 0 { 1.0 } else { -1.0 };
    let squares = (0..7).map(|row| (product(row) - label(row)).powi(2)).sum::<f64>() / 14.0;
    let logistic = (0..7).map(|row| (1.0 + (-label(row) * product(row)).exp()).ln()).sum::<f64>() / 7.0;
    let valley = (0..3).map(|i| 100.0 * (X[i + 1] - X[i] * X[i]).powi(2) + (1.0 - X[i]).powi(2)).sum::<f64>();
    let penalty = 0.25 * X.iter().map(|x| x * x).sum::<f64>();
    for (got, want) in losses.into_iter().zip([valley, squares, logistic, logistic + penalty]) {
        assert!((got - want).abs() < 1e-12 * want, "{got} and {want}");
    }
}

#[test]
fn the_ranks_shares_are_the_whole() {
    for made in all() {
        let trace = Trace::parse(&made.bytes()).unwrap();
        let rows = Rows::of(&trace).unwrap().unwrap();
        let (loss, grad) = rows.part(&X, 0, 1);
        for ranks in 2..=9 {
            let parts: Vec<_> = (0..ranks).map(|rank| rows.part(&X, rank, ranks)).collect();
            let sum: f64 = parts.iter().map(|(loss, _)| loss).sum();
            assert!((sum - loss).abs() < 1e-12 * loss, "{} on {ranks}", made.spec);
            for (i, grad) in grad.iter().enumerate() {
                let sum: f64 = parts.iter().map(|(_, grad)| grad[i]).sum();
                assert!((sum - grad).abs() < 1e-12, "{} on {ranks}", made.spec);
            }
        }
    }
}

type Spoil<'s> = &'s dyn Fn(&mut Made);

#[test]
fn what_does_not_belong_to_a_problem_is_refused() {
    let refusal = |mut made: Made, spoil: Spoil| {
        spoil(&mut made);
        replay(&made.bytes(), Asked::default()).unwrap_err().to_string()
    };
    let [rosenbrock, squares, logistic, _] = all();
    let cases: [(&Made, &str, Spoil); 9] = [
        (&rosenbrock, "one parameter, x", &|made| made.put("param/y", F64, &[1], &[1.0])),
        (&rosenbrock, "no such data", &|made| made.put("data/A", F64, &[1], &[1.0])),
        (&squares, "\"data/A\" is missing", &|made| drop(made.tensors.remove("data/A"))),
        (&squares, "data/A has the shape [4, 7] instead of [7, 4]", &|made| {
            made.tensors.get_mut("data/A").unwrap().1 = vec![4, 7];
        }),
        (&squares, "data/b has the shape", &|made| made.put("data/b", F64, &[0], &[])),
        (&logistic, "labels must be -1 and 1", &|made| made.tensors.get_mut("data/y").unwrap().2[4] = 0.5),
        (&squares, "a reduce that is not mean", &|made| made.spec["reduce"] = json!("sum")),
        (&squares, "clip and the rule lbfgs", &|made| made.spec["clip"] = json!({"max_norm": 1.0})),
        (&squares, "lrs and the rule lbfgs", &|made| made.spec["lrs"] = json!([1.0])),
    ];
    for (made, hint, spoil) in cases {
        let reason = refusal(made.clone(), spoil);
        assert!(reason.contains(hint), "{hint:?} is not in {reason:?}");
    }
}
