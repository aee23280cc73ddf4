//! Decisions: the one-block kernels compute from an exchange the same as the host's functions, in the host's order.

use super::arg;
use crate::common::{cases, tried};
use meshstep_optim::cuda::{Decided, FIELDS, Progress, Settings, StepScalars, THREADS, Verdict, norm_code};
use meshstep_optim::{
    DynamicLossScale, ExactSum, LossScale, LossScaleState, Norm, NormAccumulator, clip_coef,
};
use meshstep_simt::{self as simt, Device};
use proptest::prelude::*;
use proptest::strategy::ValueTree;

const HEAD: usize = 2;
const RANKS: u64 = 4;

/// One step's exchange, as all ranks see it afterwards.
#[derive(Clone, Debug)]
struct Exchange {
    sum: Vec<u64>,
    max: Vec<u64>,
}

impl Exchange {
    /// Returns the number of ranks with parameter `i`'s gradient.
    fn present(&self, i: u64) -> u64 {
        self.sum[HEAD + ExactSum::WORDS + i as usize / 2] >> (i % 2 * 32) & 0xffff_ffff
    }
}

/// One step.
#[derive(Clone, Debug)]
struct Case {
    settings: Settings,
    norm: Norm,
    exchange: Exchange,
    /// Number of counted parameters; each has an update flag after the step and after the decision.
    counted: u64,
}

/// Output of a step: the decision, the step, and the update flag of each counted parameter.
type Written = (Decided, StepScalars, Vec<u8>);

/// State of the run on the host.
#[derive(Clone, Debug, PartialEq)]
struct Host {
    steps: u64,
    skips: u32,
    skips_at_min_scale: u32,
    rule: Option<LossScale>,
    scale: Option<LossScaleState>,
}

impl Host {
    fn new(rule: Option<LossScale>) -> Host {
        Host { steps: 7, skips: 0, skips_at_min_scale: 0, rule, scale: rule.map(|rule| rule.start()) }
    }

    /// Returns the fields that must be equal on every rank.
    fn fields(&self, s: &Settings) -> [u64; FIELDS] {
        let [scale, growth, hysteresis] = self
            .scale
            .map_or([1f64.to_bits(), 0, 0], |s| [s.scale.to_bits(), s.growth_tracker, s.hysteresis_tracker]);
        let [lr, max_norm, grad_scale] = [s.lr, s.max_norm, s.grad_scale].map(f64::to_bits);
        [self.steps, lr, max_norm, grad_scale, scale, growth, hysteresis, s.batches, s.launches, s.rules]
    }

    fn loss_scale(&self) -> f64 {
        self.scale.map_or(1.0, |state| state.scale)
    }

    /// Takes the step of the sharded optimizer, from the exchange's result on.
    fn step(&mut self, case: &Case) -> Written {
        let s = &case.settings;
        let (decided, grad_scale) = self.decide(case);
        let skip = decided.verdict != 0;
        self.steps += u64::from(decided.verdict <= Verdict::Skipped as u32);
        let updated = (0..case.counted).map(|i| (case.exchange.present(i) != 0).into()).collect();
        (decided, StepScalars { lr: s.lr, grad_scale, skip: skip.into(), zero_grads: s.zero_grads }, updated)
    }

    fn decide(
        &mut self,
        Case { settings: s, norm, exchange: exchange @ Exchange { sum, max }, .. }: &Case,
    ) -> (Decided, f64) {
        let words = &sum[HEAD..HEAD + ExactSum::WORDS];
        let known = NormAccumulator::from_parts(*norm, ExactSum::from_words(words), max[0], sum[0]);
        let param = (0..s.params).find(|&i| ![0, s.world_size].contains(&exchange.present(i)));
        let so_far = Decided {
            non_finite: sum[0],
            weight: sum[1],
            fault: max[1],
            coef: 1.0,
            param: param.unwrap_or(s.params),
            ..Decided::default()
        };
        let error = |verdict: Verdict| (Decided { verdict: verdict as u32, ..so_far }, 0.0);
        if max[1] != 0 {
            return error(Verdict::Faulty);
        }
        if max[2] != !max[3] {
            let fields = &max[max.len() - 2 * FIELDS..];
            let differs = |&i: &usize| fields[i] != !fields[FIELDS + i];
            let param = (0..FIELDS).find(differs).unwrap_or(FIELDS - 1);
            let (parted, _) = error(Verdict::Parted);
            let mine = self.fields(s)[param];
            let (smallest, largest, param) = (!fields[FIELDS + param], fields[param], param as u64);
            return (Decided { param, mine, smallest, largest, ..parted }, 0.0);
        }
        if let Some(param) = param {
            let (uneven, _) = error(Verdict::Uneven);
            return (Decided { fault: max[4 + param as usize], ..uneven }, 0.0);
        }
        if sum[sum.len() - 1] != 0 {
            return error(Verdict::Unbalanced);
        }
        let combined = match s.combine {
            0 => 1.0 / s.batches as f64,
            1 => 1.0,
            _ if sum[1] == 0 => return error(Verdict::Weightless),
            _ => 1.0 / sum[1] as f64,
        };
        if known.non_finite() > 0 && s.propagates == 0 {
            self.skips += 1;
            let can_fall = self.rule.zip(self.scale).is_some_and(|(rule, state)| rule.can_fall(&state));
            self.skips_at_min_scale = if can_fall { 0 } else { self.skips_at_min_scale + 1 };
            let in_a_row = self.skips;
            if self.skips_at_min_scale > s.max_skips {
                return (Decided { verdict: Verdict::TooManySkips as u32, in_a_row, ..so_far }, 0.0);
            }
            self.rescale(true);
            return (Decided { verdict: Verdict::Skipped as u32, in_a_row, ..so_far }, 0.0);
        }
        let factor = s.grad_scale / self.loss_scale() * combined;
        let norm = told(factor, &known);
        let max_norm = s.max_norm.is_finite().then_some(s.max_norm).filter(|_| s.clips != 0);
        let coef = max_norm.map_or(1.0, |max_norm| clip_coef(norm, max_norm).unwrap());
        (self.skips, self.skips_at_min_scale) = (0, 0);
        self.rescale(false);
        (Decided { norm, coef, ..so_far }, factor * coef)
    }

    fn rescale(&mut self, overflow: bool) {
        if let (Some(rule), Some(state)) = (self.rule, &mut self.scale) {
            rule.update(state, overflow);
        }
    }

    fn progress(&self) -> Progress {
        Progress {
            skips: self.skips,
            skips_at_min_scale: self.skips_at_min_scale,
            ..Progress::new(self.steps, self.scale)
        }
    }
}

/// Returns the norm of a step's gradients.
fn told(factor: f64, sum: &NormAccumulator) -> f64 {
    if sum.non_finite() > 0 { f64::INFINITY } else { factor * sum.finish() }
}

/// Returns the words of a block for `T` and one byte for each of `params` parameters, with a pattern to be overwritten.
fn block<T>(params: u64) -> Vec<u64> {
    vec![0x9999_9999_9999_9999; size_of::<T>() / 8 + params.div_ceil(8) as usize]
}

/// Splits a block into its head and its bytes; asserts that nothing was written after them.
fn parts<T: bytemuck::Pod>(block: &[u64], params: u64) -> (T, Vec<u8>) {
    let (head, bytes) = bytemuck::cast_slice::<u64, u8>(block).split_at(size_of::<T>());
    let (bytes, rest) = bytes.split_at(params as usize);
    assert!(rest.iter().all(|&byte| byte == 0x99), "{bytes:?} {rest:?}");
    (bytemuck::pod_read_unaligned(head), bytes.to_vec())
}

fn decide(device: &Device, case: &Case, progress: &mut Progress) -> Written {
    let mut counted = case.counted;
    let (mut decided, mut step) = (block::<Decided>(counted), block::<StepScalars>(counted));
    let (sum, max) = (&case.exchange.sum, &case.exchange.max);
    let (mut settings, mut sum, mut max) = (&raw const case.settings, sum.as_ptr(), max.as_ptr());
    let (mut progress, mut at_step, mut at) = (&raw mut *progress, step.as_mut_ptr(), decided.as_mut_ptr());
    let mut args = [
        arg(&mut settings),
        arg(&mut progress),
        arg(&mut sum),
        arg(&mut max),
        arg(&mut at_step),
        arg(&mut at),
        arg(&mut counted),
    ];
    // SAFETY: the arguments point at the kernel's inputs. `sum` has a word for every two parameters, `max` one for each that must be
    // even, and the blocks have a byte for each.
    unsafe { device.launch("decide", 1, THREADS, &mut args) }.unwrap();
    let ((decided, told), (step, updated)) = (parts(&decided, counted), parts(&step, counted));
    assert_eq!(told, updated);
    (decided, step, updated)
}

/// Compares a run on the device with the host's; returns the first difference.
fn difference(device: &Device, rule: Option<LossScale>, cases: &[Case]) -> Option<String> {
    let mut host = Host::new(rule);
    let mut progress = host.progress();
    for (i, case) in cases.iter().enumerate() {
        let expected = host.step(case);
        let found = (decide(device, case, &mut progress), progress);
        let expected = (expected, host.progress());
        if found != expected {
            return Some(format!("step {i}:\n{found:?}\n{expected:?}\n{:?}", case.settings));
        }
    }
    None
}

fn rule() -> impl Strategy<Value = Option<LossScale>> {
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
fn accumulated(norm: Norm, values: &[f64]) -> NormAccumulator {
    let mut sum = NormAccumulator::new(norm);
    sum.add(values.into()).unwrap();
    sum
}

fn exchange(params: u64, even: bool) -> impl Strategy<Value = (usize, Exchange)> {
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
            let mut max = vec![0, u64::from(fault) * (3 << 56), digest, !digest];
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

const NORMS: [Norm; 3] = [Norm::L1, Norm::L2, Norm::Inf];

fn case() -> impl Strategy<Value = Case> {
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

fn run() -> impl Strategy<Value = (Option<LossScale>, Vec<Case>)> {
    (rule(), prop::collection::vec(case(), 1..24)).prop_map(|(rule, mut cases)| {
        cases.iter_mut().for_each(|case| case.settings = case.settings.with_loss_scale(rule.as_ref()));
        (rule, cases)
    })
}

#[test]
fn runs_go_as_the_hosts_do() {
    let Some(device) = Device::of("norm/decide") else { return };
    proptest!(cases(200, 20_000), |((rule, cases) in run())| {
        prop_assert_eq!(difference(&device, rule, &cases), None);
    });
}

/// A step decided without its norm records it afterwards, unless the step was not applied.
#[test]
fn a_norm_is_told_afterwards() {
    let Some(device) = Device::of("norm/decide") else { return };
    proptest!(cases(200, 20_000), |(case in case(), later in case(), scale in prop_oneof![Just(None), Just(Some(LossScale::Static(8.0)))])| {
        let mut progress = Host::new(scale).progress();
        let settings = Settings { max_norm: f64::INFINITY, ..case.settings };
        let case = Case { settings, ..case };
        let (mut decided, step, _) = decide(&device, &case, &mut progress);
        let Exchange { sum, max } = &later.exchange;
        let words = ExactSum::from_words(&sum[HEAD..HEAD + ExactSum::WORDS]);
        let known = NormAccumulator::from_parts(case.norm, words, max[0], sum[0]);
        // Nothing was clipped, so this is the full factor on gradients.
        let (norm, non_finite) = (told(step.grad_scale, &known), sum[0]);
        let applied = decided.verdict == Verdict::Applied as u32;
        let expected = if applied { Decided { norm, non_finite, ..decided } } else { decided };
        let (mut settings, mut progress) = (&raw const case.settings, &raw const progress);
        let (mut sum, mut max, mut at) = (sum.as_ptr(), max.as_ptr(), &raw mut decided);
        let mut args = [arg(&mut settings), arg(&mut progress), arg(&mut sum), arg(&mut max), arg(&mut at)];
        // SAFETY: the arguments point at the kernel's inputs.
        unsafe { device.launch("decide_norm", 1, THREADS, &mut args) }.unwrap();
        prop_assert_eq!(decided, expected);
    });
}

/// Roots and roundings at the limits of f64: sums of squares beyond it, subnormal results, ties.
#[test]
fn norms_are_rounded_as_the_hosts_are() {
    let Some(device) = Device::of("norm/decide") else { return };
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let template = case().new_tree(&mut runner).unwrap().current();
    let plain =
        Settings { params: 0, combine: 1, clips: 0, max_norm: 1.0, grad_scale: 1.0, ..template.settings };
    let tie = [1.0, 2f64.powi(-53)];
    let rows: [&[f64]; 14] = [
        &[],
        &[0.0],
        &[f64::MAX],
        &[f64::MAX; 9],
        &[f64::from_bits(1)],
        &[f64::from_bits(1); 3],
        &[f64::from_bits(1); 2],
        &[f64::MIN_POSITIVE, f64::from_bits(1)],
        &[2f64.powi(-537), 2f64.powi(-538)],
        &[2f64.powi(-511), 2f64.powi(-512), 3e-200],
        &tie,
        &[1.0 + f64::EPSILON, 2f64.powi(-53)],
        &[1.0, 2f64.powi(-53), f64::from_bits(1)],
        &[1e154, 1e160, 1e-160],
    ];
    for values in rows {
        for norm in NORMS {
            let sum = accumulated(norm, values);
            let mut words = vec![0, 6];
            words.extend(sum.sum().words());
            words.push(0);
            let mut max = vec![sum.max_bits(), 0, 1, !1];
            max.resize(4 + 2 * FIELDS, 0);
            let exchange = Exchange { sum: words, max };
            let settings = Settings { norm: norm_code(norm).unwrap(), ..plain };
            let case = Case { settings, norm, exchange, counted: 0 };
            assert_eq!(difference(&device, None, &[case]), None, "{norm:?} of {values:?}");
        }
    }
}

fn bring(device: &Device, settings: &Settings, here: &[bool], progress: &Progress) -> [Vec<u64>; 2] {
    let (mut counted, head) = (here.len() as u64, size_of::<Settings>() / 8);
    let mut block = vec![0u64; head + here.len().div_ceil(8)];
    block[..head].copy_from_slice(bytemuck::cast_slice(std::slice::from_ref(settings)));
    let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut block[head..]);
    bytes.iter_mut().zip(here).for_each(|(byte, &here)| *byte = here.into());
    let mut sum: Vec<u64> = (11..).take(HEAD + ExactSum::WORDS + here.len().div_ceil(2) + 1).collect();
    let mut max: Vec<u64> = (13..).take(4 + settings.params as usize + 2 * FIELDS).collect();
    let (mut settings, mut progress) = (block.as_ptr(), &raw const *progress);
    let (mut at_sum, mut at_max) = (sum.as_mut_ptr(), max.as_mut_ptr());
    let mut args =
        [arg(&mut settings), arg(&mut progress), arg(&mut at_sum), arg(&mut at_max), arg(&mut counted)];
    // SAFETY: the arguments point at the kernel's inputs; both vectors have the words of as many parameters.
    unsafe { device.launch("decide_bring", 1, THREADS, &mut args) }.unwrap();
    [sum, max]
}

/// Returns the digest of the fields that must be equal on all ranks: shard's, field by field.
fn digest(fields: &[u64]) -> u64 {
    let mix = |h: u64, x: u64| (h.rotate_left(5) ^ x).wrapping_mul(0x517c_c1b7_2722_0a95);
    fields.iter().fold(0, |so_far, field| mix(mix(so_far, field.wrapping_add(1)), 0))
}

#[test]
fn what_a_rank_brings_is_what_the_host_would() {
    let Some(device) = Device::of("norm/decide") else { return };
    proptest!(cases(100, 10_000), |(case in case(), rule in rule(), fault in prop_oneof![Just(0), any::<u64>()],
                            factor in prop_oneof![3 => Just(1.0), 1 => Just(1e30), 1 => Just(1e-30)],
                            here in prop::collection::vec(any::<bool>(), 0..600))| {
        let host = Host::new(rule);
        let progress = host.progress();
        let s = Settings { fault, rank: 3, weight: 77, ..case.settings };
        let params = if s.params > 0 { here.len() as u64 } else { 0 };
        let s = Settings { grad_scale: s.grad_scale * factor, params, ..s };
        let [sum, max] = bring(&device, &s, &here, &progress);
        let ([bad, weight], [peak, found, known, complement]) = ([sum[0], sum[1]], [max[0], max[1], max[2], max[3]]);
        prop_assert_eq!((bad, weight, peak), (11, 77, 13), "what the norm adds to is left alone");
        let (words, counts) = sum[HEAD..].split_at(ExactSum::WORDS);
        prop_assert!(words.iter().zip(13..).all(|(&word, before)| word == before), "{words:?}");
        for (counts, here) in counts.iter().zip(here.chunks(2)) {
            let expected: u64 = here.iter().zip([0, 32]).map(|(&here, shift)| u64::from(here) << shift).sum();
            prop_assert_eq!(*counts, expected);
        }
        prop_assert_eq!(counts[here.len().div_ceil(2)..].to_vec(), [17], "balance");
        for (i, (&fault, &here)) in max[4..4 + params as usize].iter().zip(&here).enumerate() {
            let missing = 1 << 56 | (0xff_ffff - 3) << 32 | i as u64;
            prop_assert_eq!(fault, if here { 0 } else { missing });
        }
        let fits = (1e-30..=1e30).contains(&(s.grad_scale / host.loss_scale()));
        let bad_scale = 4 << 56 | (0xff_ffff - 3) << 32;
        let expected = if fault != 0 { fault } else if fits { 0 } else { bad_scale };
        prop_assert_eq!(found, expected);
        let fields = host.fields(&s);
        prop_assert_eq!((known, complement), (digest(&fields), !digest(&fields)));
        let told = &max[4 + params as usize..];
        prop_assert_eq!(told, [fields, fields.map(|field| !field)].concat());
    });
}

/// The suite detects bugs: a scale that changes before the gradients are divided by it, a coefficient without its epsilon, a lost carry,
/// a root of a number shifted by one.
#[test]
fn mistakes_are_noticed() {
    // Without the last kernel, which is not launched here.
    let whole = simt::text("norm/decide");
    let text = &whole[..whole.find("// Writes the norm of a step that was decided").unwrap()];
    let mistakes = [
        ("    Decided d = judge(", "    rescale(s, p, sum[BAD] != 0);\n    Decided d = judge("),
        ("plus(norm, 1e-6)", "norm"),
        ("carried = full >> 32", "carried = 0"),
        ("odd ? plus(x, x) : x", "x"),
        ("| lost;", ";"),
        ("p.hysteresis_tracker = s.hysteresis;", ""),
        ("count != 0 && count", "count"),
        ("= count != 0;", "= count == s.world_size;"),
        ("i % 2 * 32);", "0);"),
        ("max[LACKING + d.param]", "max[LACKING]"),
        ("found |= largest != smallest;", ""),
        ("if (!found) d.param", "d.param"),
        ("d.mine = of[i]", "d.mine = largest"),
        ("if (balance) return with(UNBALANCED);", ""),
    ];
    for (i, (right, wrong)) in mistakes.into_iter().enumerate() {
        assert_eq!(text.matches(right).count(), 1, "{right}");
        // Short runs try the loss scale, a rounding, the parameters' gradient counts and a difference between ranks; long runs try each.
        if !tried(i, 4) {
            continue;
        }
        let Some(device) = Device::compile(&text.replace(right, wrong), "") else { return };
        let mut runner = proptest::test_runner::TestRunner::deterministic();
        let noticed = (0..400).any(|_| {
            let (rule, cases) = run().new_tree(&mut runner).unwrap().current();
            difference(&device, rule, &cases).is_some()
        });
        assert!(noticed, "{right} -> {wrong}");
    }
}
