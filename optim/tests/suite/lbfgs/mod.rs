//! L-BFGS against its plain form, on any number of shards, and its errors.

mod history;
mod problems;
mod reference;
mod refusals;
mod shards;
mod state;

use crate::common::{Values, long, tried};
use meshstep_optim::{Lbfgs, LbfgsReport, LineSearch, Stop};
use meshstep_tensor::{DType, Slice};
use problems::{Problem, classic_start, least_squares, logistic, rosenbrock, waves};
use shards::{Trace, ranges, run};
use std::ops::Range;

/// Name, loss, start, learning rate of a fixed step, loss at the minimum.
type Case = (&'static str, Problem, Vec<f64>, f64, f64);

fn cases() -> Vec<Case> {
    vec![
        ("rosenbrock of 10", rosenbrock(), classic_start(10), 0.1, 0.0),
        ("rosenbrock of 1,000", rosenbrock(), vec![0.8; 1000], 1.0, 0.0),
        ("logistic", logistic(60, 12, 0.01), vec![0.0; 12], 1.0, 0.566_701_818_6),
        ("least squares", least_squares(40, 8), vec![0.0; 8], 1.0, 0.121_600_932_59),
    ]
}

fn searching() -> Lbfgs {
    let line_search = LineSearch::StrongWolfe;
    Lbfgs { line_search, max_iter: 300, max_eval: Some(1000), tolerance_change: 1e-14, ..Lbfgs::default() }
}

pub(crate) fn wide(x: Slice<'_>) -> Vec<f64> {
    let mut wide = vec![0.0; x.len()];
    meshstep_tensor::cast(x, (&mut wide[..]).into()).unwrap();
    wide
}

pub(crate) fn no_report() -> LbfgsReport {
    LbfgsReport {
        first_loss: 0.0,
        loss: 0.0,
        grad_norm: 0.0,
        grad_max: 0.0,
        iterations: 0,
        evaluations: 0,
        folds: 0,
        stop: Stop::Loss,
    }
}

fn alone(rule: &Lbfgs, problem: &Problem, x0: &[f64]) -> Trace {
    run(rule, problem, x0, &ranges(x0.len(), 1), DType::F64)
}

fn relative(a: &[f64], b: &[f64]) -> f64 {
    let largest = |x: &mut dyn Iterator<Item = f64>| x.fold(0.0, |m: f64, x| m.max(x.abs()));
    largest(&mut a.iter().zip(b).map(|(a, b)| a - b)) / largest(&mut b.iter().copied())
}

#[test]
fn the_gram_form_is_the_two_loop_recursion() {
    for (name, problem, x0, lr, _) in cases() {
        for history_len in [1, 5, 100] {
            let rule = Lbfgs { lr, history_len, max_iter: 11, ..Lbfgs::default() };
            let trace = alone(&Lbfgs { max_eval: Some(100), ..rule }, &problem, &x0);
            let plain = reference::fixed_step(&problem, &x0, (lr, history_len, 10));
            let pairs = trace.iterates[1..].iter().zip(&plain);
            let worst = pairs.map(|(ours, plain)| relative(ours, plain)).fold(0.0, f64::max);
            println!(
                "{name}, history of {history_len}: {} iterates within {worst:.1e}",
                trace.iterates.len()
            );
            assert!(worst < 1e-9 && trace.iterates.len() >= 8, "{name}, {history_len}: {worst:e}");
        }
    }
}

#[test]
fn a_line_search_reaches_the_minimum() {
    for (name, problem, x0, _, minimum) in cases() {
        let trace = alone(&searching(), &problem, &x0);
        let LbfgsReport { loss, grad_max, iterations, evaluations, stop, .. } = trace.report;
        println!(
            "{name}: {loss:e} after {iterations} iterations, {evaluations} evaluations; {grad_max:e}, {stop:?}"
        );
        assert!((loss - minimum).abs() < 1e-9 && grad_max < 1e-4, "{name}: {:?}", trace.report);
        assert!(trace.losses.windows(2).all(|w| w[1] <= w[0]), "a search never goes up");
    }
}

#[test]
fn any_number_of_shards_gives_the_same_bits() {
    let mut row = 0;
    for (name, problem, x0, lr, _) in cases() {
        for rule in [Lbfgs { lr, max_iter: 40, history_len: 7, ..Lbfgs::default() }, searching()] {
            for dtype in [DType::F64, DType::F32] {
                let end = x0.len();
                // More shards than elements to share: the middle ones are empty.
                let odd = vec![0..0, 0..3, 3..3, 3..end, end..end];
                let cuts = (2..=5).map(|parts| ranges(end, parts)).chain([odd]).enumerate();
                // Short runs try each cut with three or four runs, long runs with all.
                let chosen = |i: usize| long() || (i == row % 5 && tried(row, 1));
                let cuts: Vec<_> = cuts.filter(|(i, _)| chosen(*i)).collect();
                row += 1;
                if cuts.is_empty() {
                    continue;
                }
                let one = run(&rule, &problem, &x0, &ranges(end, 1), dtype);
                for (_, cut) in cuts {
                    let many = run(&rule, &problem, &x0, &cut, dtype);
                    assert_eq!(many, one, "{name} {dtype} on shards {cut:?}");
                }
            }
        }
    }
}

/// Long enough that passes run on several threads, while those of its shards do not.
#[test]
fn a_vector_spread_over_threads_has_the_bits_of_its_shards() {
    // Long enough for two threads, and in the long run for more.
    let len = if long() { 300_007 } else { 150_001 };
    let bowl: Problem = Box::new(|x, g| {
        let mut loss = 0.0;
        for (i, (g, x)) in g.iter_mut().zip(x).enumerate() {
            let steep = 1.0 + (i % 97) as f64 / 10.0;
            *g = steep * (x - 1.0);
            loss += steep * (x - 1.0).powi(2) / 2.0;
        }
        loss
    });
    let start = classic_start(len);
    let rule = Lbfgs { lr: 0.5, max_iter: 6, max_eval: Some(100), history_len: 3, ..Lbfgs::default() };
    let one = alone(&rule, &bowl, &start);
    let plain = reference::fixed_step(&bowl, &start, (rule.lr, rule.history_len, 5));
    for (ours, plain) in one.iterates[1..].iter().zip(&plain) {
        assert!(relative(ours, plain) < 1e-9);
    }
    assert_eq!(one.iterates.len(), 6);
    let types = [DType::F64, DType::F32].into_iter().enumerate();
    for (i, rule) in [rule, Lbfgs { max_iter: 5, history_len: 3, ..searching() }].into_iter().enumerate() {
        // Short runs try each with one type.
        for (_, dtype) in types.clone().filter(|(j, _)| tried(2 * i + j, 4)) {
            let one = run(&rule, &bowl, &start, &ranges(len, 1), dtype);
            let ten = run(&rule, &bowl, &start, &ranges(len, 10), dtype);
            assert!(one == ten, "{dtype}, {:?}", rule.line_search);
        }
    }
}

#[test]
fn folds_are_counted() {
    for (name, problem, x0, lr, _) in cases() {
        let fixed = alone(&Lbfgs { lr, ..Lbfgs::default() }, &problem, &x0).report;
        assert_eq!(fixed.folds, fixed.evaluations, "{name}: one an iteration");
        assert!(fixed.evaluations - fixed.iterations <= 1, "{name}: one evaluation an iteration");
        let search = alone(&searching(), &problem, &x0).report;
        assert_eq!(
            search.folds,
            search.evaluations + search.iterations - 1,
            "{name}: one more for each pair"
        );
    }
}

/// A refused pair pushes nothing out of a full history, so the pair that would have left is measured too.
#[test]
fn a_refused_pair_leaves_a_full_history_as_it_was() {
    let (x0, lr) = ((0..6).map(|i| 0.3 + 0.4 * f64::from(i)).collect::<Vec<_>>(), 1.0);
    for history_len in [1, 2, 3] {
        let rule = Lbfgs { lr, history_len, max_iter: 13, max_eval: Some(100), ..Lbfgs::default() };
        let plain = reference::fixed_step(&waves(), &x0, (lr, history_len, 12));
        for parts in [1, 3] {
            let trace = run(&rule, &waves(), &x0, &ranges(x0.len(), parts), DType::F64);
            let pairs = trace.iterates[1..].iter().zip(&plain);
            let worst = pairs.map(|(ours, plain)| relative(ours, plain)).fold(0.0, f64::max);
            let refused = trace.report.folds - trace.report.evaluations;
            println!("history of {history_len} on {parts}: {refused} refused, within {worst:.1e}");
            assert!(worst < 1e-9 && refused > 0 && trace.iterates.len() == 13, "{:?}", trace.report);
        }
    }
}

#[test]
fn every_reason_to_stop_has_its_moment() {
    let slope = |slope: f64| -> Problem {
        Box::new(move |x, g| {
            g.fill(slope);
            slope * x.iter().sum::<f64>()
        })
    };
    let parabola = || -> Problem {
        Box::new(|x, g| {
            g.iter_mut().zip(x).for_each(|(g, x)| *g = 1.2 * x);
            x.iter().map(|x| 0.6 * x * x).sum()
        })
    };
    let flat: Problem = Box::new(|_, g| {
        g.fill(0.5);
        7.0
    });
    let base = Lbfgs { max_iter: 10, lr: 0.01, ..Lbfgs::default() };
    let longer = Lbfgs { max_eval: Some(100), ..base.clone() };
    let few = Lbfgs { max_eval: Some(4), ..base.clone() };
    let searched = |rule: &Lbfgs| Lbfgs { line_search: LineSearch::StrongWolfe, ..rule.clone() };
    let tiny = Lbfgs { lr: 1e-10, ..base.clone() };
    // Rule, loss, reason to stop, and the iterations and evaluations until then.
    let cases = [
        (base.clone(), slope(1e-7), Stop::Gradient, 0, 1),
        (base.clone(), slope(1.1e-7), Stop::Direction, 1, 1),
        (base.clone(), slope(3e-5), Stop::Direction, 1, 1),
        (longer.clone(), slope(1.0), Stop::Iterations, 10, 10),
        (few.clone(), slope(1.0), Stop::Evaluations, 3, 4),
        (tiny.clone(), slope(1.0), Stop::Parameters, 1, 2),
        (base.clone(), flat, Stop::Loss, 1, 2),
        (Lbfgs { lr: 1.0, ..base.clone() }, parabola(), Stop::Gradient, 2, 3),
        (searched(&few), slope(1.0), Stop::Evaluations, 1, 5),
        (searched(&base), slope(1e-7), Stop::Gradient, 0, 1),
    ];
    for (i, (rule, problem, stop, iterations, evaluations)) in cases.into_iter().enumerate() {
        let report = alone(&rule, &problem, &[0.5]).report;
        let counts = (report.stop, report.iterations, report.evaluations);
        println!("case {i}: {report:?}");
        assert_eq!(counts, (stop, iterations, evaluations), "case {i}: {report:?}");
    }
}

/// Runs shards that all have the whole vector and count these ranges of it.
fn all_have_all(
    rule: &Lbfgs,
    problem: &Problem,
    x0: &[f64],
    counted: &[Vec<Range<usize>>],
) -> Vec<(LbfgsReport, Vec<f64>)> {
    let meeting = &shards::Meeting::new(counted.len(), x0.len());
    let shard = &|i: usize| {
        let state = rule.state(x0.len(), DType::F64, &meshstep_tensor::Meter::new()).unwrap();
        let (mut state, mut x) = (state.counting(counted[i].clone()), x0.to_vec());
        let closure = |x: Slice<'_>, g: meshstep_tensor::SliceMut<'_>| {
            let loss = problem(x.typed().unwrap(), g.into_typed().unwrap());
            Ok::<_, std::convert::Infallible>(meshstep_optim::Loss::Whole(loss))
        };
        let report = rule.step((&mut x[..]).into(), closure, &shards::Seat(meeting, i), &mut state);
        (report.unwrap(), x)
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..counted.len()).map(|i| scope.spawn(move || shard(i))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn shards_that_overlap_count_each_element_once() {
    let rule = Lbfgs { max_iter: 30, ..searching() };
    let few = [vec![0..3, 7..7, 7..10], vec![3..5, 5..7]];
    // Ranges that begin and end within a chunk, several in one chunk, and one over many chunks.
    let (cut, len, max_iter) = if long() { (150_000, 200_001, 4) } else { (100_000, 140_001, 3) };
    let many = [vec![0..3, 40_000..40_007, 40_009..cut], vec![3..40_000, 40_007..40_009, cut..len]];
    let runs = [
        (rule.clone(), 10, few),
        (Lbfgs { max_iter, ..rule }, len, many.clone()),
        (Lbfgs { lr: 1e-3, max_iter, ..Lbfgs::default() }, len, many),
    ];
    for (_, (rule, len, counted)) in runs.into_iter().enumerate().filter(|(i, _)| tried(*i, 1)) {
        let (problem, x0) = (rosenbrock(), classic_start(len));
        let one = alone(&rule, &problem, &x0);
        for shard in all_have_all(&rule, &problem, &x0, &counted) {
            assert!(shard == (one.report, one.x.clone()), "{len}, {:?}", rule.line_search);
        }
    }
}

#[test]
fn several_steps_go_on_where_the_last_one_ended() {
    let problem = rosenbrock();
    let rule = Lbfgs { max_iter: 5, ..searching() };
    let mut x = classic_start(10);
    let mut state = rule.state(10, DType::F64, &meshstep_tensor::Meter::new()).unwrap();
    let mut losses = Vec::new();
    for _ in 0..30 {
        let closure = |x: Slice<'_>, g: meshstep_tensor::SliceMut<'_>| {
            let loss = problem(x.typed().unwrap(), g.into_typed().unwrap());
            Ok::<_, std::convert::Infallible>(meshstep_optim::Loss::Whole(loss))
        };
        let report = rule.step((&mut x[..]).into(), closure, &meshstep_optim::Alone, &mut state).unwrap();
        losses.push(report.loss);
    }
    assert!(losses[29] < 1e-15, "{losses:?}");
    assert!(state.pairs() > 5 && state.iterations() > 50, "{state:?}");
    let once = alone(&searching(), &problem, &classic_start(10));
    let first: Vec<f64> = once.iterates[5].clone();
    let rerun = alone(&rule, &problem, &classic_start(10));
    assert_eq!(rerun.x, first, "five iterations are five iterations");
}

#[test]
fn parts_and_means_of_the_loss_are_exact() {
    use meshstep_optim::{Alone, Loss};
    let rule = Lbfgs { max_iter: 1, ..Lbfgs::default() };
    let told = |loss: Loss| {
        let mut state = rule.state(1, DType::F64, &meshstep_tensor::Meter::new()).unwrap();
        let closure = |_: Slice<'_>, mut g: meshstep_tensor::SliceMut<'_>| {
            g.typed_mut::<f64>().unwrap()[0] = 1.0;
            Ok::<_, std::convert::Infallible>(loss)
        };
        rule.step((&mut [0.0][..]).into(), closure, &Alone, &mut state).unwrap().first_loss
    };
    assert_eq!(told(Loss::Whole(0.1)), 0.1);
    assert_eq!(told(Loss::Part(-0.1)), -0.1);
    for weight in [1, 3, 7, 1 << 40] {
        assert_eq!(told(Loss::Mean { value: 0.1, weight }), 0.1, "weight {weight}");
    }
}

/// An empty vector.
#[test]
fn an_empty_vector_is_at_its_minimum() {
    let nothing: Problem = Box::new(|_, _| 1.5);
    let report = alone(&searching(), &nothing, &[]).report;
    assert_eq!((report.stop, report.loss, report.evaluations), (Stop::Gradient, 1.5, 1));
    assert!(Values::new(DType::F64, 0, || 0.0).slice().is_empty());
}
