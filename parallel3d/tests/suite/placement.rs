//! A rank's part of a parameter: shapes, pieces, counting, and refused placements.

use Axis::{Cp, Dp, DpReplicate, DpShard, Pp, Tp};
use meshstep_optim::Strided;
use meshstep_parallel3d::{Axes, Axis, Gradient, Mesh, MeshError, Model, Piece, Placement};
use meshstep_tensor::DType::{self, F32};
use proptest::prelude::*;
use std::ops::Range;

fn mesh(text: &str) -> Mesh {
    text.parse().unwrap()
}

fn pieces(placement: &Placement, shape: &[usize], mesh: &Mesh, rank: usize) -> Vec<Piece> {
    placement.pieces("w", shape, mesh, &mesh.coordinate(rank).unwrap()).unwrap()
}

type Ranges = Vec<Range<usize>>;

/// Megatron's interleaved queries, keys and values, with fewer heads for keys and values: rank 1 of 2 has the second half of each.
#[test]
fn blocks_are_each_cut() {
    let qkv = Placement::whole().cut_in_blocks(Tp, 0, [8, 2, 2]);
    let of_rank: Vec<(Ranges, Ranges)> =
        pieces(&qkv, &[12, 3], &mesh("tp=2,dp=2"), 3).into_iter().map(|p| (p.global, p.local)).collect();
    let expected: [(Ranges, Ranges); 3] = [
        (vec![4..8, 0..3], vec![0..4, 0..3]),
        (vec![9..10, 0..3], vec![4..5, 0..3]),
        (vec![11..12, 0..3], vec![5..6, 0..3]),
    ];
    assert_eq!(of_rank, expected);
    let row = Placement::whole().cut(Tp, 1);
    assert_eq!(pieces(&row, &[5, 4], &mesh("tp=2,dp=2"), 2)[0].global, [0..5, 0..2]);
    assert_eq!(pieces(&row, &[5, 4], &mesh("dp=2"), 1)[0].global, [0..5, 0..4]);
}

/// A cut by columns, also in equal blocks, is one part for any number of rows; unequal blocks are separate parts.
#[test]
fn parts_are_few() {
    let on = mesh("tp=2,dp=2");
    let parts = |placement: Placement, shape: &[usize]| {
        placement.parts("w", shape, &on, &on.coordinate(1).unwrap()).unwrap()
    };
    let w = Placement::whole;
    let run = |first, run, stride| Strided { first, run, stride };
    assert_eq!(parts(w(), &[5, 4]), [(0..20, run(0, 20, 0))]);
    assert_eq!(parts(w().cut(Tp, 0), &[6, 4]), [(0..12, run(12, 12, 0))]);
    assert_eq!(parts(w().cut(Tp, 1), &[1000, 4]), [(0..2000, run(2, 2, 4))]);
    assert_eq!(parts(w().cut_in_blocks(Tp, 1, [4, 4, 4]), &[5, 12]), [(0..30, run(2, 2, 4))]);
    let heads = [(0..6, run(6, 6, 0)), (6..8, run(13, 1, 2))];
    assert_eq!(parts(w().cut_in_blocks(Tp, 0, [12, 2, 2]), &[16]), heads);
}

/// Axes with equal values, with partial gradients, and with equal reduced gradients.
#[test]
fn axes_follow_from_the_placement() {
    let whole = Placement::whole();
    let partial = whole.clone().gradient(Gradient::PartialSum);
    let cut = partial.clone().cut(Tp, 0);
    let expert = Placement::whole().cut(Cp, 0).reduced_over(Dp);
    let mesh3 = mesh("tp=2,cp=2,dp=2,pp=2");
    let rows: [(&Placement, Axes, Axes, Axes, Axes); 4] = [
        (&whole, Dp | Cp, Axes::NONE, Tp | Cp | Dp, Tp.into()),
        (&partial, Dp | Cp, Tp.into(), Tp | Cp | Dp, Tp.into()),
        (&cut, Dp | Cp, Axes::NONE, Cp | Dp, Axes::NONE),
        (&expert, Dp.into(), Axes::NONE, Tp | Dp, Tp.into()),
    ];
    for (placement, reduced, partial, replicas, repeated) in rows {
        let sharing = placement.sharing(&mesh3);
        let axes = (sharing.reduced, sharing.partial, sharing.replicas, sharing.repeated());
        assert_eq!(axes, (reduced, partial, replicas, repeated), "{placement:?}");
    }
    let hybrid = whole.sharing(&mesh("dp_replicate=2,dp_shard=2,tp=2"));
    assert_eq!(hybrid.reduced, DpReplicate | DpShard);
    assert_eq!(hybrid.replicas, DpReplicate | DpShard | Tp);
}

#[test]
fn what_is_wrong_is_named() {
    let name = || "w".to_owned();
    let (w, on) = (Placement::whole(), mesh("tp=4,dp=2"));
    let refused = |placement: Placement, shape: &[usize]| placement.local_shape("w", shape, &on).unwrap_err();
    let uneven = MeshError::Uneven { name: name(), axis: Tp, degree: 4, dim: 1, extent: 6 };
    assert_eq!(refused(w.clone().cut(Tp, 1), &[4, 6]), uneven);
    assert!(uneven.to_string().ends_with("pad to 8"), "{uneven}");
    let block = MeshError::Uneven { name: name(), axis: Tp, degree: 4, dim: 0, extent: 2 };
    assert_eq!(refused(w.clone().cut_in_blocks(Tp, 0, [8, 2, 2]), &[12]), block);
    let blocks = MeshError::Blocks { name: name(), dim: 0, extent: 12, blocks: vec![8, 8] };
    assert_eq!(refused(w.clone().cut_in_blocks(Tp, 0, [8, 8]), &[12]), blocks);
    let dim = MeshError::NoSuchDim { name: name(), axis: Tp, dim: 1, shape: vec![4] };
    assert_eq!(refused(w.clone().cut(Tp, 1), &[4]), dim);
    let twice = |axis, dim| MeshError::CutTwice { name: name(), axis, dim };
    assert_eq!(refused(w.clone().cut(Tp, 0).cut(Tp, 1), &[4, 4]), twice(Tp, 1));
    assert_eq!(refused(w.clone().cut(Tp, 0).cut(Dp, 0), &[8]), twice(Dp, 0));
    assert_eq!(refused(w.clone().cut(Dp, 0), &[4]), MeshError::CutAndReduced { name: name(), axis: Dp });
    let stages = MeshError::AlongStages { name: name() };
    assert_eq!(refused(w.clone().cut(Pp, 0), &[4]), stages);
    assert_eq!(refused(w.clone().reduced_over(Dp | Pp), &[4]), stages);
    let endless = w.clone().cut_in_blocks(Tp, 0, [usize::MAX - 1, 10]);
    assert!(matches!(refused(endless, &[8]), MeshError::Blocks { extent: 8, .. }));
    // dp and one of its parts count as the same axis.
    let (hsdp, apart) = (mesh("dp_replicate=2,dp_shard=2"), w.reduced_over(Axes::NONE));
    for (first, second) in [(Dp, DpShard), (DpShard, Dp), (Dp, DpReplicate)] {
        let error = apart.clone().cut(first, 0).cut(second, 1).local_shape("w", &[8, 8], &hsdp).unwrap_err();
        assert_eq!(error, twice(second, 1));
    }
    apart.cut(DpReplicate, 0).cut(DpShard, 1).local_shape("w", &[8, 8], &hsdp).unwrap();
}

#[test]
fn tied_parameters_are_one() {
    let model = |alias: &[usize]| {
        let w = Placement::whole();
        Model::builder()
            .param("wte", &[8, 4], F32, w.clone())
            .param("ln", &[4], F32, w)
            .tied("lm_head", "wte", alias)
    };
    let tied = model(&[8, 4]).build().unwrap();
    assert_eq!((tied.len(), tied.parameters().len()), (36, 2));
    assert_eq!(tied.get("lm_head"), tied.get("wte"));
    let shapes =
        MeshError::TiedShapes { name: "lm_head".into(), shape: vec![4, 8], to: "wte".into(), of: vec![8, 4] };
    assert_eq!(model(&[4, 8]).build(), Err(shapes));
    let nothing = model(&[8, 4]).tied("head", "wtf", &[4]).build();
    assert_eq!(nothing, Err(MeshError::TiedToNothing { name: "head".into(), to: "wtf".into() }));
    assert_eq!(
        model(&[8, 4]).tied("ln", "wte", &[8, 4]).build(),
        Err(MeshError::NameTwice { name: "ln".into() })
    );
    assert_eq!(
        model(&[8, 4]).param("ln", &[4], F32, Placement::whole()).build(),
        Err(MeshError::NameTwice { name: "ln".into() })
    );
}

/// Parameters of a family travel together: cut matrices, norms with partial gradients, whole parameters.
#[test]
fn families_are_the_ways_gradients_become_whole() {
    let (whole, cut) = (Placement::whole(), Placement::whole().cut(Tp, 0));
    let model = Model::builder()
        .param("wte", &[8, 4], F32, cut.clone())
        .param("pos", &[6, 4], F32, whole.clone())
        .param("ln", &[4], F32, whole.clone().gradient(Gradient::PartialSum))
        .param("up", &[16, 4], F32, cut.clone())
        .stage(1)
        .param("head", &[8, 4], DType::BF16, cut)
        .build()
        .unwrap();
    let on = mesh("tp=2,dp=2,pp=2");
    let names = |rank: usize| -> Vec<Vec<(String, Vec<usize>)>> {
        let families = model.families(&on, &on.coordinate(rank).unwrap()).unwrap();
        let params = |f: &meshstep_parallel3d::Family| {
            f.layout.params().iter().map(|p| (p.name().to_owned(), p.shape().to_vec())).collect()
        };
        families.iter().map(params).collect()
    };
    let own = |name: &str, shape: &[usize]| (name.to_owned(), shape.to_vec());
    let first =
        [vec![own("wte", &[4, 4]), own("up", &[8, 4])], vec![own("pos", &[6, 4])], vec![own("ln", &[4])]];
    assert_eq!(names(0), first);
    assert_eq!(names(3), first);
    assert_eq!(names(4), [vec![own("head", &[4, 4])]]);
    let short = mesh("tp=2");
    let refused = model.families(&short, &short.coordinate(0).unwrap());
    assert_eq!(refused, Err(MeshError::NoSuchStage { name: "head".into(), stage: 1, stages: 1 }));
    assert_eq!(on.degree(Pp), 2);
}

proptest! {
    /// Over a group with one copy of each part, every element is held once, and every position of a rank's part is filled once.
    #[test]
    fn pieces_cover_a_parameter_once(
        tp in 1usize..5,
        cp in 1usize..4,
        blocks in prop::collection::vec(0usize..3, 1..4),
        columns in 0usize..3,
        rows_first in any::<bool>(),
    ) {
        let on = Mesh::new([(Dp, 2), (Cp, cp), (Tp, tp)]).unwrap();
        let blocks: Vec<usize> = blocks.iter().map(|n| n * tp).collect();
        let mut shape = [blocks.iter().sum::<usize>(), columns * cp];
        let (mut a, mut b) = (0, 1);
        if !rows_first {
            shape.swap(0, 1);
            (a, b) = (b, a);
        }
        let placement = Placement::whole().cut_in_blocks(Tp, a, blocks).cut(Cp, b).reduced_over(Dp);
        let mut held = vec![0; shape.iter().product()];
        for rank in on.group(0, Tp | Cp).unwrap().ranks() {
            let local = placement.local_shape("w", &shape, &on).unwrap();
            let mut filled = vec![0; local.iter().product()];
            for piece in pieces(&placement, &shape, &on, rank) {
                for (i, r) in piece.global[0].clone().enumerate() {
                    for (j, c) in piece.global[1].clone().enumerate() {
                        held[r * shape[1] + c] += 1;
                        filled[(piece.local[0].start + i) * local[1] + piece.local[1].start + j] += 1;
                    }
                }
                let extents = |ranges: &[Range<usize>]| ranges.iter().map(|r| r.len()).collect::<Vec<_>>();
                prop_assert_eq!(extents(&piece.global), extents(&piece.local));
            }
            prop_assert!(filled.iter().all(|&n| n == 1));
            // `parts` has the same elements in the same order.
            let mut indices = vec![0; filled.len()];
            for piece in pieces(&placement, &shape, &on, rank) {
                for (i, r) in piece.global[0].clone().enumerate() {
                    for (j, c) in piece.global[1].clone().enumerate() {
                        indices[(piece.local[0].start + i) * local[1] + piece.local[1].start + j] = r * shape[1] + c;
                    }
                }
            }
            let parts = placement.parts("w", &shape, &on, &on.coordinate(rank).unwrap()).unwrap();
            let part = |(range, by): (Range<usize>, Strided)| {
                range.clone().map(move |i| (i, by.index((i - range.start) as u64) as usize))
            };
            let found: Vec<_> = parts.into_iter().flat_map(part).collect();
            prop_assert_eq!(found, indices.into_iter().enumerate().collect::<Vec<_>>());
        }
        prop_assert!(held.iter().all(|&n| n == 1));
    }
}
