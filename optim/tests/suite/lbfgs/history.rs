//! A history of 16 bits: the recursion over rounded pairs, its bits on any shards, its range, its memory, and refusals.

use crate::common::Random;
use crate::lbfgs::problems::{Problem, classic_start, least_squares, logistic, rosenbrock, waves};
use crate::lbfgs::reference::{self, Rounding};
use crate::lbfgs::shards::{Trace, ranges, run};
use crate::lbfgs::{relative, searching, wide};
use meshstep_optim::{Alone, Error, History, Lbfgs, LbfgsError, LbfgsState, LineSearch, Loss, Stop};
use meshstep_tensor::{Category, DType, Meter, Slice, SliceMut};
use std::convert::Infallible;

const ROUNDED: [History; 2] = [History::Bf16, History::F16];

fn alone(rule: &Lbfgs, problem: &Problem, x0: &[f64]) -> Trace {
    run(rule, problem, x0, &ranges(x0.len(), 1), DType::F32)
}

/// `sum a_i / 2 (x_i - 1)^2` with `a_i` from `size` to about `10 size`.
fn bowl(size: f64) -> Problem {
    Box::new(move |x, g| {
        let mut loss = 0.0;
        for (i, (g, x)) in g.iter_mut().zip(x).enumerate() {
            let steep = size * (1.0 + (i * 7 % 10) as f64 + (i % 13) as f64 / 17.0);
            *g = steep * (x - 1.0);
            loss += steep * (x - 1.0).powi(2) / 2.0;
        }
        loss
    })
}

/// Problems, starts and learning rates at which rounding shows and little else does.
fn cases() -> Vec<(&'static str, Problem, Vec<f64>, f64)> {
    let mut random = Random::new(3);
    let anywhere = (0..300).map(|_| 3.0 * random.unit()).collect();
    vec![
        ("rosenbrock", rosenbrock(), classic_start(10), 0.1),
        ("logistic", logistic(60, 12, 0.01), vec![0.0; 12], 0.5),
        ("least squares", least_squares(40, 8), vec![0.0; 8], 0.5),
        ("quadratic", bowl(1.0), anywhere, 0.5),
        ("waves", waves(), (0..6).map(|i| 0.3 + 0.4 * f64::from(i)).collect(), 0.5),
    ]
}

/// The reference differs in rounding errors of f32 alone; without the pairs' rounding it differs by many times more.
#[test]
fn the_direction_is_the_recursion_over_rounded_pairs() {
    for (name, problem, x0, lr) in cases() {
        for (history, rounding) in ROUNDED.into_iter().zip([Rounding::Bf16, Rounding::F16]) {
            for history_len in [1, 3, 100] {
                let rule =
                    Lbfgs { lr, history_len, history, max_iter: 7, max_eval: Some(100), ..Lbfgs::default() };
                let trace = alone(&rule, &problem, &x0);
                let setting = (lr, history_len, 6);
                let rounded = reference::fixed_step_of_f32(&problem, &x0, setting, rounding);
                let exact = reference::fixed_step_of_f32(&problem, &x0, setting, Rounding::None);
                let worst = |plain: &[Vec<f64>]| {
                    let pairs = trace.iterates[1..].iter().zip(plain);
                    pairs.map(|(ours, plain)| relative(ours, plain)).fold(0.0, f64::max)
                };
                let (of_rounded, of_exact) = (worst(&rounded), worst(&exact));
                println!("{name}, {history:?} of {history_len}: {of_rounded:.1e}, unrounded {of_exact:.1e}");
                assert_eq!(trace.iterates.len(), 7);
                assert!(of_rounded < 1e-6 && of_exact > 1e-5, "{name} {history:?} {history_len}");
            }
        }
    }
}

/// Bound on the difference of a direction from that of exact pairs, by the largest element.
#[test]
fn directions_are_near_those_of_exact_pairs() {
    for (name, problem, x0, lr) in cases() {
        for (rounding, bound) in [(Rounding::Bf16, 0.02), (Rounding::F16, 2e-3)] {
            let worst = reference::directions_apart(&problem, &x0, (lr, 5, 20), rounding);
            println!("{name}, {rounding:?}: directions within {worst:.1e}");
            assert!(worst > 0.0 && worst < bound, "{name} {rounding:?}: {worst:e}");
        }
    }
}

#[test]
fn a_line_search_needs_about_as_many_iterations() {
    for (name, problem, x0, _) in cases().into_iter().take(4) {
        let of = |history| {
            let rule = Lbfgs { tolerance_grad: 1e-4, history_len: 10, history, ..searching() };
            alone(&rule, &problem, &x0).report
        };
        let exact = of(History::Exact);
        for history in ROUNDED {
            let rounded = of(history);
            println!("{name}, {history:?}: {} iterations, exact {}", rounded.iterations, exact.iterations);
            let least = exact.loss.abs().max(1e-4);
            assert!((rounded.loss - exact.loss).abs() < 1e-3 * least, "{name}: {rounded:?} {exact:?}");
            assert!(rounded.iterations <= exact.iterations * 3 / 2 + 3, "{name}: {rounded:?} {exact:?}");
        }
    }
}

#[test]
fn any_number_of_shards_gives_the_same_bits() {
    for (name, problem, x0, lr) in cases() {
        for history in ROUNDED {
            let fixed = Lbfgs { lr, max_iter: 20, history_len: 4, ..Lbfgs::default() };
            for rule in [fixed, Lbfgs { max_iter: 20, history_len: 4, ..searching() }] {
                let (rule, end) = (Lbfgs { history, ..rule }, x0.len());
                let one = alone(&rule, &problem, &x0);
                let odd = vec![0..0, 0..3, 3..3, 3..end, end..end];
                for cut in (2..=4).map(|parts| ranges(end, parts)).chain([odd]) {
                    assert_eq!(
                        run(&rule, &problem, &x0, &cut, DType::F32),
                        one,
                        "{name} {history:?} {cut:?}"
                    );
                }
            }
        }
    }
}

/// Several pieces and several threads in one run, few elements in the other.
#[test]
fn long_vectors_have_the_bits_of_their_shards() {
    let len = 140_001;
    let (problem, mut random) = (bowl(1.0), Random::new(8));
    let x0: Vec<f64> = (0..len).map(|_| random.unit() * 2f64.powi((random.unit() * 12.0) as i32)).collect();
    for history in ROUNDED {
        for line_search in [LineSearch::None, LineSearch::StrongWolfe] {
            let rule =
                Lbfgs { lr: 0.4, max_iter: 4, history_len: 2, line_search, history, ..Lbfgs::default() };
            let rule = Lbfgs { max_eval: Some(100), tolerance_change: 0.0, ..rule };
            let one = alone(&rule, &problem, &x0);
            assert!(
                one == run(&rule, &problem, &x0, &ranges(len, 9), DType::F32),
                "{history:?} {line_search:?}"
            );
            assert_eq!(one.report.stop, Stop::Iterations);
        }
    }
}

/// One iteration along the gradient of `bowl(size)` from zero, then one along the direction of the first pair.
fn two_iterations(size: f64, history: History) -> (Vec<f64>, usize) {
    let rule = Lbfgs { lr: 0.5 / size, max_iter: 3, max_eval: Some(100), history, ..Lbfgs::default() };
    let rule = Lbfgs { tolerance_grad: 0.0, tolerance_change: 0.0, ..rule };
    let problem = bowl(size);
    let trace = alone(&rule, &problem, &[0.0; 30]);
    let pairs = {
        let mut state = rule.state(30, DType::F32, &Meter::new()).unwrap();
        let mut x = [0f32; 30];
        step(&rule, (&mut x[..]).into(), &mut state, &problem).unwrap();
        state.pairs()
    };
    (trace.iterates[2].clone(), pairs)
}

fn step(
    rule: &Lbfgs,
    x: SliceMut<'_>,
    state: &mut LbfgsState,
    problem: &Problem,
) -> Result<(), LbfgsError<Infallible>> {
    let closure = |x: Slice<'_>, mut g: SliceMut<'_>| {
        let mut wide_g = vec![0.0; x.len()];
        let loss = problem(&wide(x), &mut wide_g);
        g.cast_from(wide_g[..].into()).unwrap();
        Ok(Loss::Whole(loss))
    };
    rule.step(x, closure, &Alone, state).map(|_| ())
}

/// Changes of the gradient beyond f16's largest number, 65504, and below its smallest, 2^-24.
#[test]
fn f16_rows_have_the_range_of_f32() {
    for size in [1e9, 1e7, 1e-8] {
        let (exact, pairs) = two_iterations(size, History::Exact);
        let (rounded, same_pairs) = two_iterations(size, History::F16);
        let apart = relative(&rounded, &exact);
        println!("{size:e}: {apart:.1e} apart, {pairs} pairs");
        assert!(pairs > 0 && same_pairs == pairs, "{size:e}: {pairs} {same_pairs}");
        assert!(apart < 2e-3, "{size:e}: {apart:e}");
    }
}

/// A change of the gradient that f32 holds and bf16 does not.
#[test]
fn a_pair_that_bf16_cannot_hold_is_refused() {
    let mut pairs = Vec::new();
    for history in [History::Exact, History::Bf16, History::F16] {
        let rule = Lbfgs { lr: 1.0, max_iter: 2, max_eval: Some(100), history, ..Lbfgs::default() };
        let mut state = rule.state(2, DType::F32, &Meter::new()).unwrap();
        let mut evaluations = 0;
        let closure = |_: Slice<'_>, mut g: SliceMut<'_>| {
            evaluations += 1;
            let large = if evaluations == 1 { -1.7e38 } else { 1.7e38 };
            g.typed_mut::<f32>().unwrap().copy_from_slice(&[large, 1.0]);
            Ok::<_, Infallible>(Loss::Whole(-f64::from(evaluations)))
        };
        rule.step((&mut [0f32; 2][..]).into(), closure, &Alone, &mut state).unwrap();
        pairs.push(state.pairs());
        let finite = |(_, vector): (String, Slice<'_>)| wide(vector).iter().all(|x| x.is_finite());
        let refused = state.vectors().filter(|(name, _)| name == "y0").all(finite);
        assert_eq!(refused, history != History::Bf16);
    }
    assert_eq!(pairs, [1, 0, 1]);
}

#[test]
fn a_rounded_history_takes_half_the_bytes() {
    let (len, history_len) = (1000, 10);
    let bytes = |history| {
        let (meter, rule) = (Meter::new(), Lbfgs { history, history_len, ..Lbfgs::default() });
        let state = rule.state(len, DType::F32, &meter).unwrap();
        let rows = |name: &str| name.starts_with(['d', 'y']) && name != "d";
        let types: Vec<_> =
            state.vectors().filter(|(name, _)| rows(name)).map(|(_, vector)| vector.dtype()).collect();
        assert_eq!(types.len(), 2 * (history_len + 1));
        (meter.live(Category::State), types[0])
    };
    let rows = 2 * (history_len as u64 + 1) * len as u64;
    let other = |vectors: u64| vectors * 4 * len as u64;
    assert_eq!(bytes(History::Exact), (4 * rows + other(3), DType::F32));
    assert_eq!(bytes(History::Bf16), (2 * rows + other(4), DType::BF16));
    assert_eq!(bytes(History::F16), (2 * rows + other(4), DType::F16));
}

#[test]
fn what_does_not_fit_is_refused() {
    let rule = |history| Lbfgs { history, max_iter: 3, history_len: 2, ..Lbfgs::default() };
    for history in ROUNDED {
        let wider = rule(history).state(3, DType::F64, &Meter::new()).map(|_| ());
        assert!(matches!(wider, Err(Error::DType { given: DType::F64, .. })), "{wider:?}");
        let mut state = rule(history).state(3, DType::F32, &Meter::new()).unwrap();
        assert_eq!(state.history(), history);
        for other in [History::Exact, History::Bf16, History::F16].into_iter().filter(|&of| of != history) {
            let told = step(&rule(other), (&mut [0f32; 3][..]).into(), &mut state, &bowl(1.0));
            let expected = Error::History { given: other, expected: history };
            assert!(matches!(told, Err(LbfgsError::Invalid(error)) if error == expected));
            let words = rule(other).state(3, DType::F32, &Meter::new()).unwrap().words();
            assert_eq!(state.restore(&words), Err(expected));
        }
        let mut words = state.words();
        words[0] |= 7 << 32;
        assert!(matches!(state.restore(&words), Err(Error::Scalar { .. })));
    }
    let names =
        |history| rule(history).hyperparameters().into_iter().map(|(name, _)| name).collect::<Vec<_>>();
    assert_eq!(names(History::Bf16)[..7], names(History::Exact)[..]);
    assert_eq!([History::Bf16, History::F16].map(|of| names(of)[7]), ["history_bf16", "history_f16"]);
}

#[test]
fn folds_are_counted() {
    for (name, problem, x0, lr) in cases() {
        let fixed = |history| {
            alone(&Lbfgs { lr, max_iter: 9, max_eval: Some(99), history, ..Lbfgs::default() }, &problem, &x0)
                .report
        };
        let [bf16, f16] = ROUNDED.map(fixed);
        // `waves` refuses pairs, but its history is not full.
        assert_eq!(bf16.folds, bf16.evaluations, "{name}: one an evaluation");
        assert_eq!(f16.folds, f16.evaluations + f16.iterations - 1, "{name}: one more for each pair");
    }
}
