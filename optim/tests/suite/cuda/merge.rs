//! Merges of means: packing, mixing, and steps of outer optimizers.

use crate::cuda::gpu::{LENS, difference, queue, upload, wild};
use meshstep_optim::{AdamW, Error, Lamb, Merge, OuterStep, Rule, Sgd, mix_zeros, pack};
use meshstep_tensor::{Buffer, Category, DType, Meter, Queue};

const FLOATS: [DType; 4] = [DType::F32, DType::F64, DType::BF16, DType::F16];

/// Types of values and of packed values.
fn types() -> impl Iterator<Item = (DType, DType)> {
    FLOATS.into_iter().flat_map(|own| FLOATS.map(|wire| (own, wire)))
}

#[test]
fn packed_values_and_differences_are_the_cpus() {
    let Some(queue) = queue() else { return };
    for ((own, wire), len) in types().flat_map(|types| LENS.map(|len| (types, len))) {
        for anchored in [false, true] {
            let (values, anchor) = (wild(own, len, 1), wild(own, len, 2));
            let mut into = wild(wire, len, 3);
            let [values_there, anchor_there] = [&values, &anchor].map(|vector| upload(vector, &queue));
            let mut there = upload(&into, &queue);
            let from = anchored.then(|| anchor_there.as_slice());
            pack(values_there.as_slice(), from, there.as_mut(), &queue).unwrap();
            pack(values.slice(), anchored.then(|| anchor.slice()), into.slice_mut(), &Queue::cpu()).unwrap();
            assert_eq!(difference(&there, &into, &queue), None, "{len} {own} as {wire}, {anchored}");
        }
    }
}

#[test]
fn means_and_zeros_are_the_cpus() {
    let Some(queue) = queue() else { return };
    for ((own, wire), len) in types().flat_map(|types| LENS.map(|len| (types, len))) {
        for (taken, left, anchored) in [
            (1.0, None, false),
            (1.0, None, true),
            (0.3, None, true),
            (0.5, Some(0.9), false),
            (1.0, Some(0.7), true),
        ] {
            let (mean, sent) = (wild(wire, len, 1), wild(own, len, 2));
            let (mut values, mut anchor) = (wild(own, len, 3), wild(own, len, 4));
            let (mean_there, sent_there) = (upload(&mean, &queue), upload(&sent, &queue));
            let (mut values_there, mut anchor_there) = (upload(&values, &queue), upload(&anchor, &queue));
            let merge = Merge {
                mean: mean_there.as_slice(),
                differences: anchored,
                anchor: anchored.then(|| anchor_there.as_mut()),
                sent: left.map(|left| (sent_there.as_slice(), left)),
                taken,
                squares: left == Some(0.7),
            };
            merge.mean(values_there.as_mut(), &queue).unwrap();
            let merge = Merge {
                mean: mean.slice(),
                differences: anchored,
                anchor: anchored.then(|| anchor.slice_mut()),
                sent: left.map(|left| (sent.slice(), left)),
                taken,
                squares: left == Some(0.7),
            };
            merge.mean(values.slice_mut(), &Queue::cpu()).unwrap();
            let what = format!("{len} {own} of {wire}, {taken} {left:?} {anchored}");
            assert_eq!(difference(&values_there, &values, &queue), None, "{what}");
            assert_eq!(difference(&anchor_there, &anchor, &queue), None, "anchor, {what}");
            mix_zeros(values_there.as_mut(), taken, &queue).unwrap();
            mix_zeros(values.slice_mut(), taken, &Queue::cpu()).unwrap();
            assert_eq!(difference(&values_there, &values, &queue), None, "zeros, {what}");
        }
    }
}

#[test]
fn outer_steps_are_the_cpus() {
    let Some(queue) = queue() else { return };
    let nesterov = Sgd { momentum: 0.9, nesterov: true, ..Sgd::default() };
    let rules: [&dyn Rule; 3] = [&nesterov, &Sgd::default(), &AdamW::default()];
    for ((rule, (own, wire)), len) in rules
        .into_iter()
        .flat_map(|rule| types().map(move |types| (rule, types)))
        .flat_map(|of| LENS.map(|len| (of, len)))
    {
        let meter = Meter::new();
        let (mut values, mut anchor) = (wild(own, len, 3), wild(own, len, 4));
        let (mut values_there, mut anchor_there) = (upload(&values, &queue), upload(&anchor, &queue));
        let zeros =
            |queue: &Queue| Buffer::zeroed_on(queue, len, DType::F64, &meter, Category::State).unwrap();
        let mut state: Vec<Buffer> = rule.state().iter().map(|_| zeros(&Queue::cpu())).collect();
        let mut state_there: Vec<Buffer> = rule.state().iter().map(|_| zeros(&queue)).collect();
        for t in 1..=2 {
            let (mean, taken) = (wild(wire, len, 4 + t), if t == 1 { 1.0 } else { 0.4 });
            let mean_there = upload(&mean, &queue);
            let anchored = Some(anchor_there.as_mut());
            let merge = Merge {
                mean: mean_there.as_slice(),
                differences: t == 2,
                anchor: anchored,
                sent: None,
                taken,
                squares: false,
            };
            let step = OuterStep { rule, lr: 0.7, state: &mut state_there, t };
            merge.outer(values_there.as_mut(), step, &queue, &meter).unwrap();
            let anchored = Some(anchor.slice_mut());
            let (mean, differences) = (mean.slice(), t == 2);
            let merge = Merge { mean, differences, anchor: anchored, sent: None, taken, squares: false };
            let step = OuterStep { rule, lr: 0.7, state: &mut state, t };
            merge.outer(values.slice_mut(), step, &Queue::cpu(), &meter).unwrap();
            let what = format!("{} of {len} {own} by {wire}, step {t}", rule.name());
            assert_eq!(difference(&values_there, &values, &queue), None, "{what}");
            assert_eq!(difference(&anchor_there, &anchor, &queue), None, "anchor, {what}");
        }
    }
}

#[test]
fn memory_that_does_not_go_together_is_refused() {
    let Some(queue) = queue() else { return };
    let (long, short, other) = (wild(DType::F32, 9, 1), wild(DType::F32, 8, 2), wild(DType::F64, 9, 3));
    let [long_there, short_there, other_there] = [&long, &short, &other].map(|vector| upload(vector, &queue));
    let mut values = upload(&long, &queue);
    let merge =
        |mean, differences| Merge { mean, differences, anchor: None, sent: None, taken: 1.0, squares: false };
    let told = merge(short_there.as_slice(), false).mean(values.as_mut(), &queue).unwrap_err();
    assert!(matches!(told, Error::Len { what: "mean", given: 8, expected: 9 }), "{told}");
    let told = merge(long_there.as_slice(), true).mean(values.as_mut(), &queue).unwrap_err();
    assert!(matches!(told, Error::Len { what: "anchor", .. }), "{told}");
    let told = merge(long.slice(), false).mean(values.as_mut(), &queue).unwrap_err();
    assert!(told.to_string().contains("memory is on the CPU"), "{told}");
    let told =
        pack(long_there.as_slice(), Some(other_there.as_slice()), values.as_mut(), &queue).unwrap_err();
    assert!(matches!(told, Error::DType { what: "anchor", .. }), "{told}");
    let mut anchor = upload(&long, &queue);
    let merge = Merge { anchor: Some(anchor.as_mut()), ..merge(long_there.as_slice(), false) };
    let step = OuterStep { rule: &Lamb::default(), lr: 1.0, state: &mut [], t: 1 };
    let told = merge.outer(values.as_mut(), step, &queue, &Meter::new()).unwrap_err();
    assert!(!told.to_string().is_empty());
    // Nothing was written.
    assert_eq!(difference(&values, &long, &queue), None);
}
