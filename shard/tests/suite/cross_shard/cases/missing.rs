//! Gradients that are missing on some ranks.

use super::{Ranks, at_one, build, first_state, give, layout, replicated, step, t, there, values, zeros};
use crate::common;
use meshstep_optim::{AdamW, Sgd};
use meshstep_shard::{Clip, CrossShard, Error, Fault, Missing, Optimizer, Options, Pending, StepArgs};
use meshstep_tensor::{DType, Layout, Param, Slice, SliceMut};

pub(crate) fn what_no_rank_of_a_group_has_is_left_alone(on: &impl Ranks) {
    let pairs = [vec![0, 2], vec![1, 3]];
    for missing in [Missing::Error, Missing::Zero, Missing::SkipIfMissingEverywhere, Missing::AllOrNone] {
        for clip in [Clip::AfterReduce, Clip::BeforeReduce] {
            on.run(4, |comm, queue| {
                let rank = comm.rank();
                let options = Options { missing, clip, ..replicated() };
                let rule = AdamW { weight_decay: 0.5, ..AdamW::default() };
                let first =
                    |_: &Param, mut w: SliceMut<'_>| w.cast_from(Slice::from(&vec![1f64; w.len()][..]));
                let mut opt =
                    CrossShard::new(comm, Some(&pairs), layout(), rule, first, there(&queue, options))
                        .unwrap();
                let at = StepArgs { lr: 0.1, ..StepArgs::default() };
                // Ranks 0 and 2 have no gradient for b.
                let b = (rank % 2 == 1).then_some(1.0);
                let _ = step(&mut opt, 1, Some([1.0; 2]), b, at).unwrap();
                assert_eq!((t(&opt, "w"), t(&opt, "b")), (1, (rank % 2) as u64));
                assert_eq!(values(&opt, "b")[0] == 1.0, rank % 2 == 0);
                assert_eq!(first_state(&opt, "b")[0] == 0.0, rank % 2 == 0);
            });
        }
    }
}

pub(crate) fn what_some_ranks_of_a_group_lack_is_decided_by_the_policy(on: &impl Ranks) {
    let pairs = [vec![0, 2], vec![1, 3]];
    for clip in [Clip::AfterReduce, Clip::BeforeReduce] {
        for missing in [Missing::Error, Missing::AllOrNone, Missing::Zero, Missing::SkipIfMissingEverywhere] {
            on.run(4, |comm, queue| {
                let rank = comm.rank();
                let options = Options { missing, clip, ..replicated() };
                let mut opt = build(comm, &queue, Some(&pairs), Sgd::default(), options).unwrap();
                // Rank 3 has no gradient for b; rank 1, in its group, has one. No rank of that group has one for w.
                let w = (rank % 2 == 0).then_some([2.0; 2]);
                let b = (rank != 3).then_some(2.0);
                let outcome = step(&mut opt, 1, w, b, at_one());
                let strict = matches!(missing, Missing::Error | Missing::AllOrNone);
                let expected = match (rank % 2, strict) {
                    (0, _) => -2.0,
                    (_, true) => 0.0,
                    (_, false) => -1.0,
                };
                assert_eq!(values(&opt, "b"), [expected; 3], "{missing:?} rank {rank}");
                match outcome {
                    Err(Error::Fault { rank: 1, fault: Fault::MissingGradient { name } }) => {
                        // Rank 3 of the world is rank 1 of its group.
                        assert!(rank % 2 == 1 && strict && name == "b");
                        assert_eq!(t(&opt, "b"), 0);
                    }
                    outcome => assert!(outcome.is_ok() && !(rank % 2 == 1 && strict), "{outcome:?}"),
                }
                // The next step is unaffected.
                let _ = step(&mut opt, 1, Some([1.0; 2]), Some(1.0), at_one()).unwrap();
                assert_eq!(values(&opt, "b"), [expected - 1.0; 3]);
            });
        }
    }
}

/// Without groups: `AllOrNone` works at every stage, and names the lowest rank without a gradient.
pub(crate) fn all_or_none_holds_at_every_stage(on: &impl Ranks) {
    for stage in common::STAGES {
        let options = Options { stage, missing: Missing::AllOrNone, ..Options::default() };
        on.run(3, |comm, queue| {
            let rank = comm.rank();
            let mut opt =
                Optimizer::new(comm, layout(), Sgd::default(), zeros, there(&queue, options.clone()))
                    .unwrap();
            for round in 0..2 {
                let mb = opt.micro_batch(1).unwrap();
                give(&mb, "w", &[1f32; 2][..], &queue).unwrap();
                if round == 1 && rank == 0 {
                    give(&mb, "b", &[1f32; 3][..], &queue).unwrap();
                }
                mb.finish().unwrap();
                match opt.step(at_one()).and_then(Pending::outcome) {
                    Ok(_) => assert_eq!(round, 0),
                    Err(Error::Fault { rank, fault: Fault::MissingGradient { name } }) => {
                        assert_eq!((round, rank, &*name), (1, 1, "b"), "{stage:?}");
                    }
                    Err(other) => panic!("{other}"),
                }
            }
            assert_eq!((opt.state("w").unwrap().t, opt.state("b").unwrap().t), (1, 0));
        });
    }
}

/// The empty gradient of an empty parameter counts as present, handed over or filled in place.
pub(crate) fn slots_of_empty_parameters_count_as_present(on: &impl Ranks) {
    let layout = Layout::builder().param("w", &[2], DType::F32).param("none", &[0, 3], DType::F32);
    let layout = layout.build().unwrap();
    on.run(2, |comm, queue| {
        let rank = comm.rank();
        let options = Options { missing: Missing::AllOrNone, ..Options::default() };
        let mut opt =
            Optimizer::new(comm, layout.clone(), Sgd::default(), zeros, there(&queue, options)).unwrap();
        let mb = opt.micro_batch(1).unwrap();
        give(&mb, "w", &[1f32; 2][..], &queue).unwrap();
        match rank {
            0 => give(&mb, "none", &[0f32; 0][..], &queue).unwrap(),
            _ => mb.slot("none").unwrap().fill().unwrap(),
        }
        mb.finish().unwrap();
        let _ = opt.step(at_one()).unwrap();
        assert_eq!(opt.state("none").unwrap().t, 1);
    });
}
