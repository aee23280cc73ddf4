//! Names of parameters, which are the paths of burn's records.

use crate::common::{Mlp, named, on_ranks, options, param, sharded};
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Device, Tensor};
use meshstep_burn::Error;
use meshstep_shard::{Options, Stage};

#[test]
fn names_are_the_modules_paths_in_its_order() {
    let names = on_ranks(2, |comm| {
        let mut model = Mlp::new(1);
        let opt = sharded(comm, &mut model, options(Stage::Zero2)).unwrap();
        let names: Vec<String> = opt.optimizer().params().map(|param| param.name().to_owned()).collect();
        assert_eq!(names, named(&model).into_iter().map(|(name, _)| name).collect::<Vec<_>>());
        names
    });
    let expected = [
        "up.weight",
        "up.bias",
        "layers.0.weight",
        "layers.0.bias",
        "layers.1.weight",
        "layers.1.bias",
        "down.weight",
        "down.bias",
        "shift",
    ];
    assert_eq!(names, [expected; 2]);
}

/// The optimizer's values and the record's are the same under each name.
#[test]
fn each_name_has_the_values_of_its_path() {
    on_ranks(2, |comm| {
        let mut model = Mlp::new(3);
        let opt = sharded(comm, &mut model, options(Stage::Zero1)).unwrap();
        for (name, values) in named(&model) {
            assert_eq!(opt.optimizer().param(&name).unwrap().typed::<f32>().unwrap(), values, "{name}");
        }
    });
}

#[test]
fn a_parameter_without_a_path_is_refused() {
    let errors = on_ranks(1, |comm| {
        let mut alone: Param<Tensor<2>> = param([2, 2], 1);
        sharded(comm, &mut alone, Options::default()).map(drop).unwrap_err()
    });
    assert!(matches!(errors[0], Error::NoPath), "{:?}", errors[0]);
}

/// A tuple whose parts say that they have the same name.
#[derive(Clone, Debug)]
struct Clash(Param<Tensor<1>>, Param<Tensor<1>>);

impl Module for Clash {
    fn collect_devices(&self, devices: Vec<Device>) -> Vec<Device> {
        self.0.collect_devices(devices)
    }

    fn fork(self, device: &Device) -> Self {
        Clash(self.0.fork(device), self.1.fork(device))
    }

    fn to_device(self, device: &Device) -> Self {
        Clash(self.0.to_device(device), self.1.to_device(device))
    }

    fn train(self) -> Self {
        Clash(self.0.train(), self.1.train())
    }

    fn valid(&self) -> Self {
        Clash(self.0.valid(), self.1.valid())
    }

    fn materialize(self) -> Self {
        self
    }

    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        for param in [&self.0, &self.1] {
            visitor.enter_module("same", "Struct:Clash");
            param.visit(visitor);
            visitor.exit_module("same", "Struct:Clash");
        }
    }

    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        Clash(Module::map(self.0, mapper), Module::map(self.1, mapper))
    }
}

#[test]
fn two_parameters_of_one_path_are_refused_on_every_rank() {
    let errors = on_ranks(2, |comm| {
        let mut clash = Clash(param([2], 1), param([2], 2));
        sharded(comm, &mut clash, Options::default()).map(drop).unwrap_err()
    });
    for error in errors {
        assert!(error.to_string().contains("same"), "{error:?}");
    }
}
