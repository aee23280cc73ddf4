//! Means keep the workers' mean, up to the precision of the wire type.

use crate::common::{self, Run, WhichRule, draws, tried, turns};
use crate::equal::{End, end, never, run, train};
use crate::naive::{Naive, tokens};
use meshstep_comm::loopback;
use meshstep_local::{
    Exchanged, Fragment, LocalOptimizer, LocalPlan, Merge, Outer, Placement, Weights, What, Workers,
};
use meshstep_shard::{Outcome, Stage, Step};
use meshstep_tensor::{DType, bf16};

/// State of a whole worker: its parameters, then its state vectors; each vector for all parameters.
type Whole = Vec<Vec<Vec<f32>>>;

/// One merge: the workers' weights, the values they sent, their values before it and after it.
struct Met {
    fragment: usize,
    weights: Vec<u64>,
    sent: Vec<Whole>,
    before: Vec<Whole>,
    after: Vec<Whole>,
}

/// Workers' ranks and stages.
const WORLDS: [(usize, usize, Stage); 3] =
    [(3, 1, Stage::Replicated), (4, 2, Stage::Zero1), (4, 2, Stage::Zero2)];

/// Returns every preset that takes means, due at even counts of steps only, except for the every-step phase of post-local SGD.
fn averaging() -> Vec<(&'static str, WhichRule, LocalPlan)> {
    let adamw = WhichRule::AdamW;
    let identity = || Outer::nesterov(1.0, 0.0);
    let delayed = LocalPlan::des_loc(6, 8, 10).with(|f| f.timing.delay = 4);
    let streaming = LocalPlan::streaming_diloco(8, 4, 0, 0.0).with(|f| f.merge = Merge::Outer(identity()));
    vec![
        ("local sgd", WhichRule::Sgd, LocalPlan::local_sgd(4)),
        ("post-local sgd", WhichRule::SgdMomentum, LocalPlan::post_local_sgd(5, 4)),
        ("local adam", adamw, LocalPlan::local_adam(4)),
        ("des-loc", adamw, LocalPlan::des_loc(2, 4, 6)),
        ("des-loc before", adamw, LocalPlan::des_loc(2, 4, 6).placed(Placement::Before)),
        ("mt-dao", WhichRule::TwoMoments, LocalPlan::mt_dao(2, &[Some(4), Some(6)], Some(8))),
        ("qhadopt", WhichRule::QhAdopt, LocalPlan::mt_dao(2, &[Some(4)], Some(6))),
        ("diloco(1, 0)", adamw, LocalPlan::diloco_with(4, identity())),
        ("streaming(1, 0)", adamw, streaming),
        ("delayed", adamw, delayed),
        ("mixed", adamw, LocalPlan::des_loc(2, 4, 6).with(|f| f.taken = 0.25)),
        ("in f64", adamw, LocalPlan::des_loc(2, 4, 6).with(|f| f.wire = Some(DType::F64))),
    ]
}

/// Returns true if all workers skip the step, so that their values before its exchange are those after the previous step.
fn skipped(plan: &LocalPlan, step: u64) -> bool {
    plan.fragments[0].timing.placement.count(step).is_multiple_of(2)
}

/// Returns each step's outcome, and the workers' states after it.
fn steps(run: &Run, plan: &LocalPlan, workers: usize) -> Vec<(Exchanged, Vec<Whole>)> {
    let inside = run.ranks / workers;
    let ranks = loopback::spawn(run.ranks, |world| {
        let rank = world.rank();
        let (comm, between) = Workers::split(world, (rank / inside) as u32).unwrap();
        let mut local = LocalOptimizer::new(run.build(comm).unwrap(), between, plan.clone()).unwrap();
        let step = |step| {
            let mb = local.micro_batch(tokens(rank, step)).unwrap();
            for i in (0..run.lens.len()).rev() {
                let value = |g: f64| if skipped(plan, step) { f32::NAN } else { g as f32 };
                let grad: Vec<f32> = run.gradient(step + 1, 0, rank, i).into_iter().map(value).collect();
                mb.grad(&common::name(i), &grad[..]).unwrap();
            }
            mb.finish().unwrap();
            let done = local.step(run.at(step + 1)).unwrap();
            assert_eq!(matches!(done.outcome, Outcome::Skipped { .. }), skipped(plan, step));
            assert_eq!(done.exchanged.failed, []);
            (done.exchanged, end(run, &local))
        };
        (0..run.steps).map(step).collect::<Vec<_>>()
    });
    let mut ranks: Vec<_> = ranks.unwrap().into_iter().map(Vec::into_iter).collect();
    let all = |_| {
        let (exchanged, ends): (Vec<_>, Vec<_>) = ranks.iter_mut().filter_map(Iterator::next).unzip();
        (exchanged[0].clone(), ends.chunks(inside).map(|ends| whole(run, ends)).collect())
    };
    (0..run.steps).map(all).collect()
}

/// Joins the states of a worker's ranks.
fn whole(run: &Run, ranks: &[End]) -> Whole {
    let zeros: Vec<Vec<f32>> = run.lens.iter().map(|&len| vec![0.0; len]).collect();
    let mut state = vec![zeros; ranks[0].parts[0].1.len()];
    for (i, (range, slots)) in ranks.iter().flat_map(|end| end.parts.iter().enumerate()) {
        for (slot, values) in slots.iter().enumerate() {
            state[slot][i][range.clone()].copy_from_slice(values);
        }
    }
    [vec![ranks[0].params.clone()], state].concat()
}

/// Returns every merge in a skipped step, and checks that all other values stay the same to the bit.
fn meetings(run: &Run, plan: &LocalPlan, workers: usize) -> Vec<Met> {
    let (n, inside) = (plan.fragments.len(), run.ranks / workers);
    let naive = Naive::new(run, plan, workers);
    let mut before: Vec<Whole> = vec![first(&naive); workers];
    // Tokens since a fragment was sent, and the state that was sent with its tokens.
    let mut tokens_since = vec![vec![0; workers]; n];
    let mut sent = vec![(Vec::new(), Vec::new()); n];
    let mut met = Vec::new();
    for (step, (exchanged, after)) in (0..).zip(steps(run, plan, workers)) {
        let skipped = skipped(plan, step);
        if !skipped {
            let of = |rank| tokens(rank, step);
            let add = |w: usize| (w * inside..(w + 1) * inside).map(of).sum::<u64>();
            tokens_since.iter_mut().for_each(|all| (0..workers).for_each(|w| all[w] += add(w)));
        }
        let at_once = |&&f: &&usize| plan.fragments[f].timing.delay == 0;
        for &f in exchanged.sent.iter().chain(exchanged.merged.iter().filter(at_once)) {
            let weights = std::mem::replace(&mut tokens_since[f], vec![0; workers]);
            sent[f] = (weights, before.clone());
        }
        if skipped {
            let mut expected = before.clone();
            for &fragment in &exchanged.merged {
                for (slot, i, range) in naive.places(&plan.fragments[fragment]) {
                    let v = slot.map_or(0, |slot| slot + 1);
                    for (expected, after) in expected.iter_mut().zip(&after) {
                        expected[v][i][range.clone()].copy_from_slice(&after[v][i][range.clone()]);
                    }
                }
                let (mut weights, sent) = sent[fragment].clone();
                if plan.fragments[fragment].weights == Weights::Uniform {
                    weights.fill(1);
                }
                let (before, after) = (before.clone(), after.clone());
                met.push(Met { fragment, weights, sent, before, after });
            }
            assert!(same_bits(&expected, &after), "step {step} has changed what is not due");
        }
        before = after;
    }
    met
}

/// Returns the initial state of all workers.
fn first(naive: &Naive<'_>) -> Whole {
    let worker = &naive.workers[0];
    [vec![worker.params.clone()], worker.state.clone()].concat()
}

fn same_bits(a: &[Whole], b: &[Whole]) -> bool {
    let bits = |all: &[Whole]| -> Vec<u32> {
        all.iter().flatten().flatten().flatten().map(|x| x.to_bits()).collect()
    };
    bits(a) == bits(b)
}

impl Met {
    /// Returns the elements of the fragment: the values sent, before and after.
    fn elements(&self, run: &Run, plan: &LocalPlan) -> Vec<[Vec<f32>; 3]> {
        let naive = Naive::new(run, plan, self.before.len());
        let of = |(slot, i, range): (Option<usize>, usize, std::ops::Range<usize>)| {
            let v = slot.map_or(0, |slot: usize| slot + 1);
            let of = move |all: &[Whole], j: usize| all.iter().map(|whole| whole[v][i][j]).collect();
            range.map(move |j| [&self.sent, &self.before, &self.after].map(|all| of(all, j)))
        };
        naive.places(&plan.fragments[self.fragment]).into_iter().flat_map(of).collect()
    }

    /// Returns the workers' weighted mean of these values, in f64.
    fn mean(&self, values: &[f32], of: impl Fn(f64) -> f64) -> f64 {
        let total: u64 = self.weights.iter().sum();
        let weighed = self.weights.iter().zip(values).map(|(&w, &x)| w as f64 * of(x.into()));
        weighed.sum::<f64>() / total as f64
    }

    fn alike(&self) -> bool {
        self.weights.iter().all(|w| *w == self.weights[0])
    }
}

fn world((workers, inside, stage): (usize, usize, Stage), rule: WhichRule) -> Run {
    Run { rule, steps: 24, gradients: common::Gradients::Rough, ..run(workers, inside) }.stage(stage)
}

/// Half the distance from a number to the next.
pub fn half_ulp(x: f32) -> f64 {
    (f64::from(f32::from_bits(x.abs().to_bits() + 1)) - f64::from(x.abs())) / 2.0
}

#[test]
fn a_mean_leaves_the_workers_mean_to_one_ulp() {
    for (p, (name, rule, plan)) in averaging().into_iter().enumerate().filter(|(p, _)| tried(*p, 1)) {
        for (w, at) in turns(&[(0, WORLDS[0]), (1, WORLDS[1]), (2, WORLDS[2])], p, 1) {
            for weights in turns(&[Weights::Uniform, Weights::Tokens], w + p, 1) {
                let plan = plan.clone().with(|f| weigh(f, weights));
                let run = world(at, rule);
                let met = meetings(&run, &plan, at.0);
                let what = format!("{name}, {weights:?}, {at:?}");
                for f in 0..plan.fragments.len() {
                    let all = met.iter().filter(|met| met.fragment == f);
                    let moved: Vec<usize> = all.map(|met| keeps_the_mean(met, &run, &plan, &what)).collect();
                    // After a skipped step a fragment that is exchanged every step has nothing to merge.
                    let every_step = plan.fragments[f].timing.period == Some(1);
                    assert!(
                        moved.len() > 1 && (every_step || moved.iter().sum::<usize>() > 0),
                        "{what}, {f}: {moved:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn so_it_does_where_a_step_is_taken_too() {
    let identity = Outer::nesterov(1.0, 0.0);
    let plans = [
        (WhichRule::SgdMomentum, LocalPlan::post_local_sgd(1, 4), 1),
        (WhichRule::AdamW, LocalPlan::local_adam(3), 3),
        (WhichRule::AdamW, LocalPlan::diloco_with(3, identity), 3),
        (WhichRule::TwoMoments, LocalPlan::mt_dao(3, &[Some(3), Some(3)], Some(3)), 3),
    ];
    for (rule, plan, steps) in plans {
        for weights in [Weights::Uniform, Weights::Tokens] {
            let plan = plan.clone().with(|f| f.weights = weights);
            let run = Run { steps, ..world((4, 2, Stage::Zero1), rule) };
            let all = |plan: &LocalPlan| -> Vec<Whole> {
                train(&run, plan, 4).chunks(2).map(|ends| whole(&run, ends)).collect()
            };
            // Workers that never exchange have, after as many steps, the values that the others merged.
            let (before, after) = (all(&never()), all(&plan));
            let tokens = |rank: usize| (0..steps).map(|step| tokens(rank, step)).sum::<u64>();
            let of =
                |w: usize| if weights == Weights::Uniform { 1 } else { tokens(2 * w) + tokens(2 * w + 1) };
            let due: Vec<usize> = plan.due(steps - 1, Placement::After).collect();
            assert!(!due.is_empty());
            for fragment in due {
                let (sent, before, after) = (before.clone(), before.clone(), after.clone());
                let met = Met { fragment, weights: (0..4).map(of).collect(), sent, before, after };
                assert!(keeps_the_mean(&met, &run, &plan, "in a step that is taken") > 0);
            }
        }
    }
}

/// By tokens no worker counts before the first step, or after a step that all skipped.
fn weigh(fragment: &mut Fragment, weights: Weights) {
    let timing = &mut fragment.timing;
    timing.during.start = timing.during.start.max(1);
    fragment.weights = if timing.period == Some(1) { Weights::Uniform } else { weights };
}

/// Checks the workers' mean before and after: equal to half an ulp if all take the result. If each worker mixes it in, its rounding
/// adds, and the mean is equal to an ulp of the workers' values. Returns the number of elements that moved.
fn keeps_the_mean(met: &Met, run: &Run, plan: &LocalPlan, what: &str) -> usize {
    let fragment = &plan.fragments[met.fragment];
    let taken = fragment.taken == 1.0 && fragment.timing.delay == 0;
    let mut moved = 0;
    for [sent, before, after] in met.elements(run, plan) {
        let size = [&sent, &before, &after].map(|x| met.mean(x, f64::abs)).into_iter().fold(0.0, f64::max);
        let mean = |x: &[f32]| met.mean(x, |x| x);
        let off = (mean(&after) - mean(&before)).abs();
        let most = if taken { half_ulp(after[0]) } else { f64::from(f32::EPSILON) * size };
        assert!(
            off <= most + 1e-14 * size,
            "{what}, fragment {}: {off:e} {most:e} {before:?} {after:?}",
            met.fragment
        );
        assert!(!taken || after.iter().all(|x| x.to_bits() == after[0].to_bits()), "{what}: {after:?}");
        moved += usize::from(before != after);
    }
    moved
}

/// Rounds to the nearest bf16, ties to even.
fn bf16_of(x: f64) -> f64 {
    let bits = bf16::from_f32(x as f32).to_bits();
    let near = [bits.wrapping_sub(1), bits, bits + 1].map(bf16::from_bits);
    let mut near: Vec<bf16> = near.into_iter().filter(|near| near.is_finite()).collect();
    let away = |near: &bf16| (near.to_f64() - x).abs();
    near.sort_by(|a, b| away(a).total_cmp(&away(b)).then((a.to_bits() & 1).cmp(&(b.to_bits() & 1))));
    near[0].to_f64()
}

/// Returns the bf16 mean: the worker's values are rounded, added in f32 (times their shares) in the workers' order, and the mean is
/// rounded.
fn in_bf16(met: &Met, values: impl Fn(usize) -> f64) -> f64 {
    let (n, total) = (met.weights.len(), met.weights.iter().sum::<u64>() as f64);
    let share = |w: usize| if met.alike() { 1.0 } else { (met.weights[w] as f64 / total) as f32 };
    let sum = (0..n).map(|w| bf16_of(values(w)) as f32 * share(w)).reduce(|sum, x| sum + x).unwrap();
    bf16_of(if met.alike() { sum / n as f32 } else { sum }.into())
}

#[test]
fn of_moments_in_bf16_the_rounded_ones_are_averaged() {
    let moments =
        LocalPlan::des_loc(2, 4, 6).with(|f| f.wire = Some(DType::BF16).filter(|_| f.what != What::Params));
    let placed = moments.clone().placed(Placement::Before);
    let mixed = moments.clone().with(|f| f.taken = 0.25);
    let all: Vec<(&LocalPlan, Weights)> = [&moments, &placed, &mixed]
        .into_iter()
        .flat_map(|plan| [(plan, Weights::Uniform), (plan, Weights::Tokens)])
        .collect();
    for (w, at) in WORLDS.into_iter().enumerate().filter(|(w, _)| tried(*w, 1)) {
        for (plan, weights) in turns(&all, 2 * w, 3) {
            let (run, plan) = (world(at, WhichRule::AdamW), plan.clone().with(|f| weigh(f, weights)));
            let met = meetings(&run, &plan, at.0);
            let mut moments = met.iter().filter(|met| met.fragment > 0).collect::<Vec<_>>();
            for met in &moments {
                let taken = plan.fragments[met.fragment].taken;
                for [_, before, after] in met.elements(&run, &plan) {
                    let mean = in_bf16(met, |w| before[w].into());
                    for (before, after) in before.iter().zip(&after) {
                        let own = f64::from(*before);
                        let expected = if taken == 1.0 { mean } else { own + taken * (mean - own) } as f32;
                        assert_eq!(after.to_bits(), expected.to_bits(), "{weights:?} {before} {mean}");
                    }
                }
            }
            moments.retain(|met| met.fragment == 1);
            assert!(moments.len() > 4);
        }
    }
}

#[test]
fn of_parameters_in_bf16_the_rounded_differences_are_averaged() {
    let plan = LocalPlan::local_sgd(4);
    let diloco = LocalPlan::diloco_with(4, Outer::nesterov(1.0, 0.0));
    let late = plan.clone().with(|f| f.timing.delay = 2);
    let mixed = plan.clone().with(|f| f.taken = 0.25);
    let mut drawn = draws(1);
    for (w, at) in WORLDS.into_iter().enumerate() {
        let plans = [&plan, &diloco, &late, &mixed];
        for (p, plan) in plans.into_iter().enumerate().filter(|_| drawn()) {
            for weights in turns(&[Weights::Uniform, Weights::Tokens], w + p, 1) {
                let plan = plan.clone().with(|f| (f.weights, f.wire) = (weights, Some(DType::BF16)));
                let (run, fragment) = (world(at, WhichRule::AdamW), &plan.fragments[0]);
                let initial: Vec<f32> =
                    (0..run.lens.len()).flat_map(|i| run.initial(i)).map(|x| x as f32).collect();
                // Result of the last exchange, element by element.
                let mut anchor = initial;
                let met = meetings(&run, &plan, at.0);
                assert_eq!(met.len(), if fragment.timing.delay > 0 { 5 } else { 6 });
                for met in &met {
                    for ([sent, before, after], anchor) in
                        met.elements(&run, &plan).into_iter().zip(&mut anchor)
                    {
                        let from = f64::from(*anchor);
                        let mean = from + in_bf16(met, |w| f64::from(sent[w]) - from);
                        for ((sent, before), after) in sent.iter().zip(&before).zip(&after) {
                            let [sent, own] = [sent, before].map(|&x| f64::from(x));
                            let expected = match () {
                                () if fragment.timing.delay > 0 => own + (mean - sent),
                                () if fragment.taken < 1.0 => own + fragment.taken * (mean - own),
                                () => mean,
                            };
                            assert_eq!(
                                after.to_bits(),
                                (expected as f32).to_bits(),
                                "{weights:?} {fragment:?}"
                            );
                        }
                        *anchor = mean as f32;
                    }
                }
            }
        }
    }
}
