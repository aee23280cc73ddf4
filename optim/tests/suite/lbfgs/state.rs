//! State between steps, across saving and restoring, and refused states.

use crate::common::Values;
use crate::lbfgs::problems::{classic_start, rosenbrock};
use crate::lbfgs::{searching, wide};
use meshstep_optim::{Alone, History, Lbfgs, LbfgsState, Loss, Stop};
use meshstep_tensor::{DType, Meter, Slice, SliceMut};
use std::convert::Infallible;

fn step(rule: &Lbfgs, x: &mut Values, state: &mut LbfgsState) {
    let problem = rosenbrock();
    let closure = |x: Slice<'_>, mut g: SliceMut<'_>| {
        let mut wide_g = vec![0.0; x.len()];
        let loss = problem(&wide(x), &mut wide_g);
        g.cast_from(wide_g[..].into()).unwrap();
        Ok::<_, Infallible>(Loss::Whole(loss))
    };
    rule.step(x.slice_mut(), closure, &Alone, state).unwrap();
}

#[test]
fn a_saved_state_goes_on_with_the_same_bits() {
    const LEN: usize = 10;
    let fixed = Lbfgs { lr: 1e-3, max_iter: 4, history_len: 3, ..Lbfgs::default() };
    for rule in [fixed, Lbfgs { max_iter: 4, history_len: 3, ..searching() }] {
        let [exact, bf16, f16] = [History::Exact, History::Bf16, History::F16];
        for (dtype, history) in
            [(DType::F32, exact), (DType::F64, exact), (DType::F32, bf16), (DType::F32, f16)]
        {
            let rule = Lbfgs { history, ..rule.clone() };
            let mut start = classic_start(LEN).into_iter();
            let mut x = Values::new(dtype, LEN, || start.next().unwrap());
            let mut state = rule.state(LEN, dtype, &Meter::new()).unwrap();
            // Before the history is full, when it is full, and later.
            for round in 0..4 {
                step(&rule, &mut x, &mut state);
                let mut other = rule.state(LEN, dtype, &Meter::new()).unwrap();
                for ((name, from), (to_name, mut to)) in state.vectors().zip(other.vectors_mut()) {
                    assert_eq!(name, to_name);
                    to.copy_from(from).unwrap();
                }
                other.restore(&state.words()).unwrap();
                let mut begun = wide(x.slice()).into_iter();
                let mut there = Values::new(dtype, LEN, || begun.next().unwrap());
                step(&rule, &mut there, &mut other);
                step(&rule, &mut x, &mut state);
                assert_eq!(x.bits(), there.bits(), "{dtype} {round} {rule:?}");
                assert_eq!(state.words(), other.words());
            }
            assert_eq!(state.pairs(), 3);
        }
    }
}

#[test]
fn steps_of_no_length_leave_the_point() {
    for rule in [Lbfgs::default(), searching()] {
        let rule = Lbfgs { lr: 0.0, max_iter: 3, max_eval: Some(5), ..rule };
        let mut start = classic_start(10).into_iter();
        let mut x = Values::new(DType::F64, 10, || start.next().unwrap());
        let mut state = rule.state(10, DType::F64, &Meter::new()).unwrap();
        for _ in 0..3 {
            step(&rule, &mut x, &mut state);
            assert_eq!(wide(x.slice()), classic_start(10), "{:?}", rule.line_search);
        }
    }
}

/// A direction with an element beyond f32, from a closure that is finite everywhere: the product of its other elements with `y` would
/// pass as curvature.
#[test]
fn a_direction_that_is_not_finite_makes_no_pair() {
    let rule = Lbfgs { lr: 1e35, max_iter: 4, max_eval: Some(100), ..Lbfgs::default() };
    let mut state = rule.state(2, DType::F32, &Meter::new()).unwrap();
    let mut evaluations = 0.0f32;
    let mut closure = |_: Slice<'_>, mut g: SliceMut<'_>| {
        evaluations += 1.0;
        // Adjacent f32 numbers are 2^43 apart there.
        g.typed_mut::<f32>()
            .unwrap()
            .copy_from_slice(&[1e20 - evaluations * 2f32.powi(44), 0.5 + evaluations % 2.0]);
        Ok::<_, Infallible>(Loss::Whole(f64::from(-evaluations)))
    };
    let mut x = [0f32; 2];
    let report = rule.step((&mut x[..]).into(), &mut closure, &Alone, &mut state).unwrap();
    assert!(x[0] == f32::NEG_INFINITY && report.iterations == 4, "{x:?} {report:?}");
    assert_eq!(state.pairs(), 1);
    // A direction that is not finite is not a short step either, however small its other elements are.
    let rule = Lbfgs { lr: 1e-30, tolerance_change: 2.0, ..rule };
    let report = rule.step((&mut x[..]).into(), &mut closure, &Alone, &mut state).unwrap();
    assert_eq!((report.stop, report.iterations), (Stop::Loss, 1), "{report:?}");
}
