//! Consolidated vectors on one rank equal the vectors of all ranks, window by window.

use crate::common::{Run, cases, draws};
use crate::layouts::{on, runs, seat, train};
use crate::whole::{Bytes, Whole, join, part};
use meshstep_checkpoint::{self as checkpoint, CheckpointError, Error};
use meshstep_comm::loopback::spawn;
use meshstep_shard::{Master, Optimizer, Options, Stage};
use meshstep_tensor::{Category, DType};
use proptest::prelude::*;
use std::collections::BTreeMap;

/// Every vector by parameter and name, assembled from consecutive windows.
pub(crate) type Vectors = BTreeMap<(String, String), Vec<u8>>;

pub(crate) fn consolidated(opt: &mut Optimizer, to: usize) -> Result<Vectors, Error> {
    let mut all = Vectors::new();
    checkpoint::consolidate(opt, to, &mut |window| {
        let bytes = all.entry((window.param.to_owned(), window.slot.to_owned())).or_default();
        assert_eq!(bytes.len() as u64, window.at * window.dtype.size(), "one behind the other");
        assert_eq!(Some(window.values.dtype()), window.dtype.dtype());
        bytes.extend(window.values.bytes().unwrap());
        assert!(bytes.len() as u64 <= window.shape.iter().product::<u64>() * window.dtype.size());
        Ok(())
    })?;
    Ok(all)
}

/// Returns the same from the parts of all ranks.
fn expected(whole: &Whole) -> Vectors {
    let len = |bytes: &Bytes| bytes.values().len();
    let mut all = Vectors::new();
    for (name, (_, vectors)) in &whole.tensors {
        let halves = |slot: &str| slot == "master" && len(&vectors["master"]) == len(&vectors["whole"]);
        for (slot, bytes) in vectors.iter().filter(|(_, bytes)| len(bytes) > 0) {
            let slot = match &**slot {
                "whole" => continue,
                slot if halves(slot) && len(&vectors["param"]) == 2 * len(bytes) => "param",
                slot => slot,
            };
            all.insert((name.clone(), slot.to_owned()), bytes.whole().unwrap().to_vec());
        }
    }
    all
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(60, 2000), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn one_rank_gets_all_there_is(
        (seat, run) in (seat(), runs()),
        to in 0..6usize,
        steps in 0..3u64,
    ) {
        let run = on(seat, &run);
        let to = to % run.ranks;
        let ends = spawn(run.ranks, |comm| {
            let mut opt = run.build(comm).unwrap();
            train(&run, &mut opt, 1..steps + 1);
            let all = consolidated(&mut opt, to).unwrap();
            let part = part(&opt);
            train(&run, &mut opt, steps + 1..steps + 2);
            (all, part)
        });
        let (mut all, parts): (Vec<_>, Vec<_>) = ends.unwrap().into_iter().unzip();
        let remainder = run.dtype == DType::BF16 && run.options.precision.master == Master::Remainder;
        let mut got = all.remove(to);
        if remainder {
            got = got.into_iter().map(|((name, slot), bytes)| {
                let slot = if slot == "remainder" { "master".to_owned() } else { slot };
                ((name, slot), bytes)
            }).collect();
        }
        prop_assert!(got == expected(&join(parts)), "what came is not what there is");
        prop_assert!(all.iter().all(Vectors::is_empty), "others get nothing");
    }
}

/// A vector is longer than a window, its parts end within windows, and the memory is that of windows.
#[test]
fn a_long_vector_comes_in_windows_of_bounded_memory() {
    const LEN: usize = (5 << 20) + 77;
    let run = Run { lens: vec![3, LEN], ranks: 3, ..Run::default() };
    let options = Options { bucket_len: Some(4 << 20), ..run.options.clone() };
    let mut drawn = draws(1);
    for stage in [Stage::Replicated, Stage::Zero2].into_iter().filter(|_| drawn()) {
        let run = Run { options: options.clone(), ..run.clone() }.stage(stage);
        let ends = spawn(run.ranks, |comm| {
            let mut opt = run.build(comm).unwrap();
            let meter = opt.options().meter.clone();
            meter.reset_peaks();
            let before = meter.live(Category::Staging);
            let sent = opt.comm().stats().total().bytes;
            let (mut windows, mut all) = (Vec::new(), Vec::<u8>::with_capacity(4 * LEN));
            let mut at = 0;
            checkpoint::consolidate(&mut opt, 1, &mut |window| {
                if (window.param, window.slot) == ("p1", "param") {
                    assert_eq!(window.at, at, "one behind the other");
                    at += window.values.len() as u64;
                    windows.push(window.values.len());
                    all.extend(window.values.bytes().unwrap());
                }
                Ok(())
            })
            .unwrap();
            let most = meter.peak(Category::Staging) - before;
            assert!(most <= 33 << 20, "{most} bytes beside what there is");
            // Elements that rank 1 has itself are not sent.
            let sent = opt.comm().stats().total().bytes - sent;
            assert_eq!(sent < 1 << 20, opt.comm().rank() == 1 || stage == Stage::Replicated, "{sent} bytes");
            (windows, all == crate::common::param(&opt, "p1"))
        });
        let ends = ends.unwrap();
        assert_eq!(ends[1].0, [2 << 20, 2 << 20, (1 << 20) + 77]);
        assert!(ends[1].1, "the same bytes");
        assert!(ends[0].0.is_empty() && ends[2].0.is_empty());
    }
}

#[test]
fn a_sink_that_refuses_is_an_error_on_all_ranks_and_training_goes_on() {
    let run = Run { ranks: 3, ..Run::default() }.stage(Stage::Zero2);
    let ends = spawn(3, |comm| {
        let mut opt = run.build(comm).unwrap();
        train(&run, &mut opt, 1..3);
        let before = part(&opt);
        let mut errors = Vec::new();
        for calls in [0, 1, 7] {
            let mut left = calls;
            let refused = checkpoint::consolidate(&mut opt, 2, &mut |_| {
                left -= 1;
                if left < 0 { Err(CheckpointError::Memory { message: "full".to_owned() }) } else { Ok(()) }
            });
            errors.push(refused.unwrap_err().to_string());
        }
        errors.push(checkpoint::consolidate(&mut opt, 3, &mut |_| Ok(())).unwrap_err().to_string());
        assert!(part(&opt) == before);
        train(&run, &mut opt, 3..4);
        (errors, consolidated(&mut opt, 0).unwrap())
    });
    let mut naive = run.clone();
    naive.steps = 3;
    let end = naive.run();
    let ends = ends.unwrap();
    for (errors, _) in &ends {
        let full = "on rank 2: full";
        assert_eq!(*errors, [full, full, full, "no rank 3 in a group of 3; ranks count from 0"]);
    }
    let whole = &ends[0].1;
    for (i, param) in end.params.iter().enumerate().filter(|(_, param)| !param.is_empty()) {
        assert_eq!(whole[&(crate::common::name(i), "param".to_owned())], *param, "as if nobody had asked");
    }
}

#[test]
fn ranks_that_call_apart_are_told_so() {
    let run = Run { ranks: 2, ..Run::default() }.stage(Stage::Zero1);
    let ends = spawn(2, |comm| {
        let mut opt = run.build(comm).unwrap();
        let to = opt.comm().rank();
        let other = checkpoint::consolidate(&mut opt, to, &mut |_| Ok(())).unwrap_err().to_string();
        train(&run, &mut opt, 1..2);
        other
    });
    for error in ends.unwrap() {
        assert!(
            error.contains("consolidate to rank 0") && error.contains("consolidate to rank 1"),
            "{error}"
        );
    }
}
