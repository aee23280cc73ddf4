//! Matrices that several ranks hold: their steps visit one rank each, and no bit shows it.

use crate::common::{PRECISIONS, params, state, turns};
use crate::matrices::{Run, first, matrices, values};
use meshstep_comm::Communicator;
use meshstep_comm::loopback::spawn;
use meshstep_optim::{Blocks, Error as OptimError, Flat, Isa, Muon, Rule, Scalars, Sees, Segment, StateSlot};
use meshstep_shard::{
    DataRank, Error, Groups, Missing, NonFinite, Optimizer, Options, Outcome, ParamGroup, Part, Plan,
    RankRoles, Sizes, Stage, StepArgs,
};
use meshstep_tensor::{DType, Layout, LayoutBuilder, Meter, Param, Queue, Slice, SliceMut, Threads};
use meshstep_tensor::{bf16, f16};
use std::sync::Arc;

pub fn options(stage: Stage) -> Options {
    Options { stage, bucket_len: Some(700), meter: Meter::new(), ..Options::default() }
}

/// Hands over the gradients of step `t` for which `has` is true, in the order of a backward pass.
pub fn hand_over(opt: &mut Optimizer, t: u64, has: impl Fn(&str) -> bool) {
    let all: Vec<Param> = opt.params().filter(|p| !opt.is_frozen(p.name()).unwrap()).cloned().collect();
    let batch = opt.micro_batch(1).unwrap();
    all.iter().rev().filter(|p| has(p.name())).for_each(|p| batch.grad(p.name(), &values(p, t)[..]).unwrap());
    batch.finish().unwrap();
}

pub fn step(opt: &mut Optimizer) -> Outcome {
    opt.step(StepArgs { lr: 0.1, ..StepArgs::default() }).unwrap().outcome().unwrap()
}

/// Returns what `train` ends with on each of `ranks` ranks, which must be the same on all.
fn ends<T: PartialEq + Send>(ranks: usize, train: impl Fn(Arc<dyn Communicator>) -> T + Sync) -> T {
    let mut ends = spawn(ranks, train).unwrap();
    assert!(ends.iter().all(|end| *end == ends[0]), "{ranks} ranks");
    ends.swap_remove(0)
}

#[test]
fn memory_and_traffic_of_the_exchange_are_the_plans_to_the_byte() {
    for ranks in [1, 2, 3, 4, 8] {
        let plan = Plan::new(&matrices(), ranks, &options(Stage::Zero3)).unwrap();
        let sent = spawn(ranks, |comm| {
            let (rank, muon, options) = (comm.rank(), Muon::default(), options(Stage::Zero3));
            let mut opt = Optimizer::new(comm, matrices(), muon.clone(), first, options.clone()).unwrap();
            let (wire, memory) = (plan.wire(rank, &muon), plan.memory(rank, &muon));
            for t in 1..=2 {
                hand_over(&mut opt, t, |_| true);
                let Outcome::Applied { traffic, .. } = step(&mut opt) else { panic!() };
                // The run reads no parameter, so it gathers no unit.
                assert_eq!(traffic.sent, wire.total() - wire.gather, "rank {rank} of {ranks}");
            }
            for (category, planned) in memory.by_category() {
                assert_eq!(options.meter.peak(category), planned, "{category}, rank {rank} of {ranks}");
            }
            let kind = plan.kind(rank, &muon);
            assert_eq!((plan.wire(kind.clone(), &muon), plan.memory(kind, &muon)), (wire, memory));
            wire.matrices
        });
        let sent: u64 = sent.unwrap().into_iter().sum();
        assert_eq!(sent > 0, ranks > 1);
    }
}

/// Queries, keys and values in one matrix, experts, and matrices as they are, of which some are frozen.
fn fused() -> Layout {
    Layout::builder()
        .param("qkv", &[36, 10], DType::F32)
        .param("experts", &[5, 8, 14], DType::F32)
        .frozen("f", &[9, 9], DType::F32)
        .param("none", &[3, 0, 4], DType::F32)
        .param("w", &[21, 17], DType::F32)
        .param("v", &[1, 40], DType::F32)
        .build()
        .unwrap()
}

fn blocks() -> Groups {
    let muon = |blocks| Muon { blocks, ..Muon::moonshot() };
    Groups::new(Muon::default()).with(muon(Blocks::Rows(3)), ["qkv"]).with_lr(
        muon(Blocks::Batch),
        0.5,
        ["experts", "none"],
    )
}

#[test]
fn blocks_and_groups_have_the_bits_of_one_rank() {
    let run = |ranks, stage| {
        ends(ranks, |comm| {
            let mut opt = Optimizer::new(comm, fused(), blocks(), first, options(stage)).unwrap();
            for t in 1..=3 {
                hand_over(&mut opt, t, |_| true);
                assert!(matches!(step(&mut opt), Outcome::Applied { .. }));
            }
            opt.verify().unwrap();
            params(&opt)
        })
    };
    let expected = run(1, Stage::Replicated);
    for ranks in [2, 3, 4, 8] {
        for stage in [Stage::Zero1, Stage::Zero2, Stage::Zero3] {
            assert!(run(ranks, stage) == expected, "{ranks} ranks, {stage:?}");
        }
    }
}

#[test]
fn frozen_matrices_and_missing_gradients_stay_out_of_the_exchange() {
    for missing in [Missing::Zero, Missing::SkipIfMissingEverywhere] {
        let run = |ranks, stage| {
            ends(ranks, |comm| {
                let (rank, options) = (comm.rank(), Options { missing, ..options(stage) });
                let mut opt = Optimizer::new(comm, fused(), blocks(), first, options).unwrap();
                hand_over(&mut opt, 1, |_| true);
                step(&mut opt);
                // No rank has the gradient of "w", one lacks that of "v".
                hand_over(&mut opt, 2, |name| name != "w" && (name != "v" || rank != 1));
                step(&mut opt);
                opt.set_frozen(["experts"], true).unwrap();
                hand_over(&mut opt, 3, |_| true);
                step(&mut opt);
                opt.set_frozen(["experts"], false).unwrap();
                hand_over(&mut opt, 4, |_| true);
                step(&mut opt);
                let counts: Vec<u64> = state(&opt).into_iter().map(|(t, _)| t).collect();
                (counts, params(&opt))
            })
        };
        for ranks in [2, 3] {
            let expected = run(ranks, Stage::Replicated);
            assert!(run(ranks, Stage::Zero3) == expected, "{missing:?}, {ranks} ranks");
            let w = if missing == Missing::Zero { 4 } else { 3 };
            assert_eq!(expected.0[1..5], [3, 0, 4, w], "{:?}", expected.0);
        }
    }
}

/// Hands over gradients in the parameters' type, which sums of a few ranks keep.
fn hand_over_as(opt: &mut Optimizer, dtype: DType, t: u64) {
    let all: Vec<Param> = opt.params().cloned().collect();
    let batch = opt.micro_batch(1).unwrap();
    for p in &all {
        let coarse = values(p, t).into_iter().map(|x| (x * 8.0).round() / 8.0);
        match dtype {
            DType::F32 => batch.grad(p.name(), &coarse.collect::<Vec<f32>>()[..]),
            DType::F64 => batch.grad(p.name(), &coarse.map(f64::from).collect::<Vec<_>>()[..]),
            DType::F16 => batch.grad(p.name(), &coarse.map(f16::from_f32).collect::<Vec<_>>()[..]),
            _ => batch.grad(p.name(), &coarse.map(bf16::from_f32).collect::<Vec<_>>()[..]),
        }
        .unwrap();
    }
    batch.finish().unwrap();
}

#[test]
fn every_precision_has_the_bits_of_one_rank() {
    for (i, (dtype, precision)) in PRECISIONS.into_iter().enumerate() {
        // Momentum that state of 16 bits keeps when it rounds to nearest.
        let rule = Muon { momentum: 0.5, weight_decay: 0.2, ..Muon::moonshot() };
        let run = |ranks, stage| {
            ends(ranks, |comm| {
                let add = |b: LayoutBuilder, (i, shape): (usize, [usize; 2])| {
                    b.param(format!("w{i}"), &shape, dtype)
                };
                let layout =
                    [[20, 13], [7, 31], [64, 1]].into_iter().enumerate().fold(Layout::builder(), add);
                let fill = |p: &Param, mut into: SliceMut<'_>| match dtype {
                    DType::F64 => {
                        let values = values(p, 1).into_iter().map(f64::from).collect::<Vec<_>>();
                        into.copy_from(Slice::from(&values[..]))
                    }
                    DType::F32 => into.copy_from(Slice::from(&values(p, 1)[..])),
                    DType::F16 => {
                        let values = values(p, 1).into_iter().map(f16::from_f32).collect::<Vec<_>>();
                        into.copy_from(Slice::from(&values[..]))
                    }
                    _ => {
                        let values = values(p, 1).into_iter().map(bf16::from_f32).collect::<Vec<_>>();
                        into.copy_from(Slice::from(&values[..]))
                    }
                };
                let options = Options { precision, ..options(stage) };
                let mut opt =
                    Optimizer::new(comm, layout.build().unwrap(), rule.clone(), fill, options).unwrap();
                for t in 1..=3 {
                    hand_over_as(&mut opt, dtype, t);
                    assert!(matches!(step(&mut opt), Outcome::Applied { .. }));
                }
                params(&opt)
            })
        };
        let expected = run(1, Stage::Replicated);
        for ranks in turns(&[2, 3, 4], i, 1) {
            assert!(run(ranks, Stage::Zero3) == expected, "{dtype}, {precision:?}, {ranks} ranks");
        }
    }
}

#[test]
fn threads_change_no_bit_of_the_exchange() {
    let run = |ranks, stage, threads: usize| {
        ends(ranks, |comm| {
            let queue = Queue::cpu_on(&Threads::new(threads).unwrap());
            let layout =
                Layout::builder().param("a", &[300, 170], DType::F32).param("b", &[90, 410], DType::F32);
            let options = Options { queue, bucket_len: None, ..options(stage) };
            let mut opt =
                Optimizer::new(comm, layout.build().unwrap(), Muon::default(), first, options).unwrap();
            hand_over(&mut opt, 1, |_| true);
            step(&mut opt);
            params(&opt)
        })
    };
    let expected = run(1, Stage::Replicated, 1);
    for (ranks, threads) in [(2, 1), (2, 2), (3, 2)] {
        assert!(run(ranks, Stage::Zero3, threads) == expected, "{ranks} ranks, {threads} threads");
    }
}

/// Chunks may cut matrices at stages 1 and 2 too, if the plan says so.
#[test]
fn a_planned_part_that_cuts_matrices_is_exchanged() {
    let train = |opt: &mut Optimizer| {
        for t in 1..=3 {
            hand_over(opt, t, |_| true);
            assert!(matches!(step(opt), Outcome::Applied { .. }));
        }
        opt.verify().unwrap();
        params(opt)
    };
    let expected = ends(1, |comm| {
        train(
            &mut Optimizer::new(comm, matrices(), Muon::default(), first, options(Stage::Replicated))
                .unwrap(),
        )
    });
    for (stage, non_finite, in_step) in [
        (Stage::Zero1, NonFinite::Skip, false),
        (Stage::Zero1, NonFinite::Propagate, true),
        (Stage::Zero2, NonFinite::Propagate, false),
        (Stage::Zero3, NonFinite::Propagate, false),
    ] {
        for ranks in [2, 3] {
            let end = ends(ranks, |comm| {
                let options = Options { non_finite, reduce_in_step: in_step, ..options(stage) };
                let part = Part::new(matrices(), Sizes::all(ranks), [], &options).unwrap();
                assert!(!part.is_uncut());
                let mut opt = Optimizer::empty(Arc::clone(&comm), DataRank::OWN, options).unwrap();
                let (rules, among) = (Muon::default().into(), RankRoles::all(comm));
                opt.add_parts(vec![ParamGroup { part, rules, among }], first).unwrap();
                train(&mut opt)
            });
            assert!(end == expected, "{stage:?}, {non_finite:?}, {ranks} ranks");
        }
    }
}

/// A rule that sees matrices and has no phases.
#[derive(Debug)]
struct Undivided(Muon);

impl Rule for Undivided {
    fn name(&self) -> &'static str {
        "undivided"
    }

    fn state(&self) -> &'static [&'static str] {
        self.0.state()
    }

    fn check(&self) -> Result<(), OptimError> {
        self.0.check()
    }

    fn each_hyperparameter(&self, each: &mut dyn FnMut(&'static str, f64)) {
        self.0.each_hyperparameter(each);
    }

    fn sees(&self) -> Sees {
        Sees::Matrix
    }

    fn slot(&self, slot: usize) -> StateSlot {
        self.0.slot(slot)
    }

    fn update_on(
        &self,
        isa: Isa,
        flat: Flat<'_, '_>,
        segments: &[Segment],
        scalars: &Scalars,
        queue: &Queue,
    ) -> Result<(), OptimError> {
        self.0.update_on(isa, flat, segments, scalars, queue)
    }
}

#[test]
fn what_cannot_be_exchanged_is_refused_on_every_rank() {
    spawn(2, |comm| {
        let undivided = || Undivided(Muon::default());
        let refused =
            Optimizer::new(comm.clone(), matrices(), undivided(), first, options(Stage::Zero3)).unwrap_err();
        assert!(
            matches!(&refused, Error::NeedsWholeParams { rule: "undivided", stage: Stage::Zero3 }),
            "{refused}"
        );
        assert!(refused.to_string().contains("Stage::WholeParams"), "{refused}");
        let options_1 = options(Stage::Zero1);
        let part = Part::new(matrices(), Sizes::all(2), [], &options_1).unwrap();
        let mut opt = Optimizer::empty(Arc::clone(&comm), DataRank::OWN, options_1).unwrap();
        let (rules, among) = (undivided().into(), RankRoles::all(Arc::clone(&comm)));
        let refused = opt.add_parts(vec![ParamGroup { part, rules, among }], first).unwrap_err();
        assert!(matches!(&refused, Error::NeedsWholeParams { stage: Stage::Zero1, .. }), "{refused}");
        assert!(refused.to_string().contains("Part::uncut"), "{refused}");
        let vector = Layout::builder().param("bias", &[64], DType::F32).build().unwrap();
        let refused =
            Optimizer::new(comm, vector, Muon::default(), first, options(Stage::Zero3)).unwrap_err();
        assert!(matches!(&refused, Error::NotAMatrix { name, .. } if name == "bias"), "{refused}");
    })
    .unwrap();
}

#[test]
fn a_matrix_with_nan_skips_the_step_everywhere() {
    let ends = spawn(3, |comm| {
        let rank = comm.rank();
        let run = Run { stage: Stage::Zero3, ..Run::on(3) };
        let mut opt = run.build(comm);
        let all: Vec<Param> = opt.params().cloned().collect();
        let (before, kept) = (params(&opt), state(&opt));
        let batch = opt.micro_batch(1).unwrap();
        for p in &all {
            let mut grad = values(p, 2);
            if p.name() == "w3" && rank == 0 {
                grad[5] = f32::NAN;
            }
            batch.grad(p.name(), &grad[..]).unwrap();
        }
        batch.finish().unwrap();
        assert!(matches!(step(&mut opt), Outcome::Skipped { .. }));
        assert!(params(&opt) == before && state(&opt) == kept);
    });
    ends.unwrap();
}
