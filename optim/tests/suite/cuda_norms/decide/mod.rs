//! Decisions: the one-block kernels compute from an exchange the same as the host's functions, in the host's order.

mod bring;
mod drawn;

use super::arg;
use crate::common::cases;
use drawn::{NORMS, accumulated, case, run};
use meshstep_optim::cuda::{Decided, FIELDS, Progress, Settings, StepScalars, THREADS, Verdict, norm_code};
use meshstep_optim::{ExactSum, LossScale, LossScaleState, Norm, NormAccumulator, clip_coef};
use meshstep_simt::Device;
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
        if max[1] >> 56 != 0 {
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
