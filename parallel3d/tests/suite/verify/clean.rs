//! Verifications without a difference, repair, and parts that are equal.

use super::{CUBE, built, take};
use meshstep_comm::{Communicator, loopback};
use meshstep_optim::AdamW;
use meshstep_parallel3d::{Alike, Axis, Mesh, Model, Optimizer, Parameter, Piece, Placement};
use meshstep_shard::{Options, Owners, Stage, Step};
use meshstep_tensor::DType::F32;
use meshstep_tensor::{Meter, SliceMut};
use std::sync::Arc;

/// Number of verified steps.
fn clean_steps() -> usize {
    meshstep_cases::cases(60, 1000) as usize
}

#[test]
fn clean_steps_raise_no_alarm_and_majorities_repair() {
    let all = [
        (CUBE, Stage::Zero2),
        (CUBE, Stage::Replicated),
        ("dp_replicate=2,dp_shard=2,tp=2", Stage::Zero1),
        ("tp=8", Stage::Zero1),
        ("dp_replicate=2,dp_shard=2,cp=2", Stage::WholeParams(Owners::SortedGreedy)),
    ];
    for (_, (mesh, stage)) in all.into_iter().enumerate().filter(|(i, _)| meshstep_cases::tried(*i, 1)) {
        let told = loopback::spawn(8, |world: Arc<dyn Communicator>| {
            let rank = world.rank();
            let mut opt = built(world, mesh, stage);
            opt.verify_every(1).unwrap();
            (1..=clean_steps()).for_each(|t| take(&mut opt, t).unwrap());
            let verified = opt.verify().unwrap();
            assert_eq!((verified.of.unchecked, verified.alike), (0, vec![]), "{mesh} {stage:?}");
            assert_eq!(verified.of.compared + verified.of.kept, 5 * 3);
            if rank == 6 {
                opt.flip_bit("ln", "param", 12, 30).unwrap();
            }
            let repaired = opt.repair().unwrap();
            opt.verify().unwrap();
            repaired
        });
        for repaired in told.unwrap() {
            let told: Vec<_> =
                repaired.iter().map(|r| (&r.param[..], r.slot, &r.ranks[..], r.from)).collect();
            assert_eq!(told, [("ln", "param", &[6][..], 0)], "{mesh} {stage:?}");
        }
    }
}

#[test]
fn clean_steps_at_stage_3_raise_no_alarm_and_majorities_repair_a_part() {
    // Ranks that hold rank 2's part: two along tp have no majority.
    let hsdp = "dp_replicate=2,dp_shard=2,tp=2";
    let all = [(hsdp, vec![2, 3, 6, 7]), (CUBE, vec![]), ("tp=4,dp=2", vec![0, 1, 2, 3])];
    for (_, (mesh, same)) in all.into_iter().enumerate().filter(|(i, _)| meshstep_cases::tried(*i, 1)) {
        let told = loopback::spawn(8, |world: Arc<dyn Communicator>| {
            let rank = world.rank();
            let mut opt = built(world, mesh, Stage::Zero3);
            opt.verify_every(1).unwrap();
            (1..=clean_steps()).for_each(|t| take(&mut opt, t).unwrap());
            let verified = opt.verify().unwrap();
            assert_eq!((verified.of.unchecked, verified.alike), (0, vec![]), "{mesh}");
            assert_eq!(verified.of.compared + verified.of.kept, 5 * 3);
            if rank == 2 {
                let first = opt.state("pos").unwrap().range.start;
                opt.flip_bit("pos", "param", first, 30).unwrap();
            }
            let repaired = opt.repair().map_err(|error| error.to_string());
            (repaired, opt.verify().is_ok())
        });
        for (rank, (repaired, right)) in told.unwrap().into_iter().enumerate() {
            assert_eq!((repaired.is_ok(), right), (!same.is_empty(), !same.is_empty()), "{mesh}");
            let told: Vec<_> =
                repaired.iter().flatten().map(|r| (&r.param[..], r.slot, &r.ranks[..])).collect();
            let expected: &[_] = if same.contains(&rank) { &[("pos", "param", &[2][..])] } else { &[] };
            assert_eq!(told, expected, "{mesh} on rank {rank}");
        }
    }
}

/// Parts of a cut matrix that began equal on all ranks; constant parts are not listed.
#[test]
fn parts_that_are_alike_are_listed() {
    let model = Model::builder()
        .param("same", &[8, 4], F32, Placement::whole().cut(Axis::Tp, 0))
        .param("zeros", &[8], F32, Placement::whole().cut(Axis::Tp, 0))
        .param("other", &[8, 4], F32, Placement::whole().cut(Axis::Tp, 1))
        .build()
        .unwrap();
    let told = loopback::spawn(8, |world: Arc<dyn Communicator>| {
        let mesh: Mesh = "tp=4,dp=2".parse().unwrap();
        let initial = |p: &Parameter, pieces: &[Piece], mut values: SliceMut<'_>| {
            let part = pieces[0].global.iter().map(|range| range.start).sum::<usize>();
            let of = |i: usize| match p.name.as_str() {
                // The second and the fourth rank have equal parts.
                "same" => (i * (1 + part / 2 % 2)) as f32,
                "zeros" => 0.0,
                _ => (i + part) as f32,
            };
            let own: Vec<f32> = (0..values.len()).map(of).collect();
            values.copy_from((&own[..]).into())
        };
        let options = Options { meter: Meter::new(), ..Options::default() };
        let mut opt = Optimizer::new(world, mesh, &model, AdamW::default(), initial, options).unwrap();
        (1..=2).map(|_| opt.verify().unwrap().alike).collect::<Vec<_>>()
    });
    for (rank, told) in told.unwrap().into_iter().enumerate() {
        let first = rank / 4 * 4;
        let alike = |place: usize| Alike {
            param: "same".into(),
            axes: Axis::Tp.into(),
            ranks: vec![first + place, first + place + 2],
        };
        assert_eq!(told, [vec![alike(0), alike(1)], vec![alike(0), alike(1)]]);
    }
}
