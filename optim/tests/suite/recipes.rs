//! Parameters, masters and moments narrower than the computation: the same bits everywhere, nothing lost, and recipes that would lose
//! something are refused.

use crate::common::{LENGTHS, Memory, RECIPES, Recipe, Values, cases, difference, fast, long, rules, tried};
use meshstep_optim::{
    AdamW, Error, Isa, Lamb, NEAREST_RETENTION, Rounding, Rule, Scalars, Segment, Sgd, Strided,
};
use meshstep_tensor::{DType, bf16};
use proptest::prelude::*;

const SCALARS: Scalars =
    Scalars { lr: 0.01, grad_scale: 0.75, zero_grads: false, rounding: Rounding::Nearest };
const KEY: u64 = 0x0123_4567_89ab_cdef;

fn scalars(recipe: &Recipe) -> Scalars {
    Scalars { rounding: recipe.rounding, ..SCALARS }
}

/// Returns elements `range` of a tensor that begins `before` elements earlier.
fn segment(range: std::ops::Range<usize>, before: usize, t: u64) -> Segment {
    let first = (range.start + before) as u64;
    Segment { key: KEY, first, ..Segment::new(range, t) }
}

fn compare(
    rule: &dyn Rule,
    recipe: &Recipe,
    (offset, len): (usize, usize),
    which: std::ops::RangeInclusive<u64>,
    isas: &[Isa],
) {
    let start = Memory::of(rule, recipe, offset + len, (len + offset) as u64);
    let steps = |isa: Isa| {
        let mut memory = start.clone();
        for t in which.clone() {
            memory.new_grads(t);
            let scalars = Scalars { zero_grads: t == 2, ..scalars(recipe) };
            memory.update(rule, isa, offset, &[segment(0..len, offset, t)], &scalars).unwrap();
        }
        memory
    };
    let expected = steps(Isa::Reference);
    for &isa in isas {
        let found = difference(&steps(isa), &expected);
        assert_eq!(found, None, "{rule:?} {recipe:?} on {isa}: {len} elements from {offset}");
    }
}

#[test]
fn all_instruction_sets_give_the_reference_bits_under_every_recipe() {
    let isas = fast();
    for (row, rule) in rules().iter().enumerate() {
        for (column, recipe) in RECIPES.iter().enumerate().filter(|(_, recipe)| recipe.suits(&**rule)) {
            // Together the table's rows cover every offset; in the long run each row covers all.
            let cell = row * RECIPES.len() + column;
            let one = cell % 18;
            let lengths = LENGTHS.into_iter().enumerate().filter(|&(_, len)| long() || len < 65_537);
            let chosen =
                |&(i, len): &(usize, usize)| tried(cell * LENGTHS.len() + i, if len < 1000 { 2 } else { 12 });
            for (_, len) in lengths.filter(chosen) {
                for offset in if long() { 0..18 } else { one..one + 1 } {
                    // Long vectors take one step of three, except in the long run.
                    let step = 1 + cell as u64 % 3;
                    let which = if len < 1000 || long() { 1..=3 } else { step..=step };
                    compare(&**rule, recipe, (offset, len), which, &isas);
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(cases(40, 6400))]

    /// Sharding relies on this: random bits depend on the element of the tensor, not on the cut.
    #[test]
    fn however_a_tensor_is_cut_the_bits_are_the_same(
        (rule, recipe, isa) in (any::<prop::sample::Index>(), 0..RECIPES.len(), 0..4usize),
        len in prop_oneof![1usize..300, 60_000usize..200_000],
        mut cuts in prop::collection::vec(0.0f64..1.0, 0..20),
        together: bool,
        (t, seed, before) in (1u64..1 << 40, any::<u32>(), 0usize..1 << 40),
    ) {
        let rules = rules();
        let rule = &*rules[rule.index(rules.len())];
        let recipe = &RECIPES[recipe];
        prop_assume!(recipe.suits(rule));
        let isas: Vec<Isa> = Isa::available().collect();
        let start = Memory::of(rule, recipe, len, seed.into());
        let mut whole = start.clone();
        whole.update(rule, Isa::detect(), 0, &[segment(0..len, before, t)], &scalars(recipe)).unwrap();
        cuts.sort_by(f64::total_cmp);
        let mut from = 0;
        let ends = cuts.iter().map(|cut| (cut * len as f64) as usize).chain([len]);
        let segments: Vec<Segment> =
            ends.map(|end| segment(std::mem::replace(&mut from, end)..end, before, t)).collect();
        let mut parts = start;
        for segments in segments.chunks(if together { segments.len() } else { 1 }) {
            parts.update(rule, isas[isa % isas.len()], 0, segments, &scalars(recipe)).unwrap();
        }
        prop_assert_eq!(difference(&parts, &whole), None);
    }
}

proptest! {
    #![proptest_config(cases(48, 6400))]

    /// A tensor cut across its rows: each run of a part has the bits of a segment that begins at the same element.
    #[test]
    fn runs_have_the_bits_of_their_place_in_the_tensor(
        (rule, recipe, isa) in (any::<prop::sample::Index>(), 0..RECIPES.len(), 0..4usize),
        (first, run, apart) in (0u64..1 << 40, prop_oneof![1u64..20, 100u64..700], 0u64..5000),
        (place, len, from) in (0u64..3000, prop_oneof![1usize..3000, 65_000usize..140_000], 0usize..40),
    ) {
        let rules = rules();
        let rule = &*rules[rule.index(rules.len())];
        let recipe = &RECIPES[recipe];
        prop_assume!(recipe.suits(rule));
        let isas: Vec<Isa> = Isa::available().collect();
        let strided = Strided { first, run, stride: run + apart };
        let start = Memory::of(rule, recipe, from + len, first);
        let whole = Segment { key: KEY, first: place, strided, ..Segment::new(from..from + len, 3) };
        let mut found = start.clone();
        found.update(rule, isas[isa % isas.len()], 0, &[whole], &scalars(recipe)).unwrap();
        let (mut runs, mut begin) = (Vec::new(), 0);
        while begin < len {
            let at = place + begin as u64;
            let end = len.min(begin + (run - at % run) as usize);
            let index = first + at / run * (run + apart) + at % run;
            runs.push(Segment { key: KEY, first: index, ..Segment::new(from + begin..from + end, 3) });
            begin = end;
        }
        let mut expected = start;
        expected.update(rule, Isa::detect(), 0, &runs, &scalars(recipe)).unwrap();
        prop_assert_eq!(difference(&found, &expected), None, "{:?}", strided);
    }
}

/// A remainder and the bf16 parameters are the halves of an f32 master.
#[test]
fn a_remainder_is_an_f32_master_but_for_ties() {
    let rule = AdamW::default();
    let (split, master) = (RECIPES[0], (DType::F32, DType::BF16, Some(DType::BF16)));
    let mut halves = Memory::of(&rule, &Recipe { state: DType::F32, ..split }, 5000, 1);
    let mut random = crate::common::Random::new(9);
    halves.params = Values::new(DType::BF16, 5000, || random.unit());
    halves.remainder = Some(Values::U16(vec![0; 5000]));
    let mut wide = Memory::random(&rule, master, 5000, 1);
    wide.params = Values::F32(halves.params.f64().iter().map(|&p| p as f32).collect());
    wide.state = vec![Values::F32(vec![0.0; 5000]); 2];
    halves.state = wide.state.clone();
    for t in 1..=50 {
        wide.grads = Values::new(DType::BF16, 5000, || random.unit());
        halves.grads = wide.grads.clone();
        for memory in [&mut wide, &mut halves] {
            memory.update(&rule, Isa::detect(), 0, &[segment(0..5000, 0, t)], &SCALARS).unwrap();
        }
    }
    // A tie moves by an ulp at most once or twice in fifty steps, and few elements meet one.
    let copy = wide.copy.unwrap();
    let differ = copy.bits().iter().zip(halves.params.bits()).filter(|(a, b)| *a != b).count();
    assert!(differ <= 2, "{differ} of 5000 differ from the f32 master's copy");
}

/// Without gradients v is multiplied by beta2 in each step: on average bf16 must follow, although each change is far less than half of
/// its last bit.
#[test]
fn stochastic_moments_decay_as_f32_does() {
    const STEPS: u64 = 600;
    let len = meshstep_cases::cases(1 << 14, 1 << 16) as usize;
    let rule = AdamW { weight_decay: 0.0, ..AdamW::default() };
    let mut memory = Memory::of(&rule, &RECIPES[3], len, 1);
    memory.grads = Values::F32(vec![0.0; len]);
    let mut random = crate::common::Random::new(5);
    memory.state[1] = Values::new(DType::BF16, len, || 1.0 + random.unit().abs());
    let mean = |memory: &Memory| memory.state[1].f64().iter().sum::<f64>() / len as f64;
    let before = mean(&memory);
    for t in 1..=STEPS {
        memory.update(&rule, Isa::detect(), 0, &[segment(0..len, 0, t)], &scalars(&RECIPES[3])).unwrap();
    }
    let ratio = mean(&memory) / before / 0.999f64.powi(STEPS as i32);
    assert!((ratio - 1.0).abs() < 0.02, "decayed to {ratio} of what f32 does");
    println!("bf16 moments decay to {ratio:.5} of what f32 does in {STEPS} steps");
}

#[test]
fn stochastic_bf16_parameters_take_small_steps_on_average() {
    const LEN: usize = 1 << 16;
    let recipe = RECIPES[7];
    let mut memory = Memory::of(&Sgd::default(), &recipe, LEN, 1);
    memory.params = Values::BF16(vec![bf16::ONE; LEN]);
    for t in 1..=100 {
        memory.grads = Values::BF16(vec![bf16::ONE; LEN]);
        let scalars = Scalars { lr: 1e-4, grad_scale: 1.0, ..scalars(&recipe) };
        memory.update(&Sgd::default(), Isa::detect(), 0, &[segment(0..LEN, 0, t)], &scalars).unwrap();
    }
    let mean = memory.params.f64().iter().sum::<f64>() / LEN as f64;
    assert!((mean - 0.99).abs() < 2e-4, "100 steps of 1e-4 lead from 1 to {mean}");
}

/// Refused with these messages, by every rule with state; no bit has changed.
#[test]
fn recipes_that_lose_are_refused() {
    let adamw = AdamW::default();
    let quick = AdamW { beta2: 0.99, ..AdamW::default() };
    let check = |rule: &dyn Rule, recipe: Recipe, says: &[&str]| {
        for isa in Isa::available() {
            let mut memory = Memory::of(rule, &recipe, 40, 1);
            let before = memory.bits();
            let result = memory.update(rule, isa, 0, &[segment(0..40, 0, 1)], &scalars(&recipe));
            let error = result.unwrap_err().to_string();
            assert!(says.iter().all(|says| error.contains(says)), "{error:?} should say {says:?}");
            assert_eq!(memory.bits(), before);
        }
    };
    let nearest = RECIPES[6];
    check(&adamw, nearest, &["adamw", "0.999", "stochastic", "0.99609375"]);
    check(&Lamb::default(), nearest, &["lamb", "0.999", "stochastic"]);
    let mut fine = Memory::of(&quick, &nearest, 40, 1);
    assert_eq!(fine.update(&quick, Isa::detect(), 0, &[segment(0..40, 0, 1)], &scalars(&nearest)), Ok(()));
    assert!(quick.retention() <= NEAREST_RETENTION);
    let low = Recipe { rounding: Rounding::Nearest, ..RECIPES[7] };
    check(&adamw, low, &["bf16 params", "remainder", "master", "stochastic"]);
    check(&adamw, Recipe { params: DType::F16, ..RECIPES[7] }, &["params", "f16", "copy"]);
    check(&adamw, Recipe { params: DType::F32, ..RECIPES[0] }, &["remainder", "f32", "bf16"]);
    check(&adamw, Recipe { copy: Some(DType::BF16), ..RECIPES[0] }, &["copy", "no copy"]);
    check(&adamw, Recipe { state: DType::F16, ..RECIPES[3] }, &["state", "f16", "f32 or bf16"]);
    check(&adamw, Recipe { state: DType::F64, ..RECIPES[0] }, &["state", "f64", "f32 or bf16"]);
    let wide = Recipe { params: DType::F64, grads: DType::F64, ..RECIPES[3] };
    check(&adamw, wide, &["state of f64", "bf16", "f64"]);
    check(&adamw, Recipe { grads: DType::F64, ..RECIPES[0] }, &["grads of bf16", "f64"]);
}

#[test]
fn state_of_several_types_and_remainders_of_another_type_or_length_are_refused() {
    let rule = AdamW::default();
    let mut mixed = Memory::of(&rule, &RECIPES[3], 40, 1);
    mixed.state[0] = Values::F32(vec![0.0; 40]);
    let stochastic = scalars(&RECIPES[3]);
    let error = mixed.update(&rule, Isa::detect(), 0, &[segment(0..40, 0, 1)], &stochastic).unwrap_err();
    assert!(error.to_string().contains("one type"), "{error}");
    let mut short = Memory::of(&rule, &RECIPES[0], 40, 1);
    short.remainder = Some(Values::U16(vec![0; 39]));
    let error = short.update(&rule, Isa::detect(), 0, &[segment(0..39, 0, 1)], &SCALARS);
    assert_eq!(error, Err(Error::Len { what: "remainder", given: 39, expected: 40 }));
    short.remainder = Some(Values::BF16(vec![bf16::ZERO; 40]));
    let error = short.update(&rule, Isa::detect(), 0, &[segment(0..39, 0, 1)], &SCALARS);
    assert!(matches!(error, Err(Error::DType { what: "a remainder", .. })), "{error:?}");
}
