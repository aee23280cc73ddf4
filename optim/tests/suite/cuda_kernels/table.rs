//! Tables of several groups, tables that need 64-bit tile counts, and the search of a tile's row.

use crate::common::{Memory, difference, tried};
use crate::cuda_kernels::{SCALARS, Table, describe, launch, recipes, scalars, segment, step};
use meshstep_optim::cuda::{self, Row, StepScalars, THREADS};
use meshstep_optim::{AdamW, Isa, Momentum, Rule, Scalars, Segment, Sgd, Strided};
use meshstep_simt::{self as simt, Device};
use meshstep_tensor::DType;

/// Two groups of one rule in one launch: short and long segments with various t, in any order, with gaps.
fn groups<'a>(decaying: &'a dyn Rule, plain: &'a dyn Rule) -> [(&'a dyn Rule, Vec<Segment>); 2] {
    let first =
        [segment(3..10, 77, 5), segment(10..10, 0, 1), segment(17..90, 1, 1), segment(6000..15_000, 64, 7)];
    let second = [segment(100..2148, 1000, 1 << 40 | 3), segment(2148..5999, 1 << 20, 2000)];
    [(decaying, first.to_vec()), (plain, second.to_vec())]
}

#[test]
fn one_launch_updates_groups_and_touches_nothing_else() {
    let momentum = Sgd { momentum: 0.9, weight_decay: 0.1, ..Sgd::default() };
    let average = Sgd { form: Momentum::Average { debias: true }, ..momentum.clone() };
    let decaying = AdamW { weight_decay: 0.3, maximize: true, ..AdamW::default() };
    let pairs: [(&str, &dyn Rule, &dyn Rule); 2] =
        [("adam", &decaying, &AdamW::default()), ("sgd", &momentum, &average)];
    for (folder, one, other) in pairs {
        let Some(device) = Device::of(folder) else { return };
        for (i, recipe) in recipes().iter().enumerate().filter(|(_, recipe)| recipe.suits(one)) {
            let ways = [(1, false), (3, true), (200, false)].into_iter().enumerate();
            for (_, (blocks, reverse)) in ways.filter(|(j, _)| tried(3 * i + j, 1)) {
                let start = Memory::of(one, recipe, 16_000, 1);
                let (mut expected, mut found) = (start.clone(), start);
                let scalars = Scalars { zero_grads: true, ..scalars(recipe, 1) };
                for (rule, segments) in groups(one, other) {
                    expected.update(rule, Isa::Reference, 0, &segments, &scalars).unwrap();
                }
                device.reverse(reverse);
                let kernel = launch(&device, &groups(one, other), &mut found, &scalars, blocks).unwrap();
                assert_eq!(difference(&found, &expected), None, "{kernel} {recipe:?} in {blocks} blocks");
            }
        }
    }
}

/// Parts of tensors cut across their rows; runs are whole groups of random bits or split them anywhere.
#[test]
fn runs_draw_the_bits_of_their_place_in_the_tensor() {
    let rule = AdamW::default();
    let Some(device) = Device::of("adam") else { return };
    let runs = [(0, 128, 256), (1 << 34, 1024, 4096), (128, 384, 1000), (5, 96, 1000), (1 << 33, 5000, 5120)];
    for recipe in recipes().iter().filter(|recipe| recipe.suits(&rule)) {
        for (first, run, stride) in runs {
            for (place, range) in [(0, 0..7000), (1000, 8..5000), (77, 3..4099)] {
                let strided = Strided { first, run, stride };
                let segment = Segment { strided, first: place, ..segment(range, 0, 3) };
                let start = Memory::of(&rule, recipe, 7000, 1);
                let (mut expected, mut found) = (start.clone(), start);
                let (scalars, group) = (scalars(recipe, 1), [segment]);
                expected.update(&rule, Isa::Reference, 0, &group, &scalars).unwrap();
                let groups = [(&rule as &dyn Rule, group.to_vec())];
                let kernel = launch(&device, &groups, &mut found, &scalars, 3).unwrap();
                assert_eq!(difference(&found, &expected), None, "{kernel} {recipe:?}: {group:?}");
            }
        }
    }
}

/// Each group has its factor on the learning rate, and a table has more rows than a block has threads.
#[test]
fn rows_have_rates_of_their_own() {
    let rule = AdamW { weight_decay: 0.3, ..AdamW::default() };
    let Some(device) = Device::of("adam") else { return };
    let recipe = &recipes()[0];
    let start = Memory::of(&rule, recipe, 3000, 1);
    let (mut expected, mut found) = (start.clone(), start);
    let mut table = Table::new(&device, DType::F32, &[(&rule, Vec::new())]);
    for i in 0..1000 {
        let (segment, scale) = (segment(3 * i..3 * i + 2, 0, 1 + i as u64 % 7), i as f64 / 100.0);
        cuda::append(&mut table.rows, DType::F32, &rule, scale, std::slice::from_ref(&segment)).unwrap();
        let scalars = Scalars { lr: SCALARS.lr * scale, ..SCALARS };
        expected.update(&rule, Isa::Reference, 0, &[segment], &scalars).unwrap();
    }
    table.step(&mut found, 0, SCALARS.rounding, step(&SCALARS), 2).unwrap();
    assert_eq!(difference(&found, &expected), None);
}

#[test]
fn a_skipped_step_writes_nothing_and_does_not_count() {
    let rule = AdamW::default();
    let Some(device) = Device::of("adam") else { return };
    for recipe in recipes().iter().filter(|recipe| recipe.suits(&rule)) {
        let start = Memory::of(&rule, recipe, 5000, 1);
        let mut memory = start.clone();
        let mut table = Table::new(&device, recipe.params, &[(&rule, vec![segment(0..5000, 0, 1)])]);
        let rows = table.rows.clone();
        let step = StepScalars { skip: 1, zero_grads: 1, ..step(&SCALARS) };
        let kernel = table.step(&mut memory, 0, recipe.rounding, step, 3).unwrap();
        assert_eq!((difference(&memory, &start), &table.rows), (None, &rows), "{kernel}");
    }
}

/// Parameters without a gradient in some steps: their rows count only the steps that update them.
#[test]
fn rows_of_parameters_without_a_gradient_are_left_alone() {
    let average = Sgd { momentum: 0.9, form: Momentum::Average { debias: true }, ..Sgd::default() };
    let rules: [(&str, &dyn Rule); 2] = [("adam", &AdamW::default()), ("sgd", &average)];
    // One parameter has two rows, and one row belongs to no parameter.
    let (ranges, params) =
        ([3..10, 10..2100, 2100..2100, 2101..9000, 9000..9100], [0, 1, 1, 7, Row::EVERY_STEP]);
    for (folder, rule) in rules {
        let Some(device) = Device::of(folder) else { return };
        for recipe in recipes().iter().filter(|recipe| recipe.suits(rule)) {
            let start = Memory::of(rule, recipe, 9100, 1);
            let (mut expected, mut found) = (start.clone(), start);
            let mut segments = ranges.clone().map(|range| segment(range, 0, 1)).to_vec();
            let mut table = Table::new(&device, recipe.params, &[(rule, segments.clone())]);
            table.rows.iter_mut().zip(params).for_each(|(row, param)| row.param = param);
            for (t, bytes) in [0u8, 0xff, 0b1, 0b1000_0000, 0b10, 0b1000_0011].into_iter().enumerate() {
                let scalars = scalars(recipe, t as u64);
                let updated = |param: u32| param == Row::EVERY_STEP || bytes >> param & 1 == 1;
                for (segment, _) in segments.iter_mut().zip(params).filter(|&(_, param)| updated(param)) {
                    let one = std::slice::from_ref(segment);
                    expected.update(rule, Isa::Reference, 0, one, &scalars).unwrap();
                    segment.t += 1;
                }
                let (kernel, streams) = describe(table.family, &mut found, 0, recipe.rounding);
                table.prepare_some(step(&scalars), std::array::from_fn(|i| bytes >> i & 1));
                // SAFETY: the vectors have the kernel's types and the segments' length.
                unsafe { table.update(&kernel, streams, step(&scalars), 3) }.unwrap();
                assert_eq!(difference(&found, &expected), None, "{kernel} {recipe:?}, step {t}");
                let counted = table.rows.iter().map(|row| row.t + 1);
                assert!(counted.eq(segments.iter().map(|segment| segment.t)), "{kernel}, step {t}");
            }
        }
    }
}

/// A row that claims 2^34 tiles without elements, followed by one of three tiles: the largest possible grid wraps around eight times.
/// Only the blocks that reach the second row run.
#[test]
fn tiles_are_counted_in_64_bits() {
    const CLAIMED: u64 = 1 << 34;
    const GRID: u32 = i32::MAX as u32;
    let rule = AdamW::default();
    let Some(device) = Device::of("adam") else { return };
    let recipe = &recipes()[0];
    let start = Memory::of(&rule, recipe, 5000, 1);
    let (mut expected, mut found) = (start.clone(), start);
    let segments = [segment(0..5000, 0, 1)];
    expected.update(&rule, Isa::Reference, 0, &segments, &SCALARS).unwrap();
    let mut table = Table::new(&device, DType::F32, &[(&rule, segments.to_vec())]);
    table.rows.insert(0, Row { start: 0, end: 0, ..table.rows[0] });
    table.rows[1].tile = CLAIMED;
    table.prepare(step(&SCALARS));
    let (kernel, streams) = describe("adam", &mut found, 0, SCALARS.rounding);
    assert_eq!(cuda::tiles(&table.rows, DType::F32), CLAIMED + 3);
    let from = (CLAIMED % u64::from(GRID)) as u32;
    device.blocks(from..from + 3);
    // SAFETY: the vectors have the kernel's types and the segment's length.
    unsafe { table.update(&kernel, streams, step(&SCALARS), GRID) }.unwrap();
    assert_eq!(difference(&found, &expected), None);
}

/// Kernel that returns for each of the given tiles, in order, its row, first element and length: found from the previous row, and from
/// the first one.
const PLACE: &str = r#"
extern "C" __global__ void place(const Row* rows, u64 count, const u64* tiles, u64 asked, u64* told) {
    if (threadIdx.x > 0) return;
    u32 on = 0;
    for (u64 i = 0; i < asked; i++) {
        u32 anew = find(rows, 0, count, tiles[i]);
        on = find(rows, on, count, tiles[i]);
        Tile tile = tile_of<float>(rows[on], tiles[i]);
        told[3 * i] = on == anew ? on : ~0ull, told[3 * i + 1] = tile.start, told[3 * i + 2] = tile.len;
    }
}
"#;

#[test]
fn tiles_are_found_in_tables_of_any_size() {
    let text = simt::text("adam");
    let shared = &text[..text.find("KERNELS(adam,").unwrap()];
    let Some(device) = Device::compile(&format!("{shared}{PLACE}"), "") else { return };
    let mut rows = Vec::new();
    let at = |range| [Segment::new(range, 1)];
    let far = (1u64 << 45) as usize;
    for range in [0..far, far..far, far + 7..far + 7 + 2048, far + 5000..far + 9097, far + 9097..far + 9097] {
        cuda::append(&mut rows, DType::F32, &AdamW::default(), 1.0, &at(range)).unwrap();
    }
    let (far, tile) = (far as u64, 1u64 << 34);
    // (tile, row, start, len)
    let expected = [
        (0, 0, 0, 2048),
        ((1 << 32) + 1, 0, (1 << 43) + 2048, 2048),
        (tile - 1, 0, far - 2048, 2048),
        (tile, 2, far + 7, 2041),
        (tile + 1, 2, far + 2048, 7),
        (tile + 2, 3, far + 5000, 2040),
        (tile + 3, 3, far + 7040, 2048),
        (tile + 4, 3, far + 9088, 9),
    ];
    assert_eq!(cuda::tiles(&rows, DType::F32), tile + 5);
    let asked = expected.map(|(tile, ..)| tile);
    let mut told = [0u64; 3 * 8];
    let (mut rows_at, mut count) = (rows.as_ptr(), rows.len() as u64);
    let (mut asked_at, mut asked_count, mut told_at) =
        (asked.as_ptr(), asked.len() as u64, told.as_mut_ptr());
    let mut args = [
        (&raw mut rows_at).cast(),
        (&raw mut count).cast(),
        (&raw mut asked_at).cast(),
        (&raw mut asked_count).cast(),
        (&raw mut told_at).cast(),
    ];
    // SAFETY: these are the arguments of `place`, and `told` has three slots for each tile.
    unsafe { device.launch("place", 1, THREADS, &mut args) }.unwrap();
    let expected: Vec<u64> = expected.iter().flat_map(|&(_, row, start, len)| [row, start, len]).collect();
    assert_eq!(told[..], expected);
}
