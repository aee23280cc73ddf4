//! Rounds, messages, places and windows of planned exchanges.

use super::*;
use crate::{CutRank, Options, Part, Sizes, Stage, TensorCuts};
use meshstep_optim::{MatrixRule, Muon, Strided};
use meshstep_tensor::Layout;
use proptest::prelude::*;
use std::collections::{BTreeSet, VecDeque};

fn part(shapes: &[(usize, usize)], ranks: usize, bucket_len: Option<usize>) -> Part {
    let add = |b: meshstep_tensor::LayoutBuilder, (i, &(rows, cols)): (usize, &(usize, usize))| {
        let dtype = if i % 5 == 4 { DType::F64 } else { DType::F32 };
        b.param(format!("w{i}"), &[rows, cols], dtype)
    };
    let layout = shapes.iter().enumerate().fold(Layout::builder(), add).build().unwrap();
    let options = Options { stage: Stage::Zero3, bucket_len, ..Options::default() };
    Part::new(layout, Sizes::all(ranks), [], &options).unwrap()
}

#[test]
fn in_each_round_of_a_tournament_a_rank_meets_at_most_one_other() {
    for ranks in 2..=17 {
        for a in 0..ranks {
            let met: BTreeSet<usize> = (0..ranks).filter(|&b| b != a).map(|b| round(ranks, a, b)).collect();
            assert_eq!(met.len(), ranks - 1, "rank {a} of {ranks}");
            assert!((0..ranks).all(|b| b == a || round(ranks, a, b) == round(ranks, b, a)));
        }
    }
}

/// Runs each rank's messages in order, each with the same message of its peer; returns the messages that are left.
fn meet(shares: &[WindowShare]) -> usize {
    let mut queues: Vec<VecDeque<&Message>> =
        shares.iter().map(|share| share.order.iter().map(|&m| &share.messages[m]).collect()).collect();
    loop {
        let met = (0..queues.len()).find_map(|rank| {
            let mine = queues[rank].front()?;
            let theirs = queues[mine.peer].front()?;
            (theirs.peer == rank && theirs.matrix == mine.matrix).then_some((rank, mine.peer))
        });
        let Some((a, b)) = met else { return queues.iter().map(VecDeque::len).sum() };
        let (mine, theirs) = (queues[a].pop_front(), queues[b].pop_front());
        let (mine, theirs) = (mine.unwrap(), theirs.unwrap());
        assert!(mine.place.len() == theirs.place.len() && mine.owned != theirs.owned);
    }
}

proptest! {
    #[test]
    fn every_piece_reaches_the_owner_and_returns(
        shapes in prop::collection::vec((0usize..40, 1usize..40), 1..12),
        ranks in 1usize..10,
        bucket_len in prop::option::of(64usize..3000),
    ) {
        prop_assume!(shapes.iter().any(|shape| shape.0 > 0));
        let (part, rule) = (part(&shapes, ranks, bucket_len), Muon::default());
        let exchange = part.matrix_exchange(&rule);
        let mut seen: Vec<usize> = Vec::new();
        for window in exchange.windows() {
            let shares: Vec<WindowShare> = (0..ranks).map(|rank| window.share(rank, ranks)).collect();
            prop_assert_eq!(meet(&shares), 0);
            for (i, matrix) in window.matrices.iter().enumerate() {
                seen.push(matrix.param);
                let held = (0..ranks).map(|rank| matrix.held_by(rank)).sum::<usize>();
                prop_assert_eq!((held, matrix.elements()), (shapes[matrix.param].0 * shapes[matrix.param].1, held));
                let alone = shares.iter().filter(|share| share.alone.contains(&i)).count();
                let whole = shares.iter().filter(|share| share.wholes.iter().any(|whole| whole.0 == i)).count();
                prop_assert_eq!((alone, whole), if matrix.travels() { (0, 1) } else { (1, 0) });
            }
            for (rank, share) in shares.iter().enumerate() {
                check_places(rank, share, window);
            }
        }
        seen.sort_unstable();
        let all: Vec<usize> = (0..shapes.len()).filter(|&i| shapes[i].0 > 0).collect();
        prop_assert_eq!(seen, all);
        let sent = |window: &ExchangeWindow| {
            let away = |m: &ExchangedMatrix| (m.elements() - m.held_by(m.owner)) * window.dtype.size();
            2 * window.matrices.iter().map(away).sum::<usize>() as u64
        };
        let expected: u64 = exchange.windows().iter().map(sent).sum();
        prop_assert_eq!((0..ranks).map(|rank| exchange.sent_bytes(rank)).sum::<u64>(), expected);
    }
}

/// Checks that wholes and pieces of others lie one behind another, with the messages and own pieces in their places.
fn check_places(rank: usize, share: &WindowShare, window: &ExchangeWindow) {
    assert!(share.messages.is_sorted_by(|a, b| a.place.end <= b.place.start));
    assert!(share.messages.last().is_none_or(|last| last.place.end <= share.scratch));
    for (i, place) in &share.pieces {
        let matrix = &window.matrices[*i];
        let own = matrix.piece_of(rank).unwrap();
        assert_eq!(place.len(), own.own.len());
        let whole = share.wholes.iter().find(|whole| whole.0 == *i);
        assert_eq!(whole.is_some(), matrix.owner == rank);
        let sent = share.messages.iter().find(|m| !m.owned && m.matrix == *i);
        match (whole, own.start()) {
            (Some((_, whole)), Some(start)) => assert_eq!(place.start, whole.start + start),
            (Some(_), None) => assert!(share.scattered.iter().any(|piece| piece.place == *place)),
            (None, _) => assert_eq!((&sent.unwrap().place, place.start % ALIGN), (place, 0)),
        }
    }
    for (i, place) in &share.wholes {
        let matrix = &window.matrices[*i];
        let received = share.messages.iter().filter(|m| m.owned && m.matrix == *i).map(|m| m.place.clone());
        let own = share.pieces.iter().filter(|piece| piece.0 == *i).map(|piece| piece.1.clone());
        // Pieces lie within the matrix, or are scattered over it.
        let mut covered = vec![0; place.len()];
        for part in received.chain(own) {
            match share.scattered.iter().find(|piece| piece.place == part) {
                Some(piece) => {
                    assert!(piece.whole == *place && piece.matrix == *i && place.end <= part.start);
                    let runs = piece.places.iter().flat_map(crate::plan::tensor_cuts::runs_of);
                    runs.for_each(|(own, at)| covered[at..at + own.len()].iter_mut().for_each(|n| *n += 1));
                }
                None => {
                    covered[part.start - place.start..part.end - place.start].iter_mut().for_each(|n| *n += 1)
                }
            }
        }
        assert!(covered.iter().all(|&n| n == 1), "{covered:?}");
        assert_eq!(place.len(), matrix.elements());
    }
}

#[test]
fn a_window_has_one_of_the_longest_matrices_for_each_rank() {
    let shapes: Vec<(usize, usize)> = (0..64).map(|i| if i % 5 == 4 { (0, 1) } else { (100, 70) }).collect();
    for ranks in [2, 4, 8] {
        let exchange = part(&shapes, ranks, Some(7040)).matrix_exchange(&Muon::default());
        // One bucket for each matrix: every matrix is cut.
        let lens: Vec<usize> = exchange.windows().iter().map(|window| window.matrices.len()).collect();
        assert_eq!((lens.iter().sum::<usize>(), lens.len()), (52, 52usize.div_ceil(ranks)));
        assert!(lens.iter().all(|&len| len <= ranks && len + 1 >= ranks), "{lens:?}");
        for rank in 0..ranks {
            let [(DType::F32, scratch)] = exchange.scratch(rank)[..] else { panic!() };
            assert!(scratch <= 2 * 7040, "{scratch}");
        }
    }
}

/// Tensors cut by rows or by columns in `tp` cuts, on `shards` ranks of each; ranks are in the order of shards, or of cuts.
fn cut_part(
    tensors: &[(usize, usize, bool)],
    (tp, shards): (usize, usize),
    stage: Stage,
    by_cut: bool,
) -> Part {
    let add = |b: meshstep_tensor::LayoutBuilder,
               (i, &(rows, cols, by_rows)): (usize, &(usize, usize, bool))| {
        let local = if by_rows { [rows, tp * cols] } else { [tp * rows, cols] };
        b.param(format!("w{i}"), &local, DType::F32)
    };
    let layout = tensors.iter().enumerate().fold(Layout::builder(), add).build().unwrap();
    let parts = |cut: usize| -> Vec<Parts> {
        let of = |&(rows, cols, by_rows): &(usize, usize, bool)| {
            let (len, tp, cols, cut) = (rows * cols * tp, tp as u64, cols as u64, cut as u64);
            let by = match by_rows {
                true => Strided { first: cut * len as u64, run: len as u64, stride: 0 },
                false => Strided { first: cut * cols, run: cols, stride: tp * cols },
            };
            vec![(0..len, by)]
        };
        tensors.iter().map(of).collect()
    };
    let divides = if stage == Stage::Replicated { 1 } else { shards };
    let all = 0..tp * divides;
    let rank = |r: usize| match by_cut {
        true => CutRank { shard: r % divides, cut: r / divides },
        false => CutRank { shard: r / tp, cut: r % tp },
    };
    let cuts = TensorCuts {
        shapes: tensors.iter().map(|&(rows, cols, _)| vec![tp * rows, tp * cols]).collect(),
        cuts: (0..tp).map(parts).collect(),
        ranks: all.map(rank).collect(),
    };
    let options = Options { stage, bucket_len: Some(200), ..Options::default() };
    Part::new(layout, Sizes::all(shards), [], &options).unwrap().with_cuts(cuts).unwrap()
}

proptest! {
    #[test]
    fn cut_pieces_reach_the_owner_and_return(
        tensors in prop::collection::vec((1usize..8, 1usize..8, any::<bool>()), 1..8),
        (tp, shards) in (2usize..5, 1usize..5),
        stage in 0usize..4,
        by_cut in any::<bool>(),
    ) {
        let whole = Stage::WholeParams(crate::Owners::SortedGreedy);
        let stage = [Stage::Replicated, Stage::Zero1, Stage::Zero3, whole][stage];
        let part = cut_part(&tensors, (tp, shards), stage, by_cut);
        let ranks = part.cuts().unwrap().ranks.len();
        let exchange = part.matrix_exchange(&Muon::default());
        let mut seen: Vec<usize> = Vec::new();
        for window in exchange.windows() {
            let shares: Vec<WindowShare> = (0..ranks).map(|rank| window.share(rank, ranks)).collect();
            prop_assert_eq!(meet(&shares), 0);
            for (i, matrix) in window.matrices.iter().enumerate() {
                seen.push(matrix.param);
                let (rows, cols, _) = tensors[matrix.param];
                prop_assert_eq!(matrix.elements(), rows * cols * tp * tp);
                prop_assert!(matrix.travels() && shares[matrix.owner].wholes.iter().any(|whole| whole.0 == i));
                let cost = Muon::default().cost(matrix.elements(), (rows * tp, cols * tp));
                prop_assert_eq!(matrix.cost, cost);
            }
            for (rank, share) in shares.iter().enumerate() {
                check_places(rank, share, window);
                // Memory for the matrices of the rank, once more for the scattered pieces, and for its own pieces.
                let owned: usize = share.wholes.iter().map(|whole| 2 * whole.1.len() + ranks * ALIGN).sum();
                let own: usize = share.pieces.iter().map(|piece| piece.1.len() + ALIGN).sum();
                prop_assert!(share.scratch <= owned + own);
            }
        }
        seen.sort_unstable();
        prop_assert_eq!(seen, (0..tensors.len()).collect::<Vec<_>>());
        let alike = exchange.alike();
        prop_assert_eq!(alike.len(), ranks);
        for (rank, first) in alike.into_iter().enumerate() {
            let figures = |rank| (exchange.sent_bytes(rank), exchange.scratch(rank));
            prop_assert_eq!(figures(first), figures(rank));
            prop_assert!((0..first).all(|other| figures(other) != figures(rank)));
        }
    }
}
