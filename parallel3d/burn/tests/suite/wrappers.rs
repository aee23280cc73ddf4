//! Modules with optimizers that exist: the optimizer of all ranks, and replicas in groups.

use crate::common::{Mlp, applied, at, bits, named, on_ranks, options, rule, sharded};
use meshstep_burn::{Error, Sharded};
use meshstep_comm::Communicator;
use meshstep_shard::{CrossShard, Optimizer, Options, Stage};
use meshstep_tensor::{DType, Layout, Param, SliceMut};
use std::sync::Arc;

const SHAPES: [(&str, &[usize]); 9] = [
    ("up.weight", &[5, 9]),
    ("up.bias", &[9]),
    ("layers.0.weight", &[9, 9]),
    ("layers.0.bias", &[9]),
    ("layers.1.weight", &[9, 9]),
    ("layers.1.bias", &[9]),
    ("down.weight", &[9, 3]),
    ("down.bias", &[3]),
    ("shift", &[3]),
];

fn layout(shapes: &[(&str, &[usize])]) -> Layout {
    let add = |builder, (name, shape): &(&str, &[usize])| {
        meshstep_tensor::LayoutBuilder::param(builder, *name, shape, DType::F32)
    };
    shapes.iter().fold(Layout::builder(), add).build().unwrap()
}

fn fill(
    values: &[(String, Vec<f32>)],
    param: &Param,
    mut out: SliceMut<'_>,
) -> Result<(), meshstep_tensor::Error> {
    let (_, values) = values.iter().find(|(name, _)| name == param.name()).unwrap();
    out.copy_from(values.into())
}

/// Returns an optimizer with the parameters of the network, and its values.
fn flat(comm: Arc<dyn Communicator>, options: Options) -> Optimizer {
    let values = named(&Mlp::new(1));
    Optimizer::new(comm, layout(&SHAPES), rule(), |param, out| fill(&values, param, out), options).unwrap()
}

#[test]
fn a_module_of_an_optimizer_that_exists_trains_as_that_of_a_new_one() {
    let train = |over: bool| {
        on_ranks(2, |comm| {
            let mut model = Mlp::new(if over { 5 } else { 1 });
            let mut opt = match over {
                true => Sharded::over(flat(comm, options(Stage::Zero2)), &mut model).unwrap(),
                false => sharded(comm, &mut model, options(Stage::Zero2)).unwrap(),
            };
            for step in 0..3 {
                let loss = model.loss(step);
                applied(opt.backward_step(&mut model, loss, at()));
            }
            bits(&model)
        })
    };
    assert_eq!(train(true), train(false));
}

#[test]
fn replicas_in_groups_train_their_own_modules() {
    let finals = on_ranks(4, |comm| {
        let (mut model, group) = (Mlp::new(1), comm.rank() as u64 / 2);
        let values = named(&model);
        let initial = |param: &Param, out: SliceMut<'_>| fill(&values, param, out);
        let halves = [vec![0, 1], vec![2, 3]];
        let groups =
            CrossShard::new(comm, Some(&halves), layout(&SHAPES), rule(), initial, Options::default());
        let mut opt = Sharded::over(groups.unwrap(), &mut model).unwrap();
        for step in 0..3 {
            opt.backward(&model, model.loss(10 * group + step)).unwrap();
            opt.wrapper_step(&mut model, at()).unwrap().outcome().unwrap();
        }
        bits(&model)
    });
    assert!(finals[0] == finals[1] && finals[2] == finals[3] && finals[0] != finals[2]);
}

#[test]
fn a_module_and_parameters_that_do_not_match_are_refused() {
    on_ranks(1, |comm| {
        let over = |shapes: &[(&str, &[usize])]| {
            let rule = rule();
            let comm = Arc::clone(&comm);
            let made = Optimizer::new(comm, layout(shapes), rule, |_, _| Ok(()), Options::default());
            Sharded::over(made.unwrap(), &mut Mlp::new(1)).map(drop).unwrap_err()
        };
        let error = over(&SHAPES[..8]);
        assert!(matches!(&error, Error::NotListed { name } if name == "shift"), "{error:?}");
        let mut more = SHAPES.to_vec();
        more.push(("scale", &[3]));
        let error = over(&more);
        assert!(matches!(&error, Error::NoParameter { name } if name == "scale"), "{error:?}");
        more.pop();
        more[8].1 = &[1, 3];
        let error = over(&more);
        assert!(matches!(&error, Error::Differs { name, .. } if name == "shift"), "{error:?}");
        let stage3 = flat(comm.clone(), options(Stage::Zero3));
        let error = Sharded::over(stage3, &mut Mlp::new(1)).map(drop).unwrap_err();
        assert!(matches!(error, Error::WholeParameters), "{error:?}");
    });
}
