//! Places of cut tensors, against one element at a time.

use super::*;
use proptest::prelude::*;

/// Returns the index in the tensor of each element, one by one.
fn indices(parts: &Parts) -> Vec<usize> {
    parts.iter().flat_map(|(part, by)| (0..part.len()).map(|i| by.index(i as u64) as usize)).collect()
}

/// Parts of rows of `cols` elements, cut by columns or by rows in blocks.
fn columns(rows: usize, cols: usize, at: usize, of: usize) -> Parts {
    let run = (cols / of) as u64;
    vec![(0..rows * cols / of, Strided { first: at as u64 * run, run, stride: cols as u64 })]
}

proptest! {
    #[test]
    fn a_range_of_parts_has_the_places_of_its_elements(
        lens in prop::collection::vec((1usize..20, 1u64..7, 7u64..9), 1..4),
        from in 0usize..40,
        len in 0usize..40,
    ) {
        let (mut parts, mut end) = (Parts::new(), 0);
        for (i, (len, run, stride)) in lens.into_iter().enumerate() {
            parts.push((end..end + len, Strided { first: 1000 * i as u64, run, stride }));
            end += len;
        }
        let own = from.min(end)..(from + len).min(end);
        let cut = places(&parts, &own);
        prop_assert_eq!(indices(&cut), &indices(&parts)[own.clone()]);
        prop_assert!(cut.iter().try_fold(0, |end, (part, _)| (part.start == end).then_some(part.end)) == Some(own.len()));
        let runs = cut.iter().flat_map(runs_of);
        let by_runs: Vec<usize> = runs.flat_map(|(from, at)| at..at + from.len()).collect();
        prop_assert_eq!(&by_runs, &indices(&cut));
        if let Some(first) = together(&cut) {
            prop_assert_eq!(by_runs, (first..first + own.len()).collect::<Vec<_>>());
        }
    }
}

#[test]
fn cuts_have_each_element_once() {
    let of = |parts: Vec<Parts>| TensorCuts {
        shapes: vec![vec![4, 6]],
        cuts: parts.into_iter().map(|parts| vec![parts]).collect(),
        ranks: Vec::new(),
    };
    assert!(of((0..3).map(|at| columns(4, 6, at, 3)).collect()).cover(0, 8));
    assert!(of(vec![vec![(0..24, Strided::WHOLE)]]).cover(0, 24));
    let run = |first, run| Strided { first, run, stride: 0 };
    for (wrong, len) in [
        (vec![columns(4, 6, 0, 2), columns(4, 6, 0, 2)], 12),
        (vec![columns(4, 6, 0, 2), columns(4, 6, 1, 2)], 11),
        (vec![columns(4, 6, 0, 2)], 12),
        (vec![vec![(0..12, run(0, 12))], vec![(0..12, run(11, 12))]], 12),
        (vec![vec![(0..12, run(0, 12))], vec![(0..12, run(13, 12))]], 12),
        (vec![vec![(0..12, run(0, 12))], vec![(1..12, run(12, 12))]], 12),
        (vec![vec![(0..12, run(0, 12))], vec![(0..12, run(12, 0))]], 12),
        (vec![vec![(0..12, run(0, 12))], vec![(0..12, run(u64::MAX, 12))]], 12),
    ] {
        assert!(!of(wrong.clone()).cover(0, len), "{wrong:?}");
    }
}

#[test]
fn every_shard_of_every_cut_has_one_rank() {
    let of = |ranks: &[(usize, usize)]| {
        let ranks = ranks.iter().map(|&(shard, cut)| CutRank { shard, cut }).collect();
        TensorCuts { shapes: Vec::new(), cuts: vec![Vec::new(); 2], ranks }.seats(2)
    };
    assert_eq!(of(&[(0, 0), (0, 1), (1, 0), (1, 1)]), Some(vec![0, 2, 1, 3]));
    for wrong in
        [&[(0, 0), (0, 1), (1, 0)][..], &[(0, 0), (0, 1), (1, 0), (1, 0)], &[(0, 0), (0, 1), (1, 0), (2, 0)]]
    {
        assert_eq!(of(wrong), None, "{wrong:?}");
    }
    assert_eq!(of(&[(0, 0), (0, 1), (1, 0), (1, usize::MAX)]), None);
}
