//! A difference on a mesh is reported with its vector, the ranks' coordinates, and the element of the whole parameter.

mod clean;
mod gradients;

use meshstep_comm::{Communicator, loopback};
use meshstep_optim::AdamW;
use meshstep_parallel3d::{
    Axes, Axis, Differs, Error, Gradient, Mesh, Model, Optimizer, Parameter, Piece, Placement,
};
use meshstep_shard::{MicroBatch, Options, Owners, Stage, Step, StepArgs, Until};
use meshstep_tensor::DType::F32;
use meshstep_tensor::{Meter, SliceMut};
use std::sync::Arc;

const AT: StepArgs = StepArgs { lr: 0.01, max_norm: Some(1.0), grad_scale: 1.0 };

/// A norm with partial gradients along tp, one with equal gradients, and matrices cut in three ways.
fn model() -> Model {
    let whole = Placement::whole();
    Model::builder()
        .param("ln", &[70], F32, whole.clone().gradient(Gradient::PartialSum))
        .param("pos", &[40, 3], F32, whole.clone())
        .param("up", &[16, 20], F32, whole.clone().cut(Axis::Tp, 0))
        .param("down", &[10, 16], F32, whole.clone().cut(Axis::Tp, 1))
        .param("qkv", &[32, 6], F32, whole.cut_in_blocks(Axis::Tp, 0, [16, 8, 8]))
        .build()
        .unwrap()
}

fn built(world: Arc<dyn Communicator>, mesh: &str, stage: Stage) -> Optimizer {
    let rank = world.rank();
    let options = Options { stage, bucket_len: Some(300), meter: Meter::new(), ..Options::default() };
    let initial = |p: &Parameter, pieces: &[Piece], mut values: SliceMut<'_>| {
        // Different values on ranks that hold different parts.
        let salt = pieces.iter().flat_map(|piece| &piece.global).fold(p.name.len(), |s, r| s * 31 + r.start);
        let own: Vec<f32> = (0..values.len()).map(|i| ((i * 7 + salt) % 101) as f32 / 32.0 - 1.5).collect();
        values.copy_from((&own[..]).into())
    };
    let opt = Optimizer::new(world, mesh.parse().unwrap(), &model(), AdamW::default(), initial, options);
    let opt = opt.unwrap();
    assert_eq!(opt.optimizer().comm().rank(), rank);
    opt
}

/// Takes a step with gradients that are equal for equal parts.
fn take(opt: &mut Optimizer, t: usize) -> Result<(), Error> {
    let lens: Vec<(String, usize)> =
        opt.optimizer().params().map(|p| (p.name().to_owned(), p.len())).collect();
    let mb = opt.micro_batch(1)?;
    for (name, len) in lens {
        let grad: Vec<f32> = (0..len).map(|i| ((i * 5 + t * 3) % 17) as f32 - 8.0).collect();
        mb.grad(&name, &grad[..])?;
    }
    mb.finish()?;
    opt.step(AT)?.outcome()?;
    Ok(())
}

fn differs(error: Error) -> Differs {
    match error {
        Error::Differs(differs) => *differs,
        other => panic!("{other}"),
    }
}

/// Flips the lowest bit of one element of a vector on the rank at `at`. Returns the error that all ranks get from `verify`; the next step
/// reports the same.
fn flipped(mesh: &str, stage: Stage, at: &str, (name, slot): (&str, &str), element: usize) -> Differs {
    let shape: Mesh = mesh.parse().unwrap();
    let told = loopback::spawn(shape.world_size(), |world: Arc<dyn Communicator>| {
        let mut opt = built(world, mesh, stage);
        opt.verify_every(1).unwrap();
        take(&mut opt, 1).unwrap();
        if opt.coordinate().to_string() == at {
            opt.flip_bit(name, slot, element, 0).unwrap();
        }
        let told = opt.verify().unwrap_err();
        assert_eq!(take(&mut opt, 2).unwrap_err().to_string(), told.to_string());
        differs(told)
    });
    let told = told.unwrap();
    assert!(told.iter().all(|differs| *differs == told[0]));
    let differs = told[0].clone();
    assert_eq!((&differs.difference.param[..], differs.difference.slot), (name, slot));
    assert_eq!(differs.at.iter().map(|at| at.to_string()).collect::<Vec<_>>(), [at], "{differs}");
    assert_eq!((differs.difference.element, differs.difference.more), (Some(element), 0));
    assert_eq!(differs.difference.apart().unwrap().ulps, 1);
    differs
}

const CUBE: &str = "tp=2,cp=2,dp=2";

#[test]
fn a_norm_weight_on_a_tensor_parallel_rank_is_named() {
    for stage in [Stage::Replicated, Stage::Zero1, Stage::Zero2, Stage::WholeParams(Owners::RoundRobin)] {
        let told = flipped(CUBE, stage, "dp=0 cp=0 tp=1", ("ln", "param"), 33);
        assert_eq!((told.difference.odd(), told.difference.held.len()), (vec![1], 8));
        assert_eq!(told.axes, Axis::Dp | Axis::Cp | Axis::Tp);
        assert_eq!((told.element, told.index), (Some(33), Some(vec![33])));
    }
    let told = flipped("tp=4", Stage::Zero1, "tp=2", ("ln", "param"), 69);
    assert_eq!((told.axes, told.difference.odd()), (Axes::from(Axis::Tp), vec![2]));
}

#[test]
fn a_replicated_moment_on_a_context_parallel_rank_is_named() {
    let told = flipped(CUBE, Stage::Replicated, "dp=0 cp=1 tp=0", ("pos", "m"), 100);
    assert_eq!((told.difference.odd(), told.difference.held.len()), (vec![2], 8));
    assert_eq!(told.index, Some(vec![33, 1]));
    // Cut along tp: four ranks have the same part; the element is reported in the whole parameter.
    let told = flipped(CUBE, Stage::Replicated, "dp=1 cp=1 tp=1", ("down", "v"), 8 + 3);
    let ranks: Vec<usize> = told.difference.held.iter().map(|held| held.rank).collect();
    assert_eq!((ranks, told.axes), (vec![1, 3, 5, 7], Axis::Dp | Axis::Cp));
    assert_eq!((told.index, told.element), (Some(vec![1, 8 + 3]), Some(16 + 8 + 3)));
}

#[test]
fn a_sharded_moment_is_named() {
    let moments = [Stage::Zero1, Stage::Zero2, Stage::Zero3].map(|stage| (stage, "v"));
    for (stage, slot) in moments.into_iter().chain([(Stage::Zero3, "param")]) {
        // `up` has 20 columns; the ranks along dp x cp own 64 elements each, padded.
        let told = flipped(CUBE, stage, "dp=0 cp=1 tp=1", ("up", slot), 64 + 5);
        let down = &told.difference;
        assert_eq!((down.odd(), down.held.len(), told.axes), (vec![3], 1, Axes::NONE), "{told}");
        assert!(down.wrote.is_some());
        assert_eq!((told.index, told.element), (Some(vec![8 + 3, 9]), Some((8 + 3) * 20 + 9)));
    }
}

/// A shard with replicas: along dp_replicate, and along tp for a whole parameter.
#[test]
fn a_shard_with_replicas_is_compared_with_them() {
    let mesh = "dp_replicate=4,dp_shard=2";
    for (stage, slot) in [(Stage::Zero2, "m"), (Stage::Zero3, "m"), (Stage::Zero3, "param")] {
        let told = flipped(mesh, stage, "dp_replicate=2 dp_shard=1", ("down", slot), 64 + 70);
        let ranks: Vec<usize> = told.difference.held.iter().map(|held| held.rank).collect();
        assert_eq!((ranks, told.difference.odd()), (vec![1, 3, 5, 7], vec![5]));
        assert_eq!((told.axes, told.difference.wrote), (Axes::from(Axis::DpReplicate), None));
    }
    // Cut along tp, with the part divided along dp_shard.
    let mesh = "dp_replicate=3,dp_shard=2,tp=2";
    let told = flipped(mesh, Stage::Zero3, "dp_replicate=1 dp_shard=1 tp=1", ("up", "param"), 80 + 70);
    let ranks: Vec<usize> = told.difference.held.iter().map(|held| held.rank).collect();
    assert_eq!((ranks, told.difference.odd()), (vec![3, 7, 11], vec![7]));
    assert_eq!(told.index, Some(vec![8 + 7, 10]));
    let told = flipped("tp=4,dp=2", Stage::Zero1, "dp=1 tp=3", ("pos", "v"), 64);
    let ranks: Vec<usize> = told.difference.held.iter().map(|held| held.rank).collect();
    assert_eq!((ranks, told.axes), (vec![4, 5, 6, 7], Axes::from(Axis::Tp)));
}

#[test]
fn a_parameter_on_a_data_parallel_rank_is_named() {
    let told = flipped("tp=2,dp=4", Stage::Zero2, "dp=3 tp=0", ("qkv", "param"), 8 * 6 + 13);
    let ranks: Vec<usize> = told.difference.held.iter().map(|held| held.rank).collect();
    assert_eq!((ranks, told.difference.odd()), (vec![0, 2, 4, 6], vec![6]));
    assert_eq!(told.axes, Axes::from(Axis::Dp));
    // Rows 8..12 of the rank's part are the first half of the second block, which begins at row 16.
    assert_eq!((told.index, told.element), (Some(vec![16 + 2, 1]), Some(18 * 6 + 1)));
}

/// Two ranks: there is no majority, and both are reported.
#[test]
fn a_tie_names_both() {
    let told = loopback::spawn(4, |world: Arc<dyn Communicator>| {
        let mut opt = built(world, "tp=2,dp=2", Stage::Zero1);
        if opt.coordinate().to_string() == "dp=1 tp=1" {
            opt.flip_bit("up", "param", 21, 4).unwrap();
        }
        let told = opt.verify().unwrap_err();
        (told, opt.repair().unwrap_err())
    });
    for (told, refused) in told.unwrap() {
        assert!(matches!(&refused, Error::NoMajority(of) if **of == differs(told.clone())), "{refused}");
        let text = told.to_string();
        assert!(text.ends_with("(dp=0 tp=1) and (dp=1 tp=1), among ranks along dp; the element is [9, 1] of the whole parameter"), "{text}");
        let told = differs(told);
        assert_eq!((told.axes, told.difference.odd()), (Axes::from(Axis::Dp), vec![]));
    }
}

/// A step with a closure reports the location of a difference as any other step does.
#[test]
fn a_step_with_a_closure_tells_where() {
    let told = loopback::spawn(4, |world: Arc<dyn Communicator>| {
        let mut opt = built(world, "tp=2,dp=2", Stage::Zero1);
        opt.verify_every(1).unwrap();
        if opt.optimizer().comm().rank() == 3 {
            opt.flip_bit("up", "param", 21, 4).unwrap();
        }
        let lens: Vec<(String, usize)> =
            opt.optimizer().params().map(|p| (p.name().to_owned(), p.len())).collect();
        let closure = |mb: &MicroBatch<'_>| -> Result<f64, meshstep_shard::Error> {
            lens.iter().try_for_each(|(name, len)| mb.grad(name, &vec![1f32; *len][..]).map(drop))?;
            Ok(1.0)
        };
        let until = Until { max_iter: 2, ..Until::default() };
        let step = opt.step_with(AT, 1, closure).unwrap_err();
        let run = opt.minimize(until, |_| AT, 1, closure).unwrap_err();
        [step, run].map(|told| differs(told).index)
    });
    assert_eq!(told.unwrap(), vec![[Some(vec![9, 1]), Some(vec![9, 1])]; 4]);
}

/// Some ranks verify while others step, for every split into the two: all of them get an error, and none waits.
#[test]
fn ranks_that_verify_while_others_step_are_told() {
    for (s, stage) in [Stage::Replicated, Stage::Zero1, Stage::Zero2].into_iter().enumerate() {
        for (m, mesh) in ["tp=2,dp=2", "dp_replicate=2,dp_shard=2", "cp=2,tp=2"].into_iter().enumerate() {
            for verifying in (1u32..15).filter(|n| meshstep_cases::tried(15 * (3 * s + m) + *n as usize, 1)) {
                let told = loopback::spawn(4, |world: Arc<dyn Communicator>| {
                    let rank = world.rank();
                    let mut opt = built(world, mesh, stage);
                    let told =
                        if verifying >> rank & 1 > 0 { opt.verify().map(drop) } else { take(&mut opt, 1) };
                    drop(opt);
                    told
                });
                for told in told.unwrap() {
                    let comm = matches!(&told, Err(Error::Shard(meshstep_shard::Error::Comm(_))));
                    assert!(comm, "{mesh} {stage:?} {verifying:b}: {told:?}");
                }
            }
        }
    }
}
