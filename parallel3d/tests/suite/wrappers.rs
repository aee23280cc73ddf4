//! The trait `Step`: one training loop, over an optimizer and each of its wrappers.

use meshstep_comm::{Communicator, loopback};
use meshstep_local::{LocalPlan, Workers};
use meshstep_optim::AdamW;
use meshstep_parallel3d::{LocalOptimizer, Mesh, Model, Optimizer, Placement, replicas};
use meshstep_shard::{CrossShard, Error as ShardError, Options, Pending, Step, StepArgs, Until};
use meshstep_tensor::{DType, Layout};
use std::fmt::Debug;
use std::sync::Arc;

const LEN: usize = 37;

type Made<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

fn layout() -> Layout {
    Layout::builder().param("w", &[LEN], DType::F32).build().unwrap()
}

fn plain(comm: Arc<dyn Communicator>) -> meshstep_shard::Optimizer {
    let (rule, options) = (AdamW::default(), Options::default());
    meshstep_shard::Optimizer::new(comm, layout(), rule, |_, _| Ok(()), options).unwrap()
}

fn meshed(comm: Arc<dyn Communicator>, mesh: Mesh) -> Optimizer {
    let model = Model::builder().param("w", &[LEN], DType::F32, Placement::whole()).build().unwrap();
    Optimizer::new(comm, mesh, &model, AdamW::default(), |_, _, _| Ok(()), Options::default()).unwrap()
}

fn grad(rank: usize, step: usize) -> Vec<f32> {
    (0..LEN).map(|i| ((i * 7 + step * 13 + rank * 29) % 31) as f32 - 15.0).collect()
}

fn hand_over<S: Step<Error: Debug> + ?Sized>(opt: &mut S, grad: &[f32]) {
    let mb = opt.micro_batch(1).unwrap();
    mb.grad("w", grad).unwrap();
    mb.finish().unwrap();
}

/// Takes three steps, the second after gradients that are dropped, and returns the parameter's bits.
fn train<S: Step<Error: Debug> + ?Sized>(opt: &mut S, rank: usize) -> Vec<u32> {
    for step in 0..3 {
        if step == 1 {
            hand_over(opt, &[1e3; LEN]);
            opt.discard_gradients().unwrap();
        }
        hand_over(opt, &grad(rank, step));
        opt.step(StepArgs { lr: 0.1, max_norm: Some(1.0), ..StepArgs::default() }).unwrap();
    }
    opt.verify().unwrap();
    opt.param("w").unwrap().typed::<f32>().unwrap().iter().map(|w| w.to_bits()).collect()
}

/// A plan by which workers never meet in the steps taken here.
fn never() -> LocalPlan {
    LocalPlan::local_sgd(1000)
}

#[test]
fn one_loop_trains_an_optimizer_and_each_wrapper_to_the_same_bits() {
    let finals = loopback::spawn(2, |comm| -> Made<[Vec<u32>; 5]> {
        let rank = comm.rank();
        let alone = || comm.split(Some(0), 0).unwrap().unwrap();
        let (inside, workers) = Workers::split(alone(), 0)?;
        let mut worker = meshstep_local::LocalOptimizer::new(plain(inside), workers, never())?;
        let (inside, mesh, workers) = replicas(alone(), &"dp_shard=2".parse()?)?;
        let mut replica = LocalOptimizer::new(meshed(inside, mesh), workers, never())?;
        let mut groups =
            CrossShard::new(alone(), None, layout(), AdamW::default(), |_, _| Ok(()), Options::default())?;
        let mut on_mesh = meshed(alone(), "dp=2".parse()?);
        let dynamic: &mut dyn Step<Outcome = Pending, Error = ShardError> = &mut plain(alone());
        Ok([
            train(dynamic, rank),
            train(&mut groups, rank),
            train(&mut on_mesh, rank),
            train(&mut worker, rank),
            train(&mut replica, rank),
        ])
    });
    for finals in finals.unwrap() {
        let finals = finals.unwrap();
        assert!(finals.iter().all(|bits| *bits == finals[0]), "{finals:?}");
        assert!(finals[0].iter().any(|bits| f32::from_bits(*bits) != 0.0));
    }
}

#[test]
fn every_call_fails_with_the_error_of_its_type() {
    let calls = |opt: &mut Optimizer| -> [meshstep_parallel3d::Error; 5] {
        [
            opt.step(StepArgs::default()).unwrap_err(),
            opt.scheduled().unwrap_err(),
            opt.param("v").unwrap_err(),
            opt.read("w", &mut [0f32; LEN + 1]).unwrap_err(),
            opt.flip_bit("w", "param", LEN, 0).unwrap_err(),
        ]
    };
    let errors = loopback::spawn(1, |comm| calls(&mut meshed(comm, "dp=1".parse().unwrap()))).unwrap();
    let shard = |error: &meshstep_parallel3d::Error| matches!(error, meshstep_parallel3d::Error::Shard(_));
    assert!(errors.iter().flatten().all(shard), "{errors:?}");
}

#[test]
fn runs_to_a_tolerance_are_the_same_through_a_wrapper() {
    let ends = loopback::spawn(2, |comm| {
        let until = Until { max_iter: 20, ..Until::default() };
        let loss = |mb: &meshstep_shard::MicroBatch<'_>| -> Result<f64, ShardError> {
            let w = mb.param("w")?.typed::<f32>()?.to_vec();
            mb.grad("w", &w.iter().map(|w| w - 3.0).collect::<Vec<_>>())?;
            Ok(w.iter().map(|w| f64::from(w - 3.0).powi(2) / 2.0).sum())
        };
        let at = |_| StepArgs { lr: 0.3, ..StepArgs::default() };
        let whole = plain(comm.split(Some(0), 0).unwrap().unwrap()).minimize(until, at, 1, loss).unwrap();
        let mesh = meshed(comm, "dp=2".parse().unwrap()).minimize(until, at, 1, loss).unwrap();
        (whole, mesh)
    });
    for (whole, mesh) in ends.unwrap() {
        assert_eq!(whole, mesh);
        assert_eq!((whole.iterations, whole.history.len()), (20, 20));
        assert!(whole.loss < whole.history[0].loss);
    }
}
