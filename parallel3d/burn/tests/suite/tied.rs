//! Parameters at several places of a module.

use crate::common::{Mlp, applied, at, bits, named, on_ranks, options, param, sharded, tensor};
use burn::module::{Module, Param};
use burn::tensor::Tensor;
use meshstep_burn::{Error, Sharded};
use meshstep_shard::{Options, Stage};

/// Two matrices, each used once.
#[derive(Module, Debug)]
struct Pair {
    encode: Param<Tensor<2>>,
    decode: Param<Tensor<2>>,
}

impl Pair {
    fn loss(&self, step: u64) -> Tensor<1> {
        let x = tensor([4, 6], 50 + step);
        (x.clone().matmul(self.encode.val()).tanh().matmul(self.decode.val().transpose()) - x).square().mean()
    }
}

/// The same network with one matrix, used twice.
#[derive(Module, Debug)]
struct Single {
    encode: Param<Tensor<2>>,
}

impl Single {
    fn loss(&self, step: u64) -> Tensor<1> {
        Pair { encode: self.encode.clone(), decode: self.encode.clone() }.loss(step)
    }
}

fn expected() -> Vec<u32> {
    let finals = on_ranks(2, |comm| {
        let mut model = Single { encode: param([6, 3], 1) };
        let mut opt = sharded(comm, &mut model, options(Stage::Zero2)).unwrap();
        for step in 0..3 {
            let loss = model.loss(step);
            applied(opt.backward_step(&mut model, loss, at()));
        }
        bits(&model).remove(0)
    });
    finals.into_iter().next().unwrap()
}

#[test]
fn clones_of_a_parameter_are_one_and_stay_one() {
    let expected = expected();
    for apart in [false, true] {
        let finals = on_ranks(2, |comm| {
            let encode: Param<Tensor<2>> = param([6, 3], 1);
            // A record that is loaded makes two tensors with one id of a clone.
            let decode = match apart {
                false => encode.clone(),
                true => Param::initialized(encode.id, tensor([6, 3], 1).require_grad()),
            };
            let mut model = Pair { encode, decode };
            let mut opt = sharded(comm, &mut model, options(Stage::Zero2)).unwrap();
            let names: Vec<_> = opt.optimizer().params().map(|param| param.name().to_owned()).collect();
            assert_eq!(names, ["encode"]);
            for step in 0..3 {
                let loss = model.loss(step);
                applied(opt.backward_step(&mut model, loss, at()));
            }
            bits(&model)
        });
        for values in finals.into_iter().flatten() {
            assert_eq!(values, expected, "apart: {apart}");
        }
    }
}

/// The places have tensors of their own from a load on, so each has a gradient.
#[test]
fn gradients_of_places_with_tensors_of_their_own_are_added() {
    let expected = expected();
    let finals = on_ranks(2, |comm| {
        let encode: Param<Tensor<2>> = param([6, 3], 1);
        let mut model = Pair { decode: encode.clone(), encode };
        let mut opt = sharded(comm, &mut model, options(Stage::Zero2)).unwrap();
        for step in 0..3 {
            let copy = model.decode.val().into_data();
            let decode = Tensor::<2>::from_data(copy, &crate::common::device()).require_grad();
            model.decode = Param::initialized(model.encode.id, decode);
            let loss = model.loss(step);
            applied(opt.backward_step(&mut model, loss, at()));
        }
        named(&model)
    });
    for (name, values) in finals.into_iter().flatten() {
        for (x, y) in values.into_iter().zip(&expected) {
            let y = f32::from_bits(*y);
            assert!((x - y).abs() <= 1e-5, "{name}: {x} and {y}");
        }
    }
}

#[test]
fn one_id_for_unlike_parameters_is_refused_on_every_rank() {
    let errors = on_ranks(2, |comm| {
        let encode: Param<Tensor<2>> = param([6, 3], 1);
        let unlike = tensor([3, 6], 2).require_grad();
        let decode = if comm.rank() == 1 { Param::initialized(encode.id, unlike) } else { encode.clone() };
        sharded(comm, &mut Pair { encode, decode }, Options::default()).map(drop).unwrap_err()
    });
    assert!(matches!(&errors[1], Error::SameId { name } if name == "encode"), "{:?}", errors[1]);
    assert!(errors[0].to_string().contains("has the ParamId of \"encode\""), "{}", errors[0]);
}

/// A module that was built anew has other ids and the same paths.
#[test]
fn ids_may_differ_between_ranks_and_modules() {
    let finals = on_ranks(2, |comm| {
        let mut model = Mlp::new(1 + comm.rank() as u64);
        let mut opt: Sharded = sharded(comm, &mut model, options(Stage::Zero2)).unwrap();
        let mut other = Mlp::new(7);
        opt.refresh(&mut other).unwrap();
        assert_eq!(bits(&other), bits(&model));
        let loss = other.loss(0);
        applied(opt.backward_step(&mut other, loss, at()));
        bits(&other)
    });
    assert_eq!(finals[0], finals[1]);
}
