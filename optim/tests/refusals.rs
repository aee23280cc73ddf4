//! What cannot work is refused by name, says what would, and leaves all memory as it was.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "tests fail by panicking and say what they skip"
)]

mod common;

use common::{DTYPES, Memory, Values, rules, segment};
use meshstep_optim::{Adam, AdamW, Error, Flat, Isa, Rounding, Rule, Scalars, Segment, Sgd, accumulate};
use meshstep_tensor::{DType, Queue, SliceMut};

const SCALARS: Scalars = Scalars { lr: 0.1, grad_scale: 1.0, zero_grads: true, rounding: Rounding::Nearest };

/// Refused with a message that contains every one of `says`; not a bit has changed.
fn refused(rule: &dyn Rule, memory: &Memory, segments: &[Segment], scalars: &Scalars, says: &[&str]) {
    for isa in Isa::available() {
        let mut after = memory.clone();
        let error = after.update(rule, isa, 0, segments, scalars).unwrap_err().to_string();
        assert!(says.iter().all(|says| error.contains(says)), "{error:?} should say {says:?}");
        assert_eq!(after.bits(), memory.bits());
    }
}

#[test]
fn hyperparameters_out_of_range() {
    let usual = AdamW::default;
    let (nan, inf) = (f64::NAN, f64::INFINITY);
    let adam: Vec<(AdamW, &str)> = [-0.1, 1.0, nan]
        .into_iter()
        .flat_map(|x| [(AdamW { beta1: x, ..usual() }, "beta1"), (AdamW { beta2: x, ..usual() }, "beta2")])
        .chain([-1e-8, nan, inf, 1e39].map(|eps| (AdamW { eps, ..usual() }, "eps")))
        .chain([-1.0, nan, inf, 1e39].map(|weight_decay| (AdamW { weight_decay, ..usual() }, "weight_decay")))
        .collect();
    for (rule, name) in adam {
        let AdamW { beta1, beta2, eps, weight_decay, maximize } = rule;
        let coupled = Adam { beta1, beta2, eps, weight_decay, maximize };
        for rule in [&rule as &dyn Rule, &coupled] {
            let memory = Memory::random(rule, DTYPES[0], 40, 1);
            assert!(rule.check().is_err());
            refused(rule, &memory, &[segment(0..40, 1)], &SCALARS, &[rule.name(), name, "use"]);
        }
    }
    let sgd = [
        (Sgd { momentum: -0.1, ..Sgd::default() }, "momentum = -0.1"),
        (Sgd { momentum: nan, ..Sgd::default() }, "momentum = NaN"),
        (Sgd { dampening: inf, momentum: 0.5, ..Sgd::default() }, "dampening = inf"),
        (Sgd { weight_decay: -1.0, ..Sgd::default() }, "weight_decay = -1"),
        (Sgd { nesterov: true, ..Sgd::default() }, "momentum > 0"),
        (Sgd { nesterov: true, momentum: 0.5, dampening: 0.5, ..Sgd::default() }, "dampening = 0"),
    ];
    for (rule, says) in sgd {
        let memory = Memory::random(&rule, DTYPES[0], 40, 1);
        refused(&rule, &memory, &[segment(0..40, 1)], &SCALARS, &["sgd", says, "use"]);
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
        // f64 parameters can be given more.
        let mut wide = Memory::random(&*rule, DTYPES[7], 40, 1);
        let scalars = Scalars { grad_scale: 1e39, ..SCALARS };
        assert_eq!(wide.update(&*rule, Isa::detect(), 0, &segments, &scalars), Ok(()));
    }
}

#[test]
fn segments_that_do_not_fit() {
    let backwards = Segment::new(std::ops::Range { start: 9, end: 3 }, 1);
    let table: [(&[Segment], &[&str]); 6] = [
        (&[segment(0..5, 1), segment(30..41, 1)], &["segment 1", "30..41", "40"]),
        (&[segment(50..60, 1)], &["segment 0", "50..60"]),
        (&[backwards], &["9..3"]),
        (&[segment(0..9, 1), segment(8..20, 1)], &["segment 1", "8", "9", "overlap"]),
        (&[segment(20..30, 1), segment(0..9, 1)], &["segment 1", "sort"]),
        (&[segment(0..9, 1), segment(9..20, 0)], &["segment 1", "t = 0"]),
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
            let error =
                accumulate((&mut dst[..]).into(), src.slice(), weight, first).unwrap_err().to_string();
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
    assert!(accumulate((&mut integers[..]).into(), (&more[..]).into(), 1.0, true).is_err());
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
