//! Muon: its variants and options against the published formulas, blocks of a tensor, refusals.

use crate::common::{Values, difference};
use crate::layer_wise::{SCALARS, STEPS, assert_close, ordinary};
use meshstep_optim::{Adjust, Blocks, Error, Flat, Isa, Muon, Rounding, Rule, Scalars, Segment};
use meshstep_tensor::{DType, Queue, SliceMut};

/// Muon by its published formulas, in f64, on one matrix.
fn muon(rule: &Muon, (rows, cols): (usize, usize), mut p: Vec<f64>, g: &[f64]) -> Vec<f64> {
    let (mu, sign) = (rule.momentum, if rule.maximize { -1.0 } else { 1.0 });
    let mut b = vec![0.0; p.len()];
    for _ in 0..STEPS {
        let mut u = vec![0.0; p.len()];
        for i in 0..p.len() {
            let g = sign * SCALARS.grad_scale * g[i];
            let share = if rule.decaying_sum { 1.0 } else { 1.0 - mu };
            b[i] = mu * b[i] + share * g;
            u[i] = if rule.nesterov { share * g + mu * b[i] } else { b[i] };
        }
        let norm = u.iter().map(|x| x * x).sum::<f64>().sqrt();
        let divisor = if rule.add_eps { norm + rule.eps } else { norm.max(rule.eps) };
        u.iter_mut().for_each(|x| *x /= divisor);
        (0..rule.ns_steps).for_each(|_| u = polynomial(rule.ns_coefficients, &u, rows, cols));
        let adjust = match rule.adjust {
            Adjust::Original => (rows as f64 / cols as f64).max(1.0).sqrt(),
            Adjust::MatchRmsAdamW => 0.2 * (rows.max(cols) as f64).sqrt(),
        };
        for i in 0..p.len() {
            p[i] -= SCALARS.lr * rule.weight_decay * p[i] + SCALARS.lr * adjust * u[i];
        }
    }
    p
}

/// Returns `a x + b (x xT) x + c (x xT)^2 x`, which needs no transposing.
fn polynomial([a, b, c]: [f64; 3], x: &[f64], rows: usize, cols: usize) -> Vec<f64> {
    let outer = |y: &[f64]| -> Vec<f64> {
        let xt_y = |k: usize, j: usize| (0..rows).map(|i| x[i * cols + k] * y[i * cols + j]).sum::<f64>();
        let middle: Vec<f64> = (0..cols * cols).map(|at| xt_y(at / cols, at % cols)).collect();
        let one = |i: usize, j: usize| (0..cols).map(|k| x[i * cols + k] * middle[k * cols + j]).sum();
        (0..rows * cols).map(|at| one(at / cols, at % cols)).collect()
    };
    let once = outer(x);
    let twice = outer(&once);
    (0..x.len()).map(|i| a * x[i] + b * once[i] + c * twice[i]).collect()
}

/// Returns the named variants, and rules with each option. In the last ones eps is no small part of a norm.
fn rules() -> Vec<Muon> {
    let plain = Muon { nesterov: false, weight_decay: 0.0, ns_steps: 3, ..Muon::default() };
    vec![
        Muon::default(),
        Muon::keller_jordan(),
        Muon::moonshot(),
        Muon { nesterov: false, maximize: true, ..Muon::moonshot() },
        Muon { adjust: Adjust::MatchRmsAdamW, ..plain.clone() },
        Muon { ns_coefficients: [2.0, -1.5, 0.5], ..plain.clone() },
        Muon { eps: 1.0, ..plain.clone() },
        Muon { eps: 1.0, add_eps: true, ..plain },
    ]
}

#[test]
fn muon_follows_its_published_formulas() {
    for rule in rules() {
        for shape in [(4, 7), (7, 4), (3, 3), (1, 5)] {
            let len = shape.0 * shape.1;
            let mut memory = ordinary(&rule, (DType::F64, DType::F64), len, 9);
            let expected = muon(&rule, shape, memory.params.f64(), &memory.grads.f64());
            for t in 1..=STEPS {
                let segment = Segment { matrix: Some(shape), ..Segment::new(0..len, t) };
                memory.update(&rule, Isa::detect(), 0, &[segment], &SCALARS).unwrap();
            }
            assert_close(&memory.params, &expected, 1e-9, &format!("{rule:?} {shape:?}"));
        }
    }
}

/// A tensor of several blocks has the bits of as many tensors, of their random numbers too.
#[test]
fn blocks_are_matrices_of_their_own() {
    let stochastic = Scalars { rounding: Rounding::Stochastic, ..SCALARS };
    for (blocks, matrix) in [
        (Blocks::Rows(3), (15, 4)),
        (Blocks::Rows(5), (15, 4)),
        (Blocks::Batch, (5, 4)),
        (Blocks::Batch, (20, 1)),
    ] {
        let (rows, cols) = blocks.of(&[matrix.0, matrix.1]).unwrap_or(matrix);
        for (dtype, scalars) in [(DType::F64, SCALARS), (DType::F32, SCALARS), (DType::BF16, stochastic)] {
            let whole = Muon::moonshot();
            let rule = Muon { blocks, ..whole.clone() };
            let mut memory = ordinary(&rule, (dtype, dtype), 60, 4);
            let mut apart = memory.clone();
            for t in 1..=3 {
                let segment = Segment { key: 8, matrix: Some(matrix), ..Segment::new(0..60, t) };
                memory.update(&rule, Isa::detect(), 0, &[segment], &scalars).unwrap();
                let block = |first: usize| {
                    let range = first..first + rows * cols;
                    Segment {
                        key: 8,
                        first: first as u64,
                        matrix: Some((rows, cols)),
                        ..Segment::new(range, t)
                    }
                };
                let segments: Vec<Segment> = (0..60).step_by(rows * cols).map(block).collect();
                assert!(segments.len() > 1);
                apart.update(&whole, Isa::detect(), 0, &segments, &scalars).unwrap();
            }
            assert_eq!(difference(&memory, &apart), None, "{blocks:?} of {matrix:?}, {dtype}");
        }
    }
}

#[test]
fn the_adjusted_rate_is_a_blocks() {
    let lr = |blocks, matrix| Muon { blocks, ..Muon::moonshot() }.reach(1.0, Some(matrix));
    assert_eq!(lr(Blocks::Whole, (400, 100)), 4.0);
    assert_eq!(lr(Blocks::Rows(4), (400, 100)), 2.0);
    assert_eq!(lr(Blocks::Batch, (400, 100)), 4.0);
}

#[test]
fn blocks_that_do_not_divide_are_refused_by_segment() {
    for (blocks, matrix) in [(Blocks::Rows(3), (4, 3)), (Blocks::Rows(2), (2, 3)), (Blocks::Batch, (5, 1))] {
        let rule = Muon { blocks, ..Muon::default() };
        let mut memory = ordinary(&rule, (DType::F32, DType::F32), 24, 9);
        let before = memory.clone();
        let good = Segment { matrix: Some((6, 2)), ..Segment::new(0..12, 1) };
        let bad = Segment { matrix: Some(matrix), ..Segment::new(12..24, 1) };
        let refused = memory.update(&rule, Isa::detect(), 0, &[good, bad], &SCALARS).unwrap_err();
        let shape = Some(matrix);
        assert_eq!(refused, Error::NotAMatrix { rule: "muon", index: 1, len: 12, shape, blocks });
        assert_eq!(difference(&memory, &before), None);
    }
}

#[test]
fn muon_refuses_what_is_not_a_whole_matrix() {
    let rule = Muon::default();
    let mut memory = ordinary(&rule, (DType::F32, DType::F32), 12, 9);
    let before = memory.clone();
    for matrix in [None, Some((3, 5)), Some((usize::MAX, 2))] {
        let good = Segment { matrix: Some((2, 2)), ..Segment::new(0..4, 1) };
        let bad = Segment { matrix, ..Segment::new(4..12, 1) };
        let refused = memory.update(&rule, Isa::detect(), 0, &[good, bad], &SCALARS).unwrap_err();
        assert_eq!(
            refused,
            Error::NotAMatrix { rule: "muon", index: 1, len: 8, shape: matrix, blocks: Blocks::Whole }
        );
        assert_eq!(difference(&memory, &before), None);
    }
    let mut state: Vec<SliceMut<'_>> = Vec::new();
    let flat = Flat {
        params: memory.params.slice_mut(),
        grads: memory.grads.slice_mut(),
        state: &mut state,
        copy: None,
        remainder: None,
    };
    assert!(rule.update(flat, &[], &SCALARS, &Queue::cpu()).is_err());
}

#[test]
fn muon_of_nothing_is_nothing_and_rates_that_do_not_fit_are_refused() {
    let rule = Muon { eps: 1e-50, weight_decay: 0.0, ..Muon::default() };
    let mut memory = ordinary(&rule, (DType::F32, DType::F32), 8, 1);
    memory.grads = Values::F32(vec![0.0; 8]);
    let before = memory.params.bits();
    let segment = Segment { matrix: Some((8, 1)), ..Segment::new(0..8, 1) };
    memory.update(&rule, Isa::detect(), 0, std::slice::from_ref(&segment), &SCALARS).unwrap();
    assert_eq!(memory.params.bits(), before);
    let scalars = Scalars { lr: 3e38, ..SCALARS };
    let refused = memory.update(&rule, Isa::detect(), 0, &[segment], &scalars).unwrap_err();
    assert!(matches!(refused, Error::Scalar { name: "lr", .. }), "{refused}");
    assert_eq!(memory.params.bits(), before);
}
