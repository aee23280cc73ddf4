//! Checks of an operation's arguments that need no other rank.

use crate::{Error, Reduction};
use meshstep_tensor::DType;

pub(crate) fn check_dtype(dtype: DType) -> Result<(), Error> {
    match dtype {
        DType::F32 | DType::F64 | DType::BF16 | DType::F16 | DType::U64 => Ok(()),
        _ => Err(Error::UnsupportedDType { dtype }),
    }
}

pub(crate) fn check_reduction(reduction: Reduction, dtype: DType) -> Result<(), Error> {
    match reduction {
        Reduction::Mean if !dtype.is_float() => Err(Error::MeanOfIntegers { dtype }),
        Reduction::PreMulSum { .. } if !dtype.is_float() => Err(Error::FactorsOfIntegers { dtype }),
        Reduction::SumThenMax { .. } if dtype != DType::U64 => Err(Error::WordsOnly { dtype }),
        _ => Ok(()),
    }
}

pub(crate) fn check_reduced(
    reduction: Reduction,
    dtype: DType,
    len: usize,
    world_size: usize,
) -> Result<(), Error> {
    check_reduction(reduction, dtype)?;
    check_whole(reduction)?;
    check_even(len, world_size)
}

/// Checks that the reduction of an element does not depend on its place in the whole buffer.
fn check_whole(reduction: Reduction) -> Result<(), Error> {
    if matches!(reduction, Reduction::SumThenMax { .. }) { Err(Error::WholeOnly) } else { Ok(()) }
}

pub(crate) fn check_even(len: usize, world_size: usize) -> Result<(), Error> {
    if len.is_multiple_of(world_size) {
        return Ok(());
    }
    Err(Error::Uneven { len, world_size, padded: len.next_multiple_of(world_size) })
}

pub(crate) fn check_rank(rank: usize, world_size: usize) -> Result<(), Error> {
    if rank < world_size { Ok(()) } else { Err(Error::InvalidRank { rank, world_size }) }
}

pub(crate) fn check_peer(peer: usize, rank: usize, world_size: usize) -> Result<(), Error> {
    check_rank(peer, world_size)?;
    if peer == rank { Err(Error::ToSelf { rank }) } else { Ok(()) }
}
