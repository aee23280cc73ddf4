//! Norms on a device equal those of the CPU, word for word.

use crate::cuda::gpu::{LENS, all, queue, upload, wild};
use meshstep_optim::{Norm, NormAccumulator, NormSum};
use meshstep_tensor::{Buffer, Category, DType, Meter, Queue};

const NORMS: [Norm; 3] = [Norm::L1, Norm::L2, Norm::Inf];

#[test]
fn sums_are_the_cpus() {
    let Some(queue) = queue() else { return };
    let meter = Meter::new();
    let dtypes = [DType::F32, DType::F64, DType::BF16, DType::F16];
    for (row, (norm, dtype)) in NORMS.into_iter().flat_map(|n| dtypes.map(|d| (n, d))).enumerate() {
        let mut there = NormSum::new(norm, &queue, &meter).unwrap();
        for round in 0..2 {
            let mut here = NormAccumulator::new(norm);
            // Short runs try one of the last three lengths in each round.
            let one = 5 + (row + round as usize) % 3;
            let lens = LENS.into_iter().enumerate().filter(|&(i, _)| i < 5 || i == one || all());
            for (len, offset) in lens.map(|(_, len)| (len, 0)).chain([(5000, 1), (5000, 8)]) {
                let values = wild(dtype, len + offset, len as u64 + round);
                let buffer = upload(&values, &queue);
                let range = offset..offset + len;
                there.add(buffer.as_slice().slice(range.clone()).unwrap(), &queue).unwrap();
                here.add(values.slice().slice(range.clone()).unwrap()).unwrap();
                // Elements that another rank counts only add to the non-finite count.
                there.watch(buffer.as_slice().slice(range.clone()).unwrap(), &queue).unwrap();
                here.watch(values.slice().slice(range).unwrap()).unwrap();
            }
            assert_eq!(there.read(&queue).unwrap(), here, "{norm:?} of {dtype}");
            there.reset(&queue).unwrap();
        }
        assert_eq!(there.read(&queue).unwrap(), NormAccumulator::new(norm));
    }
    assert_eq!(meter.live(Category::Staging), 0);
}

#[test]
fn what_has_no_norm_is_refused() {
    let Some(queue) = queue() else { return };
    let meter = Meter::new();
    assert!(NormSum::new(Norm::P(3.0), &queue, &meter).unwrap_err().to_string().contains("GPU"));
    let mut there = NormSum::new(Norm::L2, &queue, &meter).unwrap();
    let (cpu, floats) = ([1u64; 3], wild(DType::F32, 3, 1));
    let integers = Buffer::zeroed_on(&queue, 3, DType::U64, &meter, Category::State).unwrap();
    there.add(integers.as_slice(), &queue).unwrap_err();
    there.add(cpu[..].into(), &queue).unwrap_err();
    there.add(floats.slice(), &Queue::cpu()).unwrap_err();
    there.merge(&NormAccumulator::new(Norm::L2)).unwrap_err();
    assert_eq!(there.read(&queue).unwrap(), NormAccumulator::new(Norm::L2));
}
