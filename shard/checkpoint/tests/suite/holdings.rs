//! Local parts of ranks as pieces of the whole, compared with every element by its index.

use meshstep_checkpoint::{LocalPieces, Piece, Region, check_cover, writers};
use meshstep_checkpoint_cases::fuzzed::indices;
use rand::prelude::*;
use std::ops::Range;

/// Returns the holding of rank `at`, of a tensor cut along one dimension in blocks into equal parts for `of` ranks.
fn cut(shape: &[u64], dim: usize, blocks: &[u64], at: u64, of: u64) -> LocalPieces {
    let mut local = shape.to_vec();
    local[dim] /= of;
    let (mut boxes, mut from, mut to) = (Vec::new(), 0, 0);
    for block in blocks {
        let (mut global, mut own) = (Region::whole(shape), Region::whole(&local));
        (global.offsets[dim], global.extents[dim]) = (from + at * (block / of), block / of);
        (own.offsets[dim], own.extents[dim]) = (to, block / of);
        boxes.push((global, own));
        (from, to) = (from + block, to + block / of);
    }
    LocalPieces { shape: shape.to_vec(), local, boxes }
}

#[test]
fn parts_of_ranges_are_those_elements() {
    for seed in 0..2000 {
        let random = &mut StdRng::seed_from_u64(seed);
        let of = random.random_range(1..4);
        let dims = random.random_range(1..4);
        let dim = random.random_range(0..dims);
        let blocks: Vec<u64> =
            (0..random.random_range(1..4)).map(|_| of * random.random_range(1..3)).collect();
        let mut shape: Vec<u64> = (0..dims).map(|_| random.random_range(1..5)).collect();
        shape[dim] = blocks.iter().sum();
        let mut all = Vec::new();
        for at in 0..of {
            let holding = cut(&shape, dim, &blocks, at, of);
            let len: u64 = holding.local.iter().product();
            // Ranges of different owners, as buckets cut them; some are empty.
            let mut cuts: Vec<u64> =
                (0..random.random_range(0..4)).map(|_| random.random_range(0..=len)).collect();
            cuts.extend([0, len]);
            cuts.sort_unstable();
            for range in cuts.windows(2).map(|cut| cut[0]..cut[1]) {
                let parts = holding.parts(range.clone());
                let whole = Piece { region: Region::whole(&holding.local), range: range.clone() };
                let mut owned: Vec<u64> = Vec::new();
                for part in &parts {
                    owned.extend(indices(&holding.local, &part.local));
                    assert_eq!(part.global.range, part.local.range);
                    // The runs follow one another and cover the whole part.
                    let copied: u64 = whole.runs(&part.local).map(|run| run.len).sum();
                    assert_eq!(copied, part.local.len(), "seed {seed}");
                }
                owned.sort_unstable();
                assert_eq!(owned, range.collect::<Vec<_>>(), "seed {seed}: {parts:?}");
                all.extend(parts.into_iter().map(|part| part.global));
            }
        }
        assert_eq!(check_cover(&shape, &all), Ok(()), "seed {seed}: {all:?}");
    }
}

#[test]
fn replicas_share_the_writing() {
    let piece = |range: Range<u64>| Piece { region: Region::whole(&[100]), range };
    // Four replicas of a large and four small tensors, and a piece that only one rank has.
    let replicated: Vec<_> = (0..5).map(|t| (t, piece(0..100), if t == 0 { 400 } else { 100 })).collect();
    let mut claims = vec![replicated; 4];
    claims[3].push((5, piece(0..50), 50));
    let writers = writers(&claims);
    let of = |tensor| writers[&(tensor, Region::whole(&[100]), 0)];
    assert_eq!(writers.len(), 6);
    assert_eq!((of(0), of(5)), (0, 3));
    let mut bytes = [0; 4];
    (0..6).for_each(|t| bytes[of(t)] += [400, 100, 100, 100, 100, 50][t]);
    assert_eq!(bytes.iter().max(), Some(&400), "{bytes:?}");
    assert!(bytes.iter().all(|&bytes| bytes >= 100), "{bytes:?}");
}
