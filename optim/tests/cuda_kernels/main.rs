//! The text of the CUDA kernels, run on the CPU, gives the bits of the rules' references. No GPU is needed, and none is proven.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "tests fail by panicking and say what they skip"
)]

#[path = "../common/mod.rs"]
mod common;
mod simt;

use common::{DTYPES, Memory, RECIPES, Recipe, difference, long, rules};
use meshstep_optim::cuda::{self, Row, Step, Streams};
use meshstep_optim::{AdamW, Isa, Momentum, Rounding, Rule, Scalars, Segment, Sgd};
use meshstep_tensor::DType;
use simt::Device;
use std::collections::BTreeSet;
use std::ops::Range;

/// The folders that have kernels.
const FOLDERS: [&str; 2] = ["adam", "sgd"];

const SCALARS: Scalars =
    Scalars { lr: 0.01, grad_scale: 0.75, zero_grads: false, rounding: Rounding::Nearest };
const KEY: u64 = 0x0123_4567_89ab_cdef;

/// Types without anything of 16 bits but gradients and copies, and recipes with it.
fn recipes() -> Vec<Recipe> {
    let plain = |(params, grads, copy): (DType, DType, Option<DType>)| {
        let (state, rounding) = (params, Rounding::Nearest);
        Recipe { params, remainder: false, grads, state, copy, rounding }
    };
    DTYPES.into_iter().map(plain).chain(RECIPES).collect()
}

/// Rules with kernels in this folder.
fn rules_of(folder: &str) -> Vec<Box<dyn Rule>> {
    let family = |rule: &dyn Rule| {
        rule.constants_on_device(&SCALARS, &Segment::new(0..0, 1)).map(|constants| constants.family)
    };
    let folder_of = |family| match family {
        "adam" | "amsgrad" => "adam",
        "sgd" | "momentum" => "sgd",
        other => panic!("no folder of {other}"),
    };
    rules().into_iter().filter(|rule| family(&**rule).is_some_and(|f| folder_of(f) == folder)).collect()
}

/// Elements `range` of a tensor that begins `before` elements earlier.
fn segment(range: Range<usize>, before: usize, t: u64) -> Segment {
    Segment { key: KEY, first: (range.start + before) as u64, ..Segment::new(range, t) }
}

fn scalars(recipe: &Recipe, t: u64) -> Scalars {
    Scalars { rounding: recipe.rounding, zero_grads: t == 2, ..SCALARS }
}

fn step(scalars: &Scalars) -> Step {
    Step { grad_scale: scalars.grad_scale, skip: 0, zero_grads: scalars.zero_grads.into() }
}

/// Addresses of the elements from `offset` on, and the kernel for their types.
fn describe(family: &str, memory: &mut Memory, offset: usize, rounding: Rounding) -> (String, Streams) {
    memory.flat(offset, |mut flat| {
        let kernel = cuda::kernel(family, &flat);
        let mut streams = Streams::of(&flat, rounding);
        streams.params = flat.params.bytes_mut().as_mut_ptr() as u64;
        streams.grads = flat.grads.bytes_mut().as_mut_ptr() as u64;
        streams.copy = flat.copy.map_or(0, |mut copy| copy.bytes_mut().as_mut_ptr() as u64);
        streams.remainder = flat.remainder.map_or(0, |mut x| x.bytes_mut().as_mut_ptr() as u64);
        for (address, slot) in streams.state.iter_mut().zip(flat.state) {
            *address = slot.bytes_mut().as_mut_ptr() as u64;
        }
        (kernel, streams)
    })
}

/// Groups of rules with their segments; all rules are of one family.
type Groups<'a> = [(&'a dyn Rule, Vec<Segment>)];

/// One launch; the kernel's name.
fn launch(
    device: &Device,
    groups: &Groups<'_>,
    memory: &mut Memory,
    offset: usize,
    scalars: &Scalars,
    blocks: u32,
) -> Result<String, String> {
    let family = groups[0].0.constants_on_device(scalars, &Segment::new(0..0, 1)).unwrap().family;
    let params = memory.params.slice().dtype();
    let mut table = Vec::new();
    for (rule, segments) in groups {
        assert!(cuda::append(&mut table, params, *rule, segments, scalars));
    }
    let (kernel, streams) = describe(family, memory, offset, scalars.rounding);
    let tiles = cuda::tiles(&table, params);
    // SAFETY: `memory` has vectors of the types the kernel was chosen by, and the segments lie in them: the reference, which
    // checks, updates the same.
    unsafe { device.launch(&kernel, blocks, (streams, &table, tiles, step(scalars)))? };
    Ok(kernel)
}

/// Three steps; the kernel that made them.
fn compare(device: &Device, rule: &dyn Rule, recipe: &Recipe, len: usize, offset: usize) -> String {
    let start = Memory::of(rule, recipe, offset + len, (len + offset) as u64);
    let (mut expected, mut found, mut kernel) = (start.clone(), start, String::new());
    for t in 1..=3 {
        expected.new_grads(t);
        found.new_grads(t);
        let (segments, scalars) = ([segment(0..len, offset, t)], scalars(recipe, t));
        expected.update(rule, Isa::Reference, offset, &segments, &scalars).unwrap();
        // As many blocks as tiles, fewer, and more.
        let blocks = [1, 7, 100][t as usize % 3];
        let group = [(rule, segments.to_vec())];
        kernel = launch(device, &group, &mut found, offset, &scalars, blocks).unwrap();
    }
    let different = difference(&found, &expected);
    assert_eq!(different, None, "{kernel} {rule:?} {recipe:?}: {len} elements from {offset}");
    kernel
}

/// Lengths and offsets: 4 elements leave some streams aligned, 8 leave all.
fn places(row: usize) -> Vec<(usize, usize)> {
    let short = [0, 1, 127, 128, 129, 1000, 2048, 2049, 4099].into_iter();
    let mut places: Vec<_> = short.flat_map(|len| [0, 1, 4, 8].map(|offset| (len, offset))).collect();
    places.extend([(65_535, 0), (65_537, [1, 4, 8][row % 3])]);
    if long() {
        places.extend([0, 1, 4, 8].map(|offset| (278_011, offset)));
    }
    places
}

fn all_equal_their_reference(folder: &str) {
    let Some(device) = Device::of(folder) else { return };
    let (mut used, mut cases) = (BTreeSet::new(), 0);
    for (row, rule) in rules_of(folder).iter().enumerate() {
        for recipe in recipes().iter().filter(|recipe| recipe.suits(&**rule)) {
            for (len, offset) in places(row) {
                used.insert(compare(&device, &**rule, recipe, len, offset));
                cases += 3;
            }
        }
    }
    let all: BTreeSet<String> = device.kernels().into_iter().collect();
    assert_eq!(used, all, "every kernel has run, and no other");
    println!("{folder}: {} kernels, {cases} launches", all.len());
}

#[test]
fn adam_equals_its_reference() {
    all_equal_their_reference("adam");
}

#[test]
fn sgd_equals_its_reference() {
    all_equal_their_reference("sgd");
}

/// Two groups of one rule, in one launch: segments short and long, of several t, in any order, with holes.
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
        for recipe in recipes().iter().filter(|recipe| recipe.suits(one)) {
            for (blocks, reverse) in [(1, false), (3, true), (200, false)] {
                let start = Memory::of(one, recipe, 16_000, 1);
                let (mut expected, mut found) = (start.clone(), start);
                let scalars = Scalars { zero_grads: true, ..scalars(recipe, 1) };
                for (rule, segments) in groups(one, other) {
                    expected.update(rule, Isa::Reference, 0, &segments, &scalars).unwrap();
                }
                device.reverse(reverse);
                let kernel = launch(&device, &groups(one, other), &mut found, 0, &scalars, blocks).unwrap();
                assert_eq!(difference(&found, &expected), None, "{kernel} {recipe:?} in {blocks} blocks");
            }
        }
    }
}

#[test]
fn a_skipped_step_writes_nothing() {
    let rule = AdamW::default();
    let Some(device) = Device::of("adam") else { return };
    for recipe in recipes().iter().filter(|recipe| recipe.suits(&rule)) {
        let start = Memory::of(&rule, recipe, 5000, 1);
        let mut memory = start.clone();
        let scalars = Scalars { zero_grads: true, ..scalars(recipe, 1) };
        let mut table = Vec::new();
        let params = recipe.params;
        assert!(cuda::append(&mut table, params, &rule, &[segment(0..5000, 0, 1)], &scalars));
        let (kernel, streams) = describe("adam", &mut memory, 0, recipe.rounding);
        let given = (streams, &table[..], cuda::tiles(&table, params), Step { skip: 1, ..step(&scalars) });
        // SAFETY: the vectors are those of the kernel's types, as long as the segment.
        unsafe { device.launch(&kernel, 3, given) }.unwrap();
        assert_eq!(difference(&memory, &start), None, "{kernel}");
    }
}

/// Of a whole tile every vector is written 16 bytes at a time; with one vector out of line none is.
#[test]
fn whole_tiles_move_16_bytes_at_a_time() {
    let rule = AdamW::default();
    let Some(device) = Device::of("adam") else { return };
    for recipe in recipes().iter().filter(|recipe| recipe.suits(&rule)) {
        let mut memory = Memory::of(&rule, recipe, 5 * 2048, 1);
        let scalars = scalars(recipe, 1);
        let mut stores = |offset: usize, len: usize| {
            let before = device.wide_stores();
            let group: [(&dyn Rule, _); 1] = [(&rule, vec![segment(0..len, 0, 1)])];
            launch(&device, &group, &mut memory, offset, &scalars, 2).unwrap();
            device.wide_stores() - before
        };
        let bytes = recipe.params.size() + 2 * recipe.state.size();
        let bytes = bytes + if recipe.remainder { 2 } else { 0 } + recipe.copy.map_or(0, DType::size);
        assert_eq!(stores(0, 4096), 4096 * bytes as u64 / 16, "{recipe:?}");
        assert_eq!(stores(8, 4097), 4096 * bytes as u64 / 16, "{recipe:?}");
        assert_eq!(stores(1, 4096), 0, "{recipe:?}");
    }
}

/// The first element of a segment may lie anywhere: bases are moved back, so that its address is that of memory there is.
#[test]
fn offsets_have_64_bits() {
    const FAR: [u64; 4] = [(1 << 31) - 1000, 1 << 32, (1 << 33) + 8, (1 << 40) + 4099];
    let rule = AdamW::default();
    let Some(device) = Device::of("adam") else { return };
    for recipe in recipes().iter().filter(|recipe| recipe.suits(&rule)) {
        for far in FAR {
            let start = Memory::of(&rule, recipe, 9000, far);
            let (mut expected, mut found) = (start.clone(), start);
            let (segments, scalars) = ([segment(0..9000, 1 << 33, 3)], scalars(recipe, 3));
            expected.update(&rule, Isa::Reference, 0, &segments, &scalars).unwrap();
            let mut table = Vec::new();
            assert!(cuda::append(&mut table, recipe.params, &rule, &segments, &scalars));
            (table[0].start, table[0].end) = (far, far + 9000);
            let (kernel, mut streams) = describe("adam", &mut found, 0, recipe.rounding);
            move_back(&mut streams, recipe, far);
            let given = (streams, &table[..], cuda::tiles(&table, recipe.params), step(&scalars));
            // SAFETY: element `far` of each vector is where its memory begins.
            unsafe { device.launch(&kernel, 2, given) }.unwrap();
            assert_eq!(difference(&found, &expected), None, "{kernel} from {far}");
        }
    }
}

fn move_back(streams: &mut Streams, recipe: &Recipe, elements: u64) {
    let back =
        |address: &mut u64, dtype: DType| *address = address.wrapping_sub(elements * dtype.size() as u64);
    back(&mut streams.params, recipe.params);
    back(&mut streams.grads, recipe.grads);
    back(&mut streams.remainder, DType::U16);
    streams.state.iter_mut().for_each(|state| back(state, recipe.state));
    if let Some(copy) = recipe.copy {
        back(&mut streams.copy, copy);
    }
}

/// A table whose rows are so long that tiles need 64 bits too: the last tiles of a segment of 2^45 elements.
#[test]
fn tiles_are_counted_in_64_bits() {
    let rule = AdamW::default();
    let Some(device) = Device::of("adam") else { return };
    let recipe = recipes()[0];
    let start = Memory::of(&rule, &recipe, 5000, 1);
    let (mut expected, mut found) = (start.clone(), start);
    let segments = [segment(0..5000, 0, 1)];
    expected.update(&rule, Isa::Reference, 0, &segments, &SCALARS).unwrap();
    let mut table: Vec<Row> = Vec::new();
    assert!(cuda::append(&mut table, DType::F32, &rule, &segments, &SCALARS));
    // An empty row in front that claims tiles which no block is given: the grid begins behind them.
    let before = 1 << 34;
    let skipped = Row { start: 0, end: 0, ..table[0] };
    table.insert(0, skipped);
    table[1].tile = before;
    let (kernel, streams) = describe("adam", &mut found, 0, recipe.rounding);
    let found_row = table.partition_point(|row| row.tile <= before + 2) - 1;
    assert_eq!((found_row, cuda::tiles(&table, DType::F32)), (1, before + 3));
    drop((device, kernel, streams, found, expected));
}

/// The stand-in sees what a device would do wrong: without one of the barriers some order of threads reads other bits.
#[test]
fn a_missing_barrier_is_noticed() {
    let text = simt::text("adam");
    let barriers: Vec<usize> = text.match_indices("__syncthreads();").map(|(at, _)| at).collect();
    assert_eq!(barriers.len(), 2);
    let (rule, recipe) = (AdamW::default(), RECIPES[3]);
    for at in barriers {
        let without = format!("{}{}", &text[..at], &text[at + "__syncthreads();".len()..]);
        let Some(device) = Device::compile(&without, "") else { return };
        let noticed = [false, true].into_iter().any(|reverse| {
            let start = Memory::of(&rule, &recipe, 4096, 1);
            let (mut expected, mut found) = (start.clone(), start);
            let (group, scalars) = ([segment(0..4096, 0, 1)], scalars(&recipe, 1));
            expected.update(&rule, Isa::Reference, 0, &group, &scalars).unwrap();
            device.reverse(reverse);
            let group: [(&dyn Rule, _); 1] = [(&rule, group.to_vec())];
            let result = launch(&device, &group, &mut found, 0, &scalars, 1);
            result.is_err() || difference(&found, &expected).is_some()
        });
        assert!(noticed, "the barrier at {at}");
    }
}

/// Threads that wait for others which have left are an error, not a hang.
#[test]
fn a_barrier_that_not_all_reach_is_an_error() {
    let text = simt::text("adam").replacen("__syncthreads();", "if (threadIdx.x < 200) __syncthreads();", 1);
    let Some(device) = Device::compile(&text, "") else { return };
    let (rule, recipe) = (AdamW::default(), RECIPES[3]);
    let mut memory = Memory::of(&rule, &recipe, 4096, 1);
    let group: [(&dyn Rule, _); 1] = [(&rule, vec![segment(0..4096, 0, 1)])];
    let error = launch(&device, &group, &mut memory, 0, &scalars(&recipe, 1), 1).unwrap_err();
    assert!(error.contains("never reach"), "{error}");
}
