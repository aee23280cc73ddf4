//! Rows of several updates that one launch prepares.

use crate::common::{self, Memory, Recipe};
use crate::cuda::gpu::queue;
use crate::cuda::update::{There, recipes, scalars, segments, step};
use meshstep_optim::cuda::{Decision, Group, Progress, StepBlock, Tables, Update};
use meshstep_optim::{AdamW, Isa, Rounding, Rule, Scalars, Segment, Sgd};
use meshstep_tensor::{Meter, Queue};

/// Bucket with two groups of different hyperparameters, and its reference on the CPU.
struct Bucket {
    rules: [Box<dyn Rule>; 2],
    recipe: Recipe,
    start: Memory,
    expected: Memory,
    there: There,
    update: Update,
    len: usize,
}

impl Bucket {
    fn new(rules: [Box<dyn Rule>; 2], recipe: Recipe, len: usize, queue: &Queue, meter: &Meter) -> Self {
        let start = Memory::of(&*rules[0], &recipe, len, len as u64);
        let (expected, mut there) = (start.clone(), There::new(&start, queue));
        let [first, second] = segments(len, 1);
        let groups = [
            Group { rule: &*rules[0], lr_scale: 1.0, segments: &first, params: &[] },
            Group { rule: &*rules[1], lr_scale: 0.5, segments: &second, params: &[] },
        ];
        let update = there.flat(0, |flat| Update::new(&flat, &groups, recipe.rounding, queue, meter));
        Bucket { rules, recipe, start, expected, there, update: update.unwrap(), len }
    }

    fn step(&mut self, round: u64, t: u64, skip: bool) {
        if skip {
            return;
        }
        let scalars = Scalars { rounding: self.recipe.rounding, ..scalars(&self.recipe, round) };
        for ((segments, rule), lr_scale) in segments(self.len, t).iter().zip(&self.rules).zip([1.0, 0.5]) {
            let scalars = Scalars { lr: scalars.lr * lr_scale, ..scalars };
            self.expected.update(&**rule, Isa::detect(), 0, segments, &scalars).unwrap();
        }
    }
}

fn adam(beta1: f64, weight_decay: f64) -> Box<dyn Rule> {
    Box::new(AdamW { beta1, weight_decay, ..AdamW::default() })
}

fn sgd(momentum: f64) -> Box<dyn Rule> {
    Box::new(Sgd { momentum, ..Sgd::default() })
}

/// Buckets of two families, with different types, lengths and hyperparameters. The first step precedes the joining of their rows, the
/// third is skipped; before the last, the rows are joined again together with those of another bucket.
#[test]
fn rows_that_are_prepared_together_give_the_bits_of_each_alone() {
    let Some(queue) = queue() else { return };
    let (meter, plain) = (Meter::new(), recipes());
    let bucket = |rules, recipe: usize, len| Bucket::new(rules, plain[recipe], len, &queue, &meter);
    let mut buckets = vec![
        bucket([adam(0.9, 0.1), adam(0.8, 0.0)], 0, 129),
        bucket([sgd(0.9), sgd(0.5)], 0, 700),
        bucket([adam(0.7, 0.2), adam(0.9, 0.1)], 1, 2049),
        bucket([adam(0.95, 0.0), adam(0.6, 0.3)], 4, 4099),
    ];
    let mut block = StepBlock::new(&queue, &meter).unwrap();
    let (mut tables, mut t): (Option<Tables>, u64) = (None, 0);
    for round in 1..=5 {
        if [2, 5].contains(&round) {
            let mut updates: Vec<&mut Update> = buckets.iter_mut().map(|bucket| &mut bucket.update).collect();
            tables = Some(Tables::join(&mut updates, &queue, &meter).unwrap());
        }
        let skip = round == 3;
        block.set(&step(&scalars(&buckets[0].recipe, round), skip), &queue).unwrap();
        for bucket in &mut buckets {
            bucket.expected.new_grads(round);
            bucket.there.set_grads(&bucket.expected.grads, &queue);
        }
        t += u64::from(!skip);
        if let Some(tables) = &mut tables {
            tables.prepare(&block, &queue).unwrap();
        }
        for (b, bucket) in buckets.iter_mut().enumerate() {
            bucket.step(round, t, skip);
            let (there, update) = (&mut bucket.there, &mut bucket.update);
            assert_eq!(tables.as_ref().is_some_and(|tables| tables.has(update)), tables.is_some());
            match &tables {
                Some(_) => there.flat(0, |flat| update.sweep(flat, &block, &queue)).unwrap(),
                None => there.flat(0, |flat| update.run(flat, &block, &queue)).unwrap(),
            }
            let different = common::difference(&bucket.there.back(&bucket.start, &queue), &bucket.expected);
            assert_eq!(different, None, "bucket {b}, step {round}");
        }
    }
    for bucket in &buckets {
        assert_eq!(bucket.update.steps(&queue).unwrap(), [4, 4, 8]);
    }
}

/// An update recognises the tables that hold its rows, and a step with bytes for too few parameters prepares none.
#[test]
fn rows_of_other_tables_and_steps_without_their_parameters_are_told_apart() {
    let Some(queue) = queue() else { return };
    let (rule, meter) = (AdamW::default(), Meter::new());
    let mut there = There::new(&Memory::of(&rule, &recipes()[0], 100, 1), &queue);
    let mut made = |params: &[u32]| {
        let segments = [Segment::new(0..40, 1), Segment::new(40..100, 1)];
        let groups = [Group { rule: &rule, lr_scale: 1.0, segments: &segments, params }];
        there.flat(0, |flat| Update::new(&flat, &groups, Rounding::Nearest, &queue, &meter)).unwrap()
    };
    let (mut first, mut second) = (made(&[0, 2]), made(&[]));
    let mut both = Tables::join(&mut [&mut first, &mut second], &queue, &meter).unwrap();
    assert!(both.has(&first) && both.has(&second));
    let decision = |counted| Decision::new(&Progress::new(0, None), counted, &queue, &meter).unwrap();
    let error = both.prepare(decision(2).step(), &queue).unwrap_err();
    assert!(error.to_string().contains("2 elements where 3"), "{error}");
    both.prepare(decision(3).step(), &Queue::cpu()).unwrap_err();
    both.prepare(decision(3).step(), &queue).unwrap();
    let alone = Tables::join(&mut [&mut second], &queue, &meter).unwrap();
    assert!(both.has(&first) && !both.has(&second) && alone.has(&second) && !alone.has(&first));
    // A step without a decision skips.
    assert_eq!([first.steps(&queue).unwrap(), second.steps(&queue).unwrap()], [[0, 0]; 2]);
    drop((first, second, both, alone));
    assert_eq!(meter.live_total(), 0);
}
