//! Layers on a mesh, trained by the optimizer of the mesh.

use crate::common::{applied, on_ranks, options, rule, tensor};
use crate::parallel::common::assert_close;
use candle_core::{DType, Module as _, Result, Tensor, Var};
use meshstep_candle::Sharded;
use meshstep_candle::parallel::{Collectives, ColumnLinear, Residual, RowLinear};
use meshstep_comm::Communicator;
use meshstep_parallel3d::{
    Axis, Communicators, Mesh, Model, Optimizer, Parameter, Piece, Placement, elements,
};
use meshstep_shard::{Stage, Step as _, StepArgs};
use meshstep_tensor::{DType::F32, SliceMut};
use std::sync::Arc;

const SHAPES: [(&str, [usize; 2], u64); 2] = [("up", [8, 4], 1), ("down", [3, 8], 2)];

/// Large enough that a mesh's rounding moves no step by a visible amount.
fn lively() -> meshstep_optim::AdamW {
    meshstep_optim::AdamW { eps: 1e-3, ..rule() }
}

fn at() -> StepArgs {
    StepArgs { lr: 0.01, max_norm: Some(0.5), ..StepArgs::default() }
}

fn loss(y: &Tensor) -> Result<Tensor> {
    (y - tensor(&[5, 3], 4))?.sqr()?.mean_all()
}

/// Trains on one rank, and returns the whole matrices.
fn whole() -> Vec<Tensor> {
    let mut finals = on_ranks(1, |comm| {
        let vars = SHAPES.map(|(name, shape, salt)| (name, Var::from_tensor(&tensor(&shape, salt)).unwrap()));
        let mut opt = Sharded::new(comm, vars.clone(), lively(), options(Stage::Zero1)).unwrap();
        let [(_, up), (_, down)] = &vars;
        for _ in 0..5 {
            let hidden = tensor(&[5, 4], 3).matmul(&up.t().unwrap()).unwrap().gelu().unwrap();
            applied(opt.backward_step(&loss(&hidden.matmul(&down.t().unwrap()).unwrap()).unwrap(), at()));
        }
        vars.map(|(_, var)| var.as_tensor().clone()).to_vec()
    });
    finals.remove(0)
}

/// Returns an optimizer of the mesh with this rank's part of the matrices.
fn on_mesh(world: Arc<dyn Communicator>, mesh: &Mesh) -> Optimizer {
    let cut = |dim| Placement::whole().cut(Axis::Tp, dim);
    let model = Model::builder().param("up", &[8, 4], F32, cut(0)).param("down", &[3, 8], F32, cut(1));
    let initial = |parameter: &Parameter, pieces: &[Piece], mut out: SliceMut<'_>| {
        let (_, shape, salt) = SHAPES.into_iter().find(|(name, ..)| *name == parameter.name).unwrap();
        let values = crate::common::numbers(&tensor(&shape, salt));
        let own = elements(&parameter.shape, pieces).into_iter().map(|element| values[element]);
        out.copy_from((&own.collect::<Vec<f32>>()).into())
    };
    Optimizer::new(world, mesh.clone(), &model.build().unwrap(), lively(), initial, options(Stage::Zero2))
        .unwrap()
}

#[test]
fn variables_of_a_mesh_train_as_whole_ones_on_one_rank() {
    let (expected, mesh): (_, Mesh) = (whole(), "tp=2,dp=2".parse().unwrap());
    on_ranks(4, |world| {
        let layers = world.split(Some(0), 0).unwrap().unwrap();
        let comms = Communicators::new(layers, mesh.clone(), [Axis::Tp.into()]).unwrap();
        let tp = Collectives::new(Arc::clone(comms.along(Axis::Tp).unwrap()));
        let at_tp = tp.rank();
        let vars = [("up", [4, 4]), ("down", [3, 4])]
            .map(|(name, shape)| (name, Var::zeros(&shape, DType::F32, &candle_core::Device::Cpu).unwrap()));
        let mut opt = Sharded::over(on_mesh(world, &mesh), vars.clone()).unwrap();
        let stream = Residual::whole(tp);
        for _ in 0..5 {
            let [up, down] = vars.each_ref().map(|(_, var)| var.as_tensor().clone());
            let hidden = ColumnLinear::new(up, stream.clone()).forward(&tensor(&[5, 4], 3)).unwrap();
            let y = RowLinear::new(down, stream.clone()).forward(&hidden.gelu().unwrap()).unwrap();
            opt.backward(&loss(&y).unwrap()).unwrap();
            opt.step(at()).unwrap().outcome().unwrap();
        }
        for (dim, ((name, var), whole)) in vars.iter().zip(&expected).enumerate() {
            assert_close(var, &whole.narrow(dim, 4 * at_tp, 4).unwrap(), name);
        }
    });
}
