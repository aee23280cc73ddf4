//! Invalid input: the constructor returns an error on every rank that names axis and parameter, and no rank waits.

use meshstep_comm::{Communicator, loopback};
use meshstep_optim::AdamW;
use meshstep_parallel3d::{
    Axes, Axis, Error, Gradient, MeshError, Model, ModelBuilder, Optimizer, Placement, Plan, UnknownAxis,
};
use meshstep_shard::{Options, Stage, UnitError};
use meshstep_tensor::DType::{BF16, F32};
use meshstep_tensor::SliceMut;
use std::sync::Arc;

/// Errors of 8 ranks.
fn told(mesh: impl Fn(usize) -> &'static str + Sync, model: impl Fn(usize) -> Model + Sync) -> Vec<Error> {
    let ranks = loopback::spawn(8, |world: Arc<dyn Communicator>| {
        let rank = world.rank();
        let zeros = |_: &_, _: &[_], _: meshstep_tensor::SliceMut<'_>| Ok(());
        let mesh = mesh(rank).parse().unwrap();
        Optimizer::new(world, mesh, &model(rank), AdamW::default(), zeros, Options::default()).unwrap_err()
    });
    ranks.unwrap()
}

fn cut(dim: usize) -> Placement {
    Placement::whole().cut(Axis::Tp, dim)
}

fn two() -> ModelBuilder {
    Model::builder().param("up", &[16, 4], F32, cut(0)).param("ln", &[4], F32, Placement::whole())
}

#[test]
fn sizes_and_dimensions_that_do_not_go_with_the_mesh_are_named() {
    for error in told(|_| "tp=3,dp=2", |_| two().build().unwrap()) {
        let Error::Mesh(MeshError::WorldSize { ranks: 6, world_size: 8, .. }) = error else {
            panic!("{error}")
        };
    }
    for error in told(|_| "tp=8", |_| two().param("down", &[4, 20], F32, cut(1)).build().unwrap()) {
        let uneven = MeshError::Uneven { name: "down".into(), axis: Axis::Tp, degree: 8, dim: 1, extent: 20 };
        assert!(matches!(&error, Error::Mesh(found) if *found == uneven), "{error}");
        assert!(error.to_string().contains("pad to 24"), "{error}");
    }
    assert_eq!(
        "tp=2,ep=4".parse::<meshstep_parallel3d::Mesh>(),
        Err(UnknownAxis { name: "ep".into() }.into())
    );
    let tied = two().tied("head", "up", &[4, 16]).build();
    let text = tied.unwrap_err().to_string();
    assert!(
        text.contains("\"head\" with shape [4, 16]") && text.contains("\"up\" with shape [16, 4]"),
        "{text}"
    );
}

/// One rank with a different parameter list, along each axis and along all.
#[test]
fn ranks_with_other_parameters_are_named_with_their_axes() {
    let whole = Placement::whole;
    let more = |w: &[usize], dtype, placement| two().param("pos", w, dtype, placement).build().unwrap();
    let usual = || more(&[5, 3], F32, whole());
    let others: [(Model, &str); 7] = [
        (two().build().unwrap(), "parameter 2"),
        (two().param("pos2", &[5, 3], F32, whole()).build().unwrap(), "parameter 2"),
        (more(&[3, 5], F32, whole()), "parameter 2"),
        (more(&[5, 3], BF16, whole()), "parameter 2"),
        (more(&[5, 3], F32, whole().gradient(Gradient::PartialSum)), "parameter 2"),
        (
            two().param("pos", &[5, 3], F32, whole()).param("x", &[1], F32, whole()).build().unwrap(),
            "parameter 3",
        ),
        (Model::builder().param("ln", &[4], F32, whole()).build().unwrap(), "parameter 0"),
    ];
    let places: [(usize, Axes); 4] = [
        (2, Axis::Cp.into()),
        (4, Axis::Dp.into()),
        (1, Axis::Tp.into()),
        (7, Axis::Tp | Axis::Cp | Axis::Dp),
    ];
    for (other, expected) in &others {
        for (odd, along) in places {
            for error in told(|_| "tp=2,cp=2,dp=2", |rank| if rank == odd { other.clone() } else { usual() })
            {
                let Error::Models { what, rank, axes, .. } = &error else { panic!("{error}") };
                assert_eq!((&what[..], *rank, *axes), (*expected, odd, along), "{error}");
            }
        }
    }
    let text =
        told(|_| "tp=2,cp=2,dp=2", |rank| if rank == 2 { more(&[3, 5], F32, whole()) } else { usual() });
    let text = text[6].to_string();
    for part in
        ["parameter 2 along cp", "\"pos\" [5, 3] f32", "rank 2 (dp=0 cp=1 tp=0)", "\"pos\" [3, 5] f32"]
    {
        assert!(text.contains(part), "{text}");
    }
}

/// Input that one rank alone rejects is an error on all ranks, and so is a different mesh on one rank.
#[test]
fn what_one_rank_alone_is_given_reaches_all() {
    for odd in [0, 5] {
        let shape = |rank| [if rank == odd { 15 } else { 16 }, 4];
        let model = |rank| Model::builder().param("up", &shape(rank), F32, cut(0)).build().unwrap();
        for (rank, error) in told(|_| "tp=2,dp=4", model).into_iter().enumerate() {
            let text = error.to_string();
            assert!(
                text.contains("15 indices of \"up\"") && text.contains("along tp"),
                "rank {rank}: {text}"
            );
        }
        let mesh = |rank| if rank == odd { "tp=4,dp=2" } else { "tp=2,dp=4" };
        for error in told(mesh, |_| two().build().unwrap()) {
            let Error::Shard(meshstep_shard::Error::Disagree { what, .. }) = &error else {
                panic!("{error}")
            };
            assert_eq!(what, "mesh", "{error}");
        }
    }
}

/// A tied name of a parameter outside all units that is also the name of a unit.
#[test]
fn a_tied_name_that_is_a_unit_is_refused() {
    let model = || {
        let table = Model::builder().param("table", &[8, 4], F32, Placement::whole());
        table.unit("head").param("w", &[4], F32, Placement::whole()).tied("head", "table", &[8, 4])
    };
    for stage in [Stage::Zero2, Stage::Zero3] {
        let made = loopback::spawn(2, |world: Arc<dyn Communicator>| {
            let (zeros, options) =
                (|_: &_, _: &[_], _: SliceMut<'_>| Ok(()), Options { stage, ..Options::default() });
            let (mesh, model) = ("dp=2".parse().unwrap(), model().build().unwrap());
            let planned = Plan::new(&mesh, &model, AdamW::default(), &options).map(drop);
            [planned, Optimizer::new(world, mesh, &model, AdamW::default(), zeros, options).map(drop)]
        });
        for told in made.unwrap().into_iter().flatten() {
            match told {
                Ok(()) => assert_eq!(stage, Stage::Zero2),
                Err(Error::Shard(meshstep_shard::Error::Unit(UnitError::TwoOfOneName { name }))) => {
                    assert!(stage == Stage::Zero3 && name == "head");
                }
                Err(other) => panic!("{other}"),
            }
        }
    }
}
