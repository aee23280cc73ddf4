//! Every loop equals the reference bit for bit, at every length and offset, for any split of the work.

use crate::common::{
    DTYPES, LENGTHS, Memory, Random, Values, cases, difference, fast, long, rules, segment, tried,
};
use meshstep_optim::{Isa, Rounding, Rule, Scalars, Segment};
use meshstep_tensor::DType;
use proptest::prelude::*;
use std::ops::RangeInclusive;

const SCALARS: Scalars =
    Scalars { lr: 0.01, grad_scale: 0.75, zero_grads: false, rounding: Rounding::Nearest };

/// Takes a step for each of `grads`; step 2 resets them.
fn steps(
    rule: &dyn Rule,
    isa: Isa,
    memory: &mut Memory,
    (offset, len): (usize, usize),
    grads: &[(u64, Values)],
) {
    for &(t, ref grads) in grads {
        memory.grads.clone_from(grads);
        let scalars = Scalars { zero_grads: t == 2, ..SCALARS };
        memory.update(rule, isa, offset, &[segment(0..len, t)], &scalars).unwrap();
    }
}

fn compare(
    rule: &dyn Rule,
    dtypes: (DType, DType, Option<DType>),
    (offset, len): (usize, usize),
    which: RangeInclusive<u64>,
    isas: &[Isa],
) {
    let start = Memory::random(rule, dtypes, offset + len, (len + offset) as u64);
    let grads = which.map(|t| {
        let mut random = Random::new(t);
        (t, Values::new(dtypes.1, offset + len, || random.any()))
    });
    let grads: Vec<_> = grads.collect();
    let mut expected = start.clone();
    steps(rule, Isa::Reference, &mut expected, (offset, len), &grads);
    for &isa in isas {
        let mut memory = start.clone();
        steps(rule, isa, &mut memory, (offset, len), &grads);
        let found = difference(&memory, &expected);
        assert_eq!(found, None, "{rule:?} {dtypes:?} on {isa}: {len} elements from {offset}");
    }
}

#[test]
fn all_instruction_sets_give_the_reference_bits_at_every_length_and_offset() {
    let isas = fast();
    for (row, rule) in rules().iter().enumerate() {
        // Each rule updates one long vector in one step. Together the rules cover every type, length, offset and step; in the long run
        // each rule covers all.
        let longest = LENGTHS[match row % 6 {
            0 => 10,
            3 => 8,
            _ => 9,
        }];
        let only = (longest, row * 7 % 18, (row + row / 6) % DTYPES.len());
        let step = 1 + (row + row / 6) as u64 % 3;
        for (column, &dtypes) in DTYPES.iter().enumerate() {
            let cell = row * DTYPES.len() + column;
            for (i, len) in LENGTHS.into_iter().enumerate() {
                let at = cell * LENGTHS.len() + i;
                let chosen = |offset: &usize| match len < 1000 {
                    true => tried(18 * at + offset, 9),
                    false => long() || ((len, *offset, column) == only && tried(row, 1)),
                };
                for offset in (0..18).filter(chosen) {
                    let which = if len < 1000 || long() { 1..=3 } else { step..=step };
                    compare(&**rule, dtypes, (offset, len), which, &isas);
                }
            }
        }
    }
}

#[test]
fn nothing_outside_the_segments_is_touched() {
    let segments = [segment(3..10, 5), segment(10..10, 1), segment(17..90, 1), segment(1000..2050, 7)];
    let covered = |i: usize| segments.iter().any(|s| s.range.contains(&i));
    for (row, rule) in rules().iter().enumerate() {
        for (column, dtypes) in DTYPES.into_iter().enumerate() {
            for isa in Isa::available().filter(|_| tried(row * DTYPES.len() + column, 1)) {
                let start = Memory::random(&**rule, dtypes, 3000, 1);
                let mut memory = start.clone();
                let scalars = Scalars { zero_grads: true, ..SCALARS };
                memory.update(&**rule, isa, 0, &segments, &scalars).unwrap();
                for (after, before) in memory.bits().iter().zip(&start.bits()) {
                    assert!((0..3000).all(|i| covered(i) || after[i] == before[i]), "{rule:?} {isa}");
                }
                let grads = memory.grads.f64();
                assert!((0..3000).filter(|&i| covered(i)).all(|i| grads[i] == 0.0));
                assert_ne!(memory.params.bits(), start.params.bits());
            }
        }
    }
}

#[test]
fn groups_update_their_own_segments_of_the_same_memory() {
    let rules = rules();
    let (decay, plain) = (&*rules[0], &*rules[1]);
    let start = Memory::random(decay, DTYPES[0], 200_000, 3);
    let whole = |rule| {
        let mut memory = start.clone();
        memory.update(rule, Isa::detect(), 0, &[segment(0..200_000, 2)], &SCALARS).unwrap();
        memory.bits()
    };
    let mut both = start.clone();
    let (even, odd): (Vec<Segment>, Vec<Segment>) =
        (0..100).map(|i| segment(i * 2000..(i + 1) * 2000, 2)).partition(|s| s.range.start % 4000 == 0);
    both.update(decay, Isa::detect(), 0, &even, &SCALARS).unwrap();
    both.update(plain, Isa::detect(), 0, &odd, &SCALARS).unwrap();
    for ((both, decay), plain) in both.bits().iter().zip(whole(decay)).zip(whole(plain)) {
        assert!((0..200_000).all(|i| both[i] == if i % 4000 < 2000 { decay[i] } else { plain[i] }));
    }
}

proptest! {
    #![proptest_config(cases(48, 6400))]

    /// Sharding relies on this: any cut of a range gives the same bits, in one call or several, on any instruction set.
    #[test]
    fn however_the_range_is_cut_the_bits_are_the_same(
        (rule, dtypes, isa) in (any::<prop::sample::Index>(), 0..8usize, 0..4usize),
        len in prop_oneof![0usize..300, 60_000usize..300_000],
        mut cuts in prop::collection::vec(0.0f64..1.0, 0..40),
        together: bool,
        (t, seed) in (1u64..2000, any::<u64>()),
    ) {
        let (rules, isas) = (rules(), Isa::available().collect::<Vec<_>>());
        let rule = &**rule.get(&rules);
        let start = Memory::random(rule, DTYPES[dtypes], len, seed);
        let mut whole = start.clone();
        whole.update(rule, Isa::detect(), 0, &[segment(0..len, t)], &SCALARS).unwrap();
        cuts.sort_by(f64::total_cmp);
        let ends = cuts.iter().map(|cut| (cut * len as f64) as usize).chain([len]);
        let mut from = 0;
        let segments: Vec<Segment> = ends.map(|end| segment(std::mem::replace(&mut from, end)..end, t)).collect();
        let mut parts = start;
        let step = if together { segments.len() } else { 1 };
        for segments in segments.chunks(step) {
            parts.update(rule, isas[isa % isas.len()], 0, segments, &SCALARS).unwrap();
        }
        prop_assert_eq!(difference(&parts, &whole), None);
    }
}
