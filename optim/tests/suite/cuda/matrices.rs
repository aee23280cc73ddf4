//! Muon on a GPU has the CPU's bits: all variants, shapes, types and blocks; whole tensors, and pieces in phases.

use crate::common::{self, F32_RECIPE, Memory, Random, Recipe, Values};
use crate::cuda::gpu::{all, download, queue, upload};
use crate::cuda::update::{There, recipes, step};
use meshstep_optim::cuda::{Group, MatrixMemory, MatrixSizes, Orthogonalizer, StepBlock, Tables, Update};
use meshstep_optim::{Adjust, Blocks, Error, Flat, Isa, Muon, Rule, Scalars, Segment, Sgd};
use meshstep_tensor::{DType, Meter, Queue};
use std::sync::Arc;

const F64_RECIPE: Recipe = Recipe { params: DType::F64, grads: DType::F64, state: DType::F64, ..F32_RECIPE };

/// A tensor's elements, and the rows and columns of its segment.
type Tensor = (usize, (usize, usize));

/// A parameter group: rule, factor on the learning rate, tensors.
struct Case<'a> {
    rule: &'a Muon,
    lr_scale: f64,
    tensors: &'a [Tensor],
}

/// Returns the segments of each group, with gaps, and the elements of all.
fn layout(cases: &[Case<'_>], t: u64) -> (Vec<Vec<Segment>>, usize) {
    let mut next = 0;
    let mut segment = |&(len, matrix): &Tensor| {
        let range = next + 3..next + 3 + len;
        next = range.end;
        Segment { key: next as u64 ^ 77, matrix: Some(matrix), ..Segment::new(range, t) }
    };
    let segments = cases.iter().map(|case| case.tensors.iter().map(&mut segment).collect()).collect();
    (segments, next + 3)
}

/// Returns ordinary numbers: one NaN would make all of a matrix NaN.
fn ordinary(rule: &Muon, recipe: &Recipe, len: usize, seed: u64) -> Memory {
    let mut memory = Memory::of(rule, recipe, len, seed);
    let mut random = Random::new(seed);
    for (values, dtype) in [(&mut memory.params, recipe.params), (&mut memory.grads, recipe.grads)] {
        *values = Values::new(dtype, len, || random.unit());
    }
    memory.state = vec![Values::new(recipe.state, len, || random.unit())];
    memory
}

fn scalars(recipe: &Recipe, round: u64) -> Scalars {
    Scalars { lr: 0.01 * round as f64, grad_scale: 0.75, zero_grads: round == 3, rounding: recipe.rounding }
}

fn groups<'a>(cases: &'a [Case<'_>], segments: &'a [Vec<Segment>]) -> Vec<Group<'a>> {
    let group = |(case, segments): (&'a Case<'_>, &'a Vec<Segment>)| Group {
        rule: case.rule,
        lr_scale: case.lr_scale,
        segments,
        params: &[],
    };
    cases.iter().zip(segments).map(group).collect()
}

/// Takes the step on the CPU.
fn on_cpu(memory: &mut Memory, cases: &[Case<'_>], offset: usize, scalars: &Scalars, t: u64) {
    for (case, segments) in cases.iter().zip(layout(cases, t).0) {
        let scalars = Scalars { lr: scalars.lr * case.lr_scale, ..*scalars };
        memory.update(case.rule, Isa::detect(), offset, &segments, &scalars).unwrap();
    }
}

/// Takes four steps, of which the second is skipped, on both places, with the gradients that `grads` makes.
fn compare(
    cases: &[Case<'_>],
    recipe: &Recipe,
    (offset, queue): (usize, &Queue),
    mut grads: impl FnMut(&mut Random) -> f64,
) {
    let (segments, len) = layout(cases, 1);
    let mut expected = ordinary(cases[0].rule, recipe, len + offset, len as u64);
    let (start, mut there, meter) = (expected.clone(), There::new(&expected, queue), Meter::new());
    let groups = groups(cases, &segments);
    let made = there.flat(offset, |flat| Update::new(&flat, &groups, recipe.rounding, queue, &meter));
    let (mut update, mut block) = (made.unwrap(), StepBlock::new(queue, &meter).unwrap());
    let (allocated, mut t) = (meter.live_total(), 0);
    for round in 1..=4 {
        let (mut random, skip, scalars) = (Random::new(round), round == 2, scalars(recipe, round));
        expected.grads = Values::new(recipe.grads, len + offset, || grads(&mut random));
        there.set_grads(&expected.grads, queue);
        block.set(&step(&scalars, skip), queue).unwrap();
        there.flat(offset, |flat| update.run(flat, &block, queue)).unwrap();
        if !skip {
            t += 1;
            on_cpu(&mut expected, cases, offset, &scalars, t);
        }
        let different = common::difference(&there.back(&start, queue), &expected);
        let rule = cases[0].rule;
        assert_eq!(different, None, "{rule:?} {recipe:?}: {:?}, step {round}", cases[0].tensors);
    }
    assert!(update.steps(queue).unwrap().iter().all(|&steps| steps == 3));
    assert_eq!(meter.live_total(), allocated, "a step allocates nothing");
    drop((update, block));
    assert_eq!(meter.live_total(), 0);
}

fn whole(shapes: &[(usize, usize)]) -> Vec<Tensor> {
    shapes.iter().map(|&(rows, cols)| (rows * cols, (rows, cols))).collect()
}

/// Published variants, and rules with each option. In the last ones eps is no small part of a norm.
fn variants() -> Vec<Muon> {
    let plain = Muon { nesterov: false, weight_decay: 0.0, ns_steps: 2, ..Muon::default() };
    vec![
        Muon::default(),
        Muon::keller_jordan(),
        Muon::moonshot(),
        Muon { decaying_sum: true, ..Muon::keller_jordan() },
        Muon { nesterov: false, maximize: true, ..Muon::moonshot() },
        Muon { adjust: Adjust::MatchRmsAdamW, ..plain.clone() },
        Muon { ns_coefficients: [2.0, -1.5, 0.5], ns_steps: 1, ..plain.clone() },
        Muon { eps: 100.0, ..plain.clone() },
        Muon { eps: 1.0, add_eps: true, ..plain },
    ]
}

#[test]
fn every_variant_has_the_cpus_bits() {
    let Some(queue) = queue() else { return };
    let tensors = whole(&[(7, 5), (5, 7), (1, 30), (30, 1), (1, 1), (66, 20)]);
    for rule in &variants() {
        for recipe in [F32_RECIPE, F64_RECIPE] {
            let case = Case { rule, lr_scale: 1.0, tensors: &tensors };
            compare(&[case], &recipe, (1, &queue), Random::unit);
        }
    }
}

/// Sides around a square of a block of threads, and inner sizes around one and two blocks of a sum.
#[test]
fn every_shape_has_the_cpus_bits() {
    let Some(queue) = queue() else { return };
    let short = [
        (16, 16),
        (15, 17),
        (63, 64),
        (64, 65),
        (65, 64),
        (129, 33),
        (66, 80),
        (140, 130),
        (3, 255),
        (3, 256),
        (257, 3),
        (2, 513),
    ];
    let long = [(130, 520), (520, 130), (193, 200), (300, 700), (64, 4096), (1, 100_000), (100_000, 1)];
    let shapes: Vec<_> = short.into_iter().chain(long.into_iter().filter(|_| all())).collect();
    let rule = Muon { ns_steps: 2, ..Muon::moonshot() };
    for recipe in [F32_RECIPE, F64_RECIPE] {
        for tensors in whole(&shapes).chunks(6) {
            compare(&[Case { rule: &rule, lr_scale: 1.0, tensors }], &recipe, (0, &queue), Random::unit);
        }
    }
}

#[test]
fn every_recipe_has_the_cpus_bits() {
    let Some(queue) = queue() else { return };
    let rule = Muon { ns_steps: 3, weight_decay: 0.3, ..Muon::default() };
    let tensors = whole(&[(9, 40), (60, 41)]);
    for (i, recipe) in recipes().iter().enumerate() {
        assert!(recipe.suits(&rule));
        // Some vectors are aligned.
        let offset = [0, 1, 5, 8][i % 4];
        compare(
            &[Case { rule: &rule, lr_scale: 0.5, tensors: &tensors }],
            recipe,
            (offset, &queue),
            Random::unit,
        );
    }
}

#[test]
fn blocks_and_groups_have_the_cpus_bits() {
    let Some(queue) = queue() else { return };
    let fused = Muon { blocks: Blocks::Rows(3), ns_steps: 3, ..Muon::moonshot() };
    let experts = Muon { blocks: Blocks::Batch, eps: 0.5, ..Muon::keller_jordan() };
    let plain = Muon { momentum: 0.5, maximize: true, ..Muon::default() };
    let cases = [
        Case { rule: &fused, lr_scale: 0.5, tensors: &[(36 * 10, (36, 10)), (18 * 70, (18, 70))] },
        Case {
            rule: &experts,
            lr_scale: 2.0,
            tensors: &[(5 * 8 * 14, (8, 14)), (0, (0, 4)), (2 * 67 * 3, (67, 3))],
        },
        Case { rule: &plain, lr_scale: 1.0, tensors: &[(21 * 17, (21, 17))] },
    ];
    for recipe in [F32_RECIPE, F64_RECIPE] {
        compare(&cases, &recipe, (0, &queue), Random::unit);
    }
}

#[test]
fn zeros_and_numbers_that_are_not_finite_have_the_cpus_bits() {
    let Some(queue) = queue() else { return };
    let zero = Muon { eps: 1e-50, decaying_sum: true, momentum: 0.0, ..Muon::default() };
    let tensors = whole(&[(7, 5), (5, 7), (70, 3)]);
    let rules = [zero, Muon::default()];
    for recipe in [F32_RECIPE, F64_RECIPE] {
        for rule in &rules {
            compare(&[Case { rule, lr_scale: 1.0, tensors: &tensors }], &recipe, (0, &queue), |_| 0.0);
            compare(&[Case { rule, lr_scale: 1.0, tensors: &tensors }], &recipe, (0, &queue), Random::any);
            let rare = |random: &mut Random| {
                if random.next().is_multiple_of(100) { f64::INFINITY } else { random.unit() }
            };
            compare(&[Case { rule, lr_scale: 1.0, tensors: &tensors }], &recipe, (0, &queue), rare);
        }
    }
}

/// Two updates of one queue share tables and scratch memory.
#[test]
fn updates_share_tables_and_memory() {
    let Some(queue) = queue() else { return };
    let (rule, recipe, meter) = (Muon::moonshot(), F32_RECIPE, Meter::new());
    let tensors = [whole(&[(9, 40), (20, 20)]), whole(&[(60, 41), (2, 2)])];
    let cases = [0, 1].map(|i| [Case { rule: &rule, lr_scale: 1.0, tensors: &tensors[i] }]);
    let sizes = tensors
        .iter()
        .flatten()
        .map(|&(len, matrix)| rule.by_matrix().unwrap().orthogonalization(matrix).unwrap().sizes(len));
    let sizes = sizes.fold(MatrixSizes::default(), MatrixSizes::max);
    let memory = Arc::new(MatrixMemory::new(DType::F32, sizes, &queue, &meter).unwrap());
    let mut block = StepBlock::new(&queue, &meter).unwrap();
    let mut all: Vec<_> = cases
        .iter()
        .map(|cases| {
            let (segments, len) = layout(cases, 1);
            let start = ordinary(&rule, &recipe, len, len as u64);
            let (mut there, groups, shared) =
                (There::new(&start, &queue), groups(cases, &segments), Some(&memory));
            let made = there
                .flat(0, |flat| Update::sharing(&flat, &groups, recipe.rounding, (&queue, &meter), shared));
            (start, there, made.unwrap())
        })
        .collect();
    let mut joined: Vec<&mut Update> = all.iter_mut().map(|(.., update)| update).collect();
    let mut tables = Tables::join(&mut joined, &queue, &meter).unwrap();
    for t in 1..=2 {
        block.set(&step(&scalars(&recipe, t), false), &queue).unwrap();
        tables.prepare(&block, &queue).unwrap();
        for ((expected, there, update), cases) in all.iter_mut().zip(&cases) {
            there.flat(0, |flat| update.sweep(flat, &block, &queue)).unwrap();
            on_cpu(expected, cases, 0, &scalars(&recipe, t), t);
            assert_eq!(common::difference(&there.back(expected, &queue), expected), None, "step {t}");
        }
    }
    let small =
        Arc::new(MatrixMemory::new(DType::F32, MatrixSizes { step: 9, ..sizes }, &queue, &meter).unwrap());
    let refused = all[1].2.use_memory(&small, &queue).unwrap_err().to_string();
    assert!(refused.contains("scratch memory of matrices"), "{refused}");
    all[1].2.use_memory(&memory, &queue).unwrap();
}

/// A tensor in two pieces, each in a vector of its own as a rank holds it; the step is brought together between the phases.
#[test]
fn pieces_in_phases_have_the_bits_of_the_whole() {
    let Some(queue) = queue() else { return };
    let (rule, meter, matrix, len) =
        (Muon { blocks: Blocks::Rows(2), ..Muon::moonshot() }, Meter::new(), (8, 9), 72);
    for recipe in recipes() {
        let mut expected = ordinary(&rule, &recipe, len, 5);
        let dtype = if recipe.params == DType::F64 { DType::F64 } else { DType::F32 };
        let start = expected.clone();
        let pieces = [0..31, 31..len];
        let mut there = There::new(&start, &queue);
        let whole = Orthogonalizer::new(&rule, (dtype, len), matrix, &queue, &meter).unwrap();
        let memory = MatrixMemory::new(dtype, whole.sizes(), &queue, &meter).unwrap();
        let mut travelled = upload(&Values::new(dtype, len, || f64::NAN), &queue);
        let mut block = StepBlock::new(&queue, &meter).unwrap();
        let segment = |range: std::ops::Range<usize>, t| Segment {
            key: 8,
            first: range.start as u64,
            matrix: Some(matrix),
            ..Segment::new(range, t)
        };
        let segments = pieces.clone().map(|range| segment(range, 1));
        let group = [Group { rule: &rule, lr_scale: 1.0, segments: &segments, params: &[] }];
        let made = there.flat(0, |flat| Update::new(&flat, &group, recipe.rounding, &queue, &meter));
        let mut update = made.unwrap();
        block.set(&step(&scalars(&recipe, 1), false), &queue).unwrap();
        let refused = there.flat(0, |flat| update.run(flat, &block, &queue)).unwrap_err();
        assert!(matches!(refused, Error::NotAMatrix { index: 0, len: 31, .. }), "{refused}");
        assert_eq!(update.steps(&queue).unwrap(), [0, 0]);
        update.leave_to_phases(|_| true);
        for t in 1..=2 {
            let scalars = scalars(&recipe, t);
            block.set(&step(&scalars, false), &queue).unwrap();
            // Prepares the rows, and updates none.
            there.flat(0, |flat| update.run(flat, &block, &queue)).unwrap();
            for (row, piece) in pieces.iter().enumerate() {
                let into = travelled.as_mut().slice(piece.clone()).unwrap();
                there.flat(0, |flat| update.advance(row, flat, into, &block, &queue)).unwrap();
            }
            whole.run(travelled.as_mut(), &memory, &block, &queue).unwrap();
            for (row, piece) in pieces.iter().enumerate() {
                let from = travelled.as_mut().slice(piece.clone()).unwrap();
                there.flat(0, |flat| update.apply(row, flat, from, &block, &queue)).unwrap();
            }
            expected.update(&rule, Isa::detect(), 0, &[segment(0..len, t)], &scalars).unwrap();
            assert_eq!(
                common::difference(&there.back(&start, &queue), &expected),
                None,
                "{recipe:?}, step {t}"
            );
        }
    }
}

#[test]
fn a_captured_step_replayed_equals_direct_steps() {
    let Some(queue) = queue() else { return };
    let (rule, recipe, meter) = (Muon::default(), F32_RECIPE, Meter::new());
    let tensors = whole(&[(70, 20), (5, 9)]);
    let cases = [Case { rule: &rule, lr_scale: 1.0, tensors: &tensors }];
    let (segments, len) = layout(&cases, 1);
    let mut expected = ordinary(&rule, &recipe, len, 7);
    let (groups, mut there) = (groups(&cases, &segments), There::new(&expected, &queue));
    let made = there.flat(0, |flat| Update::new(&flat, &groups, recipe.rounding, &queue, &meter));
    let (mut update, mut block) = (made.unwrap(), StepBlock::new(&queue, &meter).unwrap());
    let stream = queue.stream().unwrap();
    let graph = stream.capture(|| there.flat(0, |flat| update.run(flat, &block, &queue))).unwrap();
    for t in 1..=3 {
        block.set(&step(&scalars(&recipe, t), false), &queue).unwrap();
        // SAFETY: the graph uses the memory of `there`, `update` and `block`, which live and are used again only after waiting for the
        // queue.
        unsafe { graph.launch(stream) }.unwrap();
        on_cpu(&mut expected, &cases, 0, &scalars(&recipe, t), t);
        assert_eq!(common::difference(&there.back(&expected, &queue), &expected), None, "step {t}");
    }
}

#[test]
fn wrong_arguments_are_refused_and_change_nothing() {
    let Some(queue) = queue() else { return };
    let (rule, sgd, meter, recipe) = (Muon::default(), Sgd::default(), Meter::new(), F32_RECIPE);
    let start = ordinary(&rule, &recipe, 24, 1);
    let mut there = There::new(&start, &queue);
    let segments = [Segment { matrix: Some((4, 6)), ..Segment::new(0..24, 1) }];
    let of_rules: [&dyn Rule; 2] = [&rule, &sgd];
    let [group, of_sgd] =
        of_rules.map(|rule| [Group { rule, lr_scale: 1.0, segments: &segments, params: &[] }]);
    let made = there.flat(0, |flat| Update::new(&flat, &group, recipe.rounding, &queue, &meter));
    let (mut update, mut block) = (made.unwrap(), StepBlock::new(&queue, &meter).unwrap());
    block.set(&step(&scalars(&recipe, 1), false), &queue).unwrap();
    for (row, len, dtype, told) in
        [(0, 23, DType::F32, "23"), (0, 24, DType::F64, "f64"), (1, 24, DType::F32, "rows of an update")]
    {
        let mut memory = upload(&Values::new(dtype, len, || 1.0), &queue);
        let mut phase = |advance: bool| {
            there.flat(0, |flat| match advance {
                true => update.advance(row, flat, memory.as_mut(), &block, &queue),
                false => update.apply(row, flat, memory.as_mut(), &block, &queue),
            })
        };
        let refused = [phase(true), phase(false)].map(|told| told.unwrap_err().to_string());
        assert!(refused.iter().all(|error| error.contains(told)), "{refused:?}");
    }
    let whole = Orthogonalizer::new(&rule, (DType::F32, 24), (4, 6), &queue, &meter).unwrap();
    let memory = |dtype, sizes| MatrixMemory::new(dtype, sizes, &queue, &meter).unwrap();
    let run = |memory: &MatrixMemory, len, dtype| {
        let mut values = Values::new(dtype, len, || 1.0);
        let mut place = upload(&values, &queue);
        let refused = whole.run(place.as_mut(), memory, &block, &queue).unwrap_err().to_string();
        download(&place, &mut values, &queue);
        assert!(values.f64().iter().all(|&x| x == 1.0));
        refused
    };
    let fits = memory(DType::F32, whole.sizes());
    assert!(run(&fits, 23, DType::F32).contains("23"));
    assert!(run(&fits, 24, DType::F64).contains("f64"));
    assert!(run(&memory(DType::F64, whole.sizes()), 24, DType::F32).contains("scratch memory"));
    for less in [
        MatrixSizes { tensor: 23, ..whole.sizes() },
        MatrixSizes { gram: 15, ..whole.sizes() },
        MatrixSizes { matrices: 0, ..whole.sizes() },
    ] {
        assert!(run(&memory(DType::F32, less), 24, DType::F32).contains("scratch memory of matrices"));
    }
    assert!(MatrixMemory::new(DType::BF16, whole.sizes(), &queue, &meter).is_err());
    for (len, matrix) in [(23, (4, 6)), (0, (usize::MAX, 2)), (8, (0, 6))] {
        let pieces = Orthogonalizer::new(&rule, (DType::F32, len), matrix, &queue, &meter).unwrap_err();
        assert!(matches!(pieces, Error::NotAMatrix { .. }), "{pieces}");
    }
    assert!(Orthogonalizer::new(&sgd, (DType::F32, 24), (4, 6), &queue, &meter).is_err());
    let nothing = |flat: Flat<'_, '_>| Update::new(&flat, &of_sgd, recipe.rounding, &queue, &meter);
    there.flat(0, nothing).unwrap_err();
    assert_eq!(common::difference(&there.back(&start, &queue), &start), None);
}
