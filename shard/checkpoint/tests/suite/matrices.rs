//! Muon beside AdamW: a run that is saved and resumed on other ranks, or moved there, ends with the bits of one that was not.

use meshstep_checkpoint::{self as checkpoint, Load, Save, Store, reshard};
use meshstep_checkpoint_cases::Sim;
use meshstep_comm::{Communicator, loopback::spawn};
use meshstep_optim::{AdamW, Muon};
use meshstep_shard::{Groups, Optimizer, Options, Outcome, Owners, Stage, StepArgs, hidden_matrices};
use meshstep_tensor::{DType, Layout, LayoutBuilder, Meter, Param, Slice, SliceMut};
use std::sync::Arc;

const MATRICES: [[usize; 2]; 7] = [[6, 10], [10, 6], [8, 8], [2, 0], [30, 20], [5, 5], [1, 9]];

fn value(name: &str, index: usize, step: u64) -> f32 {
    let key = name.bytes().fold(step, |key, byte| key * 31 + u64::from(byte));
    ((key * 7919 + index as u64 * 104_729) % 257) as f32 / 64.0 - 2.0
}

fn first(param: &Param, mut into: SliceMut<'_>) -> Result<(), meshstep_tensor::Error> {
    let values = into.typed_mut::<f32>()?.iter_mut().enumerate();
    values.for_each(|(i, x)| *x = value(param.name(), i, 0));
    Ok(())
}

fn make(comm: Arc<dyn Communicator>, stage: Stage) -> Optimizer {
    let options = Options { stage, bucket_len: Some(300), meter: Meter::new(), ..Options::default() };
    let others = Layout::builder().param("embedding", &[50, 3], DType::F32).param("bias", &[7], DType::F32);
    let add =
        |b: LayoutBuilder, (i, shape): (usize, &[usize; 2])| b.param(format!("w{i}"), shape, DType::F32);
    let matrices = MATRICES.iter().enumerate().fold(Layout::builder(), add);
    let mut opt = Optimizer::new(comm, others.build().unwrap(), AdamW::default(), first, options).unwrap();
    opt.add_param_group(matrices.build().unwrap(), Muon::default(), first).unwrap();
    opt
}

/// Makes the same optimizer in one call, from a layout in another order. Its parameters are listed rule by rule, as above.
fn make_at_once(comm: Arc<dyn Communicator>, stage: Stage) -> Optimizer {
    let options = Options { stage, bucket_len: Some(300), meter: Meter::new(), ..Options::default() };
    let add =
        |b: LayoutBuilder, (i, shape): (usize, &[usize; 2])| b.param(format!("w{i}"), shape, DType::F32);
    let layout = Layout::builder().param("embedding", &[50, 3], DType::F32);
    let layout = MATRICES.iter().enumerate().fold(layout, add).param("bias", &[7], DType::F32);
    let rules = Groups::new(AdamW::default()).with(Muon::default(), hidden_matrices);
    Optimizer::new(comm, layout.build().unwrap(), rules, first, options).unwrap()
}

fn train(opt: &mut Optimizer, steps: std::ops::RangeInclusive<u64>) {
    let all: Vec<Param> = opt.params().cloned().collect();
    for step in steps {
        let batch = opt.micro_batch(1).unwrap();
        for p in &all {
            let grad: Vec<f32> = (0..p.len()).map(|i| value(p.name(), i, step)).collect();
            batch.grad(p.name(), &grad[..]).unwrap();
        }
        batch.finish().unwrap();
        let at = StepArgs { lr: 0.05, max_norm: Some(2.0), ..StepArgs::default() };
        assert!(matches!(opt.step(at).unwrap().outcome().unwrap(), Outcome::Applied { .. }));
    }
}

/// Returns the parameters' bits, gathered if they are sharded: then collective.
fn params(opt: &Optimizer) -> Vec<Vec<u32>> {
    let bits = |values: Slice<'_>| values.typed::<f32>().unwrap().iter().map(|x| x.to_bits()).collect();
    let of = |p: &Param| match opt.unit_of(p.name()).unwrap().filter(|_| opt.options().stage == Stage::Zero3)
    {
        Some(unit) => bits(opt.gather(unit).unwrap().param(p.name()).unwrap()),
        None => bits(opt.param(p.name()).unwrap()),
    };
    opt.params().map(of).collect()
}

#[test]
fn muon_goes_on_with_the_same_bits_on_other_ranks_and_at_other_stages() {
    let expected = spawn(1, |comm| {
        let mut opt = make(comm, Stage::Replicated);
        train(&mut opt, 1..=4);
        params(&opt)
    });
    let expected = expected.unwrap().remove(0);
    let placements = [
        (1, Stage::Replicated),
        (2, Stage::WholeParams(Owners::SortedGreedy)),
        (3, Stage::Zero1),
        (4, Stage::Zero2),
        (8, Stage::Zero1),
        (3, Stage::Zero3),
    ];
    for (ranks, stage) in [(4, Stage::Zero1), (3, Stage::Zero2), (4, Stage::Zero3)] {
        let store = Store::on(Arc::new(Sim::new("/run")), "/run");
        let saved = spawn(ranks, |comm| {
            let mut opt = make(comm, stage);
            train(&mut opt, 1..=2);
            checkpoint::save(&mut opt, &store, Save::default()).unwrap();
        });
        saved.unwrap();
        for (ranks, stage) in placements {
            let ends = spawn(ranks, |comm| {
                let mut opt = make(comm, stage);
                checkpoint::load(&mut opt, &store, Load::default()).unwrap();
                train(&mut opt, 3..=4);
                params(&opt)
            });
            assert!(ends.unwrap().iter().all(|end| *end == expected), "resumed on {ranks} ranks, {stage:?}");
        }
    }
}

/// Checkpoints name parameters, so that one call for both rules continues two, and the other way round.
#[test]
fn one_call_and_two_continue_each_others_checkpoints() {
    type Make = fn(Arc<dyn Communicator>, Stage) -> Optimizer;
    let expected = spawn(1, |comm| {
        let mut opt = make(comm, Stage::Replicated);
        train(&mut opt, 1..=4);
        params(&opt)
    });
    let expected = expected.unwrap().remove(0);
    let pairs: [[Make; 2]; 3] = [[make_at_once, make_at_once], [make, make_at_once], [make_at_once, make]];
    for (i, [saves, loads]) in pairs.into_iter().enumerate() {
        let store = Store::on(Arc::new(Sim::new("/run")), "/run");
        let saved = spawn(4, |comm| {
            let mut opt = saves(comm, Stage::Zero1);
            train(&mut opt, 1..=2);
            checkpoint::save(&mut opt, &store, Save::default()).unwrap();
        });
        saved.unwrap();
        for (ranks, stage) in [(3, Stage::Zero2), (2, Stage::Replicated)] {
            let ends = spawn(ranks, |comm| {
                let mut opt = loads(comm, stage);
                checkpoint::load(&mut opt, &store, Load::default()).unwrap();
                train(&mut opt, 3..=4);
                params(&opt)
            });
            assert!(ends.unwrap().iter().all(|end| *end == expected), "pair {i} on {ranks} ranks, {stage:?}");
        }
    }
}

#[test]
fn muon_moves_to_fewer_ranks_in_mid_run() {
    for (before, after) in
        [(Stage::Zero1, Stage::Zero2), (Stage::Zero3, Stage::Zero1), (Stage::Zero2, Stage::Zero3)]
    {
        let ends = spawn(4, |comm| {
            let mut old = make(comm.clone(), before);
            train(&mut old, 1..=2);
            let fewer = comm.split((comm.rank() < 3).then_some(0), comm.rank() as i64).unwrap();
            let mut new = fewer.map(|fewer| make(fewer, after));
            reshard(&comm, Some(&mut old), new.as_mut()).unwrap();
            [&mut old].into_iter().chain(&mut new).for_each(|opt| train(opt, 3..=4));
            [Some(params(&old)), new.map(|opt| params(&opt))]
        });
        let ends: Vec<_> = ends.unwrap().into_iter().flatten().flatten().collect();
        assert_eq!(ends.len(), 7);
        assert!(ends.iter().all(|end| *end == ends[0]), "from {before:?} to {after:?}");
    }
}
