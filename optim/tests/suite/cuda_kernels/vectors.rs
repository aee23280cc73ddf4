//! Accumulation and conversion give the results of the CPU.

use crate::common::{Random, Values};
use meshstep_optim::cuda::{self, THREADS};
use meshstep_optim::{Isa, accumulate_on};
use meshstep_simt::Device;
use meshstep_tensor::{DType, Slice, SliceMut, Threads, cast};
use std::collections::BTreeSet;

const LENGTHS: [usize; 10] = [0, 1, 127, 128, 129, 2047, 2049, 65_535, 65_537, 278_011];

/// Offsets of dst and src in their memory: equal and different.
const OFFSETS: [(usize, usize); 4] = [(0, 0), (1, 1), (8, 0), (3, 8)];

/// Creates random values with a margin on both sides that must stay unchanged.
fn random(dtype: DType, len: usize, seed: u64) -> Values {
    let mut random = Random::new(seed);
    Values::new(dtype, len + 16, || random.any())
}

fn part(values: &Values, offset: usize, len: usize) -> Slice<'_> {
    values.slice().slice(offset..offset + len).unwrap()
}

fn part_mut(values: &mut Values, offset: usize, len: usize) -> SliceMut<'_> {
    values.slice_mut().slice(offset..offset + len).unwrap()
}

/// Runs a kernel of (dst, src, len, ...).
fn launch<const N: usize>(
    device: &Device,
    kernel: &str,
    mut dst: SliceMut<'_>,
    src: Slice<'_>,
    more: [*mut std::ffi::c_void; N],
) {
    assert_eq!(dst.len(), src.len());
    let mut len = src.len() as u64;
    let (mut to, mut from) = (dst.bytes_mut().unwrap().as_mut_ptr(), src.bytes().unwrap().as_ptr());
    let mut args = vec![(&raw mut to).cast(), (&raw mut from).cast(), (&raw mut len).cast()];
    args.extend(more);
    // SAFETY: the kernel was chosen for the types of `dst` and `src`, which have this length.
    unsafe { device.launch(kernel, 3, THREADS, &mut args) }.unwrap();
}

#[test]
fn accumulate_equals_its_reference() {
    const TYPES: [DType; 4] = [DType::F32, DType::F64, DType::BF16, DType::F16];
    let Some(device) = Device::of("cuda/accumulate") else { return };
    let mut used = BTreeSet::new();
    for (dtype, len) in TYPES.into_iter().flat_map(|dtype| LENGTHS.map(|len| (dtype, len))) {
        let (start, src) = (random(dtype, len, 1), random(dtype, len, 2));
        let kernel = cuda::accumulate(dtype).unwrap();
        for (i, (to, from)) in OFFSETS.into_iter().enumerate().filter(|(i, _)| len < 65_536 || *i == len % 4)
        {
            for (mut weight, first) in [(1.0, true), (0.3, true), (1.0, false), (-2.7, false)] {
                let (mut expected, mut found) = (start.clone(), start.clone());
                let dst = part_mut(&mut expected, to, len);
                accumulate_on(Isa::Reference, &Threads::caller(), dst, part(&src, from, len), weight, first)
                    .unwrap();
                let mut flag = u32::from(first);
                let more = [(&raw mut weight).cast(), (&raw mut flag).cast()];
                launch(&device, &kernel, part_mut(&mut found, to, len), part(&src, from, len), more);
                let different = found.first_other(&expected);
                assert_eq!(different, None, "{kernel} {len} {weight} {first}, offsets {i}");
            }
        }
        used.insert(kernel);
    }
    assert_eq!(used, device.kernels().into_iter().collect());
    assert_eq!(cuda::accumulate(DType::U64), None);
}

#[test]
fn cast_equals_its_reference() {
    const TYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];
    let Some(device) = Device::of("cuda/cast") else { return };
    let mut used = BTreeSet::new();
    for (from_type, to_type) in TYPES.into_iter().flat_map(|from| TYPES.map(|to| (from, to))) {
        let Some(kernel) = cuda::cast(from_type, to_type) else {
            assert_eq!(from_type, to_type);
            continue;
        };
        for len in LENGTHS {
            let (start, src) = (random(to_type, len, 1), random(from_type, len, 2));
            for (to, from) in OFFSETS {
                let (mut expected, mut found) = (start.clone(), start.clone());
                cast(part(&src, from, len), part_mut(&mut expected, to, len)).unwrap();
                cast_on(&device, part(&src, from, len), part_mut(&mut found, to, len));
                assert_eq!(found.first_other(&expected), None, "{kernel} {len}, offsets {to} {from}");
            }
        }
        used.insert(kernel);
    }
    assert_eq!(used, device.kernels().into_iter().collect());
    assert_eq!(cuda::cast(DType::F64, DType::F32), None);
}

/// Casts `src` to the type of `dst`.
pub(crate) fn cast_on(device: &Device, src: Slice<'_>, dst: SliceMut<'_>) {
    let kernel = cuda::cast(src.dtype(), dst.dtype()).unwrap();
    launch(device, &kernel, dst, src, []);
}
