//! Runs and covers, compared with the slow way: every element by its index.

use meshstep_checkpoint::{Piece, Region, check_cover};
use meshstep_checkpoint_cases::fuzzed::indices;
use rand::prelude::*;
use std::collections::HashMap;

pub(crate) fn any_piece(random: &mut StdRng, shape: &[u64]) -> Piece {
    let (mut offsets, mut extents) = (Vec::new(), Vec::new());
    for &all in shape {
        // Spans whole dimensions often, as they make long runs.
        let whole = random.random_bool(0.5);
        let offset = if whole { 0 } else { random.random_range(0..all) };
        offsets.push(offset);
        extents.push(if whole { all } else { random.random_range(1..=all - offset) });
    }
    let len: u64 = extents.iter().product();
    let start = random.random_range(0..len);
    Piece { region: Region { offsets, extents }, range: start..random.random_range(start..=len) }
}

#[test]
fn runs_are_the_elements_two_pieces_have_in_common() {
    for seed in 0..4000 {
        let random = &mut StdRng::seed_from_u64(seed);
        let dims = random.random_range(0..4);
        let shape: Vec<u64> = (0..dims).map(|_| random.random_range(1..6)).collect();
        let (from, to) = (any_piece(random, &shape), any_piece(random, &shape));
        let (there, here) = (indices(&shape, &from), indices(&shape, &to));
        let places: HashMap<u64, usize> = there.iter().enumerate().map(|(at, &index)| (index, at)).collect();
        let expected: Vec<(u64, u64)> = here
            .iter()
            .enumerate()
            .filter_map(|(to, index)| places.get(index).map(|&from| (from as u64, to as u64)))
            .collect();
        let runs: Vec<_> = from.runs(&to).collect();
        let given: Vec<(u64, u64)> =
            runs.iter().flat_map(|run| (0..run.len).map(|i| (run.from + i, run.to + i))).collect();
        assert_eq!(given, expected, "seed {seed}: {from:?} to {to:?}");
        // A piece that is whole in both is one run.
        if from.region == to.region {
            assert!(runs.len() <= 1, "{runs:?}");
        }
    }
}

/// Returns a random grid of boxes, each cut into ranges.
pub(crate) fn any_cover(random: &mut StdRng, shape: &[u64]) -> Vec<Piece> {
    let mut boxes = vec![Region::whole(shape)];
    for (dim, &all) in shape.iter().enumerate() {
        let mut cuts: Vec<u64> = (1..all).filter(|_| random.random_bool(0.3)).collect();
        cuts.insert(0, 0);
        cuts.push(all);
        boxes = boxes
            .iter()
            .flat_map(|region| {
                cuts.windows(2).map(|cut| {
                    let mut region = region.clone();
                    (region.offsets[dim], region.extents[dim]) = (cut[0], cut[1] - cut[0]);
                    region
                })
            })
            .collect();
    }
    let mut pieces = Vec::new();
    for region in boxes {
        let len = region.elements().unwrap();
        let mut at = 0;
        while at < len {
            let end = random.random_range(at + 1..=len);
            pieces.push(Piece { region: region.clone(), range: at..end });
            at = end;
        }
    }
    pieces.shuffle(random);
    pieces
}

/// Returns true if every element is there once.
fn covers(shape: &[u64], pieces: &[Piece]) -> bool {
    let mut all: Vec<u64> = pieces.iter().flat_map(|piece| indices(shape, piece)).collect();
    all.sort_unstable();
    all == (0..shape.iter().product()).collect::<Vec<u64>>()
}

#[test]
fn covers_are_told_from_holes_and_overlaps() {
    let mut refused = 0;
    for seed in 0..3000 {
        let random = &mut StdRng::seed_from_u64(seed);
        let shape: Vec<u64> = (0..random.random_range(0..4)).map(|_| random.random_range(1..6)).collect();
        let mut pieces = any_cover(random, &shape);
        assert!(covers(&shape, &pieces));
        assert_eq!(check_cover(&shape, &pieces), Ok(()), "seed {seed}: {pieces:?}");
        let at = random.random_range(0..pieces.len());
        match random.random_range(0..4) {
            0 => drop(pieces.remove(at)),
            1 => pieces.push(pieces[at].clone()),
            2 => pieces[at].range.end -= 1,
            _ => pieces[at] = any_piece(random, &shape),
        }
        // The change may leave the pieces as they were.
        if !covers(&shape, &pieces) {
            refused += 1;
            assert!(check_cover(&shape, &pieces).is_err(), "seed {seed}: {pieces:?}");
        }
    }
    assert!(refused > 2000, "{refused}");
}

#[test]
fn a_tensor_without_elements_has_no_pieces() {
    let none: [Piece; 0] = [];
    assert_eq!(check_cover(&[3, 0, 2], &none), Ok(()));
    assert!(check_cover(&[3], &none).is_err());
    assert_eq!(check_cover(&[], &[Piece { region: Region::whole(&[]), range: 0..1 }]), Ok(()));
    let huge = Region { offsets: vec![0, 0], extents: vec![u64::MAX, 2] };
    assert!(check_cover(&[u64::MAX, 2], &[Piece { region: huge, range: 0..1 }]).is_err());
}
