//! Updates by the driver's launches: a table on the device, steps decided there.

use crate::common::{self, DTYPES, Memory, RECIPES, Recipe, Values, rules};
use crate::cuda::gpu::{download, queue, upload};
use meshstep_optim::cuda::{
    Decision, FIELDS, Group, Progress, Settings, StepBlock, StepScalars, Update, Verdict,
};
use meshstep_optim::{
    Adam, AdamW, ExactSum, Flat, Isa, Lamb, Rounding, Rule, Scalars, Segment, Sgd, Strided,
};
use meshstep_tensor::{Buffer, Category, DType, Meter, Queue, SliceMut};

/// Device copy of all memory that an update touches.
pub(crate) struct There {
    params: Buffer,
    pub(crate) grads: Buffer,
    state: Vec<Buffer>,
    copy: Option<Buffer>,
    remainder: Option<Buffer>,
}

impl There {
    pub(crate) fn new(memory: &Memory, queue: &Queue) -> Self {
        There {
            params: upload(&memory.params, queue),
            grads: upload(&memory.grads, queue),
            state: memory.state.iter().map(|slot| upload(slot, queue)).collect(),
            copy: memory.copy.as_ref().map(|copy| upload(copy, queue)),
            remainder: memory.remainder.as_ref().map(|remainder| upload(remainder, queue)),
        }
    }

    /// Calls `with` with the elements from `offset` on.
    pub(crate) fn flat<R>(&mut self, offset: usize, with: impl FnOnce(Flat<'_, '_>) -> R) -> R {
        fn cut(buffer: &mut Buffer, offset: usize) -> SliceMut<'_> {
            let len = buffer.len();
            buffer.as_mut().slice(offset..len).unwrap()
        }
        let mut state: Vec<SliceMut<'_>> = self.state.iter_mut().map(|slot| cut(slot, offset)).collect();
        with(Flat {
            params: cut(&mut self.params, offset),
            grads: cut(&mut self.grads, offset),
            state: &mut state,
            copy: self.copy.as_mut().map(|copy| cut(copy, offset)),
            remainder: self.remainder.as_mut().map(|remainder| cut(remainder, offset)),
        })
    }

    pub(crate) fn set_grads(&mut self, grads: &Values, queue: &Queue) {
        queue.upload(grads.slice(), self.grads.as_mut()).unwrap();
    }

    /// Downloads all vectors into a copy of `memory`.
    pub(crate) fn back(&self, memory: &Memory, queue: &Queue) -> Memory {
        let mut found = memory.clone();
        download(&self.params, &mut found.params, queue);
        download(&self.grads, &mut found.grads, queue);
        for (buffer, values) in self.state.iter().zip(&mut found.state) {
            download(buffer, values, queue);
        }
        for (buffer, values) in self.copy.iter().zip(&mut found.copy) {
            download(buffer, values, queue);
        }
        for (buffer, values) in self.remainder.iter().zip(&mut found.remainder) {
            download(buffer, values, queue);
        }
        found
    }
}

pub(super) fn scalars(recipe: &Recipe, t: u64) -> Scalars {
    Scalars { lr: 0.01 * t as f64, grad_scale: 0.75, zero_grads: t == 3, rounding: recipe.rounding }
}

pub(super) fn step(scalars: &Scalars, skip: bool) -> StepScalars {
    let Scalars { lr, grad_scale, zero_grads, .. } = *scalars;
    StepScalars { lr, grad_scale, skip: skip.into(), zero_grads: zero_grads.into() }
}

/// Returns segments of two groups, with gaps, in a vector of `len` elements; the next step is `t`.
pub(super) fn segments(len: usize, t: u64) -> [Vec<Segment>; 2] {
    let at = |range: std::ops::Range<usize>, t: u64| {
        let (key, first) = (range.start as u64 ^ 77, range.start as u64 * 3);
        // The second group's tensor is cut across its rows.
        let cut = Strided { first: 7, run: 96, stride: 1000 };
        let strided = if range.start > len / 3 { cut } else { Strided::WHOLE };
        Segment { key, first, strided, ..Segment::new(range, t) }
    };
    let third = len / 3;
    [vec![at(0..third, t), at(third..third, t)], vec![at(third + (len > 9) as usize..len, t + 4)]]
}

pub(super) fn recipes() -> Vec<Recipe> {
    let plain = |(params, grads, copy)| Recipe {
        params,
        remainder: false,
        grads,
        state: params,
        copy,
        rounding: Rounding::Nearest,
    };
    DTYPES.into_iter().map(plain).chain(RECIPES).collect()
}

/// Takes five steps, of which the second is skipped, on both places.
fn compare(rule: &dyn Rule, recipe: &Recipe, (len, offset): (usize, usize), queue: &Queue) {
    let start = Memory::of(rule, recipe, len + offset, len as u64);
    let (mut expected, mut there) = (start.clone(), There::new(&start, queue));
    let [first, second] = segments(len, 1);
    let groups = [
        Group { rule, lr_scale: 1.0, segments: &first, params: &[] },
        Group { rule, lr_scale: 0.5, segments: &second, params: &[] },
    ];
    let meter = Meter::new();
    let mut update =
        there.flat(offset, |flat| Update::new(&flat, &groups, recipe.rounding, queue, &meter)).unwrap();
    let mut block = StepBlock::new(queue, &meter).unwrap();
    let mut t = 0;
    for round in 1..=5 {
        expected.new_grads(round);
        there.set_grads(&expected.grads, queue);
        let (skip, scalars) = (round == 2, scalars(recipe, round));
        block.set(&step(&scalars, skip), queue).unwrap();
        there.flat(offset, |flat| update.run(flat, &block, queue)).unwrap();
        if !skip {
            t += 1;
            for (segments, lr_scale) in segments(len, t).iter().zip([1.0, 0.5]) {
                let scalars = Scalars { lr: scalars.lr * lr_scale, ..scalars };
                expected.update(rule, Isa::detect(), offset, segments, &scalars).unwrap();
            }
        }
        let different = common::difference(&there.back(&start, queue), &expected);
        assert_eq!(different, None, "{rule:?} {recipe:?}: {len} from {offset}, step {round}");
    }
    assert_eq!(update.steps(queue).unwrap(), [4, 4, 8], "{rule:?}");
}

/// Lengths and offsets of the vectors of [`every_rule`]: less than a warp's part of a tile, whole tiles, an odd offset, an aligned one.
const PLACES: [(usize, usize); 4] = [(129, 0), (4099, 0), (5000, 1), (2049, 8)];

/// Compares every rule in every fourth recipe, at place `part`. A driver that has no kernel in its cache compiles about a hundred.
fn every_rule(part: usize) {
    let Some(queue) = queue() else { return };
    let mut compared = 0;
    for rule in rules().iter().filter(|rule| rule.on_device().is_some()) {
        let recipes = recipes().into_iter().enumerate();
        let here = recipes.filter(|(i, recipe)| i % PLACES.len() == part && recipe.suits(&**rule));
        for (_, recipe) in here {
            compare(&**rule, &recipe, PLACES[part], &queue);
            compared += 1;
        }
    }
    assert!(compared > 40, "{compared}");
}

#[test]
fn rules_give_the_cpus_bits_in_a_short_vector() {
    every_rule(0);
}

#[test]
fn rules_give_the_cpus_bits_in_whole_tiles() {
    every_rule(1);
}

#[test]
fn rules_give_the_cpus_bits_at_an_odd_offset() {
    every_rule(2);
}

#[test]
fn rules_give_the_cpus_bits_at_an_aligned_offset() {
    every_rule(3);
}

#[test]
fn a_captured_step_replayed_equals_direct_steps() {
    let Some(queue) = queue() else { return };
    let (rule, recipe, meter) = (AdamW::default(), RECIPES[2], Meter::new());
    let start = Memory::of(&rule, &recipe, 4099, 7);
    let [first, second] = segments(4099, 1);
    let groups = [
        Group { rule: &rule, lr_scale: 1.0, segments: &first, params: &[] },
        Group { rule: &rule, lr_scale: 0.5, segments: &second, params: &[] },
    ];
    let made = |there: &mut There| {
        there.flat(0, |flat| Update::new(&flat, &groups, recipe.rounding, &queue, &meter)).unwrap()
    };
    let (mut direct, mut replayed) = (There::new(&start, &queue), There::new(&start, &queue));
    let (mut update, mut captured) = (made(&mut direct), made(&mut replayed));
    let [mut block, mut read_by_graph] = [0; 2].map(|_| StepBlock::new(&queue, &meter).unwrap());
    let stream = queue.stream().unwrap();
    let graph =
        stream.capture(|| replayed.flat(0, |flat| captured.run(flat, &read_by_graph, &queue))).unwrap();
    assert_eq!(
        common::difference(&replayed.back(&start, &queue), &start),
        None,
        "nothing is done by a capture"
    );
    for round in 1..=5 {
        let mut grads = start.clone();
        grads.new_grads(round);
        let step = step(&scalars(&recipe, round), round == 2);
        for (there, block) in [(&mut direct, &mut block), (&mut replayed, &mut read_by_graph)] {
            there.set_grads(&grads.grads, &queue);
            block.set(&step, &queue).unwrap();
        }
        direct.flat(0, |flat| update.run(flat, &block, &queue)).unwrap();
        // SAFETY: the graph uses the memory of `replayed`, `captured` and `read_by_graph`, which live and are used again only after
        // waiting for the queue.
        unsafe { graph.launch(stream) }.unwrap();
        let expected = direct.back(&start, &queue);
        assert_eq!(common::difference(&replayed.back(&start, &queue), &expected), None, "step {round}");
        assert!(round == 2 || common::difference(&expected, &start).is_some());
    }
    assert_eq!(
        (captured.steps(&queue).unwrap(), update.steps(&queue).unwrap()),
        (vec![4, 4, 8], vec![4, 4, 8])
    );
}

#[test]
fn every_length_gives_the_cpus_bits() {
    let Some(queue) = queue() else { return };
    let recipe = RECIPES[2];
    for place in crate::cuda::gpu::LENS.map(|len| (len, 0)).into_iter().chain([(65_537, 1), (65_535, 4)]) {
        compare(&AdamW::default(), &recipe, place, &queue);
    }
}

#[test]
fn what_an_update_cannot_do_is_refused() {
    let Some(queue) = queue() else { return };
    let (rule, recipe, meter) = (AdamW::default(), recipes()[0], Meter::new());
    let start = Memory::of(&rule, &recipe, 100, 1);
    let mut there = There::new(&start, &queue);
    let fits = [Segment::new(0..100, 1)];
    let mut refused = |rules: &[&dyn Rule], segments: &[Segment], queue: &Queue| {
        let groups: Vec<Group<'_>> =
            rules.iter().map(|&rule| Group { rule, lr_scale: 1.0, segments, params: &[] }).collect();
        let made = there.flat(0, |flat| Update::new(&flat, &groups, Rounding::Nearest, queue, &meter));
        made.unwrap_err().to_string()
    };
    let amsgrad = Adam { amsgrad: true, ..Adam::default() };
    for (rules, segments, told) in [
        (&[&Lamb::default() as &dyn Rule][..], &fits[..], "no CUDA kernels"),
        (&[&rule, &Sgd::default()], &fits, "state"),
        (&[&rule, &amsgrad], &fits, "state"),
        (&[], &fits, "no rule"),
        (&[&rule], &[Segment::new(0..101, 1)], "101"),
        (&[&rule], &[Segment::new(0..9, 0)], "t = 0"),
        (&[&rule, &rule], &fits, "overlap"),
    ] {
        let error = refused(rules, segments, &queue);
        assert!(error.contains(told), "{error}");
    }
    assert!(refused(&[&rule], &fits, &Queue::cpu()).contains("memory is on the CPU"));
    assert_eq!(meter.live_total(), 0);
}

/// Segments that some steps skip, with decisions that have bytes for fewer parameters, or require fewer gradients on all ranks or none.
#[test]
fn parameters_that_nobody_tells_of_are_refused() {
    let Some(queue) = queue() else { return };
    let (rule, meter) = (AdamW::default(), Meter::new());
    let mut there = There::new(&Memory::of(&rule, &recipes()[0], 100, 1), &queue);
    let segments = [Segment::new(0..40, 1), Segment::new(40..100, 1)];
    let mut made = |params: &[u32]| {
        let groups = [Group { rule: &rule, lr_scale: 1.0, segments: &segments, params }];
        there.flat(0, |flat| Update::new(&flat, &groups, Rounding::Nearest, &queue, &meter))
    };
    for params in [&[0][..], &[0, 1, 2]] {
        let error = made(params).unwrap_err().to_string();
        assert!(error.contains("params of segments"), "{error}");
    }
    let mut update = made(&[2, 0]).unwrap();
    let decision = |counted| Decision::new(&Progress::new(0, None), counted, &queue, &meter).unwrap();
    for counted in [0, 2] {
        let decision = decision(counted);
        let error = there.flat(0, |flat| update.run(flat, decision.step(), &queue)).unwrap_err();
        assert!(error.to_string().contains(&format!("{counted} elements where 3")), "{error}");
    }
    let mut decision = decision(3);
    there.flat(0, |flat| update.run(flat, decision.step(), &queue)).unwrap();
    let words = |len| Buffer::zeroed_on(&queue, len, DType::U64, &meter, Category::Staging).unwrap();
    let (head, rest) = (3 + ExactSum::WORDS, 4 + 2 * FIELDS);
    for (params, sums, maxima, told) in [
        (0, head + 1, rest, "sum has"),
        (3, head + 2, rest + 2, "max has"),
        (2, head + 2, rest + 3, "Settings::params has 2"),
        (4, head + 2, rest + 4, "Settings::params has 4"),
    ] {
        let (mut sum, mut max) = (words(sums), words(maxima));
        let settings = Settings { params, ..Settings::default() };
        let set = decision.set(&settings, [true; 3], &queue);
        let brought = set.and_then(|()| decision.bring(sum.as_mut(), max.as_mut(), &queue));
        let error = brought.unwrap_err();
        assert!(error.to_string().contains(told), "{error}");
        if !told.starts_with("Settings") {
            decision.decide(sum.as_slice(), max.as_slice(), &queue).unwrap_err();
        }
    }
    let (mut sum, mut max) = (words(head + 2), words(rest + 3));
    let settings = Settings { params: 3, ..Settings::default() };
    decision.set(&settings, [true, false, true], &queue).unwrap();
    decision.bring(sum.as_mut(), max.as_mut(), &queue).unwrap();
    decision.decide(sum.as_slice(), max.as_slice(), &queue).unwrap();
    let answer = decision.answer(&queue).unwrap();
    assert_eq!(answer.read().unwrap().verdict, Verdict::Applied as u32);
    assert_eq!(answer.updated().unwrap(), [true, false, true]);
    there.flat(0, |flat| update.run(flat, decision.step(), &queue)).unwrap();
    // The first segment belongs to the last parameter, the second to the first: both are updated.
    assert_eq!(update.steps(&queue).unwrap(), [1, 1]);
    decision.set(&settings, [true], &queue).unwrap();
    decision.bring(sum.as_mut(), max.as_mut(), &queue).unwrap();
    decision.decide(sum.as_slice(), max.as_slice(), &queue).unwrap();
    let answer = decision.answer(&queue).unwrap();
    assert_eq!(answer.updated().unwrap(), [true, false, false]);
    there.flat(0, |flat| update.run(flat, decision.step(), &queue)).unwrap();
    assert_eq!(update.steps(&queue).unwrap(), [1, 2]);
}

#[test]
fn other_memory_than_an_update_was_made_for_is_refused() {
    let Some(queue) = queue() else { return };
    let (rule, meter) = (AdamW::default(), Meter::new());
    let plain = recipes()[0];
    let of = |recipe: &Recipe, len| There::new(&Memory::of(&rule, recipe, len, 1), &queue);
    let mut there = of(&plain, 100);
    let segments = [Segment::new(0..100, 1)];
    let groups = [Group { rule: &rule, lr_scale: 1.0, segments: &segments, params: &[] }];
    let made = there.flat(0, |flat| Update::new(&flat, &groups, Rounding::Nearest, &queue, &meter));
    let (mut update, block) = (made.unwrap(), StepBlock::new(&queue, &meter).unwrap());
    let with_bf16 = Recipe { grads: DType::BF16, copy: Some(DType::BF16), ..plain };
    for mut other in [of(&plain, 99), of(&plain, 101), of(&with_bf16, 100)] {
        let error = other.flat(0, |flat| update.run(flat, &block, &queue)).unwrap_err();
        assert!(error.to_string().contains("the update was made for"), "{error}");
    }
    let mut cpu = Memory::of(&rule, &plain, 100, 1);
    cpu.flat(0, |flat| update.run(flat, &block, &queue)).unwrap_err();
    there.flat(0, |flat| update.run(flat, &block, &Queue::cpu())).unwrap_err();
    assert_eq!(update.steps(&queue).unwrap(), [0]);
}
