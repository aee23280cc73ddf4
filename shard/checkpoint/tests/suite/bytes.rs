//! One rank's state as bytes: the same rank of the same layout takes them in, and either all ranks do or none.

use crate::common::{Run, WhichRule, cases, draws, long};
use crate::layouts::{on, runs, seat, train};
use crate::whole::part;
use meshstep_checkpoint::{self as checkpoint, Error};
use meshstep_comm::loopback::spawn;
use meshstep_shard::{Optimizer, Options, Stage};
use proptest::prelude::*;

fn serialized(run: &Run, steps: u64) -> Vec<Vec<u8>> {
    let ranks = spawn(run.ranks, |comm| {
        let mut opt = run.build(comm).unwrap();
        train(run, &mut opt, 1..steps + 1);
        let bytes = checkpoint::serialize(&mut opt).unwrap();
        assert_ne!(checkpoint::serialize(&mut opt).unwrap(), bytes, "of another moment");
        bytes
    });
    ranks.unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(40, 1000), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn bytes_go_into_another_group_of_the_same_layout(
        seat in seat(),
        run in runs(),
        (before, strayed) in (0..4u64, 0..3u64),
    ) {
        let run = on(seat, &run);
        let saved = spawn(run.ranks, |comm| {
            let mut opt = run.build(comm).unwrap();
            train(&run, &mut opt, 1..before + 1);
            let (bytes, then) = (checkpoint::serialize(&mut opt).unwrap(), part(&opt));
            train(&run, &mut opt, before + 1..before + 4);
            (bytes, then, part(&opt))
        });
        let saved = saved.unwrap();
        let same = spawn(run.ranks, |comm| {
            let (bytes, then, end) = &saved[comm.rank()];
            let mut opt = run.build(comm).unwrap();
            train(&run, &mut opt, 1..strayed + 1);
            checkpoint::deserialize(&mut opt, bytes).unwrap();
            assert!(part(&opt) == *then, "what was taken in is not what was made");
            train(&run, &mut opt, before + 1..before + 4);
            part(&opt) == *end
        });
        prop_assert!(same.unwrap().into_iter().all(|same| same), "three steps later they are apart");
    }
}

/// Returns the error of all ranks when each gives `bytes` to an optimizer of `run`. The optimizer must not change.
fn refused(run: &Run, bytes: &[Vec<u8>]) -> String {
    told(run, |opt| checkpoint::deserialize(opt, &bytes[opt.comm().rank()]).map(drop))
}

/// Returns the error of all ranks of a call that changes nothing.
pub(crate) fn told(run: &Run, call: impl Fn(&mut Optimizer) -> Result<(), Error> + Sync) -> String {
    let errors = spawn(run.ranks, |comm| {
        let mut opt = run.build(comm).unwrap();
        train(run, &mut opt, 1..2);
        let before = part(&opt);
        let error = call(&mut opt).unwrap_err().to_string();
        assert!(part(&opt) == before, "nothing has changed");
        train(run, &mut opt, 2..3);
        error
    });
    let errors = errors.unwrap();
    assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
    errors.into_iter().next().unwrap()
}

#[test]
fn every_flipped_bit_and_every_cut_is_noticed_on_all_ranks() {
    let run = Run { ranks: 2, lens: vec![3, 2], ..Run::default() }.stage(Stage::Zero1);
    let sound = serialized(&run, 2);
    let mut drawn = draws(1);
    for at in (0..sound[1].len()).step_by(if long() { 7 } else { 13 }).filter(|_| drawn()) {
        let mut bytes = sound.clone();
        bytes[1][at] ^= 1 << (at % 8);
        assert!(refused(&run, &bytes).starts_with("on rank 1: the bytes are not what"));
        bytes[1].truncate(at);
        assert!(refused(&run, &bytes).starts_with("on rank 1: the bytes are not what"));
    }
    let mut long = sound.clone();
    long[0].push(0);
    assert!(refused(&run, &long).starts_with("on rank 0: the bytes are not what"));
}

#[test]
fn what_is_for_others_is_refused_by_name() {
    let run = Run { ranks: 2, lens: vec![30, 20], ..Run::default() }.stage(Stage::Zero1);
    let own = serialized(&run, 2);
    let swapped = vec![own[1].clone(), own[0].clone()];
    let three = Run { ranks: 3, ..run.clone() };
    let bucket = Run { options: Options { bucket_len: Some(7), ..run.options.clone() }, ..run.clone() };
    let mixed = vec![own[0].clone(), serialized(&run, 2)[1].clone()];
    let (whole, one) = (run.stage(Stage::Replicated), Run { lens: vec![30], ..run.clone() });
    type Row<'a> = (&'a Run, Vec<Vec<u8>>, &'a [&'a str]);
    let table: [Row<'_>; 8] = [
        (&run, swapped, &["the rank", "1 of 2 on ranks=2", "0 of 2"]),
        (&run, vec![own[0].clone(); 2], &["on rank 1", "the rank", "0 of 2"]),
        (&run, serialized(&three, 2)[..2].to_vec(), &["the rank", "0 of 3 on ranks=3"]),
        (&whole, own.clone(), &["a vector", "\"m\" of \"p0\""]),
        (&run, serialized(&bucket, 2), &["a vector"]),
        (
            &one.stage(Stage::Replicated),
            serialized(&whole, 2),
            &["the number of vectors", "6 of 2", "3 of 1"],
        ),
        (
            &Run { rule: WhichRule::Adam, ..run.clone() },
            own.clone(),
            &["the rule of \"p0\"", "adamw", "adam "],
        ),
        (&run, mixed, &["ranks disagree on moment of the bytes"]),
    ];
    for (run, bytes, texts) in table {
        let error = refused(run, &bytes);
        assert!(texts.iter().all(|text| error.contains(text)), "{error} says {texts:?}");
    }
    assert!(refused(&run, &[b"".to_vec(), own[1].clone()]).contains("too few"));
}
