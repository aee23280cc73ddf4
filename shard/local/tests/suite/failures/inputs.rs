//! Types of parameters, and arguments that every rank refuses.

use super::{LEN, first, layout};
use meshstep_comm::loopback;
use meshstep_local::{LocalError, LocalOptimizer, LocalPlan, What, Workers};
use meshstep_optim::{AdamW, Sgd};
use meshstep_shard::{Groups, Master, Missing, Optimizer, Options, Precision, Stage, Step, StepArgs};
use meshstep_tensor::{DType, Layout, Slice, SliceMut, bf16};

#[test]
fn masters_are_averaged_and_differences_travel_in_bf16() {
    let precision = Precision { master: Master::F32, ..Precision::default() };
    // At lr 0.01 the change is too small for bf16 parameters, which would lose it; at lr 1 they follow.
    let table = [
        (Stage::Zero1, None, 0.01),
        (Stage::Replicated, None, 1.0),
        (Stage::Zero1, None, 1.0),
        (Stage::Zero2, Some(DType::BF16), 0.01),
    ];
    for (stage, wire, lr) in table {
        let options = Options { stage, precision, ..Options::default() };
        let ends = loopback::spawn(4, |world| {
            let worker = world.rank() / 2;
            let (comm, between) = Workers::split(world, worker as u32).unwrap();
            let layout = Layout::builder().param("x", &[LEN], DType::BF16).build().unwrap();
            let first = |_: &_, mut x: SliceMut<'_>| x.cast_from(Slice::from(&[100.0f32; LEN][..]));
            let options = Options { meter: meshstep_tensor::Meter::new(), ..options.clone() };
            let inner = Optimizer::new(comm, layout, Sgd::default(), first, options).unwrap();
            let plan = LocalPlan::local_sgd(2).with(|f| f.wire = wire);
            let mut local = LocalOptimizer::new(inner, between.clone(), plan).unwrap();
            for _ in 0..2 {
                let mb = local.micro_batch(1).unwrap();
                mb.grad("x", &[bf16::from_f32(worker as f32 + 1.0); LEN][..]).unwrap();
                mb.finish().unwrap();
                let _ = local.step(StepArgs { lr, ..StepArgs::default() }).unwrap();
            }
            let state = local.state("x").unwrap();
            let master = state.master.unwrap().typed::<f32>().unwrap().to_vec();
            let params = local.param("x").unwrap().typed::<bf16>().unwrap().to_vec();
            (master, params, between.across.stats().total().bytes)
        });
        for (master, params, _) in &ends.unwrap() {
            let expected = 100.0 - 3.0 * lr as f32;
            let near = |x: &f32| (x - expected).abs() < if wire.is_some() { 2e-4 } else { 1e-5 };
            assert!(master.iter().all(|x| near(x) && x == &master[0]), "{stage:?}: {:?}", &master[..2]);
            assert!(params.iter().all(|x| *x == bf16::from_f32(expected)) && params.len() == LEN);
        }
    }
}

#[test]
fn bad_input_is_every_rank_s_error() {
    let made = |plan: fn(usize) -> LocalPlan, options: Options, dtype: DType, value: fn(usize) -> f32| {
        let all = loopback::spawn(4, |world| {
            let (rank, worker) = (world.rank(), world.rank() / 2);
            let (comm, between) = Workers::split(world, worker as u32).unwrap();
            let layout = Layout::builder().param("x", &[LEN], dtype).build().unwrap();
            let first = |_: &_, mut x: SliceMut<'_>| x.cast_from(Slice::from(&[value(worker); LEN][..]));
            let options = Options { meter: meshstep_tensor::Meter::new(), ..options.clone() };
            let inner = Optimizer::new(comm, layout, AdamW::default(), first, options).unwrap();
            LocalOptimizer::new(inner, between, plan(rank)).map(drop).unwrap_err().to_string()
        });
        let all = all.unwrap();
        assert!(all.iter().all(|error| *error == all[0]), "{all:?}");
        all[0].clone()
    };
    let plain = Options::default;
    let same = |_: usize| 1.0f32;
    assert_eq!(
        made(|_| LocalPlan::local_sgd(0), plain(), DType::F32, same),
        "fragment 0 has the period 0; use 1 or more, or None for never"
    );
    assert_eq!(
        made(|rank| LocalPlan::local_sgd(if rank == 3 { 5 } else { 4 }), plain(), DType::F32, same),
        "ranks disagree on period of fragment 0: rank 0 has 4, rank 3 has 5"
    );
    assert_eq!(
        made(|_| LocalPlan::local_sgd(4), plain(), DType::F32, |worker| worker as f32),
        "rank 2 of all workers' ranks begins with other values than the first worker; give all workers the same"
    );
    let precision = Precision { master: Master::Remainder, ..Precision::default() };
    assert_eq!(
        made(|_| LocalPlan::local_sgd(4), Options { precision, ..plain() }, DType::BF16, same),
        "replicas that drift are averaged, and bf16 remainders cannot be; use `Master::F32`"
    );
    let error = |rules: &Groups, plan: &LocalPlan| {
        let told = loopback::spawn(1, |world| {
            let (comm, between) = Workers::split(world, 0).unwrap();
            let options = Options { missing: Missing::Zero, ..Options::default() };
            let inner = Optimizer::new(comm, layout(), rules.clone(), first, options).unwrap();
            LocalOptimizer::new(inner, between, plan.clone()).map(|local| local.warnings().len())
        });
        told.unwrap().remove(0)
    };
    // One worker alone is valid; warnings are returned on request.
    let apart = LocalPlan::des_loc(2, 4, None);
    assert_eq!(error(&AdamW::default().into(), &apart).unwrap(), 1);
    assert!(matches!(error(&Sgd::default().into(), &apart), Err(LocalError::NoState { .. })));
    let outer = apart.with(|f| {
        if f.what == What::Params {
            f.taken = 2.0
        }
    });
    assert!(matches!(error(&AdamW::default().into(), &outer), Err(LocalError::Taken { .. })));
}
