//! Incompatible plans, meshes and workers: a typed error on every rank.

use crate::local::worker::{Job, plans};
use meshstep_comm::loopback;
use meshstep_local::{Fragment, LocalError, LocalPlan, Select, Timing, What, Workers};
use meshstep_parallel3d::{Axis, Error, LocalOptimizer, Mesh, MeshError, Model, Placement, replicas};
use meshstep_shard::{Error as ShardError, Stage};
use meshstep_tensor::DType;

fn of(params: Select) -> LocalPlan {
    LocalPlan::new(vec![Fragment { params, ..Fragment::mean(What::Params, Timing::every(2)) }])
}

fn elements(name: &str, range: std::ops::Range<usize>) -> Select {
    Select::Elements { name: name.into(), range }
}

#[test]
fn plans_that_cannot_be_followed_are_refused_everywhere() {
    let refused = |params: Select| {
        let (_, _, rules) = plans().remove(0);
        let (job, mesh) = (Job::new(Stage::Zero1, &of(params), &rules), "dp_replicate=2,tp=2");
        let mesh: Mesh = mesh.parse().unwrap();
        let made = loopback::spawn(4, |world| {
            let (comm, own, workers) = replicas(world, &mesh).unwrap();
            LocalOptimizer::new(job.optimizer(comm, &own), workers, job.plan.clone()).map(drop)
        });
        made.unwrap()
    };
    for told in refused(elements("qkv", 3..9)) {
        let is = matches!(&told, Err(LocalError::CutElements { name, len: 48, whole: 96 }) if name == "qkv");
        assert!(is, "{told:?}");
    }
    // Element ranges of uncut parameters are valid on all ranks.
    assert!(refused(elements("pos", 3..9)).iter().all(Result::is_ok));
    for told in refused(Select::Names(vec!["nowhere".into()])) {
        assert!(matches!(&told, Err(LocalError::UnknownParam { name, .. }) if name == "nowhere"), "{told:?}");
    }
}

#[test]
fn tied_parameters_go_by_either_name() {
    let (_, _, rules) = plans().remove(0);
    let digest = |name: &str| {
        let job = Job::new(Stage::Zero1, &of(Select::Names(vec![name.into()])), &rules);
        let all = loopback::spawn(1, |comm| job.optimizer(comm, &"tp=1".parse().unwrap()).digest(&job.plan));
        all.unwrap()[0]
    };
    assert_eq!(digest("head"), digest("wte"));
    assert_ne!(digest("head"), digest("pos"));
}

#[test]
fn one_mesh_among_others_is_refused_everywhere() {
    let begin = std::time::Instant::now();
    for odd in ["tp=2", "tp=2,dp_replicate=2", "dp_replicate=4"] {
        let made = loopback::spawn(4, |world| {
            let mesh = if world.rank() == 1 { odd } else { "dp_replicate=2,tp=2" };
            let mesh = match odd {
                "tp=2,dp_replicate=2" if world.rank() == 1 => {
                    Mesh::new([(Axis::Tp, 2), (Axis::DpReplicate, 2)])
                }
                _ => mesh.parse(),
            };
            replicas(world, &mesh.unwrap()).map(drop)
        });
        for (rank, told) in made.unwrap().into_iter().enumerate() {
            let own = matches!(told, Err(Error::Mesh(MeshError::WorldSize { ranks: 2, .. })));
            let all = matches!(&told, Err(Error::Shard(ShardError::Disagree { rank: 1, .. })));
            assert!(if (rank, odd) == (1, "tp=2") { own } else { all }, "{odd}, rank {rank}: {told:?}");
        }
    }
    assert!(begin.elapsed() < std::time::Duration::from_secs(20));
}

/// A worker with ranks that hold different elements than their peers cannot exchange with them, and cannot join.
#[test]
fn workers_that_are_arranged_otherwise_are_refused_everywhere() {
    let (_, plan, rules) = plans().remove(2);
    let cut = |dim| Placement::whole().cut(Axis::Tp, dim);
    let model = |dim| Model::builder().param("up", &[16, 8], DType::F32, cut(dim)).build().unwrap();
    let job = |dim| Job { model: model(dim), ..Job::new(Stage::Zero3, &plan, &rules) };
    let of = |(mesh, dim): (&str, usize), comm| job(dim).optimizer(comm, &mesh.parse().unwrap());
    let first = ("tp=2", 1);
    for odd in [("dp_shard=2", 1), ("tp=2", 0)] {
        let made = loopback::spawn(4, |world| {
            let worker = world.rank() / 2;
            let (comm, workers) = Workers::split(world, worker as u32).unwrap();
            LocalOptimizer::new(of([first, odd][worker], comm), workers, plan.clone()).map(drop)
        });
        for told in made.unwrap() {
            let is = matches!(&told, Err(LocalError::Shard(ShardError::Disagree { rank: 2, .. })));
            assert!(is, "{odd:?}: {told:?}");
        }
        let digest = |of_it| loopback::spawn(2, |comm| of(of_it, comm).digest(&plan)).unwrap()[0];
        assert_ne!(digest(first), digest(odd), "{odd:?}");
        assert_eq!(digest(odd), digest(odd));
    }
}

#[test]
fn a_mesh_of_another_size_is_refused_everywhere() {
    let mesh: Mesh = "dp_replicate=2,tp=2".parse().unwrap();
    let made = loopback::spawn(3, |world| replicas(world, &mesh).map(drop)).unwrap();
    for told in made {
        let is = matches!(told, Err(Error::Mesh(MeshError::WorldSize { ranks: 4, world_size: 3, .. })));
        assert!(is, "{told:?}");
    }
}
