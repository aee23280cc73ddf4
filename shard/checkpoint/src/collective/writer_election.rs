//! Division of writes: each element is written by one rank, and ranks write about equally much. Arithmetic only.

use super::write::STAGING;
use crate::format::local_pieces::{Part, writers};
use crate::format::piece::Piece;
use crate::tensors::SavedTensor;
use std::collections::BTreeMap;
use std::ops::Range;

/// Claim of a rank: a parameter, a piece of it, and the size in bytes of all its vectors there.
pub(crate) type WriterClaim = (usize, Piece, u64);

/// Returns this rank's parts of each parameter: its own shard where state is sharded, all elements where it is replicated.
pub(crate) fn parts(contents: &[SavedTensor]) -> Vec<(usize, Part)> {
    let of = |(i, content): (usize, &SavedTensor)| {
        let owned = content.owned.start as u64..content.owned.end as u64;
        content.holding.parts(owned).into_iter().map(move |part| (i, part)).collect::<Vec<_>>()
    };
    contents.iter().enumerate().flat_map(of).collect()
}

/// Returns the claims of this rank for all parts that it could write.
pub(crate) fn claims(contents: &[SavedTensor], parts: &[(usize, Part)]) -> Vec<WriterClaim> {
    let bytes = |i: usize| contents[i].vectors.iter().map(|vector| vector.dtype.size()).sum::<u64>();
    parts.iter().map(|(i, part)| (*i, part.global.clone(), part.global.len() * bytes(*i))).collect()
}

/// Returns the portions of `parts` that rank `rank` writes, given the claims of all ranks. The partition is the same on every rank.
pub(crate) fn elected(
    claims: Vec<Vec<WriterClaim>>,
    rank: usize,
    parts: &[(usize, Part)],
) -> Vec<(usize, Part)> {
    let mut mine = Vec::new();
    for (i, piece) in shared_out(claims).swap_remove(rank) {
        let own = parts[parts.partition_point(|&(of, _)| of < i)..].iter().take_while(|&&(of, _)| of == i);
        let hooks = |&(_, part): &&(usize, Part)| {
            let Range { start, end } = part.global.range;
            part.global.region == piece.region && start <= piece.range.start && piece.range.end <= end
        };
        let local = own.into_iter().find(hooks).map(|(_, part)| part.local.region.clone());
        let Some(region) = local else { continue };
        let local = Piece { region, range: piece.range.clone() };
        mine.push((i, Part { global: piece, local }));
    }
    mine
}

/// Returns the pieces that each rank is elected to write, given the claims of all ranks.
pub(crate) fn shared_out(mut claims: Vec<Vec<WriterClaim>>) -> Vec<Vec<(usize, Piece)>> {
    share_out(&mut claims);
    let writers = writers(&claims);
    let own = |(rank, claims): (usize, &Vec<WriterClaim>)| {
        let elected = |(i, piece, _): &&WriterClaim| {
            writers.get(&(*i, piece.region.clone(), piece.range.start)) == Some(&rank)
        };
        claims.iter().filter(elected).map(|(i, piece, _)| (*i, piece.clone())).collect()
    };
    claims.iter().enumerate().map(own).collect()
}

/// Cuts long pieces that several ranks claim into as many parts as there are claimants.
fn share_out(claims: &mut [Vec<WriterClaim>]) {
    let mut ranks: BTreeMap<_, u64> = BTreeMap::new();
    let key = |(i, piece, _): &WriterClaim| (*i, piece.region.clone(), piece.range.start);
    claims.iter().flatten().for_each(|claim| *ranks.entry(key(claim)).or_default() += 1);
    for own in claims {
        let cut = |claim: &WriterClaim| {
            let (i, piece, bytes) = claim;
            let most = bytes.div_ceil(STAGING as u64).min(piece.len()).max(1);
            let parts = ranks.get(&key(claim)).map_or(1, |&ranks| ranks.min(most));
            let at = |n: u64| {
                piece.range.start + (u128::from(piece.len()) * u128::from(n) / u128::from(parts)) as u64
            };
            let part = |n: u64| {
                let range = at(n)..at(n + 1);
                let bytes = bytes / piece.len().max(1) * (range.end - range.start);
                (*i, Piece { region: piece.region.clone(), range }, bytes)
            };
            (0..parts).map(part).collect::<Vec<_>>()
        };
        *own = own.iter().flat_map(cut).collect();
    }
}
