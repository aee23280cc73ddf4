//! What does not go together is a typed error on every rank.

use crate::worker::{Job, plans};
use meshstep_comm::loopback;
use meshstep_parallel3d::{Error, LocalOptimizer, Mesh, MeshError, replicas};
use meshstep_shard::Stage;
use meshstep_shard::local::{Fragment, LocalError, LocalPlan, Select, Timing, What};

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
    // What no mesh cuts has elements that all ranks know.
    assert!(refused(elements("pos", 3..9)).iter().all(Result::is_ok));
    for told in refused(Select::Names(vec!["nowhere".into()])) {
        assert!(matches!(&told, Err(LocalError::UnknownParam { name, .. }) if name == "nowhere"), "{told:?}");
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
