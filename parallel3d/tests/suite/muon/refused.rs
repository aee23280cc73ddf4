//! Matrices that a rule cannot see: the same typed error in the plan and on every rank.

use super::options;
use meshstep_comm::{Communicator, loopback};
use meshstep_optim::{Blocks, Error as RuleError, Flat, Isa, Muon, Rule, Scalars, Sees, Segment, StateSlot};
use meshstep_parallel3d::{Axis, Error, Mesh, Model, Optimizer, Placement, Plan};
use meshstep_shard::{Groups, Stage};
use meshstep_tensor::{DType::F32, Queue};
use std::sync::Arc;

/// Returns the error of the plan, which every rank has too.
fn refused(mesh: &str, model: &Model, rules: &Groups, stage: Stage) -> meshstep_shard::Error {
    let mesh: Mesh = mesh.parse().unwrap();
    let of = |error: Error| match error {
        Error::Shard(error) => error,
        other => panic!("{other}"),
    };
    let planned = of(Plan::new(&mesh, model, rules.clone(), &options(stage)).unwrap_err());
    let ranks = loopback::spawn(mesh.world_size(), |world: Arc<dyn Communicator>| {
        let made =
            Optimizer::new(world, mesh.clone(), model, rules.clone(), |_, _, _| Ok(()), options(stage));
        made.map(drop).unwrap_err()
    });
    for error in ranks.unwrap() {
        assert_eq!(of(error).to_string(), planned.to_string());
    }
    planned
}

fn one(shape: &[usize], placement: Placement) -> Model {
    Model::builder().param("w", shape, F32, placement).build().unwrap()
}

/// Blocks are those of the whole tensor, whatever the cut.
#[test]
fn blocks_are_checked_against_the_whole_tensor() {
    let rows = |n| Groups::new(Muon { blocks: Blocks::Rows(n), ..Muon::default() });
    let cut = || Placement::whole().cut(Axis::Tp, 0);
    // Ranks have 6 rows, which 4 does not divide, of 12, which it does.
    let mesh: Mesh = "tp=2".parse().unwrap();
    Plan::new(&mesh, &one(&[12, 5], cut()), rows(4), &options(Stage::Zero1)).unwrap();
    for stage in [Stage::Replicated, Stage::Zero1, Stage::Zero3] {
        let error = refused("tp=2,dp=2", &one(&[12, 5], cut()), &rows(5), stage);
        assert!(
            matches!(&error, meshstep_shard::Error::NotAMatrix { shape, .. } if shape[..] == [12, 5]),
            "{error}"
        );
        let error = refused("tp=2,dp=2", &one(&[12], cut()), &rows(1), stage);
        assert!(
            matches!(&error, meshstep_shard::Error::NotAMatrix { shape, .. } if shape[..] == [12]),
            "{error}"
        );
    }
}

/// A rule of the caller's that sees matrices, and has no phases for pieces of one.
#[derive(Clone, Debug)]
struct Whole;

impl Rule for Whole {
    fn name(&self) -> &'static str {
        "whole"
    }

    fn state(&self) -> &'static [&'static str] {
        &[]
    }

    fn check(&self) -> Result<(), RuleError> {
        Ok(())
    }

    fn each_hyperparameter(&self, _: &mut dyn FnMut(&'static str, f64)) {}

    fn sees(&self) -> Sees {
        Sees::Matrix
    }

    fn slot(&self, _: usize) -> StateSlot {
        StateSlot::average(0.9)
    }

    fn update_on(
        &self,
        _: Isa,
        _: Flat<'_, '_>,
        _: &[Segment],
        _: &Scalars,
        _: &Queue,
    ) -> Result<(), RuleError> {
        Ok(())
    }
}

#[test]
fn a_rule_without_phases_is_refused_where_the_mesh_or_the_stage_cuts() {
    let cut = one(&[12, 5], Placement::whole().cut(Axis::Tp, 1));
    let cut = |stage| refused("tp=5", &cut, &Whole.into(), stage);
    for stage in [Stage::Replicated, Stage::Zero1] {
        let error = cut(stage);
        assert!(
            matches!(&error, meshstep_shard::Error::Shared { what, .. } if what.contains("whole")),
            "{error}"
        );
    }
    let error =
        refused("dp_replicate=2,dp_shard=2", &one(&[12, 5], Placement::whole()), &Whole.into(), Stage::Zero3);
    assert!(matches!(error, meshstep_shard::Error::NeedsWholeParams { .. }), "{error}");
    let mesh: Mesh = "dp_replicate=2,dp_shard=2".parse().unwrap();
    Plan::new(&mesh, &one(&[12, 5], Placement::whole()), Whole, &options(Stage::Zero1)).unwrap();
}
