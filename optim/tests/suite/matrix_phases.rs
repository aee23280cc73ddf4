//! Muon in phases: matrices in pieces have the bits of whole ones, and wrong memory is refused.

use crate::common::{F32_RECIPE, Memory, RECIPES, Random, Recipe, Values, difference};
use meshstep_optim::{Blocks, Error, Flat, Isa, Muon, Rule, Scalars, Segment};
use meshstep_tensor::{DType, Queue, SliceMut};
use std::ops::Range;

fn part<'v>(values: &'v mut Values, range: &Range<usize>) -> SliceMut<'v> {
    values.slice_mut().slice(range.clone()).unwrap()
}

/// Updates a tensor with each range in a call of its own, and the transformation between them.
fn in_pieces(
    memory: &mut Memory,
    rule: &Muon,
    cuts: &[usize],
    whole: &Segment,
    scalars: &Scalars,
) -> Result<(), Error> {
    let (phases, queue) = (rule.by_matrix().unwrap(), Queue::cpu());
    let dtype = if memory.params.slice().dtype() == DType::F64 { DType::F64 } else { DType::F32 };
    let mut step = Values::new(dtype, whole.range.len(), || f64::NAN);
    let pieces: Vec<Range<usize>> = cuts.windows(2).map(|cut| cut[0]..cut[1]).collect();
    let segment = |range: &Range<usize>| {
        [Segment { range: 0..range.len(), first: range.start as u64, ..whole.clone() }]
    };
    for range in &pieces {
        let mut state: Vec<SliceMut<'_>> = memory.state.iter_mut().map(|s| part(s, range)).collect();
        let (params, grads) = (part(&mut step, range), part(&mut memory.grads, range));
        let flat = Flat { params, grads, state: &mut state, copy: None, remainder: None };
        phases.advance(Isa::detect(), flat, &segment(range), scalars, &queue)?;
    }
    phases.transform(Isa::detect(), step.slice_mut(), whole.matrix.unwrap(), &queue)?;
    for range in &pieces {
        let (params, grads) = (part(&mut memory.params, range), part(&mut step, range));
        let copy = memory.copy.as_mut().map(|copy| part(copy, range));
        let remainder = memory.remainder.as_mut().map(|remainder| part(remainder, range));
        let flat = Flat { params, grads, state: &mut [], copy, remainder };
        phases.apply(Isa::detect(), flat, &segment(range), scalars, &queue)?;
    }
    Ok(())
}

#[test]
fn pieces_of_a_matrix_have_the_bits_of_the_whole_in_every_recipe() {
    let f64s = Recipe { params: DType::F64, grads: DType::F64, state: DType::F64, ..F32_RECIPE };
    for recipe in RECIPES.iter().chain([&F32_RECIPE, &f64s]) {
        for (blocks, matrix) in
            [(Blocks::Whole, (20, 7)), (Blocks::Rows(4), (20, 7)), (Blocks::Batch, (5, 7))]
        {
            let rule = Muon { blocks, momentum: 0.5, weight_decay: 0.3, ..Muon::moonshot() };
            assert!(recipe.suits(&rule));
            let scalars = Scalars { lr: 0.1, grad_scale: 0.5, zero_grads: true, rounding: recipe.rounding };
            let mut whole = Memory::of(&rule, recipe, 140, 3);
            // Ordinary numbers: one NaN would make all of a matrix NaN.
            let mut random = Random::new(5);
            whole.grads = Values::new(recipe.grads, 140, || random.unit());
            whole.state = vec![Values::new(recipe.state, 140, || random.unit())];
            let mut pieces = whole.clone();
            for t in 1..=3 {
                let segment = Segment { key: 9, matrix: Some(matrix), ..Segment::new(0..140, t) };
                whole.update(&rule, Isa::detect(), 0, std::slice::from_ref(&segment), &scalars).unwrap();
                let cuts = [&[0, 140][..], &[0, 1, 64, 140], &[0, 128, 140]][t as usize - 1];
                in_pieces(&mut pieces, &rule, cuts, &segment, &scalars).unwrap();
                whole.grads = Values::new(recipe.grads, 140, || random.unit());
                pieces.grads = whole.grads.clone();
            }
            assert_eq!(difference(&whole, &pieces), None, "{recipe:?}, {blocks:?}");
        }
    }
}

#[test]
fn each_phase_refuses_what_it_cannot_update() {
    let rule = Muon { blocks: Blocks::Rows(2), ..Muon::default() };
    let (phases, isa, queue) = (rule.by_matrix().unwrap(), Isa::detect(), Queue::cpu());
    let (mut step, mut grads) = ([1f32; 12], [1f32; 12]);
    for (len, matrix) in [(12, (3, 4)), (11, (4, 3)), (12, (usize::MAX, 4))] {
        let refused = phases.transform(isa, (&mut step[..len]).into(), matrix, &queue).unwrap_err();
        assert!(matches!(refused, Error::NotAMatrix { rule: "muon", index: 0, .. }), "{refused}");
    }
    for matrix in [None, Some((3, 4))] {
        let segment = [Segment { matrix, ..Segment::new(0..5, 1) }];
        let (params, grads) = ((&mut step[..5]).into(), (&mut grads[..5]).into());
        let flat = Flat { params, grads, state: &mut [], copy: None, remainder: None };
        let refused = phases.apply(isa, flat, &segment, &Scalars::default(), &queue).unwrap_err();
        assert!(matches!(refused, Error::NotAMatrix { len: 5, .. }), "{refused}");
    }
    // Momentum is the only state; without it nothing advances.
    let flat = Flat {
        params: (&mut step).into(),
        grads: (&mut grads).into(),
        state: &mut [],
        copy: None,
        remainder: None,
    };
    let refused = phases.advance(isa, flat, &[], &Scalars::default(), &queue).unwrap_err();
    assert!(matches!(refused, Error::StateCount { given: 0, .. }), "{refused}");
    assert_eq!((step, grads), ([1.0; 12], [1.0; 12]));
}

#[test]
fn the_cost_is_that_of_the_blocks_products() {
    let rule = |blocks| Muon { blocks, ns_steps: 5, ..Muon::default() };
    let of = |blocks, len, matrix| rule(blocks).by_matrix().unwrap().cost(len, matrix);
    assert_eq!(of(Blocks::Whole, 12, (3, 4)), 5 * 9 * 15);
    assert_eq!(of(Blocks::Whole, 12, (4, 3)), 5 * 9 * 15);
    assert_eq!(of(Blocks::Rows(2), 12, (4, 3)), 2 * 5 * 4 * 11);
    assert_eq!(of(Blocks::Batch, 36, (3, 4)), 3 * 5 * 9 * 15);
    assert_eq!(of(Blocks::Whole, 0, (0, 4)), 0);
    assert_eq!(of(Blocks::Whole, 1, (usize::MAX, usize::MAX)), 0);
}
