//! Steps on meshes: with exact sums, every mesh and stage gives the same parameters and norms, bit for bit.

use crate::common::{MESHES, STAGES, arrangements, model, run};
use meshstep_comm::{Communicator, loopback};
use meshstep_optim::{AdamW, Muon, Sgd};
use meshstep_parallel3d::{Axes, Axis, Error, Gradient, Mesh, MeshError, Model, Optimizer, Placement};
use meshstep_shard::{Clip, Combine, Groups, Options, Outcome, Owners, Stage, Step, StepArgs};
use meshstep_tensor::DType::F32;
use std::sync::Arc;

#[test]
fn every_mesh_and_stage_gives_the_same_bits() {
    let options =
        |stage| Options { stage, combine: Combine::Weighted, bucket_len: Some(100), ..Options::default() };
    let expected = run(&model(F32), "tp=1", &options(Stage::Replicated));
    assert!(expected.1.iter().all(|&(_, coef)| f64::from_bits(coef) < 1.0), "clipped");
    for (_, mesh, stage) in arrangements() {
        assert_eq!(run(&model(F32), mesh, &options(stage)), expected, "{mesh} {stage:?}");
    }
}

/// With equally many tokens on each rank, the mean of means is the mean.
#[test]
fn a_mean_of_means_is_the_mean_where_ranks_have_as_many_tokens() {
    let options = |combine| Options { combine, ..Options::default() };
    let expected = run(&model(F32), "tp=1", &options(Combine::Weighted));
    for mesh in MESHES {
        assert_eq!(run(&model(F32), mesh, &options(Combine::Mean)), expected, "{mesh}");
    }
}

/// One valid token in a sequence cut along cp: weighted by tokens, its gradient does not depend on the cut; the mean of the ranks' means
/// would divide it by their number.
#[test]
fn a_mask_does_not_show_how_a_sequence_is_cut() {
    let model = Model::builder().param("w", &[1], F32, Placement::whole()).build().unwrap();
    let moved = |cp: usize, combine: Combine| {
        let ranks = loopback::spawn(cp, |world: Arc<dyn Communicator>| {
            let (mesh, valid) = (format!("cp={cp}").parse().unwrap(), world.rank() == 0);
            let options = Options { combine, ..Options::default() };
            let mut opt =
                Optimizer::new(world, mesh, &model, Sgd::default(), |_, _, _| Ok(()), options).unwrap();
            let mb = opt.micro_batch(u64::from(valid)).unwrap();
            mb.grad("w", &[if valid { 3f32 } else { 0.0 }][..]).unwrap();
            mb.finish().unwrap();
            let _ = opt.step(StepArgs { lr: 1.0, ..StepArgs::default() }).unwrap().outcome().unwrap();
            opt.param("w").unwrap().typed::<f32>().unwrap()[0]
        });
        let ranks = ranks.unwrap();
        assert!(ranks.iter().all(|w| *w == ranks[0]));
        ranks[0]
    };
    assert_eq!([1, 2, 4].map(|cp| moved(cp, Combine::Weighted)), [-3.0; 3]);
    assert_eq!([1, 2, 4].map(|cp| moved(cp, Combine::Mean)), [-3.0, -1.5, -0.75]);
}

/// n ones have the norm sqrt(n), for any number of ranks that hold them; the sum of all ranks' own squares is larger.
#[test]
fn what_several_ranks_hold_counts_once() {
    let ones = Model::builder()
        .param("cut", &[8, 4], F32, Placement::whole().cut(Axis::Tp, 0))
        .param("whole", &[17], F32, Placement::whole())
        .build()
        .unwrap();
    for (_, mesh, stage) in arrangements() {
        let mesh: Mesh = mesh.parse().unwrap();
        let norms = loopback::spawn(mesh.world_size(), |world: Arc<dyn Communicator>| {
            let options = Options { stage, ..Options::default() };
            let mut opt =
                Optimizer::new(world, mesh.clone(), &ones, AdamW::default(), |_, _, _| Ok(()), options)
                    .unwrap();
            let mb = opt.micro_batch(1).unwrap();
            let mut squares = 0;
            for parameter in ones.parameters() {
                let shape =
                    parameter.placement.local_shape(&parameter.name, &parameter.shape, &mesh).unwrap();
                let len: usize = shape.iter().product();
                squares += len;
                mb.grad(&parameter.name, &vec![1f32; len][..]).unwrap();
            }
            mb.finish().unwrap();
            match opt.step(StepArgs::default()).unwrap().outcome().unwrap() {
                Outcome::Applied { norm, .. } => (norm, squares),
                Outcome::Skipped { .. } => panic!("gradients are finite"),
            }
        });
        let norms = norms.unwrap();
        assert!(norms.iter().all(|&(norm, _)| norm == 49f64.sqrt()), "{mesh} {stage:?}: {norms:?}");
        let naive: usize = norms.iter().map(|(_, squares)| squares).sum();
        assert!(mesh.world_size() == 1 || naive > 49, "{mesh}: a naive sum would be wrong");
    }
}

/// Ones on four tensor-parallel ranks: partial sums add up to 4, partial means to 1, equal gradients stay 1.
#[test]
fn parts_become_one_as_their_placement_says() {
    let parts = |gradient| Placement::whole().gradient(gradient);
    let model = Model::builder()
        .param("sum", &[1], F32, parts(Gradient::PartialSum))
        .param("mean", &[1], F32, parts(Gradient::PartialMean))
        .param("same", &[1], F32, parts(Gradient::Same))
        .build()
        .unwrap();
    let moved = loopback::spawn(4, |world: Arc<dyn Communicator>| {
        let (mesh, sgd) = ("tp=4".parse().unwrap(), Sgd::default());
        let mut opt = Optimizer::new(world, mesh, &model, sgd, |_, _, _| Ok(()), Options::default()).unwrap();
        let mb = opt.micro_batch(1).unwrap();
        ["sum", "mean", "same"].iter().for_each(|name| mb.grad(name, &[1f32][..]).unwrap());
        mb.finish().unwrap();
        let _ = opt.step(StepArgs { lr: 1.0, ..StepArgs::default() }).unwrap().outcome().unwrap();
        ["sum", "mean", "same"].map(|name| opt.param(name).unwrap().typed::<f32>().unwrap()[0])
    });
    assert_eq!(moved.unwrap(), [[-4.0, -1.0, -1.0]; 4]);
}

#[test]
fn what_cannot_step_is_refused_on_every_rank() {
    let expert = Placement::whole().cut(Axis::Cp, 0).reduced_over(Axis::Dp);
    let model = |placement| {
        Model::builder()
            .param("w", &[4], F32, placement)
            .param("b", &[4], F32, Placement::whole())
            .build()
            .unwrap()
    };
    let refused = |mesh: &'static str, placement: Placement, rules: Groups, options: Options| -> Vec<Error> {
        let ranks = loopback::spawn(4, |world: Arc<dyn Communicator>| {
            let options = options.clone();
            Optimizer::new(
                world,
                mesh.parse().unwrap(),
                &model(placement.clone()),
                rules.clone(),
                |_, _, _| Ok(()),
                options,
            )
            .unwrap_err()
        });
        ranks.unwrap()
    };
    let adam = || Groups::new(AdamW::default());
    let all = |errors: Vec<Error>, is: fn(&Error) -> bool| assert!(errors.iter().all(is), "{errors:?}");
    let cut = Placement::whole().cut(Axis::Tp, 0);
    let on = Options::default;
    all(refused("tp=2,dp=4", cut.clone(), adam(), on()), |e| {
        matches!(e, Error::Mesh(MeshError::WorldSize { ranks: 8, .. }))
    });
    all(refused("pp=2,dp=2", cut.clone(), adam(), on()), |e| matches!(e, Error::Stages { stages: 2 }));
    all(refused("cp=2,dp=2", expert, adam(), on()), |e| {
        matches!(e, Error::Unequal { ranks: 2, data: 4, .. })
    });
    let named = adam().with(AdamW::default(), ["c"]);
    all(refused("tp=2,dp=2", cut.clone(), named, on()), |e| matches!(e, Error::UnknownParam { .. }));
    let clip = Options { clip: Clip::BeforeReduce, stage: Stage::Zero2, ..on() };
    all(refused("tp=2,dp=2", cut, adam(), clip), |e| matches!(e, Error::Shard(_)));
    let cut = || Placement::whole().cut(Axis::Tp, 0);
    let clip = Options { clip: Clip::BeforeReduce, ..on() };
    all(refused("tp=2,dp=2", cut(), adam(), clip), |e| {
        matches!(e, Error::Shard(meshstep_shard::Error::Shared { .. }))
    });
    let twice = Placement::whole().gradient(Gradient::PartialSum).reduced_over(Axis::Dp | Axis::Tp);
    all(refused("tp=2,dp=2", twice, adam(), on()), |e| {
        matches!(e, Error::Mesh(MeshError::PartialAndReduced { .. }))
    });
    let whole = Options { stage: Stage::WholeParams(Owners::SortedGreedy), ..on() };
    all(refused("tp=2,dp=2", cut(), Groups::new(Muon::default()), whole), |e| matches!(e, Error::Shard(_)));
    let weighted = Options { combine: Combine::Weighted, ..on() };
    all(refused("cp=2,dp=2", Placement::whole().reduced_over(Axis::Dp), adam(), weighted), |e| {
        matches!(e, Error::Unequal { ranks: 2, data: 4, .. })
    });
}

/// One rank along tp passes a different weight for the shared micro-batch: every rank gets an error, and the next step works.
#[test]
fn weights_that_differ_along_tp_are_told() {
    let model = Model::builder().param("w", &[4], F32, Placement::whole()).build().unwrap();
    for (mesh, odd, ranks, weights) in [
        ("tp=2,cp=2,dp=2", 5, [4, 5], [3, 7]),
        ("dp_replicate=2,dp_shard=2,tp=2", 2, [2, 3], [7, 3]),
        ("tp=8", 6, [0, 6], [3, 7]),
    ] {
        for stage in STAGES {
            let told = loopback::spawn(8, |world: Arc<dyn Communicator>| {
                let rank = world.rank();
                let options = Options { stage, combine: Combine::Weighted, ..Options::default() };
                let mut opt = Optimizer::new(
                    world,
                    mesh.parse().unwrap(),
                    &model,
                    Sgd::default(),
                    |_, _, _| Ok(()),
                    options,
                )
                .unwrap();
                let mut step = |weight, dropped: bool| {
                    let mb = opt.micro_batch(weight).unwrap();
                    mb.grad("w", &[1f32; 4][..]).unwrap();
                    mb.finish().unwrap();
                    if dropped {
                        opt.discard_gradients().unwrap();
                        return Ok(());
                    }
                    opt.step(StepArgs::default()).map(|pending| pending.outcome().map(drop).unwrap())
                };
                let odd = if rank == odd { 7 } else { 3 };
                step(odd, true).unwrap();
                let told = step(odd, false).unwrap_err();
                // Different data has different weights.
                step(1 + place(mesh, rank), false).unwrap();
                told
            });
            for told in told.unwrap() {
                let tp = Axes::from(Axis::Tp);
                let is = matches!(&told, Error::Weights { ranks: r, weights: w, axes } if (*r, *w, *axes) == (ranks, weights, tp));
                assert!(is, "{mesh} {stage:?}: {told}");
            }
        }
    }
}

/// Returns a number for each index along dp and cp.
fn place(mesh: &str, rank: usize) -> u64 {
    let mesh: Mesh = mesh.parse().unwrap();
    let at = mesh.coordinate(rank).unwrap();
    (mesh.place(&at, Axis::Dp) * 8 + mesh.place(&at, Axis::Cp)) as u64
}

/// One rank with a different placement: every rank gets an error, and none waits for a group that never forms.
#[test]
fn ranks_with_different_models_are_told() {
    let told = loopback::spawn(4, |world: Arc<dyn Communicator>| {
        let dim = usize::from(world.rank() == 2);
        let model =
            Model::builder().param("w", &[4, 4], F32, Placement::whole().cut(Axis::Tp, dim)).build().unwrap();
        let mesh = if world.rank() == 3 { "tp=4" } else { "tp=2,dp=2" }.parse().unwrap();
        Optimizer::new(world, mesh, &model, AdamW::default(), |_, _, _| Ok(()), Options::default())
            .unwrap_err()
    });
    for error in told.unwrap() {
        assert!(matches!(&error, Error::Models { what, rank: 2, .. } if what == "parameter 0"), "{error}");
    }
}

/// A tied parameter is one parameter and can be accessed by either name.
#[test]
fn tied_parameters_go_by_either_name() {
    let model = || {
        let placement = Placement::whole().cut(Axis::Tp, 0);
        let model = Model::builder().param("wte", &[8, 2], F32, placement.clone()).param(
            "other",
            &[8],
            F32,
            placement,
        );
        model.tied("lm_head", "wte", &[8, 2])
    };
    let tied = model().build().unwrap();
    assert_eq!(tied.tied(), [("lm_head", "wte")]);
    let new = |world: &Arc<dyn Communicator>, model: &Model, rules: Groups| {
        let mesh = "tp=2,dp=2".parse().unwrap();
        Optimizer::new(Arc::clone(world), mesh, model, rules, |_, _, _| Ok(()), Options::default())
    };
    let sgd = |weight_decay| Sgd { weight_decay, ..Sgd::default() };
    let run = |world: Arc<dyn Communicator>, names: &[&str], handed: &str| {
        let mut opt = new(&world, &tied, Groups::new(sgd(0.0)).with(sgd(0.5), names.to_vec())).unwrap();
        for _ in 0..2 {
            let mb = opt.micro_batch(1).unwrap();
            let mut slot = mb.slot(handed).unwrap();
            slot.as_mut().unwrap().typed_mut::<f32>().unwrap().fill(1.0);
            slot.fill().unwrap();
            for name in ["wte", "lm_head"] {
                let told = mb.grad(name, &[1f32; 8][..]).unwrap_err();
                assert!(matches!(told, meshstep_shard::Error::GradTwice { .. }), "{told}");
            }
            let told = mb.grad("head", &[1f32; 8][..]).unwrap_err();
            assert!(matches!(told, meshstep_shard::Error::UnknownParam { .. }), "{told}");
            mb.grad("other", &[1f32; 4][..]).unwrap();
            mb.finish().unwrap();
            let _ = opt.step(StepArgs { lr: 1.0, ..StepArgs::default() }).unwrap().outcome().unwrap();
        }
        assert_eq!((opt.state("lm_head").unwrap().t, opt.optimizer().params().count()), (2, 2));
        ["wte", "lm_head", "other"].map(|name| opt.param(name).unwrap().typed::<f32>().unwrap()[0])
    };
    for names in [&["lm_head"][..], &["wte"], &["lm_head", "wte"]] {
        for handed in ["wte", "lm_head"] {
            let told = loopback::spawn(4, |world: Arc<dyn Communicator>| run(world, names, handed)).unwrap();
            assert_eq!(told, [[-1.5, -1.5, -2.0]; 4], "{names:?} {handed}");
        }
    }
    let refused = loopback::spawn(4, |world: Arc<dyn Communicator>| {
        let twice = Groups::new(sgd(0.0)).with(sgd(0.5), ["lm_head"]).with(sgd(0.1), ["wte"]);
        let twice = new(&world, &tied, twice).unwrap_err();
        let model = if world.rank() == 2 { model().tied("head", "wte", &[8, 2]) } else { model() };
        (twice, new(&world, &model.build().unwrap(), sgd(0.0).into()).unwrap_err())
    });
    for (twice, models) in refused.unwrap() {
        assert!(matches!(twice, Error::Shard(meshstep_shard::Error::InTwoGroups { .. })), "{twice}");
        // The first alias in alphabetical order.
        let tied = "tied parameter \"lm_head\"";
        assert!(matches!(&models, Error::Models { what, rank: 2, .. } if what == tied), "{models}");
    }
}
