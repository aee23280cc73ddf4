//! Refusals: every rank gets the same error.

use super::{Ranks, at_one, build, give, replicated, values};
use meshstep_optim::Sgd;
use meshstep_shard::{AssignmentError, Combine, Error, Master, Options, Owners, Precision, Stage, Step};

/// Returns the error of each of 4 ranks that build with the arguments of `of`.
fn refused(on: &impl Ranks, of: impl Fn(usize) -> (Option<Vec<Vec<usize>>>, Options) + Sync) -> Vec<Error> {
    on.run(4, |comm, queue| {
        let (groups, options) = of(comm.rank());
        build(comm, &queue, groups.as_deref(), Sgd::default(), options).unwrap_err()
    })
}

pub(crate) fn assignments_that_do_not_cover_are_refused_on_every_rank(on: &impl Ranks) {
    let table = [
        (vec![vec![0, 1], vec![1, 2]], AssignmentError::Twice { rank: 1, first: 0, second: 1 }),
        (vec![vec![0, 1], vec![2, 2]], AssignmentError::Twice { rank: 2, first: 1, second: 1 }),
        (vec![vec![0, 1]], AssignmentError::Uncovered { rank: 2 }),
        (vec![], AssignmentError::Uncovered { rank: 0 }),
        (vec![vec![0, 1], vec![2, 4]], AssignmentError::OutOfRange { rank: 4, group: 1, world_size: 4 }),
        (vec![vec![0, 1, 2], vec![3]], AssignmentError::Unequal { group: 1, len: 1, expected: 3 }),
    ];
    for (groups, expected) in table {
        for error in refused(on, |_| (Some(groups.clone()), replicated())) {
            assert!(matches!(&error, Error::Assignment(e) if *e == expected), "{error}");
        }
    }
    for stage in [Stage::Zero2, Stage::Zero3, Stage::WholeParams(Owners::RoundRobin)] {
        for error in refused(on, |_| (None, Options { stage, ..Options::default() })) {
            assert!(matches!(error, Error::NotReplicated { stage: other } if other == stage), "{error}");
        }
    }
    let precision = Precision { master: Master::Remainder, ..Precision::default() };
    for error in refused(on, |_| (None, Options { precision, ..replicated() })) {
        assert!(matches!(error, Error::RemaindersOfReplicas), "{error}");
    }
}

pub(crate) fn ranks_with_different_assignments_are_told(on: &impl Ranks) {
    let pairs = || Some(vec![vec![0, 2], vec![1, 3]]);
    for error in refused(on, |rank| (if rank == 2 { None } else { pairs() }, replicated())) {
        let told =
            "ranks disagree on group assignment: rank 0 has [[0, 2], [1, 3]], rank 2 has [[0, 1, 2, 3]]";
        assert_eq!(error.to_string(), told);
    }
    // Only rank 3 is given a wrong assignment.
    let bad = || Some(vec![vec![0, 1], vec![1, 3]]);
    for (rank, error) in
        refused(on, |rank| (if rank == 3 { bad() } else { pairs() }, replicated())).into_iter().enumerate()
    {
        let said = if rank == 3 { "rank 1 is in group 0" } else { "rank 3 has rank 1 is in group 0" };
        assert!(error.to_string().contains(said), "{error}");
    }
    // Options differ between groups, where no group alone would notice.
    let sum = |rank| if rank % 2 == 1 { Combine::Sum } else { Combine::Mean };
    for error in refused(on, |rank| (pairs(), Options { combine: sum(rank), ..replicated() })) {
        assert_eq!(error.to_string(), "ranks disagree on combine: rank 0 has Mean, rank 1 has Sum");
    }
}

pub(crate) fn sparse_gradients_are_refused_and_dense_ones_still_taken(on: &impl Ranks) {
    on.run(2, |comm, queue| {
        let mut opt = build(comm, &queue, None, Sgd::default(), replicated()).unwrap();
        let mb = opt.micro_batch(1).unwrap();
        let error = mb.sparse_grad("b", &[2], &[1f32][..]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "gradient of \"b\" is sparse (1 indices, 1 values); sparse gradients cannot be reduced here: scatter \
             them into 3 elements and hand those over"
        );
        assert!(matches!(mb.sparse_grad("c", &[], &[0f32; 0][..]), Err(Error::UnknownParam { .. })));
        give(&mb, "w", &[0f32; 2][..], &queue).unwrap();
        give(&mb, "b", &[0.0f32, 0.0, 1.0][..], &queue).unwrap();
        mb.finish().unwrap();
        let _ = opt.step(at_one()).unwrap();
        assert_eq!(values(&opt, "b"), [0.0, 0.0, -1.0]);
    });
}

pub(crate) fn synchronizing_in_the_middle_of_a_step_is_refused_everywhere(on: &impl Ranks) {
    on.run(2, |comm, queue| {
        let rank = comm.rank();
        let mut opt = build(comm, &queue, Some(&[vec![0], vec![1]]), Sgd::default(), replicated()).unwrap();
        if rank == 1 {
            opt.accumulate(1).unwrap().finish().unwrap();
        }
        let error = opt.synchronize_state().unwrap_err();
        assert!(if rank == 1 {
            matches!(error, Error::StepDue)
        } else {
            matches!(error, Error::Disagree { .. })
        });
        opt.discard_gradients().unwrap();
        assert!(opt.synchronize_state().unwrap().is_none());
        assert_eq!((opt.group(), opt.world().world_size()), (&[rank][..], 2));
    });
}
