//! Invalid input is refused by name, with the valid values, and leaves all memory unchanged.

use crate::common::{DTYPES, Memory, Values, rules, segment};
use meshstep_optim::{
    Adagrad, Adam, AdamW, Adopt, Decay, Error, Flat, Isa, Lion, Moments, Momentum, QhAdamW, QhAdopt, RmsProp,
    Rounding, Rule, Scalars, ScheduleFreeAdamW, Segment, Sgd, Strided, UncorrectedAdam, accumulate,
};
use meshstep_tensor::{DType, Queue, SliceMut};

const SCALARS: Scalars = Scalars { lr: 0.1, grad_scale: 1.0, zero_grads: true, rounding: Rounding::Nearest };

/// Asserts a refusal with a message that contains every one of `says`, without any change of bits.
fn refused(rule: &dyn Rule, memory: &Memory, segments: &[Segment], scalars: &Scalars, says: &[&str]) {
    for isa in Isa::available() {
        let mut after = memory.clone();
        let error = after.update(rule, isa, 0, segments, scalars).unwrap_err().to_string();
        assert!(says.iter().all(|says| error.contains(says)), "{error:?} should say {says:?}");
        assert_eq!(after.bits(), memory.bits());
    }
}

const NAN: f64 = f64::NAN;
const INF: f64 = f64::INFINITY;

/// Invalid decays of an average, and values that are not numbers of at least 0 in the range of f32.
const NO_BETA: [f64; 4] = [-0.1, 1.0, 1.5, NAN];
const NO_SIZE: [f64; 4] = [-1e-8, NAN, INF, 1e39];

/// Asserts that a rule is refused for each bad value, by rule, hyperparameter and value.
fn bad<R: Rule>(values: &[f64], name: &str, rule: impl Fn(f64) -> R) {
    for &value in values {
        let rule = rule(value);
        let memory = Memory::random(&rule, DTYPES[0], 40, 1);
        let error = rule.check().unwrap_err();
        let named = matches!(error, Error::Hyperparameter { name: n, value: v, .. }
            if n == name && v.to_bits() == value.to_bits());
        assert!(named, "{rule:?}: {error}");
        refused(&rule, &memory, &[segment(0..40, 1)], &SCALARS, &[rule.name(), name, "use"]);
    }
}

/// Hyperparameters common to all rules.
macro_rules! common_ones {
    ($($rule:ident)*) => {$(
        bad(&NO_SIZE, "weight_decay", |weight_decay| $rule { weight_decay, ..$rule::default() });
        bad(&[0.0, -1.0, NAN, INF], "lr_max", |lr_max| {
            $rule { decay: Decay::FullyDecoupled { lr_max }, ..$rule::default() }
        });
    )*};
}

#[test]
fn hyperparameters_out_of_range() {
    common_ones!(AdamW Adam Sgd RmsProp Adagrad Lion Adopt QhAdopt QhAdamW UncorrectedAdam);
    bad(&NO_BETA, "beta1", |beta1| AdamW { beta1, ..AdamW::default() });
    bad(&NO_BETA, "beta2", |beta2| AdamW { beta2, ..AdamW::default() });
    bad(&NO_SIZE, "eps", |eps| AdamW { eps, ..AdamW::default() });
    bad(&NO_BETA, "beta1", |beta1| Adam { beta1, ..Adam::default() });
    bad(&NO_BETA, "beta2", |beta2| Adam { beta2, ..Adam::default() });
    bad(&NO_SIZE, "eps", |eps| Adam { eps, ..Adam::default() });
    bad(&NO_BETA, "alpha", |alpha| RmsProp { alpha, ..RmsProp::default() });
    bad(&NO_SIZE, "eps", |eps| RmsProp { eps, ..RmsProp::default() });
    bad(&NO_SIZE, "momentum", |momentum| RmsProp { momentum, ..RmsProp::default() });
    bad(&NO_SIZE, "lr_decay", |lr_decay| Adagrad { lr_decay, ..Adagrad::default() });
    bad(&NO_SIZE, "initial_accumulator_value", |initial_accumulator_value| Adagrad {
        initial_accumulator_value,
        ..Adagrad::default()
    });
    bad(&NO_SIZE, "eps", |eps| Adagrad { eps, ..Adagrad::default() });
    bad(&NO_BETA, "beta1", |beta1| Lion { beta1, ..Lion::default() });
    bad(&NO_BETA, "beta2", |beta2| Lion { beta2, ..Lion::default() });
    bad(&NO_BETA, "beta1", |beta1| UncorrectedAdam { beta1, ..UncorrectedAdam::default() });
    bad(&NO_BETA, "beta2", |beta2| UncorrectedAdam { beta2, ..UncorrectedAdam::default() });
    bad(&NO_SIZE, "lambda", |lambda| UncorrectedAdam { lambda, ..UncorrectedAdam::default() });
    bad(&[0.0, -1.0, NAN], "clip", |clip| UncorrectedAdam { clip, ..UncorrectedAdam::default() });
    let free = ScheduleFreeAdamW::default;
    bad(&NO_BETA, "beta1", |beta1| ScheduleFreeAdamW { beta1, ..free() });
    bad(&[0.0, 1e-320], "beta1", |beta1| ScheduleFreeAdamW { beta1, ..free() });
    bad(&NO_BETA, "beta2", |beta2| ScheduleFreeAdamW { beta2, ..free() });
    bad(&NO_SIZE, "eps", |eps| ScheduleFreeAdamW { eps, ..free() });
    bad(&NO_SIZE, "weight_decay", |weight_decay| ScheduleFreeAdamW { weight_decay, ..free() });
    bad(&[-0.5, 4.5, f64::NAN], "r", |r| ScheduleFreeAdamW { r, ..free() });
    bad(&[-0.5, 4.5, f64::NAN], "weight_lr_power", |weight_lr_power| ScheduleFreeAdamW {
        weight_lr_power,
        ..free()
    });
    bad(&[2e12], "warmup_steps", |steps| ScheduleFreeAdamW { warmup_steps: steps as u64, ..free() });
    bad(&NO_BETA, "beta1", |beta1| Adopt { beta1, ..Adopt::default() });
    bad(&NO_BETA, "beta2", |beta2| Adopt { beta2, ..Adopt::default() });
    bad(&NO_SIZE, "eps", |eps| Adopt { eps, ..Adopt::default() });
    bad(&NO_BETA, "beta2", |beta2| QhAdopt { beta2, ..QhAdopt::default() });
    bad(&NO_SIZE, "eps", |eps| QhAdopt { eps, ..QhAdopt::default() });
    bad(&NO_BETA, "beta2", |beta2| QhAdamW { beta2, ..QhAdamW::default() });
    bad(&NO_SIZE, "eps", |eps| QhAdamW { eps, ..QhAdamW::default() });
}

#[test]
fn momentum_of_sgd_out_of_range() {
    let average = Momentum::Average { debias: false };
    bad(&NO_SIZE, "momentum", |momentum| Sgd { momentum, ..Sgd::default() });
    bad(&NO_SIZE, "momentum", |momentum| Sgd { momentum, form: Momentum::LrInside, ..Sgd::default() });
    bad(&NO_BETA, "momentum", |momentum| Sgd { momentum, form: average, ..Sgd::default() });
    bad(&[NAN, INF, -1e39], "dampening", |dampening| Sgd { dampening, momentum: 0.5, ..Sgd::default() });
    for form in [average, Momentum::LrInside] {
        let usual = || Sgd { momentum: 0.5, form, ..Sgd::default() };
        bad(&[0.1, -0.1], "dampening", |dampening| Sgd { dampening, ..usual() });
        bad(&[1.0], "nesterov", |_| Sgd { nesterov: true, ..usual() });
    }
    let nesterov = Sgd { nesterov: true, ..Sgd::default() };
    for (rule, says) in [
        (nesterov.clone(), "momentum > 0"),
        (Sgd { momentum: 0.5, dampening: 0.5, ..nesterov }, "dampening = 0"),
    ] {
        let memory = Memory::random(&rule, DTYPES[0], 40, 1);
        refused(&rule, &memory, &[segment(0..40, 1)], &SCALARS, &["sgd", says, "use"]);
    }
}

#[test]
fn moments_out_of_range() {
    for pairs in [&[][..], &[(0.9, 0.1); 5]] {
        let error = Moments::new(pairs).unwrap_err().to_string();
        assert!(error.contains(&pairs.len().to_string()) && error.contains("1 to 4"), "{error}");
    }
    let two = |first, second| Moments::new(&[first, second]).unwrap();
    let both = |values: &[f64], name, moments: &dyn Fn(f64) -> Moments| {
        bad(values, name, |x| QhAdamW { moments: moments(x), ..QhAdamW::default() });
        bad(values, name, |x| QhAdopt { moments: moments(x), ..QhAdopt::default() });
    };
    both(&NO_BETA, "beta1", &|beta| Moments::one(beta, 0.5));
    both(&NO_BETA, "beta1", &|beta| two((0.9, 0.5), (beta, 0.1)));
    both(&[-0.1, 1.1, NAN], "weight", &|weight| two((0.9, 0.0), (0.9, weight)));
    both(&[1.0625], "the sum of weights", &|sum| two((0.9, 0.75), (0.9, sum - 0.75)));
    // In f64 these add up to an ulp above 1.
    let four = Moments::new(&[0.05, 0.8, 0.05, 0.1].map(|weight| (0.9, weight))).unwrap();
    assert_eq!(QhAdamW { moments: four, ..QhAdamW::default() }.check(), Ok(()));
}

#[test]
fn a_decay_beyond_f32() {
    let large = AdamW { weight_decay: 1e30, ..AdamW::default() };
    let peak = Sgd { weight_decay: 1.0, decay: Decay::FullyDecoupled { lr_max: 1e-30 }, ..Sgd::default() };
    for rule in [&large as &dyn Rule, &peak] {
        let memory = Memory::random(rule, DTYPES[0], 40, 1);
        refused(
            rule,
            &memory,
            &[segment(0..40, 1)],
            &Scalars { lr: 1e10, ..SCALARS },
            &["lr", "weight decay"],
        );
    }
}

#[test]
fn scalars_out_of_range() {
    for rule in rules() {
        let memory = Memory::random(&*rule, DTYPES[0], 40, 1);
        let segments = [segment(0..40, 1)];
        for lr in [-1e-9, f64::NAN, f64::INFINITY, 1e39] {
            refused(&*rule, &memory, &segments, &Scalars { lr, ..SCALARS }, &["lr", "use"]);
        }
        for grad_scale in [f64::NAN, f64::NEG_INFINITY, 1e39] {
            refused(&*rule, &memory, &segments, &Scalars { grad_scale, ..SCALARS }, &["grad_scale", "use"]);
        }
        // f64 parameters accept larger values.
        let mut wide = Memory::random(&*rule, DTYPES[7], 40, 1);
        let scalars = Scalars { grad_scale: 1e39, ..SCALARS };
        assert_eq!(wide.update(&*rule, Isa::detect(), 0, &segments, &scalars), Ok(()));
    }
}

#[test]
fn segments_that_do_not_fit() {
    let backwards = Segment::new(std::ops::Range { start: 9, end: 3 }, 1);
    let runs = Strided { run: 0, ..Strided::WHOLE };
    let table: [(&[Segment], &[&str]); 7] = [
        (&[segment(0..5, 1), segment(30..41, 1)], &["segment 1", "30..41", "40"]),
        (&[segment(50..60, 1)], &["segment 0", "50..60"]),
        (&[backwards], &["9..3"]),
        (&[segment(0..9, 1), segment(8..20, 1)], &["segment 1", "8", "9", "overlap"]),
        (&[segment(20..30, 1), segment(0..9, 1)], &["segment 1", "sort"]),
        (&[segment(0..9, 1), segment(9..20, 0)], &["segment 1", "t = 0"]),
        (&[Segment { strided: runs, ..segment(0..9, 1) }], &["segment 0", "runs of 0"]),
    ];
    for rule in rules() {
        let memory = Memory::random(&*rule, DTYPES[1], 40, 1);
        for (segments, says) in table {
            refused(&*rule, &memory, segments, &SCALARS, says);
        }
    }
}

#[test]
fn memory_that_does_not_go_together() {
    for rule in rules() {
        let good = Memory::random(&*rule, DTYPES[1], 40, 1);
        let some = |dtype, len| Values::new(dtype, len, || 1.0);
        let check = |change: &dyn Fn(&mut Memory), says: &[&str]| {
            let mut memory = good.clone();
            change(&mut memory);
            refused(&*rule, &memory, &[segment(0..39, 1)], &SCALARS, says);
        };
        check(&|m| m.grads = some(DType::F32, 41), &["grads", "41", "40"]);
        check(&|m| m.copy = Some(some(DType::BF16, 39)), &["copy", "39", "40"]);
        check(&|m| m.grads = some(DType::F64, 40), &["grads", "f64", "f32, bf16 or f16"]);
        check(&|m| m.params = some(DType::F16, 40), &["params", "f16", "f32 or f64"]);
        check(&|m| m.copy = Some(some(DType::F32, 40)), &["copy", "bf16 or f16"]);
        check(&|m| m.state.push(some(DType::F32, 40)), &[rule.name(), "state"]);
        if !rule.state().is_empty() {
            check(&|m| drop(m.state.pop()), &[rule.name(), rule.state()[0]]);
            check(&|m| m.state[0] = some(DType::F32, 39), &["state", "39"]);
            check(&|m| m.state[0] = some(DType::F64, 40), &["state", "f64"]);
        }
        let mut wide = Memory::random(&*rule, DTYPES[7], 40, 1);
        wide.copy = Some(some(DType::BF16, 40));
        refused(&*rule, &wide, &[segment(0..40, 1)], &SCALARS, &["copy", "f64"]);
        wide.copy = None;
        wide.grads = some(DType::F32, 40);
        refused(&*rule, &wide, &[segment(0..40, 1)], &SCALARS, &["grads", "f64"]);
    }
}

#[test]
fn integers_are_no_parameters() {
    let (mut params, mut grads) = ([1u64; 4], [1f32; 4]);
    let flat = Flat {
        params: SliceMut::from(&mut params[..]),
        grads: SliceMut::from(&mut grads[..]),
        state: &mut [],
        copy: None,
        remainder: None,
    };
    let error = Sgd::default().update(flat, &[segment(0..4, 1)], &SCALARS, &Queue::cpu()).unwrap_err();
    assert!(matches!(error, Error::DType { what: "params", given: DType::U64, .. }));
    assert_eq!((params, grads), ([1; 4], [1.0; 4]));
}

#[test]
fn hand_overs_that_do_not_fit() {
    let mut dst = [1f32; 4];
    let mut refused = |src: Values, weight, says: &str| {
        for first in [true, false] {
            let error = accumulate((&mut dst[..]).into(), src.slice(), weight, first, &Queue::cpu())
                .unwrap_err()
                .to_string();
            assert!(error.contains(says), "{error:?} should say {says:?}");
            assert_eq!(dst, [1.0; 4]);
        }
    };
    refused(Values::F32(vec![2.0; 3]), 1.0, "3 elements where 4");
    refused(Values::F64(vec![2.0; 4]), 1.0, "the type of dst");
    for weight in [f64::NAN, f64::INFINITY, 1e39] {
        refused(Values::F32(vec![2.0; 4]), weight, "weight");
    }
    let (mut integers, more) = ([1u64; 2], [2u64; 2]);
    assert!(accumulate((&mut integers[..]).into(), (&more[..]).into(), 1.0, true, &Queue::cpu()).is_err());
}

#[test]
fn instructions_the_machine_lacks() {
    for isa in [Isa::Avx2, Isa::Avx512].into_iter().filter(|isa| !isa.is_available()) {
        let rule = Sgd::default();
        let mut memory = Memory::random(&rule, DTYPES[0], 4, 1);
        let before = memory.bits();
        let error = memory.update(&rule, isa, 0, &[segment(0..4, 1)], &SCALARS);
        assert_eq!(error, Err(Error::Isa { isa }));
        assert_eq!(memory.bits(), before);
    }
}
