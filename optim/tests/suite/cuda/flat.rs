//! Operations on whole vectors: add, scale, cast.

use crate::cuda::gpu::{LENS, difference, queue, upload, wild};
use meshstep_optim::{accumulate, cast, scale};
use meshstep_tensor::{DType, Queue};

const FLOATS: [DType; 4] = [DType::F32, DType::F64, DType::BF16, DType::F16];

#[test]
fn sums_and_products_are_the_cpus() {
    let Some(queue) = queue() else { return };
    for (dtype, len) in FLOATS.into_iter().flat_map(|dtype| LENS.map(|len| (dtype, len))) {
        for (weight, first, offset) in [
            (1.0, true, 0),
            (1.0, false, 0),
            (0.3, true, 0),
            (-7.5, false, 0),
            (0.1, false, 1),
            (3.0, true, 5),
        ] {
            let (src, mut sum) = (wild(dtype, len, 1), wild(dtype, len + offset, 2));
            let (there, mut sum_there) = (upload(&src, &queue), upload(&sum, &queue));
            let range = offset..offset + len;
            let dst = sum_there.as_mut().slice(range.clone()).unwrap();
            accumulate(dst, there.as_slice(), weight, first, &queue).unwrap();
            let dst = sum.slice_mut().slice(range).unwrap();
            accumulate(dst, src.slice(), weight, first, &Queue::cpu()).unwrap();
            let different = difference(&sum_there, &sum, &queue);
            assert_eq!(different, None, "{len} {dtype} from {offset}, weight {weight}, first {first}");
        }
        let mut values = wild(dtype, len, 3);
        let mut there = upload(&values, &queue);
        scale(there.as_mut(), 0.7, &queue).unwrap();
        scale(values.slice_mut(), 0.7, &Queue::cpu()).unwrap();
        assert_eq!(difference(&there, &values, &queue), None, "{len} {dtype} scaled");
    }
}

#[test]
fn casts_are_the_cpus() {
    let Some(queue) = queue() else { return };
    let narrow = [DType::F32, DType::BF16, DType::F16];
    for (from, to) in narrow.into_iter().flat_map(|from| narrow.map(|to| (from, to))) {
        for (len, offset) in LENS.map(|len| (len, 0)).into_iter().chain([(5000, 1), (5000, 8)]) {
            let (src, mut dst) = (wild(from, len + offset, 4), wild(to, len, 5));
            let (src_there, mut dst_there) = (upload(&src, &queue), upload(&dst, &queue));
            let range = offset..offset + len;
            cast(src_there.as_slice().slice(range.clone()).unwrap(), dst_there.as_mut(), &queue).unwrap();
            cast(src.slice().slice(range).unwrap(), dst.slice_mut(), &Queue::cpu()).unwrap();
            assert_eq!(difference(&dst_there, &dst, &queue), None, "{len} {from} to {to}");
        }
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let Some(queue) = queue() else { return };
    let (long, short) = (wild(DType::F32, 9, 1), wild(DType::F32, 8, 2));
    let other = wild(DType::F64, 9, 3);
    let mut dst = upload(&long, &queue);
    for src in [upload(&short, &queue), upload(&other, &queue)] {
        accumulate(dst.as_mut(), src.as_slice(), 1.0, false, &queue).unwrap_err();
        cast(src.as_slice(), dst.as_mut(), &queue).unwrap_err();
    }
    let src = upload(&long, &queue);
    for weight in [f64::NAN, f64::INFINITY, 1e39] {
        accumulate(dst.as_mut(), src.as_slice(), weight, false, &queue).unwrap_err();
    }
    // CPU memory, and a CPU queue.
    let told = accumulate(dst.as_mut(), long.slice(), 1.0, false, &queue).unwrap_err().to_string();
    assert_eq!(told, "memory is on the CPU but memory on GPU 0 is needed");
    accumulate(dst.as_mut(), src.as_slice(), 1.0, false, &Queue::cpu()).unwrap_err();
    scale(dst.as_mut(), 2.0, &Queue::cpu()).unwrap_err();
    assert_eq!(difference(&dst, &long, &queue), None);
}
