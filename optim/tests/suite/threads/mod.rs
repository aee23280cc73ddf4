//! Threads change no bit, and the time that other work spends in rayon's global pool delays none of ours.

mod full;

use crate::common::{Memory, RECIPES, Random, Recipe, rules};
use meshstep_optim::{
    Alone, History, Isa, Lbfgs, LineSearch, Loss, Merge, Norm, NormAccumulator, NormSum, Rounding, Rule,
    Scalars, Sees, Segment, TensorSums, accumulate, pack,
};
use meshstep_tensor::{Buffer, DType, Meter, Queue, Slice, SliceMut, Threads, bf16};
use std::convert::Infallible;

const LEN: usize = 700_001;

/// Queues with different threads, the first with the caller alone.
fn queues() -> Vec<Queue> {
    let new = |count| Threads::new(count).unwrap();
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
    let lent = Threads::executor(3, move |helper| pool.spawn(|| helper.run()));
    // Helpers that never come.
    let none = Threads::executor(5, drop);
    let all = [Threads::caller(), Threads::shared(), new(2), new(3), new(16), lent, none];
    all.iter().map(Queue::cpu_on).collect()
}

/// Runs `work` with every queue; all must end with the same result.
fn same<R: PartialEq + std::fmt::Debug>(what: &str, work: impl Fn(&Queue) -> R) {
    let queues = queues();
    let first = work(&queues[0]);
    for queue in &queues[1..] {
        // The results are large.
        assert!(work(queue) == first, "{what} {:?}", queue.threads());
    }
}

fn numbers(seed: u64, len: usize) -> Vec<f32> {
    let mut random = Random::new(seed);
    (0..len).map(|_| random.unit() as f32).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// Segments with borders in the middle of parts, and gaps.
fn segments() -> [Segment; 4] {
    let segment = |range, t| Segment { key: t, ..Segment::new(range, t) };
    [segment(3..70_000, 1), segment(70_000..70_000, 2), segment(70_001..300_000, 3), segment(300_000..LEN, 4)]
}

fn update(rule: &dyn Rule, recipe: &Recipe, queue: &Queue) -> Vec<Vec<u64>> {
    let mut memory = Memory::of(rule, recipe, LEN, 5);
    let scalars = Scalars { lr: 0.1, grad_scale: 0.5, zero_grads: true, rounding: recipe.rounding };
    memory.flat(0, |flat| rule.update(flat, &segments(), &scalars, queue)).unwrap();
    memory.bits()
}

#[test]
fn updates_are_the_same() {
    let f32 =
        Recipe { params: DType::F32, remainder: false, state: DType::F32, grads: DType::F32, ..RECIPES[0] };
    let f32 = Recipe { copy: None, rounding: Rounding::Nearest, ..f32 };
    let (rules, stochastic) =
        (rules(), RECIPES.into_iter().find(|recipe| recipe.rounding == Rounding::Stochastic));
    for rule in [&rules[0], &rules[6], &rules[8]] {
        same(rule.name(), |queue| update(&**rule, &f32, queue));
    }
    same("stochastic rounding", |queue| update(&*rules[0], &stochastic.unwrap(), queue));
}

#[test]
fn tensor_sums_are_the_same() {
    for rule in rules().iter().filter(|rule| rule.sees() == Sees::TensorSums) {
        let len = 2_200_000;
        let mut memory = Memory::random(&**rule, (DType::F32, DType::F32, None), len, 8);
        let segment = [Segment::new(7..len, 1)];
        memory.flat(0, |flat| {
            same(rule.name(), |queue| {
                let mut sums = [TensorSums::new()];
                let scalars = Scalars::default();
                rule.measure_on(Isa::detect(), &flat, &segment, &scalars, &mut sums, queue).unwrap();
                rule.ratio(&sums[0]).to_bits()
            });
        });
    }
}

#[test]
fn norms_and_accumulations_are_the_same() {
    let values = numbers(1, LEN);
    for norm in [Norm::L1, Norm::L2, Norm::Inf] {
        same(&format!("{norm:?}"), |queue| {
            let mut sum = NormSum::new(norm, queue, &Meter::new()).unwrap();
            sum.add((&values[..]).into(), queue).unwrap();
            sum.watch((&values[..]).into(), queue).unwrap();
            sum.read(queue).unwrap()
        });
    }
    same("accumulations", |queue| {
        let mut sum = numbers(2, LEN);
        accumulate((&mut sum[..]).into(), (&values[..]).into(), 0.3, false, queue).unwrap();
        bits(&sum)
    });
}

#[test]
fn merges_are_the_same() {
    let [mean, from] = [3, 4].map(|seed| numbers(seed, LEN));
    same("merges", |queue| {
        let (mut values, mut anchor, mut sent) = (numbers(5, LEN), from.clone(), vec![bf16::ZERO; LEN]);
        pack((&values[..]).into(), Some((&from[..]).into()), (&mut sent[..]).into(), queue).unwrap();
        let anchored = Some(SliceMut::from(&mut anchor[..]));
        let mean = Slice::from(&mean[..]);
        let merge =
            Merge { mean, differences: true, anchor: anchored, sent: None, taken: 0.4, squares: false };
        merge.mean((&mut values[..]).into(), queue).unwrap();
        (bits(&values), bits(&anchor), sent)
    });
}

/// Runs L-BFGS on a bowl; returns the point.
fn minimize(len: usize, (line_search, history): (LineSearch, History), queue: &Queue) -> Vec<u32> {
    let rule = Lbfgs { lr: 0.5, max_iter: 4, history_len: 2, line_search, history, ..Lbfgs::default() };
    let mut state = rule.state_on(len, DType::F32, queue, &Meter::new()).unwrap();
    let mut x = numbers(6, len);
    let closure = |x: Slice<'_>, mut g: SliceMut<'_>| {
        let (x, g) = (x.typed::<f32>().unwrap(), g.typed_mut::<f32>().unwrap());
        g.iter_mut().zip(x).enumerate().for_each(|(i, (g, x))| *g = (1.0 + (i % 7) as f32) * (x - 1.0));
        Ok::<_, Infallible>(Loss::Whole(g.iter().map(|g| f64::from(*g) * f64::from(*g)).sum()))
    };
    rule.step((&mut x[..]).into(), closure, &Alone, &mut state).unwrap();
    bits(&x)
}

#[test]
fn runs_of_lbfgs_are_the_same() {
    for line_search in [LineSearch::None, LineSearch::StrongWolfe] {
        for history in [History::Exact, History::Bf16, History::F16] {
            same("L-BFGS", |queue| minimize(250_001, (line_search, history), queue));
        }
    }
}

#[test]
fn whoever_names_no_threads_has_those_of_the_process() {
    let values = numbers(7, LEN);
    let mut norm = NormAccumulator::new(Norm::L2);
    norm.add((&values[..]).into()).unwrap();
    let mut other = NormAccumulator::new(Norm::L2);
    other.add_on(Isa::detect(), &Threads::caller(), (&values[..]).into()).unwrap();
    assert_eq!(norm, other);
    let zeros = Buffer::zeroed(LEN, DType::F32, &Meter::new(), meshstep_tensor::Category::Grads).unwrap();
    norm.watch(zeros.as_slice()).unwrap();
    assert_eq!(norm, other);
}
