//! Invalid hyperparameters and memory, failing closures, and values that are not finite.

use crate::common::Random;
use crate::lbfgs::problems::{classic_start, rosenbrock, waves};
use crate::lbfgs::shards::{Meeting, Seat};
use meshstep_optim::{Alone, Error, Iterate, Lbfgs, LbfgsError, LineSearch, Loss, Reduce, ReduceError, Stop};
use meshstep_tensor::{DType, Meter, Slice, SliceMut};
use std::convert::Infallible;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

const SEARCHES: [LineSearch; 2] = [LineSearch::None, LineSearch::StrongWolfe];

fn rule(line_search: LineSearch) -> Lbfgs {
    Lbfgs { line_search, max_iter: 100, ..Lbfgs::default() }
}

#[test]
fn hyperparameters_out_of_range_are_named() {
    let good = Lbfgs::default();
    let cases = [
        ("lr", Lbfgs { lr: -0.1, ..good.clone() }),
        ("lr", Lbfgs { lr: f64::NAN, ..good.clone() }),
        ("tolerance_grad", Lbfgs { tolerance_grad: -1.0, ..good.clone() }),
        ("tolerance_change", Lbfgs { tolerance_change: f64::INFINITY, ..good.clone() }),
        ("max_iter", Lbfgs { max_iter: 0, max_eval: Some(1), ..good.clone() }),
        ("max_eval", Lbfgs { max_eval: Some(0), ..good.clone() }),
        ("history_len", Lbfgs { history_len: 0, ..good.clone() }),
    ];
    for (expected, rule) in cases {
        let refused = rule.state(1, DType::F64, &Meter::new()).map(|_| ());
        assert!(matches!(refused, Err(Error::Hyperparameter { name, .. }) if name == expected), "{rule:?}");
    }
    assert_eq!(good.check(), Ok(()));
}

type Told = Result<Loss, String>;

fn step(
    rule: &Lbfgs,
    x: SliceMut<'_>,
    state: &mut meshstep_optim::LbfgsState,
    loss: impl FnMut(Slice<'_>, SliceMut<'_>) -> Told,
) -> Result<meshstep_optim::LbfgsReport, LbfgsError<String>> {
    rule.step(x, loss, &Alone, state)
}

#[test]
fn memory_that_does_not_fit_is_refused() {
    let rule = rule(LineSearch::StrongWolfe);
    let meter = Meter::new();
    let bad = rule.state(3, DType::BF16, &meter).map(|_| ());
    assert!(matches!(bad, Err(Error::DType { given: DType::BF16, .. })));
    let mut state = rule.state(3, DType::F64, &meter).unwrap();
    let never = |_: Slice<'_>, _: SliceMut<'_>| -> Told { panic!("not to be called") };
    let len = step(&rule, (&mut [0f64; 4][..]).into(), &mut state, never);
    assert!(matches!(len, Err(LbfgsError::Invalid(Error::Len { given: 4, expected: 3, .. }))));
    let dtype = step(&rule, (&mut [0f32; 3][..]).into(), &mut state, never);
    assert!(matches!(dtype, Err(LbfgsError::Invalid(Error::DType { given: DType::F32, .. }))));
    let longer = Lbfgs { history_len: 7, ..rule.clone() };
    let history = step(&longer, (&mut [0f64; 3][..]).into(), &mut state, never);
    assert!(matches!(history, Err(LbfgsError::Invalid(Error::Len { given: 7, expected: 100, .. }))));
    let fixed = Lbfgs { line_search: LineSearch::None, ..rule.clone() };
    let mut smaller = fixed.state(3, DType::F64, &meter).unwrap();
    let search = step(&rule, (&mut [0f64; 3][..]).into(), &mut smaller, never);
    assert!(matches!(search, Err(LbfgsError::Invalid(Error::Len { .. }))));
}

#[test]
fn a_first_point_that_is_not_finite_is_an_error() {
    for search in SEARCHES {
        for (loss, grad) in [(f64::NAN, 1.0), (f64::INFINITY, 1.0), (1.0, f64::NAN), (1.0, f64::NEG_INFINITY)]
        {
            let rule = rule(search);
            let mut state = rule.state(2, DType::F64, &Meter::new()).unwrap();
            let mut x = [1.0, 2.0];
            let bad = |_: Slice<'_>, mut g: SliceMut<'_>| -> Told {
                g.typed_mut::<f64>().unwrap().copy_from_slice(&[grad, 1.0]);
                Ok(Loss::Part(loss))
            };
            let result = step(&rule, (&mut x[..]).into(), &mut state, bad);
            let expected = u64::from(!grad.is_finite());
            assert!(
                matches!(result, Err(LbfgsError::NotFinite { non_finite, .. }) if non_finite == expected),
                "{result:?}"
            );
            assert_eq!((x, state.iterations()), ([1.0, 2.0], 0));
        }
    }
}

#[test]
fn steps_into_what_is_not_finite_shrink() {
    // -log x is undefined for x <= 0; from 0.5 a full step of lr 100 lands there, or at an infinite loss.
    for search in SEARCHES {
        for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let rule = Lbfgs { lr: 100.0, max_eval: Some(1000), ..rule(search) };
            let mut state = rule.state(1, DType::F64, &Meter::new()).unwrap();
            let mut x = [5.0f64];
            let barrier = |x: Slice<'_>, mut g: SliceMut<'_>| -> Told {
                let x = x.typed::<f64>().unwrap()[0];
                g.typed_mut::<f64>().unwrap()[0] = if x > 0.0 { 1.0 - 1.0 / x } else { bad };
                Ok(Loss::Whole(if x > 0.0 { x - libm::log(x) } else { bad }))
            };
            let rule = if search == LineSearch::None { Lbfgs { max_iter: 3, ..rule } } else { rule };
            let report = step(&rule, (&mut x[..]).into(), &mut state, barrier).unwrap();
            println!("{search:?} into {bad}: {report:?}");
            assert!(report.loss.is_finite() && x[0] > 0.0 || search == LineSearch::None, "{x:?} {report:?}");
            assert!(search == LineSearch::None || (x[0] - 1.0).abs() < 1e-3, "{x:?}");
            assert!(report.evaluations > 2, "some trials were not finite");
            assert!(search != LineSearch::None || report.stop == Stop::Iterations, "{report:?}");
        }
    }
}

#[test]
fn a_direction_without_a_finite_point_ends_the_step_where_it_was() {
    for search in SEARCHES {
        let rule = rule(search);
        let mut state = rule.state(1, DType::F64, &Meter::new()).unwrap();
        let mut x = [5.0f64];
        let cliff = |x: Slice<'_>, mut g: SliceMut<'_>| -> Told {
            g.typed_mut::<f64>().unwrap()[0] = 1.0;
            Ok(Loss::Whole(if x.typed::<f64>().unwrap()[0] == 5.0 { 1.0 } else { f64::NAN }))
        };
        let report = step(&rule, (&mut x[..]).into(), &mut state, cliff).unwrap();
        assert_eq!((report.stop, x, report.iterations, state.iterations()), (Stop::NotFinite, [5.0], 0, 0));
    }
}

#[test]
fn a_closure_that_fails_leaves_an_accepted_point_and_the_run_goes_on() {
    for search in SEARCHES {
        let problem = rosenbrock();
        let rule = Lbfgs { tolerance_change: 1e-14, max_eval: Some(1000), max_iter: 300, ..rule(search) };
        let lr = if search == LineSearch::None { 0.3 } else { 1.0 };
        let rule = Lbfgs { lr, ..rule };
        let mut state = rule.state(4, DType::F64, &Meter::new()).unwrap();
        let mut x = classic_start(4);
        let mut calls = 0;
        let mut accepted = vec![x.clone()];
        let mut failures = 0;
        let mut random = Random::new(3);
        for _ in 0..200 {
            let closure = |x: Slice<'_>, g: SliceMut<'_>| -> Told {
                calls += 1;
                if random.next().is_multiple_of(5) {
                    Err(format!("call {calls}"))
                } else {
                    Ok(Loss::Whole(problem(x.typed().unwrap(), g.into_typed().unwrap())))
                }
            };
            let each = |at: &Iterate<'_>| accepted.push(crate::lbfgs::wide(at.x));
            match rule.step_with((&mut x[..]).into(), closure, &Alone, &mut state, each) {
                Err(LbfgsError::Closure(said)) => {
                    failures += 1;
                    assert_eq!(said, format!("call {calls}"));
                    assert!(accepted.contains(&x), "{search:?}: {x:?} was never accepted");
                }
                Err(other) => panic!("{other}"),
                Ok(_) => break,
            }
        }
        assert!(failures > 3, "{failures}");
        let distance = x.iter().map(|x| (x - 1.0).abs()).fold(0.0, f64::max);
        println!("{search:?}: {failures} failures, {distance:e} from the minimum");
        assert!(search == LineSearch::None || distance < 1e-4, "{x:?}");
    }
}

/// Reduction that fails once, after a number of exchanges.
struct Fails(AtomicU64);

impl Reduce for Fails {
    fn fold(&self, _: &mut [u64], _: &mut [u64]) -> Result<(), ReduceError> {
        match self.0.fetch_sub(1, Relaxed) {
            0 => Err(ReduceError::new(std::io::Error::other("gone"))),
            _ => Ok(()),
        }
    }

    fn part(&self) -> usize {
        0
    }
}

/// Every exchange fails once, including the one that measures a full history again after a refused pair.
#[test]
fn a_run_goes_on_from_a_failed_exchange_as_if_there_had_been_none() {
    let problem = waves();
    let closure = |x: Slice<'_>, g: SliceMut<'_>| -> Result<Loss, Infallible> {
        Ok(Loss::Whole(problem(x.typed().unwrap(), g.into_typed().unwrap())))
    };
    for (history_len, search) in [1, 2, 3].into_iter().flat_map(|len| SEARCHES.map(|search| (len, search))) {
        let rule = Lbfgs { lr: 1.0, history_len, max_iter: 13, max_eval: Some(100), ..rule(search) };
        let x0: Vec<f64> = (0..6).map(|i| 0.3 + 0.4 * f64::from(i)).collect();
        let run = |reduce: &dyn Reduce| {
            let mut state = rule.state(6, DType::F64, &Meter::new()).unwrap();
            let (mut x, mut accepted): (_, Vec<Vec<f64>>) = (x0.clone(), Vec::new());
            let mut each = |at: &Iterate<'_>| {
                // A step begins at the end of the previous one.
                let at = crate::lbfgs::wide(at.x);
                if accepted.last() != Some(&at) {
                    accepted.push(at);
                }
            };
            let first = rule.step_with((&mut x[..]).into(), closure, reduce, &mut state, &mut each);
            if let Err(error) = &first {
                assert!(matches!(error, LbfgsError::Reduce(_)), "{error}");
                rule.step_with((&mut x[..]).into(), closure, reduce, &mut state, &mut each).unwrap();
            }
            (accepted, first.ok())
        };
        let (whole, report) = run(&Alone);
        let report = report.unwrap();
        assert!(search == LineSearch::StrongWolfe || report.folds == report.evaluations + 1, "{report:?}");
        for exchange in 0..report.folds {
            let (accepted, ended) = run(&Fails(AtomicU64::new(exchange)));
            let alike = accepted.iter().zip(&whole).take_while(|(a, b)| a == b).count();
            assert!(ended.is_none() && alike == accepted.len().min(whole.len()), "{exchange}: {alike}");
        }
    }
}

/// Two shards with one element each; `closure` receives its shard and the number of the call.
fn two_shards(
    rule: impl Fn(usize) -> Lbfgs + Sync,
    closure: impl Fn(usize, u64) -> Told + Sync,
) -> Vec<Result<Stop, LbfgsError<String>>> {
    let meeting = &Meeting::new(2, 2);
    let shard = |i: usize| {
        let rule = rule(i);
        let mut state = rule.state(1, DType::F64, &Meter::new()).unwrap();
        let (mut x, mut calls) = ([1.0f64], 0);
        let told = |x: Slice<'_>, mut g: SliceMut<'_>| -> Told {
            calls += 1;
            g.typed_mut::<f64>().unwrap().copy_from_slice(x.typed().unwrap());
            closure(i, calls)
        };
        rule.step((&mut x[..]).into(), told, &Seat(meeting, i), &mut state).map(|r| r.stop)
    };
    let shard = &shard;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..2).map(|i| scope.spawn(move || shard(i))).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

#[test]
fn a_failure_on_one_shard_is_an_error_on_all() {
    for search in SEARCHES {
        for at in [1, 2] {
            let fails = |shard: usize, call: u64| {
                if (shard, call) == (1, at) {
                    Err("no data".to_owned())
                } else {
                    Ok(Loss::Part(1.0 / call as f64))
                }
            };
            let results = two_shards(|_| rule(search), fails);
            assert!(matches!(results[0], Err(LbfgsError::Elsewhere { part: 1 })), "{results:?}");
            assert!(
                matches!(&results[1], Err(LbfgsError::Closure(said)) if said == "no data"),
                "{results:?}"
            );
        }
    }
}

#[test]
fn shards_that_differ_are_told() {
    let whole = |shard: usize, _| Ok(Loss::Whole(shard as f64));
    for result in two_shards(|_| rule(LineSearch::None), whole) {
        assert!(matches!(result, Err(LbfgsError::LossDiffers { low: 0.0, high: 1.0 })), "{result:?}");
    }
    let kinds = |shard: usize, _| Ok(if shard == 0 { Loss::Whole(1.0) } else { Loss::Part(1.0) });
    for result in two_shards(|_| rule(LineSearch::None), kinds) {
        assert!(matches!(result, Err(LbfgsError::Parted)), "{result:?}");
    }
    let rules = |shard: usize| Lbfgs { lr: 1.0 + shard as f64, ..Lbfgs::default() };
    for result in two_shards(rules, |_, _| Ok(Loss::Part(1.0))) {
        assert!(matches!(result, Err(LbfgsError::Parted)), "{result:?}");
    }
}
