//! Communicators have the same members as the mesh's groups.

use Axis::{Cp, Dp, Pp, Tp};
use meshstep_comm::{Communicator, Op, loopback};
use meshstep_parallel3d::{Axes, Axis, Communicators, Error, Mesh, MeshError};
use meshstep_tensor::{Buffer, Category, DType, Meter, Queue};
use std::sync::Arc;

/// Returns the members of a communicator in its order: world ranks, gathered.
fn members(comm: &dyn Communicator, rank: usize) -> Vec<usize> {
    let mut ranks = Buffer::zeroed(comm.world_size(), DType::U64, &Meter::new(), Category::Staging).unwrap();
    ranks.as_mut().into_typed::<u64>().unwrap()[comm.rank()] = rank as u64;
    let started = comm.start(Op::all_gather(), ranks, &Queue::cpu());
    let (ranks, gathered) = started.map_err(|(_, error)| error).unwrap().wait(&Queue::cpu());
    gathered.unwrap();
    ranks.as_slice().typed::<u64>().unwrap().iter().map(|&rank| rank as usize).collect()
}

#[test]
fn communicators_join_the_ranks_of_the_meshs_groups() {
    let sets: [Axes; 6] = [Tp.into(), Dp | Cp, Cp.into(), Tp | Cp | Dp, Pp.into(), Axes::NONE];
    loopback::spawn(8, |comm: Arc<dyn Communicator>| {
        let mesh: Mesh = "tp=2,cp=2,dp=2".parse().unwrap();
        let rank = comm.rank();
        // Each rank passes the sets in a different order.
        let mut own = sets;
        own.rotate_left(rank % 6);
        let all = Communicators::new(comm, mesh.clone(), own).unwrap();
        for axes in sets {
            let expected: Vec<usize> = mesh.group(rank, axes).unwrap().ranks().collect();
            assert_eq!(members(&**all.along(axes).unwrap(), rank), expected, "{axes} on rank {rank}");
        }
        let unasked = all.along(Tp | Cp).unwrap_err();
        assert!(matches!(unasked, Error::NotAlong { axes } if axes == (Tp | Cp)), "{unasked}");
    })
    .unwrap();
}

#[test]
fn a_mesh_of_another_size_is_refused_everywhere() {
    let refused = loopback::spawn(3, |comm: Arc<dyn Communicator>| {
        Communicators::new(comm, "tp=2,dp=2".parse().unwrap(), [Tp.into()]).unwrap_err()
    });
    for error in refused.unwrap() {
        assert!(
            matches!(error, Error::Mesh(MeshError::WorldSize { ranks: 4, world_size: 3, .. })),
            "{error}"
        );
    }
}
