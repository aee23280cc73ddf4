//! Ranks, coordinates and groups: Megatron's tables, and properties of any mesh.

use Axis::{Cp, Dp, DpReplicate, DpShard, Pp, Tp};
use meshstep_parallel3d::{Axes, Axis, Mesh, MeshError, UnknownAxis};
use proptest::prelude::*;

fn table(mesh: &Mesh, axes: impl Into<Axes>) -> Vec<Vec<usize>> {
    mesh.groups(axes).map(|group| group.ranks().collect()).collect()
}

/// Output of Megatron-Core's `generate_masked_orthogonal_rank_groups` for tp-cp-dp-pp.
#[test]
fn groups_are_megatrons() {
    let mesh = Mesh::megatron("tp-cp-dp-pp", [(Tp, 2), (Cp, 2), (Dp, 2)]).unwrap();
    let expected: [(Axes, &[&[usize]]); 7] = [
        (Tp.into(), &[&[0, 1], &[2, 3], &[4, 5], &[6, 7]]),
        (Cp.into(), &[&[0, 2], &[1, 3], &[4, 6], &[5, 7]]),
        (Dp.into(), &[&[0, 4], &[1, 5], &[2, 6], &[3, 7]]),
        (Dp | Cp, &[&[0, 2, 4, 6], &[1, 3, 5, 7]]),
        (Tp | Cp, &[&[0, 1, 2, 3], &[4, 5, 6, 7]]),
        (Tp | Dp, &[&[0, 1, 4, 5], &[2, 3, 6, 7]]),
        (Pp.into(), &[&[0], &[1], &[2], &[3], &[4], &[5], &[6], &[7]]),
    ];
    for (axes, groups) in expected {
        assert_eq!(table(&mesh, axes), groups, "{axes}");
    }
    // The order determines the neighbours.
    let pp_inside = Mesh::megatron("tp-pp-dp", [(Tp, 2), (Dp, 2), (Pp, 2)]).unwrap();
    assert_eq!(table(&pp_inside, Dp), [[0, 4], [1, 5], [2, 6], [3, 7]]);
    assert_eq!(table(&pp_inside, Pp), [[0, 2], [1, 3], [4, 6], [5, 7]]);
}

#[test]
fn there_are_three_ways_to_write_a_mesh() {
    let mesh = Mesh::new([(Pp, 1), (Dp, 4), (Cp, 1), (Tp, 2)]).unwrap();
    assert_eq!(Mesh::megatron("tp-cp-dp-pp", [(Dp, 4), (Tp, 2)]).unwrap(), mesh);
    let read: Mesh = "tp=2, dp=4".parse().unwrap();
    assert_eq!(read.axes(), [(Dp, 4), (Tp, 2)]);
    assert_eq!(table(&read, Tp), table(&mesh, Tp));
    assert_eq!(read.to_string(), "dp=4,tp=2");
    assert_eq!(read.to_string().parse(), Ok(read));
}

/// `dp` split into two parts still works as one axis.
#[test]
fn dp_in_two_parts_is_dp() {
    let mesh = Mesh::new([(DpReplicate, 2), (DpShard, 2), (Tp, 2)]).unwrap();
    assert_eq!(table(&mesh, Dp), [[0, 2, 4, 6], [1, 3, 5, 7]]);
    assert_eq!(table(&mesh, DpShard), [[0, 2], [1, 3], [4, 6], [5, 7]]);
    assert_eq!(table(&mesh, DpReplicate), [[0, 4], [1, 5], [2, 6], [3, 7]]);
    assert_eq!((mesh.degree(Dp), mesh.degree(Dp | Tp), mesh.degree(Cp)), (4, 8, 1));
    let last = mesh.coordinate(7).unwrap();
    assert!(!last.is_first(Tp) && last.clone().with(Tp, 0).is_first(Tp | Cp));
    assert_eq!(mesh.rank(&last.with(Tp, 0)), 6);
    let firsts =
        |axes: Axes| (0..8).filter(|&rank| mesh.coordinate(rank).unwrap().is_first(axes)).collect::<Vec<_>>();
    assert_eq!((firsts(Dp.into()), firsts(DpShard | Tp)), (vec![0, 1], vec![0, 4]));
}

#[test]
fn what_is_wrong_is_named() {
    assert_eq!(Mesh::new([(Tp, 0)]), Err(MeshError::NoRanks { axis: Tp }));
    assert_eq!(Mesh::new([(Tp, 2), (Dp, 2), (Tp, 2)]), Err(MeshError::AxisTwice { axis: Tp }));
    assert_eq!("tp=2,tp=2".parse::<Mesh>(), Err(MeshError::AxisTwice { axis: Tp }));
    assert_eq!(Mesh::new([(Dp, 2), (DpShard, 2)]), Err(MeshError::DpTwice { part: DpShard }));
    assert_eq!(Mesh::new([(Dp, usize::MAX), (Tp, 2)]), Err(MeshError::TooManyRanks));
    let unknown = |name: &str| Err(MeshError::UnknownAxis(UnknownAxis { name: name.into() }));
    assert_eq!("ep=2".parse::<Mesh>(), unknown("ep"));
    assert_eq!(Mesh::megatron("tp-ep-dp", []), unknown("ep"));
    assert_eq!(Mesh::megatron("tp-dp", [(Tp, 2), (Tp, 4)]), Err(MeshError::AxisTwice { axis: Tp }));
    let order = "tp-dp".to_owned();
    assert_eq!(Mesh::megatron("tp-dp", [(Cp, 2)]), Err(MeshError::NotInOrder { axis: Cp, degree: 2, order }));
    assert_eq!("tp:2".parse::<Mesh>(), Err(MeshError::Unreadable { part: "tp:2".into() }));
    assert_eq!("tp=-2".parse::<Mesh>(), Err(MeshError::Unreadable { part: "tp=-2".into() }));
    let mesh: Mesh = "tp=2,dp=3".parse().unwrap();
    assert_eq!(mesh.coordinate(6), Err(MeshError::NoSuchRank { rank: 6, world_size: 6 }));
    assert_eq!(mesh.group(6, Tp), Err(MeshError::NoSuchRank { rank: 6, world_size: 6 }));
    let text = mesh.of(8).unwrap_err().to_string();
    assert_eq!(text, "mesh dp=3,tp=2 has 6 ranks, the world 8; the degrees must multiply to 8");
}

/// A hundred thousand ranks cost arithmetic, not memory.
#[test]
fn large_worlds_are_quick() {
    let mesh = Mesh::new([(Pp, 10), (Dp, 250), (Cp, 5), (Tp, 8)]).unwrap();
    assert_eq!(mesh.world_size(), 100_000);
    for axes in [Tp.into(), Tp | Dp, Dp | Cp, Pp | Cp] {
        let covered: usize = mesh.groups(axes).map(|group| group.len()).sum();
        assert_eq!(covered, 100_000);
    }
    let group = mesh.group(99_999, Dp).unwrap();
    assert_eq!((group.len(), group.rank(249), group.place(99_999)), (250, 99_999, Some(249)));
}

prop_compose! {
    fn meshes()(
        order in Just(Axis::ALL.to_vec()).prop_shuffle(),
        degrees in prop::collection::vec(1usize..5, 6),
        parts in any::<bool>(),
        kept in 0usize..6,
    ) -> Mesh {
        let fits = |axis: &Axis| if parts { *axis != Dp } else { !matches!(axis, DpReplicate | DpShard) };
        let axes = order.into_iter().filter(fits).take(kept).zip(degrees);
        Mesh::new(axes).unwrap()
    }
}

proptest! {
    #[test]
    fn ranks_and_coordinates_are_one_to_one(mesh in meshes()) {
        let mut seen = std::collections::HashSet::new();
        for rank in 0..mesh.world_size() {
            let coordinate = mesh.coordinate(rank).unwrap();
            prop_assert_eq!(mesh.rank(&coordinate), rank);
            prop_assert!(mesh.axes().iter().all(|&(axis, degree)| coordinate.along(axis) < degree));
            prop_assert!(seen.insert(coordinate));
        }
    }

    /// Every rank is in one group of the right size, at its index; members share exactly the coordinates off the axes.
    #[test]
    fn groups_are_a_disjoint_cover(mesh in meshes(), picks in any::<[bool; 6]>()) {
        let axes: Axes = Axis::ALL.into_iter().zip(picks).filter(|(_, picked)| *picked).map(|(axis, _)| axis).collect();
        let free = mesh.resolve(axes);
        let mut count = vec![0; mesh.world_size()];
        for group in mesh.groups(axes) {
            let ranks: Vec<usize> = group.ranks().collect();
            prop_assert!(ranks.is_sorted());
            prop_assert_eq!(ranks.len(), mesh.degree(axes));
            let first = mesh.coordinate(ranks[0]).unwrap();
            for (place, &rank) in ranks.iter().enumerate() {
                count[rank] += 1;
                prop_assert_eq!(group.place(rank), Some(place));
                prop_assert_eq!(&mesh.group(rank, axes).unwrap(), &group);
                let own = mesh.coordinate(rank).unwrap();
                let fixed = mesh.axes().iter().filter(|(axis, _)| !free.contains(*axis));
                for &(axis, _) in fixed {
                    prop_assert_eq!(own.along(axis), first.along(axis));
                }
            }
            let outside = (0..mesh.world_size()).filter(|rank| !ranks.contains(rank));
            for rank in outside {
                prop_assert_eq!(group.place(rank), None);
            }
        }
        prop_assert!(count.iter().all(|&n| n == 1));
    }
}
