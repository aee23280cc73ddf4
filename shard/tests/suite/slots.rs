//! Sums over slots: one curve for every number of ranks, every stage, and every division of the slots.

use crate::common::{End, Run, WhichRule, cases, draws, params, with_dtype};
use meshstep_comm::loopback::spawn;
use meshstep_optim::Sgd;
use meshstep_shard::{
    Accumulate, Clip, Combine, DataRank, Error, Missing, Optimizer, Options, Outcome, Owners, ParamGroup,
    Part, Plan, RankRoles, Sizes, SlotError, SlotRuns, Stage, StepArgs,
};
use meshstep_tensor::{DType, Layout, Meter, Param, SliceMut};
use proptest::prelude::*;

const STAGES: [Stage; 4] = [Stage::Replicated, Stage::Zero1, Stage::Zero2, Stage::Zero3];

/// Returns the run with these slots.
fn with(run: &Run, runs: SlotRuns, stage: Stage) -> Run {
    let ranks = runs.ranks();
    let options = Options { slots: Some(runs), stage, meter: Meter::new(), ..run.options.clone() };
    Run { ranks, options, ..run.clone() }
}

fn even(slots: usize, ranks: usize) -> SlotRuns {
    SlotRuns::even(slots, ranks).unwrap()
}

#[test]
fn one_curve_for_every_number_of_ranks_and_stage() {
    let base = Run { steps: 4, ..Run::default() };
    let mut drawn = draws(1);
    for (slots, rule) in [(8, WhichRule::AdamW), (13, WhichRule::Lamb), (8, WhichRule::SgdMomentum)] {
        let run = Run { rule, ..base.clone() };
        let alone = with(&run, even(slots, 1), Stage::Replicated).run();
        for stage in STAGES {
            for ranks in [1, 2, 3, 4, 8] {
                for bucket_len in [Some(70), None] {
                    if drawn() {
                        let options = Options { bucket_len, ..run.options.clone() };
                        let other = with(&Run { options, ..run.clone() }, even(slots, ranks), stage);
                        assert_eq!(other.run(), alone, "{slots} slots, {ranks} ranks, {stage:?}");
                    }
                }
            }
        }
    }
}

/// Without slots the same gradients round differently on another number of ranks: the test above can fail.
#[test]
fn an_ordinary_mean_depends_on_the_number_of_ranks() {
    let run = Run { max_norm: None, ..Run::default() };
    let alone = with(&run, even(8, 1), Stage::Zero1);
    let ordinary = |ranks: usize| {
        let ends = spawn(ranks, |comm| {
            let options = Options { slots: None, stage: Stage::Zero1, ..run.options.clone() };
            let ordinary = Run { ranks, micro_batches: 8 / ranks, options, ..run.clone() };
            // The gradients of the slots, in the same order.
            let mut opt = ordinary.build(comm).unwrap();
            for t in 1..=ordinary.steps {
                for batch in 0..ordinary.micro_batches {
                    let slot = opt.comm().rank() * ordinary.micro_batches + batch;
                    let last = batch + 1 == ordinary.micro_batches;
                    let mb = if last { opt.micro_batch(1) } else { opt.accumulate(1) }.unwrap();
                    for i in (0..run.lens.len()).rev() {
                        with_dtype(DType::F32, &run.gradient(t, slot, 0, i), |grad| {
                            mb.grad(&crate::common::name(i), grad).unwrap();
                        });
                    }
                    mb.finish().unwrap();
                }
                opt.step(ordinary.at(t)).unwrap().outcome().unwrap();
            }
            params(&opt)
        });
        ends.unwrap().swap_remove(0)
    };
    let curves = [1, 2, 4].map(ordinary);
    assert!(curves[0] != curves[1] && curves[1] != curves[2]);
    assert_ne!(curves[0], alone.run().params);
}

prop_compose! {
    fn any_run()(
        lens in prop::collection::vec(prop_oneof![1 => Just(0usize), 4 => 1usize..300], 1..8),
        runs in prop::collection::vec(1usize..6, 1..7),
        rule in prop::sample::select(&[WhichRule::AdamW, WhichRule::SgdMomentum][..]),
        stage in prop::sample::select(&STAGES[..]),
        bucket_len in prop_oneof![Just(None), (1usize..400).prop_map(Some)],
        (overlap, shuffle, in_place, sum) in any::<(bool, bool, bool, bool)>(),
        seed in any::<u64>(),
    ) -> Run {
        let combine = if sum { Combine::Sum } else { Combine::Mean };
        let options = Options { bucket_len, overlap, combine, ..Options::default() };
        let run = Run { lens, steps: 2, rule, max_norm: None, options, shuffle, in_place, seed, ..Run::default() };
        with(&run, SlotRuns::new(&runs).unwrap(), stage)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(60, 2000), ..ProptestConfig::default() })]

    #[test]
    fn any_division_of_slots_is_the_naive_tree(run in any_run()) {
        prop_assume!(run.lens.iter().any(|&len| len > 0));
        prop_assert_eq!(run.run().params, run.naive().params);
    }

    #[test]
    fn bytes_are_the_plans(run in any_run(), accumulate in prop::sample::select(&[Accumulate::Reduced, Accumulate::Local][..])) {
        prop_assume!(run.lens.iter().any(|&len| len > 0));
        // Plans are for the order of a backward pass.
        let run = Run { options: Options { accumulate, ..run.options.clone() }, shuffle: false, ..run };
        let (rule, ranks) = (run.boxed_rule(), run.ranks);
        let plan = Plan::new(&run.layout(), ranks, &run.options).unwrap();
        spawn(ranks, |comm| {
            let rank = comm.rank();
            let mut opt = run.build(comm).unwrap();
            for t in 1..=2 {
                (0..run.batches(rank)).for_each(|batch| run.hand_over(&mut opt, t, batch).unwrap());
                let outcome = opt.step(run.at(t)).unwrap().outcome().unwrap();
                let Outcome::Applied { traffic, .. } = outcome else { panic!("{outcome:?}") };
                let wire = plan.wire(rank, &*rule);
                // The run reads no parameter.
                let gathers = if run.options.stage.cuts_params() { wire.gather } else { 0 };
                assert_eq!(traffic.sent, wire.total() - gathers, "rank {rank}: {run:?}");
                assert_eq!(traffic.pool_grown, 0);
            }
            let memory = plan.memory(rank, &*rule);
            for (category, planned) in memory.by_category() {
                assert_eq!(opt.options().meter.peak(category), planned, "{category} on rank {rank}: {run:?}");
            }
            let kind = plan.kind(rank, &*rule);
            assert_eq!((plan.memory(kind.clone(), &*rule), plan.wire(kind, &*rule)), (memory, plan.wire(rank, &*rule)));
        }).unwrap();
    }
}

/// The sum over several micro-batches stays on each rank: bits and bytes of stage 1.
#[test]
fn stages_2_and_3_accumulate_locally_if_asked() {
    let run = Run { micro_batches: 3, ..Run::default() };
    let first = run.stage(Stage::Zero1).run();
    for stage in [Stage::Zero2, Stage::Zero3] {
        let options = Options { accumulate: Accumulate::Local, ..run.options.clone() };
        assert_eq!(Run { options, ..run.clone() }.stage(stage).run(), first, "{stage:?}");
        assert_ne!(run.stage(stage).run(), first, "{stage:?} rounds after each reduction");
    }
}

/// Returns the parameters after some slots lack gradients and others weigh nothing.
fn uneven(ranks: usize, stage: Stage) -> Vec<Vec<u8>> {
    let options = Options {
        missing: Missing::Zero,
        combine: Combine::Weighted,
        slots: Some(even(8, ranks)),
        stage,
        ..Run::default().options
    };
    let run = Run { ranks, options, ..Run::default() };
    let ends = spawn(ranks, |comm| {
        let slots = even(8, ranks).run(comm.rank());
        let mut opt = run.build(comm).unwrap();
        for t in 1..=3 {
            for slot in slots.clone() {
                let weight = (slot as u64 * 7 + t) % 5;
                let mb = if slot + 1 == slots.end { opt.micro_batch(weight) } else { opt.accumulate(weight) };
                let mb = mb.unwrap();
                for i in (0..run.lens.len()).rev() {
                    let name = crate::common::name(i);
                    match (slot + i + t as usize) % 4 {
                        0 => {}
                        1 => mb.none(&name).unwrap(),
                        _ => with_dtype(DType::F32, &run.gradient(t, slot, 0, i), |grad| {
                            mb.grad(&name, grad).unwrap()
                        }),
                    }
                }
                mb.finish().unwrap();
            }
            opt.step(run.at(t)).unwrap().outcome().unwrap();
        }
        params(&opt)
    });
    let mut ends = ends.unwrap();
    assert!(ends.iter().all(|end| *end == ends[0]));
    ends.swap_remove(0)
}

#[test]
fn weights_and_missing_gradients_belong_to_slots() {
    let alone = uneven(1, Stage::Replicated);
    for stage in STAGES {
        for ranks in [2, 3, 4, 8] {
            assert_eq!(uneven(ranks, stage), alone, "{ranks} ranks, {stage:?}");
        }
    }
}

/// Steps that are refused or dropped leave nothing behind in the sums.
#[test]
fn a_step_after_an_error_has_the_bits_of_one_without() {
    let run = with(&Run { steps: 1, ..Run::default() }, even(7, 2), Stage::Zero1);
    let expected: End = run.run();
    let ends = spawn(2, |comm| {
        let mut opt = run.build(comm).unwrap();
        let rank = opt.comm().rank();
        // A micro-batch that is dropped, then a step without all slots.
        drop(opt.accumulate(1).unwrap());
        let faulty = opt.step(run.at(1)).and_then(|pending| pending.outcome());
        assert!(matches!(faulty, Err(Error::Fault { .. })), "{faulty:?}");
        // Gradients that are discarded.
        (0..run.batches(rank)).for_each(|batch| run.hand_over(&mut opt, 3, batch).unwrap());
        opt.discard_gradients().unwrap();
        run.hand_over(&mut opt, 2, 0).unwrap();
        opt.discard_gradients().unwrap();
        (0..run.batches(rank)).for_each(|batch| run.hand_over(&mut opt, 1, batch).unwrap());
        opt.step(run.at(1)).unwrap().outcome().unwrap();
        params(&opt)
    });
    ends.unwrap().into_iter().for_each(|end| assert_eq!(end, expected.params));
}

#[test]
fn a_micro_batch_out_of_order_is_refused_before_anything_changes() {
    let run = with(&Run { steps: 1, ..Run::default() }, even(5, 2), Stage::Zero2);
    let ends = spawn(2, |comm| {
        let mut opt = run.build(comm).unwrap();
        let slots = even(5, 2).run(opt.comm().rank());
        let early = opt.micro_batch(1).map(drop).unwrap_err();
        let expected = SlotError::Order { run: slots.clone(), made: 0, last: true };
        assert!(matches!(early, Error::Slots(error) if error == expected));
        (0..slots.len() - 1).for_each(|batch| run.hand_over(&mut opt, 1, batch).unwrap());
        let late = opt.accumulate(1).map(drop).unwrap_err();
        let expected = SlotError::Order { run: slots.clone(), made: slots.len() as u64 - 1, last: false };
        assert!(matches!(late, Error::Slots(error) if error == expected));
        run.hand_over(&mut opt, 1, slots.len() - 1).unwrap();
        opt.step(run.at(1)).unwrap().outcome().unwrap();
        params(&opt)
    });
    let expected = run.run().params;
    ends.unwrap().into_iter().for_each(|end| assert_eq!(end, expected));
}

/// Returns the error of an optimizer on two ranks with these options.
fn refused(options: impl Fn(usize) -> Options + Sync, dtype: DType) -> Error {
    let run = Run { dtype, grads: dtype, ranks: 2, ..Run::default() };
    let errors = spawn(2, |comm| {
        let options = options(comm.rank());
        Run { options, ..run.clone() }.build(comm).map(|_: Optimizer| ()).unwrap_err()
    });
    let errors = errors.unwrap();
    assert_eq!(errors[0].to_string(), errors[1].to_string());
    errors.into_iter().next().unwrap()
}

#[test]
fn options_without_an_order_of_slots_are_refused() {
    assert_eq!(SlotRuns::even(3, 4), Err(SlotError::TooFew { slots: 3, ranks: 4 }));
    assert_eq!(SlotRuns::new(&[2, 0]), Err(SlotError::TooFew { slots: 2, ranks: 2 }));
    assert!(matches!(SlotRuns::new(&[usize::MAX, 2]), Err(SlotError::TooMany { .. })));
    let slots = |runs: SlotRuns| Options { slots: Some(runs), ..Options::default() };
    let of = |options: Options, dtype| match refused(|_| options.clone(), dtype) {
        Error::Slots(error) => error,
        other => panic!("{other}"),
    };
    let f32 = DType::F32;
    assert_eq!(of(slots(even(8, 3)), f32), SlotError::Ranks { runs: 3, ranks: 2 });
    let stage = Stage::WholeParams(Owners::RoundRobin);
    assert_eq!(of(Options { stage, ..slots(even(8, 2)) }, f32), SlotError::Stage { stage });
    let clip = Options { clip: Clip::BeforeReduce, ..slots(even(8, 2)) };
    assert!(matches!(of(clip, f32), SlotError::Dependent { .. }));
    let all_or_none = Options { missing: Missing::AllOrNone, ..slots(even(8, 2)) };
    assert!(matches!(of(all_or_none, f32), SlotError::Dependent { .. }));
    let in_step = Options { reduce_in_step: true, ..slots(even(8, 2)) };
    assert_eq!(of(in_step, f32), SlotError::InStep);
    let narrow = Options { precision: crate::common::F32_MASTER, ..slots(even(8, 2)) };
    assert_eq!(of(narrow, DType::BF16), SlotError::Narrow { dtype: DType::BF16 });
    // Ranks with other runs.
    let apart = refused(|rank| slots(SlotRuns::new(&[1 + rank, 3 - rank]).unwrap()), f32);
    assert!(apart.to_string().contains("slots of each rank"), "{apart}");
}

/// Returns the parameters after a step before which one bit of a gradient has flipped on rank 1.
fn flipped(run: &Run) -> Vec<Vec<u8>> {
    let ends = spawn(run.ranks, |comm| {
        let mut opt = run.build(comm).unwrap();
        let rank = opt.comm().rank();
        (0..run.batches(rank)).for_each(|batch| run.hand_over(&mut opt, 1, batch).unwrap());
        opt.verify_gradients().unwrap();
        let mut all = (0..run.lens.len()).flat_map(|p| (0..run.lens[p]).map(move |i| (p, i)));
        let flips = (rank == 1)
            .then(|| all.find(|&(p, i)| opt.flip_bit(&crate::common::name(p), "grad", i, 30).is_ok()));
        assert_eq!(flips.flatten().is_some(), rank == 1);
        opt.step(run.at(1)).unwrap().outcome().unwrap();
        params(&opt)
    });
    ends.unwrap().swap_remove(0)
}

#[test]
fn verification_finds_the_sums_where_they_lie() {
    let base = Run { ranks: 2, steps: 1, rule: WhichRule::SgdMomentum, max_norm: None, ..Run::default() };
    let local = |stage| {
        let options =
            Options { accumulate: Accumulate::Local, bucket_len: Some(200), ..base.options.clone() };
        Run { options, micro_batches: 2, ..base.clone() }.stage(stage)
    };
    let bucket_len = Some(200);
    let slots = |stage| {
        with(
            &Run { options: Options { bucket_len, ..base.options.clone() }, ..base.clone() },
            even(7, 2),
            stage,
        )
    };
    for of in [&local as &dyn Fn(Stage) -> Run, &slots] {
        let first = flipped(&of(Stage::Zero1));
        assert_ne!(first, of(Stage::Zero1).run().params);
        for stage in [Stage::Zero2, Stage::Zero3] {
            assert_eq!(flipped(&of(stage)), first, "{stage:?}");
        }
    }
    // Chunks that ranks have added up are gathered in the step only.
    assert_eq!(flipped(&slots(Stage::Replicated)), flipped(&slots(Stage::Zero1)));
}

/// A part that is planned with other options would keep its gradients on the ranks.
#[test]
fn parts_that_are_planned_with_other_sums_are_refused() {
    let run = with(&Run { steps: 1, ..Run::default() }, even(8, 2), Stage::Zero2);
    let others = [
        Options { slots: None, ..run.options.clone() },
        Options { slots: None, accumulate: Accumulate::Local, ..run.options.clone() },
        Options { slots: Some(SlotRuns::new(&[3, 5]).unwrap()), ..run.options.clone() },
        Options { combine: Combine::Weighted, ..run.options.clone() },
    ];
    for (i, planned) in others.iter().enumerate() {
        for (planned, options) in [(planned, &run.options), (&run.options, planned)] {
            let told = spawn(2, |comm| {
                let options = Options { meter: Meter::new(), ..options.clone() };
                let mut opt = Optimizer::empty(comm.clone(), DataRank::OWN, options).unwrap();
                let part = Part::new(run.layout(), Sizes::all(2), [], planned).unwrap();
                let (rules, among) = (run.groups(), RankRoles::all(comm));
                opt.add_parts(vec![ParamGroup { part, rules, among }], |_, _| Ok(())).unwrap_err()
            });
            let refused = |error| matches!(error, Error::Shared { .. });
            assert!(told.unwrap().into_iter().all(refused), "case {i}");
        }
    }
}

/// Returns the bits of a parameter of negative zeros after a step whose gradients are negative zeros in even slots and missing in odd ones.
fn after_negative_zeros(ranks: usize, stage: Stage) -> Vec<u32> {
    let ends = spawn(ranks, |comm| {
        let (slots, layout) = (even(4, ranks), Layout::builder().param("w", &[70], DType::F32));
        let run = slots.run(comm.rank());
        let options = Options { missing: Missing::Zero, slots: Some(slots), stage, ..Options::default() };
        let first = |_: &Param, mut w: SliceMut<'_>| {
            w.typed_mut::<f32>()?.fill(-0.0);
            Ok(())
        };
        let mut opt = Optimizer::new(comm, layout.build().unwrap(), Sgd::default(), first, options).unwrap();
        for slot in run.clone() {
            let mb = if slot + 1 == run.end { opt.micro_batch(1) } else { opt.accumulate(1) }.unwrap();
            if slot.is_multiple_of(2) {
                mb.grad("w", &[-0.0f32; 70][..]).unwrap();
            }
            mb.finish().unwrap();
        }
        opt.step(StepArgs::default()).unwrap().outcome().unwrap();
        let mut w = [0f32; 70];
        opt.read("w", &mut w).unwrap();
        w.map(f32::to_bits).to_vec()
    });
    ends.unwrap().swap_remove(0)
}

#[test]
fn a_missing_gradient_keeps_the_sign_of_a_zero_beside_it() {
    for stage in STAGES {
        for ranks in [1, 2, 4] {
            // Along a gradient of -0.0 a parameter of -0.0 becomes 0.0; along one of 0.0 it would stay.
            assert_eq!(after_negative_zeros(ranks, stage), [0; 70], "{ranks} ranks, {stage:?}");
        }
    }
}
