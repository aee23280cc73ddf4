//! Variables with optimizers that exist: replicas in groups, and the optimizer of a mesh.

use crate::common::{Mlp, applied, at, bits, numbers, on_ranks, options, rule, sharded, tensor};
use candle_core::Var;
use meshstep_candle::{Error, Sharded};
use meshstep_comm::Communicator;
use meshstep_shard::{CrossShard, Error as Shard, Optimizer, Options, Stage, Step as _};
use meshstep_tensor::{DType, Layout, Param, SliceMut};
use std::sync::Arc;

/// Returns an optimizer with the parameters of the network, and its values.
fn flat(comm: Arc<dyn Communicator>, options: Options) -> Optimizer {
    let values = Mlp::new(1).vars();
    Optimizer::new(comm, layout(), rule(), |param, out| fill(&values, param, out), options).unwrap()
}

fn layout() -> Layout {
    let builder = Mlp::new(1)
        .vars()
        .into_iter()
        .fold(Layout::builder(), |builder, (name, var)| builder.param(name, var.dims(), DType::F32));
    builder.build().unwrap()
}

fn fill(
    values: &[(&'static str, Var)],
    param: &Param,
    mut out: SliceMut<'_>,
) -> Result<(), meshstep_tensor::Error> {
    let (_, var) = values.iter().find(|(name, _)| *name == param.name()).unwrap();
    out.copy_from((&numbers(var)).into())
}

#[test]
fn variables_of_an_optimizer_that_exists_train_as_those_of_a_new_one() {
    let train = |over: bool| {
        on_ranks(2, |comm| {
            let mlp = Mlp::new(if over { 5 } else { 1 });
            let mut opt = match over {
                true => Sharded::over(flat(comm, options(Stage::Zero2)), mlp.vars()).unwrap(),
                false => sharded(comm, mlp.vars(), options(Stage::Zero2)).unwrap(),
            };
            (0..3).for_each(|step| applied(opt.backward_step(&mlp.loss(step).unwrap(), at())));
            bits(&opt)
        })
    };
    assert_eq!(train(true), train(false));
}

#[test]
fn replicas_in_groups_train_their_own_variables() {
    let finals = on_ranks(4, |comm| {
        let (mlp, group) = (Mlp::new(1), comm.rank() as u64 / 2);
        let values = mlp.vars();
        let initial = |param: &Param, out: SliceMut<'_>| fill(&values, param, out);
        let halves = [vec![0, 1], vec![2, 3]];
        let groups =
            CrossShard::new(comm, Some(&halves), layout(), rule(), initial, Options::default()).unwrap();
        let mut opt = Sharded::over(groups, mlp.vars()).unwrap();
        for step in 0..3 {
            opt.backward(&mlp.loss(10 * group + step).unwrap()).unwrap();
            opt.step(at()).unwrap().outcome().unwrap();
        }
        numbers(&mlp.down)
    });
    assert!(finals[0] == finals[1] && finals[2] == finals[3] && finals[0] != finals[2]);
}

#[test]
fn variables_and_parameters_that_do_not_match_are_refused() {
    on_ranks(1, |comm| {
        let over = |names: &[&str], shape: &[usize]| {
            let layout = Layout::builder().param("w", &[2], DType::F32).param("b", &[2], DType::F32);
            let built = layout.build().unwrap();
            let made = Optimizer::new(Arc::clone(&comm), built, rule(), |_, _| Ok(()), Options::default());
            let vars: Vec<(String, Var)> = names
                .iter()
                .map(|name| (String::from(*name), Var::from_tensor(&tensor(shape, 1)).unwrap()))
                .collect();
            Sharded::over(made.unwrap(), vars).map(drop)
        };
        assert!(over(&["b", "w"], &[2]).is_ok());
        let error = over(&["w"], &[2]).unwrap_err();
        assert!(matches!(&error, Error::NoVariable { name } if name == "b"), "{error:?}");
        let error = over(&["w", "b", "c"], &[2]).unwrap_err();
        assert!(matches!(&error, Error::Shard(Shard::UnknownParam { name, .. }) if name == "c"), "{error:?}");
        let error = over(&["w", "b"], &[1, 2]).unwrap_err();
        assert!(matches!(&error, Error::Differs { name, .. } if name == "w"), "{error:?}");
    });
}
