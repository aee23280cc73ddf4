//! Random runs and exchanges.

use super::{Case, Exchange, HEAD, RANKS};
use meshstep_optim::cuda::{FIELDS, Settings, norm_code};
use meshstep_optim::{DynamicLossScale, ExactSum, LossScale, Norm, NormAccumulator};
use proptest::prelude::*;

pub(super) fn rule() -> impl Strategy<Value = Option<LossScale>> {
    let dynamic = (1u64..4, 1u64..4, -3i32..20, 1.5f64..3.0, 0.3f64..0.7, prop::bool::ANY);
    let dynamic = dynamic.prop_map(|(growth_interval, hysteresis, power, up, down, large)| {
        let init_scale = if large { 7e23 } else { 2f64.powi(power) };
        LossScale::Dynamic(DynamicLossScale {
            init_scale,
            growth_interval,
            hysteresis,
            growth_factor: if large { 2.0 } else { up },
            backoff_factor: down,
            min_scale: init_scale / 4.0,
        })
    });
    prop_oneof![Just(None), Just(Some(LossScale::Static(1024.0))), dynamic.prop_map(Some)]
}

/// Returns the exact sum of a few numbers of various sizes.
pub(super) fn accumulated(norm: Norm, values: &[f64]) -> NormAccumulator {
    let mut sum = NormAccumulator::new(norm);
    sum.add(values.into()).unwrap();
    sum
}

pub(super) fn exchange(params: u64, even: bool) -> impl Strategy<Value = (usize, Exchange)> {
    let number = prop_oneof![
        4 => -10.0f64..10.0,
        1 => prop::num::f64::NORMAL | prop::num::f64::SUBNORMAL | prop::num::f64::ZERO,
        1 => Just(1e-160),
    ];
    let values = prop::collection::vec(prop::collection::vec(number, 0..5), 1..4);
    let presence =
        prop::collection::vec(prop_oneof![6 => Just(RANKS), 2 => Just(0), 1 => 1..RANKS], params as usize);
    let rare = |of: u32| prop::bool::weighted(1.0 / f64::from(of));
    (0..3usize, values, presence, rare(4), rare(8), rare(12), rare(12), 0..3u64, any::<u64>()).prop_map(
        move |(norm, values, presence, bad, fault, parted, unlike, weight, digest)| {
            let mut sum = vec![0u64; HEAD + ExactSum::WORDS + presence.len().div_ceil(2)];
            sum.push(if unlike { digest } else { 0 });
            // Without a fault, every second word is a notice that fails nothing.
            let mut max = vec![0, u64::from(fault) * (3 << 56) + digest % 2, digest, !digest];
            // Arbitrary faults: the kernel passes one on.
            max.extend((0..params).filter(|_| even).map(|i| digest ^ i));
            // Fields with arbitrary values. If ranks have parted, some fields differ; now and then none does, independent of the digest.
            let fields = (0..FIELDS as u64).map(|i| digest.rotate_left(i as u32) ^ i);
            max.extend(fields.clone());
            let differs = |i: u64| parted && (digest >> (2 * i) & 3 == 0);
            max.extend((0..).zip(fields).map(|(i, field)| (!field).wrapping_add(differs(i).into())));
            for rank in values.iter().map(|values| accumulated(NORMS[norm], values)) {
                let words = sum[HEAD..].iter_mut().zip(rank.sum().words());
                words.for_each(|(sum, word)| *sum = sum.wrapping_add(word));
                max[0] = max[0].max(rank.max_bits());
            }
            (sum[0], sum[1]) = (u64::from(bad) * 3, weight * 1000 / 3);
            max[3] = max[3].wrapping_add(parted.into());
            for (i, count) in presence.iter().enumerate() {
                sum[HEAD + ExactSum::WORDS + i / 2] |= count << (i % 2 * 32);
            }
            (norm, Exchange { sum, max })
        },
    )
}

pub(super) const NORMS: [Norm; 3] = [Norm::L1, Norm::L2, Norm::Inf];

pub(super) fn case() -> impl Strategy<Value = Case> {
    let params = prop_oneof![8 => Just(0u64), 4 => 1..9u64, 1 => 250..600u64];
    let params = (params, any::<bool>());
    let exchange = params.prop_flat_map(|(n, even)| (Just((n, even)), exchange(n, even)));
    let max_norm = prop_oneof![Just(f64::INFINITY), 1e-3f64..1e3, Just(1e-7)];
    let scalars = (0.0f64..1.0, max_norm, prop_oneof![Just(1.0), 1e-3f64..1e3], 1..5u64);
    let codes = (0..3u32, 0..2u32, 0..3u32, 0..2u32, 0..2u64);
    (exchange, scalars, codes).prop_map(
        |(
            ((counted, even), (norm, exchange)),
            (lr, max_norm, grad_scale, batches),
            (combine, clips, max_skips, zero_grads, propagates),
        )| {
            let norm = NORMS[norm];
            let settings = Settings {
                lr,
                max_norm,
                grad_scale,
                batches,
                launches: 5,
                rules: 11,
                rank: 1,
                weight: 2,
                balance: 17,
                fault: 0,
                world_size: RANKS,
                params: if even { counted } else { 0 },
                growth_factor: 0.0,
                backoff_factor: 0.0,
                min_scale: 0.0,
                growth_interval: 0,
                hysteresis: 0,
                dynamic: 0,
                combine,
                norm: norm_code(norm).unwrap(),
                clips,
                max_skips,
                zero_grads,
                propagates,
            };
            Case { settings, norm, exchange, counted }
        },
    )
}

pub(super) fn run() -> impl Strategy<Value = (Option<LossScale>, Vec<Case>)> {
    (rule(), prop::collection::vec(case(), 1..24)).prop_map(|(rule, mut cases)| {
        cases.iter_mut().for_each(|case| case.settings = case.settings.with_loss_scale(rule.as_ref()));
        (rule, cases)
    })
}
