//! Repair by a majority.

use super::{take, target, wide};
use crate::common::{Run, params, state};
use meshstep_comm::loopback;
use meshstep_shard::Stage;

/// After a repair all ranks hold the values of a majority of at least three ranks.
#[test]
fn a_majority_repairs() {
    for (stage, slots) in [
        (Stage::Replicated, &["param", "m", "v"][..]),
        (Stage::Zero1, &["param"][..]),
        (Stage::WholeParams(meshstep_shard::Owners::RoundRobin), &["param"][..]),
    ] {
        let run = wide().stage(stage);
        let ends = loopback::spawn(run.ranks, |comm| {
            let rank = comm.rank();
            let mut opt = run.build(comm).unwrap();
            take(&run, &mut opt, 1).unwrap();
            let clean = (params(&opt), state(&opt));
            for (i, slot) in slots.iter().enumerate().filter(|(i, _)| rank == i + 1) {
                opt.flip_bit("p3", slot, 127 + i, 5).unwrap();
                opt.flip_bit("p3", slot, 3, 6).unwrap();
            }
            opt.verify().unwrap_err();
            let repaired = opt.repair().unwrap();
            assert_eq!((params(&opt), state(&opt)), clean);
            assert!(opt.repair().unwrap().is_empty());
            take(&run, &mut opt, 2).unwrap();
            repaired
        });
        for repaired in ends.unwrap() {
            let told: Vec<_> =
                repaired.iter().map(|r| (&r.param[..], r.slot, r.ranks.clone(), r.from)).collect();
            let expected: Vec<_> =
                slots.iter().enumerate().map(|(i, slot)| ("p3", *slot, vec![i + 1], 0)).collect();
            assert_eq!(told, expected, "{stage:?}");
        }
    }
}

#[test]
fn nobody_is_outvoted_by_as_many() {
    for (ranks, odd, stage, slot) in [
        (2, &[1][..], Stage::Replicated, "m"),
        (4, &[0, 3][..], Stage::Zero1, "param"),
        (3, &[1][..], Stage::Zero2, "m"),
    ] {
        let run = Run { ranks, ..wide() }.stage(stage);
        let told = loopback::spawn(ranks, |comm| {
            let rank = comm.rank();
            let mut opt = run.build(comm).unwrap();
            opt.verify_every(1).unwrap();
            take(&run, &mut opt, 1).unwrap();
            if odd.contains(&rank) {
                let (name, element, _) = target(&opt, slot);
                opt.flip_bit(&name, slot, element, 0).unwrap();
            }
            // A repairable difference is not repaired while another one is not repairable.
            if rank == ranks - 1 {
                opt.flip_bit("p4", "param", 1, 1).unwrap();
            }
            let before = (params(&opt), state(&opt));
            let told = opt.repair().unwrap_err();
            assert_eq!((params(&opt), state(&opt)), before);
            told.to_string()
        });
        let told = told.unwrap();
        assert!(
            told.iter().all(|text| *text == told[0] && text.contains("nothing was changed")),
            "{told:#?}"
        );
    }
}
