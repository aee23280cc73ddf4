//! A rank that fails in the exchange of matrices: an error on every rank of the mesh, and no rank waits for ever.

use super::{options, take_step};
use crate::common::fill;
use meshstep_comm::{Communicator, loopback};
use meshstep_optim::{
    Blocks, Error as RuleError, Flat, Isa, MatrixRule, Muon, Rule, Scalars, Sees, Segment, StateSlot,
};
use meshstep_parallel3d::{Axis, Model, Optimizer, Placement};
use meshstep_shard::{Stage, Step, StepArgs};
use meshstep_tensor::DType::F32;
use meshstep_tensor::{Queue, SliceMut};
use std::sync::Arc;
use std::time::Duration;

/// Muon that cannot transform on one rank.
#[derive(Clone, Debug)]
struct Failing {
    muon: Muon,
    fails: bool,
}

impl Rule for Failing {
    fn name(&self) -> &'static str {
        "failing"
    }

    fn state(&self) -> &'static [&'static str] {
        self.muon.state()
    }

    fn check(&self) -> Result<(), RuleError> {
        self.muon.check()
    }

    fn each_hyperparameter(&self, each: &mut dyn FnMut(&'static str, f64)) {
        self.muon.each_hyperparameter(each);
    }

    fn sees(&self) -> Sees {
        Sees::Matrix
    }

    fn blocks(&self) -> Blocks {
        self.muon.blocks
    }

    fn by_matrix(&self) -> Option<&dyn MatrixRule> {
        Some(self)
    }

    fn slot(&self, slot: usize) -> StateSlot {
        self.muon.slot(slot)
    }

    fn update_on(
        &self,
        isa: Isa,
        flat: Flat<'_, '_>,
        segments: &[Segment],
        scalars: &Scalars,
        queue: &Queue,
    ) -> Result<(), RuleError> {
        self.muon.update_on(isa, flat, segments, scalars, queue)
    }
}

impl MatrixRule for Failing {
    fn cost(&self, len: usize, matrix: (usize, usize)) -> u64 {
        self.muon.cost(len, matrix)
    }

    fn advance(
        &self,
        isa: Isa,
        flat: Flat<'_, '_>,
        segments: &[Segment],
        scalars: &Scalars,
        queue: &Queue,
    ) -> Result<(), RuleError> {
        self.muon.advance(isa, flat, segments, scalars, queue)
    }

    fn transform(
        &self,
        isa: Isa,
        step: SliceMut<'_>,
        matrix: (usize, usize),
        queue: &Queue,
    ) -> Result<(), RuleError> {
        // No elements are not the matrix.
        let step = if self.fails { step.slice(0..0).map_err(RuleError::from)? } else { step };
        self.muon.transform(isa, step, matrix, queue)
    }

    fn apply(
        &self,
        isa: Isa,
        flat: Flat<'_, '_>,
        segments: &[Segment],
        scalars: &Scalars,
        queue: &Queue,
    ) -> Result<(), RuleError> {
        self.muon.apply(isa, flat, segments, scalars, queue)
    }
}

fn model() -> Model {
    let add = |b: meshstep_parallel3d::ModelBuilder, i: usize| {
        b.param(format!("w{i}"), &[8, 12], F32, Placement::whole().cut(Axis::Tp, i % 2))
    };
    (0..8).fold(Model::builder(), add).build().unwrap()
}

#[test]
fn a_rank_that_fails_in_the_exchange_is_an_error_on_every_rank() {
    for (mesh, stage) in
        [("tp=4", Stage::Replicated), ("tp=2,dp=2", Stage::Zero1), ("tp=2,dp=2", Stage::Zero3)]
    {
        for lost in 0..4 {
            let config = loopback::Config { timeout: Duration::from_millis(500), ..loopback::Config::new(4) };
            let ended = loopback::spawn_with(config, |world: Arc<dyn Communicator>| {
                let rule = Failing { muon: Muon::default(), fails: world.rank() == lost };
                let (model, mesh) = (model(), mesh.parse().unwrap());
                let mut opt = Optimizer::new(world, mesh, &model, rule, fill, options(stage)).unwrap();
                let tp = opt.mesh().degree(Axis::Tp);
                let mut step = || -> Result<(), meshstep_parallel3d::Error> {
                    let mb = opt.micro_batch(1)?;
                    for p in model.parameters() {
                        mb.grad(&p.name, &vec![1f32; 8 * 12 / tp][..])?;
                    }
                    mb.finish()?;
                    Ok(opt.step(StepArgs::default())?.outcome().map(drop)?)
                };
                // A rank that has all its pieces takes the step; the next one tells it.
                step().and_then(|()| step()).is_err()
            });
            assert_eq!(ended.unwrap(), [true; 4], "rank {lost} of {mesh}, {stage:?}");
        }
    }
    // Without the failure the same model trains.
    let rule = Failing { muon: Muon::default(), fails: false };
    let trained = loopback::spawn(4, |world: Arc<dyn Communicator>| {
        let model = model();
        let mesh = "tp=2,dp=2".parse().unwrap();
        let mut opt = Optimizer::new(world, mesh, &model, rule.clone(), fill, options(Stage::Zero1)).unwrap();
        (0..2).map(|step| take_step(&mut opt, &model, (step, 1))).count()
    });
    assert_eq!(trained.unwrap(), [2; 4]);
}
