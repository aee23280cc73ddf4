//! Memory access of kernels: 16 bytes at a time if possible, 64-bit offsets, and correct barriers.

use crate::common::{Memory, RECIPES, Recipe, Values, difference};
use crate::cuda_kernels::{Table, describe, describe_flat, launch, recipes, scalars, segment, step};
use meshstep_optim::cuda::Streams;
use meshstep_optim::{AdamW, Flat, Isa, Rule};
use meshstep_simt::{self as simt, Device};
use meshstep_tensor::{DType, Queue};

/// In whole tiles every vector is written 16 bytes at a time; with one unaligned vector none is.
#[test]
fn whole_tiles_move_16_bytes_at_a_time() {
    let rule = AdamW::default();
    let Some(device) = Device::of("adam") else { return };
    for recipe in recipes().iter().filter(|recipe| recipe.suits(&rule)) {
        let mut memory = Memory::of(&rule, recipe, 5 * 2048, 1);
        let scalars = scalars(recipe, 1);
        let mut stores = |offset: usize, len: usize| {
            let before = device.wide_stores();
            let mut table = Table::new(&device, recipe.params, &[(&rule, vec![segment(0..len, 0, 1)])]);
            table.step(&mut memory, offset, recipe.rounding, step(&scalars), 2).unwrap();
            device.wide_stores() - before
        };
        let bytes = recipe.params.size() + 2 * recipe.state.size();
        let bytes = bytes + if recipe.remainder { 2 } else { 0 } + recipe.copy.map_or(0, DType::size);
        assert_eq!(stores(0, 4096), 4096 * bytes as u64 / 16, "{recipe:?}");
        assert_eq!(stores(8, 4097), 4096 * bytes as u64 / 16, "{recipe:?}");
        assert_eq!(stores(1, 4096), 0, "{recipe:?}");
    }
}

/// Each vector in turn is the only one that is not aligned to 16 bytes.
#[test]
fn any_vector_may_be_out_of_line() {
    const LEN: usize = 5000;
    let rule = AdamW { amsgrad: true, ..AdamW::default() };
    let Some(device) = Device::of("adam") else { return };
    for recipe in recipes().iter().filter(|recipe| recipe.suits(&rule)) {
        let start = Memory::of(&rule, recipe, LEN + 1, 1);
        let (segments, scalars) = ([segment(0..LEN, 0, 2)], scalars(recipe, 2));
        for out in 0..4 + rule.state().len() {
            let (mut expected, mut found) = (start.clone(), start.clone());
            shifted(&mut expected, out, LEN, |flat| {
                rule.update_on(Isa::Reference, flat, &segments, &scalars, &Queue::cpu()).unwrap();
            });
            let mut table = Table::new(&device, recipe.params, &[(&rule, segments.to_vec())]);
            let family = table.family;
            let (kernel, streams) =
                shifted(&mut found, out, LEN, |flat| describe_flat(family, flat, recipe.rounding));
            table.prepare(step(&scalars));
            // SAFETY: the vectors have the kernel's types and the segment's length.
            unsafe { table.update(&kernel, streams, step(&scalars), 2) }.unwrap();
            assert_eq!(difference(&found, &expected), None, "{kernel}, vector {out}");
        }
    }
}

/// Takes `len` elements of every vector, from the first one on, or from the second one for vector `out`.
fn shifted<R>(memory: &mut Memory, out: usize, len: usize, f: impl FnOnce(Flat<'_, '_>) -> R) -> R {
    let mut vector = 0..;
    let mut part = |values| {
        let first = usize::from(vector.next() == Some(out));
        Values::slice_mut(values).slice(first..first + len).unwrap()
    };
    let Memory { params, grads, state, copy, remainder } = memory;
    let (params, grads) = (part(params), part(grads));
    let (copy, remainder) = (copy.as_mut().map(&mut part), remainder.as_mut().map(&mut part));
    let mut state: Vec<_> = state.iter_mut().map(&mut part).collect();
    f(Flat { params, grads, state: &mut state, copy, remainder })
}

/// A segment may start anywhere: base addresses are moved back, so that its elements are in existing memory.
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
            let mut table = Table::new(&device, recipe.params, &[(&rule, segments.to_vec())]);
            (table.rows[0].start, table.rows[0].end) = (far, far + 9000);
            let (kernel, mut streams) = describe("adam", &mut found, 0, recipe.rounding);
            move_back(&mut streams, recipe, far);
            table.prepare(step(&scalars));
            // SAFETY: element `far` of each vector is at the start of its memory.
            unsafe { table.update(&kernel, streams, step(&scalars), 2) }.unwrap();
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

/// Returns Adam's source with only the kernel that draws random bits for two vectors in turn, which compiles fast.
fn two_draws() -> String {
    let text = simt::text("adam");
    let end = text.find("KERNELS(adam,").unwrap();
    format!("{}KERNEL(adam_f32_state_bf16, Plain, SAME, BF16)", &text[..end])
}

/// The stand-in reveals bugs of a device: without a barrier, some order of threads reads different bits. The second barrier comes before
/// a store, at which threads exchange words and therefore synchronise in the stand-in anyway.
#[test]
fn a_missing_barrier_is_noticed() {
    let text = two_draws();
    let bits = text.find("struct Bits {").unwrap();
    let end = bits + text[bits..].find("\n};").unwrap();
    let barriers = text[bits..end].match_indices("__syncwarp();").map(|(at, _)| bits + at);
    assert_eq!(barriers.clone().count(), 2);
    let (rule, recipe) = (AdamW::default(), RECIPES[3]);
    for at in barriers.take(1) {
        let without = format!("{}{}", &text[..at], &text[at + "__syncwarp();".len()..]);
        let Some(device) = Device::compile(&without, "") else { return };
        let noticed = [false, true].into_iter().any(|reverse| {
            let start = Memory::of(&rule, &recipe, 4096, 1);
            let (mut expected, mut found) = (start.clone(), start);
            let (segments, scalars) = ([segment(0..4096, 64, 1)], scalars(&recipe, 1));
            expected.update(&rule, Isa::Reference, 0, &segments, &scalars).unwrap();
            device.reverse(reverse);
            let group: [(&dyn Rule, _); 1] = [(&rule, segments.to_vec())];
            let result = launch(&device, &group, &mut found, &scalars, 1);
            result.is_err() || difference(&found, &expected).is_some()
        });
        assert!(noticed, "the barrier at {at}");
    }
}

/// Threads that wait for others which have exited are an error, not a hang, and the next launch works.
#[test]
fn a_barrier_that_not_all_reach_is_an_error() {
    let early = "if (threadIdx.x < 200 || gridDim.x == 2) __syncthreads();";
    let text = two_draws().replacen("__syncwarp();", early, 1);
    let Some(device) = Device::compile(&text, "") else { return };
    let (rule, recipe) = (AdamW::default(), RECIPES[3]);
    let start = Memory::of(&rule, &recipe, 4096, 1);
    let (mut expected, mut found) = (start.clone(), start.clone());
    let group: [(&dyn Rule, _); 1] = [(&rule, vec![segment(0..4096, 0, 1)])];
    let scalars = scalars(&recipe, 1);
    let error = launch(&device, &group, &mut start.clone(), &scalars, 1).unwrap_err();
    assert!(error.contains("never reach"), "{error}");
    expected.update(&rule, Isa::Reference, 0, &group[0].1, &scalars).unwrap();
    launch(&device, &group, &mut found, &scalars, 2).unwrap();
    assert_eq!(difference(&found, &expected), None);
}
