//! Words that a rank brings to the exchange, and arguments that are refused.

use super::super::arg;
use super::drawn::{case, rule, run};
use super::{HEAD, Host, difference};
use crate::common::{cases, tried};
use meshstep_optim::ExactSum;
use meshstep_optim::cuda::{FIELDS, Progress, Settings, THREADS};
use meshstep_simt::{self as simt, Device};
use proptest::prelude::*;
use proptest::strategy::ValueTree;

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
    proptest!(cases(100, 10_000), |(case in case(), rule in rule(), fault in prop_oneof![Just(0), Just(1), any::<u64>()],
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
        // A word below the faults is a notice: a fault of the scale outweighs it.
        let expected = if fault >> 56 != 0 || fits { fault } else { bad_scale };
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
        ("if (is_fault(d.fault))", "if (d.fault)"),
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
