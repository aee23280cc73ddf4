//! Groups of replicas compared with a single optimizer.

use super::{Assignment, Ranks, at_one, build, give, layout, replicated, step, there, values, zeros};
use crate::common::{self, adamw};
use meshstep_optim::{DynamicLossScale, LossScale, Sgd};
use meshstep_shard::{
    Clip, Combine, CrossShard, Error, Initial, Optimizer, Options, Outcome, Step, StepArgs,
};
use meshstep_tensor::{Param, Slice, SliceMut};
use std::sync::Arc;

/// Loss g_r w with g = 1..4 on 4 ranks, SGD with lr 1 from 0, computed by hand.
pub(crate) fn gradients_combine_within_groups(on: &impl Ranks) {
    let pairs = [vec![0, 2], vec![1, 3]];
    let swapped = [vec![3, 1], vec![2, 0]];
    let table: [(Assignment<'_>, Combine, bool, [f32; 4]); 7] = [
        (None, Combine::Mean, false, [-2.5; 4]),
        (None, Combine::Sum, false, [-10.0; 4]),
        (Some(&pairs), Combine::Mean, false, [-2.0, -3.0, -2.0, -3.0]),
        (Some(&swapped), Combine::Mean, false, [-2.0, -3.0, -2.0, -3.0]),
        (Some(&pairs), Combine::Sum, false, [-4.0, -6.0, -4.0, -6.0]),
        (None, Combine::Weighted, true, [-3.0; 4]),
        // (1 + 9) / 4 and (4 + 16) / 6.
        (Some(&pairs), Combine::Weighted, true, [-2.5, -20.0 / 6.0, -2.5, -20.0 / 6.0]),
    ];
    for (groups, combine, weighted, expected) in table {
        for clip in [Clip::AfterReduce, Clip::BeforeReduce] {
            let options = Options { combine, clip, ..replicated() };
            let ends = on.run(4, |comm, queue| {
                let rank = comm.rank();
                let mut opt = build(comm, &queue, groups, Sgd::default(), options.clone()).unwrap();
                let g = 1.0 + rank as f32;
                let batch = if weighted { rank as u64 + 1 } else { 1 };
                let outcome = step(&mut opt, batch, Some([g, 0.0]), Some(g), at_one()).unwrap();
                assert!(matches!(outcome, Outcome::Applied { coef: 1.0, .. }), "{outcome:?}");
                let (w, b) = (values(&opt, "w"), values(&opt, "b"));
                assert_eq!((w[1], b), (0.0, vec![w[0]; 3]));
                w[0]
            });
            for (end, expected) in ends.into_iter().zip(expected) {
                assert!((end - expected).abs() <= expected.abs() * 1e-7, "{combine:?} {groups:?} {end}");
            }
        }
    }
}

/// One group of all ranks equals `Optimizer`, to the bit, with a real rule and clipping.
pub(crate) fn one_group_of_everyone_is_a_replicated_optimizer(on: &impl Ranks) {
    let g = |rank: usize, t: u64| (rank as f32 + 1.5) * (0.3 + t as f32).sin();
    on.run(3, |comm, queue| {
        let rank = comm.rank();
        let at = StepArgs { max_norm: Some(0.7), ..at_one() };
        let mut plain =
            Optimizer::new(Arc::clone(&comm), layout(), adamw(), zeros, there(&queue, replicated())).unwrap();
        let mut cross = build(comm, &queue, None, adamw(), replicated()).unwrap();
        for t in 1..=4 {
            let mb = plain.micro_batch(1).unwrap();
            give(&mb, "w", &[g(rank, t), 1.0][..], &queue).unwrap();
            give(&mb, "b", &[g(rank, t + 9); 3][..], &queue).unwrap();
            mb.finish().unwrap();
            let _ = plain.step(at).unwrap();
            let _ = step(&mut cross, 1, Some([g(rank, t), 1.0]), Some(g(rank, t + 9)), at).unwrap();
        }
        assert_eq!(common::params(&plain), common::params(cross.optimizer()));
        assert_eq!(common::state(&plain), common::state(cross.optimizer()));
    });
}

/// Groups start with equal values: rank 0's, or compared.
pub(crate) fn first_values_are_the_worlds(on: &impl Ranks) {
    let pairs = [vec![1, 2], vec![3, 0]];
    for initial in [Initial::Broadcast, Initial::Compare] {
        let ends = on.run(4, |comm, queue| {
            let rank = comm.rank();
            // Equal within a group, different between groups.
            let value = if rank == 0 || rank == 3 { 7.0 } else { 5.0 };
            let first = |_: &Param, mut w: SliceMut<'_>| w.cast_from(Slice::from(&vec![value; w.len()][..]));
            let options = Options { initial, ..replicated() };
            CrossShard::new(comm, Some(&pairs), layout(), Sgd::default(), first, there(&queue, options))
                .map(|opt| values(&opt, "b")[0])
                .map_err(|e| e.to_string())
        });
        for end in ends {
            match initial {
                Initial::Broadcast => assert_eq!(end, Ok(7.0)),
                Initial::Compare => {
                    assert!(end.unwrap_err().starts_with("ranks disagree on values of \"w\""))
                }
            }
        }
    }
    // A failure on one group's first rank is an error in all groups.
    let told = on.run(4, |comm, queue| {
        let rank = comm.rank();
        let first = |_: &Param, w: SliceMut<'_>| match rank {
            1 => w.slice(9..10).map(drop),
            _ => Ok(()),
        };
        let built =
            CrossShard::new(comm, Some(&pairs), layout(), Sgd::default(), first, there(&queue, replicated()));
        built.map(drop).unwrap_err().to_string()
    });
    assert!(told.iter().all(|t| t.contains("no initial value for parameter \"w\"")));
}

/// Groups have their own losses and loss scales; restored scales continue.
pub(crate) fn groups_step_with_closures_and_restore_their_scales(on: &impl Ranks) {
    let pairs = [vec![0, 2], vec![1, 3]];
    let scale = DynamicLossScale { init_scale: 4.0, growth_interval: 1, ..DynamicLossScale::default() };
    let options = Options { loss_scale: Some(LossScale::Dynamic(scale)), ..replicated() };
    on.run(4, |comm, queue| {
        let rank = comm.rank();
        let mut opt =
            build(Arc::clone(&comm), &queue, Some(&pairs), Sgd::default(), options.clone()).unwrap();
        for (loss_scale, overflow) in [(4.0, false), (8.0, true)] {
            let told = opt.step_with(at_one(), 1, |mb| {
                assert_eq!(mb.loss_scale(), loss_scale);
                let g = if overflow && rank == 1 { f32::INFINITY } else { loss_scale as f32 };
                give(mb, "w", &[g; 2][..], &queue)?;
                give(mb, "b", &[g; 3][..], &queue)?;
                Ok::<_, Error>(rank as f64)
            });
            assert_eq!(told.unwrap().loss, [1.0, 2.0][rank % 2]);
            let next = match (overflow, rank % 2) {
                (false, _) => 8.0,
                (true, 0) => 16.0,
                (true, _) => 4.0,
            };
            assert_eq!(opt.optimizer().loss_scale(), next);
        }
        let saved = opt.optimizer().loss_scale_state().unwrap();
        let mut again = build(comm, &queue, Some(&pairs), Sgd::default(), options.clone()).unwrap();
        again.restore_loss_scale(saved).unwrap();
        assert_eq!(again.optimizer().loss_scale(), [16.0, 4.0][rank % 2]);
    });
}
