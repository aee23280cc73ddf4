//! Matrices of which ranks hold parts, planned by hand: the bits of one rank, and refusals that change nothing.

use meshstep_comm::{Communicator, loopback};
use meshstep_optim::{Muon, Strided};
use meshstep_shard::{
    CutRank, DataRank, Error, Optimizer, Options, ParamGroup, Part, Parts, RankRoles, Sizes, Stage, StepArgs,
    TensorCuts,
};
use meshstep_tensor::{DType, Layout, SliceMut};
use std::sync::Arc;

const ROWS: usize = 4;
const COLS: usize = 6;

fn options() -> Options {
    Options { stage: Stage::Replicated, ..Options::default() }
}

/// Returns the columns of a rank of two.
fn columns(rank: usize) -> Parts {
    vec![(0..12, Strided { first: 3 * rank as u64, run: 3, stride: COLS as u64 })]
}

fn cuts() -> TensorCuts {
    let ranks = (0..2).map(|cut| CutRank { shard: 0, cut }).collect();
    TensorCuts {
        shapes: vec![vec![ROWS, COLS]],
        cuts: (0..2).map(|rank| vec![columns(rank)]).collect(),
        ranks,
    }
}

fn part() -> Part {
    let layout = Layout::builder().param("up", &[ROWS, 3], DType::F32).build().unwrap();
    Part::new(layout, Sizes::all(1), [], &options()).unwrap()
}

fn value(i: usize) -> f32 {
    ((i * i + 5 * i) % 11) as f32 - 5.0
}

/// Returns this rank's elements of a step from `value`, or of all if the matrix is whole.
fn step(opt: &mut Optimizer, held: &[usize]) -> Vec<f32> {
    let mb = opt.micro_batch(1).unwrap();
    mb.grad("up", &held.iter().map(|&i| value(i)).collect::<Vec<_>>()[..]).unwrap();
    mb.finish().unwrap();
    let _ = opt.step(StepArgs { lr: 0.1, ..StepArgs::default() }).unwrap().outcome().unwrap();
    opt.param("up").unwrap().typed::<f32>().unwrap().to_vec()
}

#[test]
fn halves_of_a_matrix_have_the_bits_of_the_whole() {
    let zeros = |_: &meshstep_tensor::Param, _: SliceMut<'_>| Ok(());
    let whole = loopback::spawn(1, |comm| {
        let layout = Layout::builder().param("up", &[ROWS, COLS], DType::F32).build().unwrap();
        let mut opt = Optimizer::new(comm, layout, Muon::moonshot(), zeros, options()).unwrap();
        step(&mut opt, &(0..ROWS * COLS).collect::<Vec<_>>())
    });
    let whole = whole.unwrap().remove(0);
    let ranks = loopback::spawn(2, |world: Arc<dyn Communicator>| {
        let rank = world.rank();
        let own = world.split(Some(rank as u32), 0).unwrap().unwrap();
        let place = DataRank { index: 0, ranks: 2, first: rank == 0 };
        let mut opt = Optimizer::empty(Arc::clone(&world), place, options()).unwrap();
        let group = |part: Part, among: RankRoles| ParamGroup { part, rules: Muon::moonshot().into(), among };
        let mut refused = |group: ParamGroup| match opt.add_parts(vec![group], zeros) {
            Err(Error::Shared { what, works }) => format!("{what}; {works}"),
            other => panic!("{other:?}"),
        };
        let among = RankRoles::all(Arc::clone(&own));
        assert!(refused(group(part(), among.clone())).contains("Part::with_cuts"));
        let half = part().cut_from(vec![ROWS * COLS]).unwrap();
        assert!(refused(group(half, among.clone())).contains("\"up\""));
        let cut = || part().with_cuts(cuts()).unwrap();
        assert!(refused(group(cut(), among.clone())).contains("RankRoles::tensors"));
        let alone = RankRoles { tensors: Some(own), ..among.clone() };
        assert!(refused(group(cut(), alone)).contains("RankRoles::tensors"));
        let among = RankRoles { tensors: Some(world), ..among };
        opt.add_parts(vec![group(cut(), among)], zeros).unwrap();
        let held: Vec<usize> = (0..12).map(|i| columns(rank)[0].1.index(i) as usize).collect();
        let end = step(&mut opt, &held);
        assert_eq!(end, held.iter().map(|&i| whole[i]).collect::<Vec<_>>(), "rank {rank}");
    });
    ranks.unwrap();
}

#[test]
fn cuts_that_do_not_fit_are_refused() {
    let refused = |cuts: TensorCuts| match part().with_cuts(cuts) {
        Err(Error::Shared { what, .. }) => what,
        other => panic!("{other:?}"),
    };
    assert!(refused(TensorCuts { shapes: Vec::new(), ..cuts() }).contains("1 tensors"));
    assert!(refused(TensorCuts { cuts: Vec::new(), ..cuts() }).contains("1 tensors"));
    assert!(refused(TensorCuts { cuts: vec![vec![columns(0)], Vec::new()], ..cuts() }).contains("1 tensors"));
    for ranks in [vec![], vec![(0, 0)], vec![(0, 0), (0, 0)], vec![(0, 0), (1, 1)], vec![(0, 0), (0, 2)]] {
        let ranks = ranks.into_iter().map(|(shard, cut)| CutRank { shard, cut }).collect();
        assert!(refused(TensorCuts { ranks, ..cuts() }).contains("on the ranks"));
    }
    assert!(refused(TensorCuts { shapes: vec![vec![ROWS, 7]], ..cuts() }).contains("\"up\""));
    assert!(
        refused(TensorCuts { cuts: vec![vec![columns(0)], vec![columns(0)]], ..cuts() }).contains("\"up\"")
    );
    let twice = [(0, 0), (0, 1), (0, 1)].map(|(shard, cut)| CutRank { shard, cut });
    assert!(refused(TensorCuts { ranks: twice.to_vec(), ..cuts() }).contains("on the ranks"));
    // At stage 1 each shard of each cut has a rank.
    let zero1 = Options { stage: Stage::Zero1, ..options() };
    let layout = Layout::builder().param("up", &[ROWS, 3], DType::F32).build().unwrap();
    let two = Part::new(layout, Sizes::all(2), [], &zero1).unwrap();
    assert!(matches!(two.with_cuts(cuts()), Err(Error::Shared { .. })));
}

/// Chunks cut matrices that travel anyway: a cut part is not padded to whole ones.
#[test]
fn a_cut_part_is_not_padded() {
    let options = Options { stage: Stage::Zero1, ..options() };
    let layout = Layout::builder().param("up", &[ROWS, 3], DType::F32).param("down", &[ROWS, 3], DType::F32);
    let ranks = (0..4).map(|rank| CutRank { shard: rank / 2, cut: rank % 2 }).collect();
    let cuts = TensorCuts {
        shapes: vec![vec![ROWS, COLS]; 2],
        cuts: (0..2).map(|cut| vec![columns(cut); 2]).collect(),
        ranks,
    };
    let part = Part::new(layout.build().unwrap(), Sizes::all(2), [], &options).unwrap();
    let whole = part.clone().for_rules(&Muon::default().into(), &options).unwrap();
    assert!(whole.is_uncut());
    let cut = part.clone().with_cuts(cuts).unwrap().for_rules(&Muon::default().into(), &options).unwrap();
    assert!(!cut.is_uncut() && cut.buckets() == part.buckets());
}
