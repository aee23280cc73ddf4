//! Layouts, tables, and equality of the constants computed on device and host. Tests of the kernels: tests/suite/cuda_kernels.

use super::*;
use crate::{AdamW, Lamb, Lars, Muon, Scalars};
use meshstep_simt::Device;

#[test]
fn rows_count_the_tiles_before_them() {
    let segments =
        [0..1, 1..1, 5..2053, 2053..6150, 6208..8256, 10_000..10_000].map(|range| Segment::new(range, 3));
    let mut table = Vec::new();
    append(&mut table, DType::F32, &AdamW::default(), 1.0, &segments).unwrap();
    // Tiles are anchored at multiples of 64: 5..2053 has elements of two, 2053..6150 begins at 2048, 6208..8256 is one.
    assert_eq!(table.iter().map(|row| row.tile).collect::<Vec<_>>(), [0, 1, 1, 3, 6, 7]);
    assert_eq!(table.iter().map(|row| row.t).collect::<Vec<_>>(), [2; 6]);
    assert_eq!((tiles(&table, DType::F32), tiles(&[], DType::F32)), (7, 0));
}

#[test]
fn what_cannot_be_is_refused_and_changes_nothing() {
    let (good, bad) = (AdamW::default(), AdamW { beta1: 1.0, ..AdamW::default() });
    let mut table = Vec::new();
    append(&mut table, DType::F64, &good, 1.0, &[Segment::new(0..7, 1)]).unwrap();
    let before = table.clone();
    let fine = [Segment::new(7..9, 1)];
    let mut refused = |params, rule: &dyn Rule, lr_scale, segments: &[Segment]| {
        let error = append(&mut table, params, rule, lr_scale, segments).unwrap_err();
        assert_eq!(table, before);
        error.to_string()
    };
    let rules: [&dyn Rule; 2] = [&Lamb::default(), &Lars::default()];
    for rule in rules {
        assert!(refused(DType::F64, rule, 1.0, &fine).contains("no CUDA kernels"), "{rule:?}");
    }
    assert!(refused(DType::F64, &Muon::default(), 1.0, &fine).contains("whole matrices; segment 0"));
    assert!(refused(DType::F64, &bad, 1.0, &fine).contains("beta1"));
    assert!(refused(DType::F16, &good, 1.0, &fine).contains("f16"));
    assert!(refused(DType::F64, &good, -1.0, &fine).contains("lr_scale"));
    assert!(refused(DType::F64, &good, f64::INFINITY, &fine).contains("lr_scale"));
    assert!(refused(DType::F64, &good, 1.0, &[fine[0].clone(), Segment::new(8..9, 1)]).contains("segment 1"));
    assert!(refused(DType::F64, &good, 1.0, &[fine[0].clone(), Segment::new(9..9, 0)]).contains("t = 0"));
}

#[test]
fn layouts_are_those_of_the_kernels() {
    assert_eq!((size_of::<Row>(), size_of::<StepScalars>(), size_of::<Streams>()), (312, 24, 88));
    assert_eq!((std::mem::offset_of!(Row, given), std::mem::offset_of!(Row, constants)), (104, 200));
}

/// Asserts that `prepare` computes the constants of the rule for step `t` as `host` does: weight decay first, then those of the rule.
pub(crate) fn constants_equal(rule: &dyn Rule, host: impl Fn(&Scalars, &Segment) -> Vec<f64>) {
    const TIMES: [u64; 8] = [1, 2, 3, 7, 100, 2000, 2001, (1 << 40) + 3];
    let family = rule.on_device().unwrap().family;
    let Some(device) = Device::of(module(family)) else { return };
    for (lr, lr_scale) in [(1e-3, 1.0), (0.1, 0.3), (0.0, 1.0), (f64::from(f32::MAX), 1.7e-3)] {
        // A factor for rules that see sums of tensors only; kernels ignore it.
        let segments = TIMES.map(|t| Segment { ratio: 3.0, ..Segment::new(0..0, t) });
        let mut table = Vec::new();
        for segment in &segments {
            append(&mut table, DType::F32, rule, lr_scale, std::slice::from_ref(segment)).unwrap();
        }
        let before = table.clone();
        run(&device, family, &mut table, StepScalars { lr, grad_scale: 1.0, skip: 1, zero_grads: 0 });
        assert_eq!(table, before, "a skipped step does not count");
        run(&device, family, &mut table, StepScalars { lr, grad_scale: 1.0, skip: 0, zero_grads: 0 });
        let scalars = Scalars { lr: lr * lr_scale, ..Scalars::default() };
        for ((row, before), segment) in table.iter().zip(before).zip(&segments) {
            let expected = host(&scalars, segment);
            let found: Vec<f64> = std::iter::once(row.lw).chain(row.constants).take(expected.len()).collect();
            assert_eq!(found.map_bits(), expected.map_bits(), "{rule:?} at lr {lr}: {segment:?}");
            let rest = Row { t: segment.t - 1, lw: 0.0, constants: [0.0; Row::CONSTANTS], ..*row };
            assert_eq!((row.t, rest), (segment.t, before));
        }
    }
}

trait Bits {
    fn map_bits(&self) -> Vec<u64>;
}

impl Bits for Vec<f64> {
    fn map_bits(&self) -> Vec<u64> {
        self.iter().map(|x| x.to_bits()).collect()
    }
}

fn run(device: &Device, family: &str, table: &mut [Row], mut step: StepScalars) {
    let (mut rows, mut count, mut step) = (table.as_mut_ptr(), table.len() as u64, &raw mut step);
    let mut args = [(&raw mut rows).cast(), (&raw mut count).cast(), (&raw mut step).cast()];
    // SAFETY: `prepare` takes `count` writable rows and a step.
    unsafe { device.launch(&prepare(family), 1, THREADS, &mut args) }.unwrap();
}
