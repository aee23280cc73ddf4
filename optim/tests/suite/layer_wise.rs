//! LAMB and LARS, which see two sums per tensor, and hyperparameters of all layer-wise rules. Muon: muon.rs.

use crate::common::{Memory, Random, Values, difference, fast, long, tried};
use meshstep_optim::{
    Blocks, Error, Flat, Isa, Lamb, Lars, Muon, Rounding, Rule, Scalars, Segment, TensorSums,
};
use meshstep_tensor::{DType, Queue, SliceMut};

pub(crate) const SCALARS: Scalars =
    Scalars { lr: 0.05, grad_scale: 0.5, zero_grads: false, rounding: Rounding::Nearest };
pub(crate) const STEPS: u64 = 40;

fn layer_wise() -> Vec<Box<dyn Rule>> {
    vec![
        Box::new(Lamb::default()),
        Box::new(Lamb { weight_decay: 0.0, maximize: true, ..Lamb::default() }),
        Box::new(Lars::default()),
        Box::new(Lars { momentum: 0.0, weight_decay: 0.1, trust_coefficient: 0.5, maximize: true }),
    ]
}

/// Creates parameters, gradients and state of ordinary size.
pub(crate) fn ordinary(rule: &dyn Rule, (params, grads): (DType, DType), len: usize, seed: u64) -> Memory {
    let mut random = Random::new(seed);
    Memory {
        params: Values::new(params, len, || random.unit()),
        grads: Values::new(grads, len, || random.unit()),
        state: rule.state().iter().map(|_| Values::new(params, len, || 0.0)).collect(),
        copy: None,
        remainder: None,
    }
}

fn measure(memory: &mut Memory, rule: &dyn Rule, isa: Isa, segments: &[Segment]) -> Vec<TensorSums> {
    let mut sums = vec![TensorSums::new(); segments.len()];
    let mut state: Vec<SliceMut<'_>> = memory.state.iter_mut().map(Values::slice_mut).collect();
    let (params, grads) = (memory.params.slice_mut(), memory.grads.slice_mut());
    let flat = Flat { params, grads, state: &mut state, copy: None, remainder: None };
    rule.measure_on(isa, &flat, segments, &SCALARS, &mut sums, &Queue::cpu()).unwrap();
    sums
}

/// Takes one step of a tensor cut at `cuts`, with its sums combined by words as ranks do.
fn step(memory: &mut Memory, rule: &dyn Rule, isa: Isa, cuts: &[usize], t: u64) {
    let mut segments: Vec<Segment> = cuts.windows(2).map(|w| Segment::new(w[0]..w[1], t)).collect();
    let parts = measure(memory, rule, isa, &segments);
    let mut words = vec![0u64; TensorSums::WORDS];
    for part in parts {
        let mut mine = vec![0; TensorSums::WORDS];
        part.write(&mut mine);
        words.iter_mut().zip(mine).for_each(|(sum, word)| *sum = sum.wrapping_add(word));
    }
    let ratio = rule.ratio(&TensorSums::read(&words));
    segments.iter_mut().for_each(|s| s.ratio = ratio);
    memory.update(rule, isa, 0, &segments, &SCALARS).unwrap();
}

#[test]
fn neither_cuts_nor_instructions_change_a_bit() {
    let isas = fast();
    let types = [(DType::F32, DType::F32), (DType::F32, DType::BF16), (DType::F64, DType::F64)];
    for (i, rule) in layer_wise().into_iter().enumerate() {
        // Short runs try each rule with two types in two steps, of which the second has a state; long runs with all in three.
        let chosen = |j: usize| (long() || (i + j) % 3 != 2) && tried(types.len() * i + j, 1);
        let last = if long() { 3 } else { 2 };
        for (_, dtypes) in types.into_iter().enumerate().filter(|(j, _)| chosen(*j)) {
            let len = 150_001;
            let start = ordinary(&*rule, dtypes, len, 3);
            let mut expected = start.clone();
            (1..=last).for_each(|t| step(&mut expected, &*rule, Isa::Reference, &[0, len], t));
            for &isa in &isas {
                for cuts in [&[0, len][..], &[0, 1, 1024, 70_001, 70_001, len]] {
                    let mut memory = start.clone();
                    (1..=last).for_each(|t| step(&mut memory, &*rule, isa, cuts, t));
                    let found = difference(&memory, &expected);
                    assert_eq!(found, None, "{rule:?} {dtypes:?} on {isa} cut at {cuts:?}");
                }
            }
        }
    }
}

/// Long enough that two threads measure the whole, and one thread each part.
#[test]
fn a_tensor_measured_by_two_threads_has_the_sums_of_its_parts() {
    const LEN: usize = (1 << 20) + 4099;
    // Short runs try LAMB and LARS once each; long runs with all their options.
    let chosen = |i: usize| (long() || i.is_multiple_of(2)) && tried(i, 1);
    for (_, rule) in layer_wise().into_iter().enumerate().filter(|(i, _)| chosen(*i)) {
        let mut memory = ordinary(&*rule, (DType::F32, DType::F32), LEN, 3);
        for isa in [Isa::Reference, Isa::detect()] {
            let whole = measure(&mut memory, &*rule, isa, &[Segment::new(0..LEN, 1)]);
            let cuts = [0, 1, 700_001, LEN].windows(2).map(|w| Segment::new(w[0]..w[1], 1));
            let parts = measure(&mut memory, &*rule, isa, &cuts.collect::<Vec<_>>());
            let mut words = vec![0u64; TensorSums::WORDS];
            for part in &parts {
                let mut mine = vec![0; TensorSums::WORDS];
                part.write(&mut mine);
                words.iter_mut().zip(mine).for_each(|(sum, word)| *sum = sum.wrapping_add(word));
            }
            let (whole, parts) = (whole[0].norms(), TensorSums::read(&words).norms());
            assert_eq!(whole, parts, "{rule:?} on {isa}");
            assert!(whole.0 > 300.0, "{whole:?} of a million numbers");
        }
    }
}

/// LAMB as in its paper, in f64.
fn lamb(rule: &Lamb, memory: &Memory) -> Vec<f64> {
    let (mut p, g) = (memory.params.f64(), memory.grads.f64());
    let sign = if rule.maximize { -1.0 } else { 1.0 };
    let (mut m, mut v) = (vec![0.0; p.len()], vec![0.0; p.len()]);
    for t in 1..=STEPS as i32 {
        let mut r = vec![0.0; p.len()];
        for i in 0..p.len() {
            let g = sign * SCALARS.grad_scale * g[i];
            m[i] = rule.beta1 * m[i] + (1.0 - rule.beta1) * g;
            v[i] = rule.beta2 * v[i] + (1.0 - rule.beta2) * g * g;
            let (mhat, vhat) = (m[i] / (1.0 - rule.beta1.powi(t)), v[i] / (1.0 - rule.beta2.powi(t)));
            r[i] = mhat / (vhat.sqrt() + rule.eps) + rule.weight_decay * p[i];
        }
        let norm = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
        let ratio = if norm(&p) > 0.0 && norm(&r) > 0.0 { norm(&p) / norm(&r) } else { 1.0 };
        p.iter_mut().zip(&r).for_each(|(p, r)| *p -= SCALARS.lr * ratio * r);
    }
    p
}

/// LARS as in its paper, in f64.
fn lars(rule: &Lars, memory: &Memory) -> Vec<f64> {
    let (mut p, g) = (memory.params.f64(), memory.grads.f64());
    let sign = if rule.maximize { -1.0 } else { 1.0 };
    let g: Vec<f64> = g.iter().map(|g| sign * SCALARS.grad_scale * g).collect();
    let mut b = vec![0.0; p.len()];
    for _ in 0..STEPS {
        let norm = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
        let local = rule.trust_coefficient * norm(&p) / (norm(&g) + rule.weight_decay * norm(&p));
        for i in 0..p.len() {
            b[i] = rule.momentum * b[i] + SCALARS.lr * local * (g[i] + rule.weight_decay * p[i]);
            p[i] -= b[i];
        }
    }
    p
}

pub(crate) fn assert_close(found: &Values, expected: &[f64], bound: f64, what: &str) {
    let worst =
        found.f64().iter().zip(expected).map(|(a, b)| (a - b).abs() / b.abs().max(1e-2)).fold(0.0, f64::max);
    assert!(worst < bound, "{what}: {worst:e} off");
}

#[test]
fn lamb_and_lars_follow_their_papers() {
    for (dtype, bound) in [(DType::F64, 1e-12), (DType::F32, 2e-5)] {
        for rule in [Lamb::default(), Lamb { weight_decay: 0.0, maximize: true, ..Lamb::default() }] {
            let mut memory = ordinary(&rule, (dtype, dtype), 777, 5);
            let expected = lamb(&rule, &memory);
            (1..=STEPS).for_each(|t| step(&mut memory, &rule, Isa::detect(), &[0, 777], t));
            assert_close(&memory.params, &expected, bound, &format!("{rule:?} {dtype}"));
        }
        for trust_coefficient in [1e-3, 0.1] {
            let rule = Lars { trust_coefficient, ..Lars::default() };
            let mut memory = ordinary(&rule, (dtype, dtype), 777, 6);
            let expected = lars(&rule, &memory);
            (1..=STEPS).for_each(|t| step(&mut memory, &rule, Isa::detect(), &[0, 777], t));
            assert_close(&memory.params, &expected, bound, &format!("{rule:?} {dtype}"));
        }
    }
}

#[test]
fn a_zero_tensor_moves_by_the_learning_rate_alone() {
    let rule = Lamb { weight_decay: 0.0, ..Lamb::default() };
    let mut memory = ordinary(&rule, (DType::F32, DType::F32), 8, 1);
    memory.params = Values::F32(vec![0.0; 8]);
    memory.grads = Values::F32(vec![2.0; 8]);
    step(&mut memory, &rule, Isa::detect(), &[0, 8], 1);
    assert_close(&memory.params, &[-SCALARS.lr; 8], 1e-5, "ratio 1");
    assert_eq!(rule.ratio(&TensorSums::new()), 1.0);
    assert_eq!(Lars::default().ratio(&TensorSums::new()), 1.0);
}

#[test]
fn as_many_sums_as_segments() {
    let rule = Lamb::default();
    let mut memory = ordinary(&rule, (DType::F32, DType::F32), 8, 1);
    let mut state: Vec<SliceMut<'_>> = memory.state.iter_mut().map(Values::slice_mut).collect();
    let flat = Flat {
        params: memory.params.slice_mut(),
        grads: memory.grads.slice_mut(),
        state: &mut state,
        copy: None,
        remainder: None,
    };
    let refused =
        rule.measure_on(Isa::detect(), &flat, &[Segment::new(0..8, 1)], &SCALARS, &mut [], &Queue::cpu());
    assert_eq!(refused, Err(Error::Len { what: "sums", given: 0, expected: 1 }));
}

#[test]
fn hyperparameters_out_of_range() {
    let refused: [(Box<dyn Rule>, &str); 13] = [
        (Box::new(Lamb { beta1: 1.0, ..Lamb::default() }), "beta1"),
        (Box::new(Lamb { beta2: -0.1, ..Lamb::default() }), "beta2"),
        (Box::new(Lamb { eps: -1.0, ..Lamb::default() }), "eps"),
        (Box::new(Lamb { weight_decay: f64::NAN, ..Lamb::default() }), "weight_decay"),
        (Box::new(Lars { momentum: -0.1, ..Lars::default() }), "momentum"),
        (Box::new(Lars { weight_decay: -0.1, ..Lars::default() }), "weight_decay"),
        (Box::new(Lars { trust_coefficient: 0.0, ..Lars::default() }), "trust_coefficient"),
        (Box::new(Muon { momentum: 1.0, ..Muon::default() }), "momentum"),
        (Box::new(Muon { weight_decay: -0.1, ..Muon::default() }), "weight_decay"),
        (Box::new(Muon { eps: 0.0, ..Muon::default() }), "eps"),
        (Box::new(Muon { blocks: Blocks::Rows(0), ..Muon::default() }), "blocks"),
        (Box::new(Muon { ns_steps: 100, ..Muon::default() }), "ns_steps"),
        (Box::new(Muon { ns_coefficients: [1.0, f64::INFINITY, 1.0], ..Muon::default() }), "ns_coefficients"),
    ];
    for (rule, name) in refused {
        let Err(Error::Hyperparameter { name: found, .. }) = rule.check() else {
            panic!("{rule:?} is accepted")
        };
        assert_eq!(found, name);
    }
}

#[test]
fn ratios_that_are_no_factor_on_a_learning_rate_are_refused() {
    for rule in layer_wise() {
        let mut memory = ordinary(&*rule, (DType::F32, DType::F32), 8, 1);
        let before = memory.clone();
        for ratio in [f64::NAN, -1.0, f64::INFINITY, 1e40] {
            let segment = Segment { ratio, ..Segment::new(0..8, 1) };
            let refused = memory.update(&*rule, Isa::detect(), 0, &[segment], &SCALARS).unwrap_err();
            assert!(matches!(refused, Error::SegmentRatio { index: 0, .. }), "{refused}");
            assert_eq!(difference(&memory, &before), None);
        }
    }
}

#[test]
fn gradients_that_have_all_but_vanished_do_not_throw_parameters_away() {
    let rule = Lamb { weight_decay: 0.0, ..Lamb::default() };
    let mut memory = ordinary(&rule, (DType::F32, DType::F32), 2, 1);
    memory.params = Values::F32(vec![1e5; 2]);
    memory.grads = Values::F32(vec![1e-42; 2]);
    step(&mut memory, &rule, Isa::detect(), &[0, 2], 1);
    assert_close(&memory.params, &[1e5; 2], 1e-6, "ratio 1");
}
