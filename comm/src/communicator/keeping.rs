//! All-reduce of values where they lie, through a copy: the default of every backend.

use crate::{Communicator, Error, Op};
use meshstep_tensor::{Buffer, DType, Element, Place, SliceMut, bf16, f16};

/// Checks that `values`, laid end to end, are as long as `kept`, of its type, and on the CPU.
pub(crate) fn check(values: &[SliceMut<'_>], kept: &Buffer) -> Result<(), Error> {
    kept.place().check(Place::Cpu)?;
    for slice in values {
        slice.place().check(Place::Cpu)?;
        if slice.dtype() != kept.dtype() {
            let (asked, holds) = (kept.dtype(), slice.dtype());
            return Err(meshstep_tensor::Error::WrongDType { asked, holds }.into());
        }
    }
    let given = values.iter().map(SliceMut::len).sum();
    if given != kept.len() {
        return Err(meshstep_tensor::Error::WrongLen { given, expected: kept.len() }.into());
    }
    Ok(())
}

/// Implements [`Communicator::all_reduce_keeping`] by a copy into `kept`, an all-reduce there, and a swap.
pub(crate) fn through_a_copy<C: Communicator + ?Sized>(
    comm: &C,
    op: Op,
    values: &mut [SliceMut<'_>],
    mut kept: Buffer,
) -> (Buffer, Result<u64, Error>) {
    let copied = check(values, &kept).and_then(|()| copy_in(values, &mut kept));
    if let Err(error) = copied {
        return (kept, Err(error));
    }
    let (mut kept, reduced) = comm.complete(op, kept);
    let swapped = reduced.and_then(|()| swap(values, &mut kept));
    (kept, swapped)
}

fn copy_in(values: &[SliceMut<'_>], kept: &mut Buffer) -> Result<(), Error> {
    let mut rest = kept.as_mut();
    for slice in values {
        let (mut place, after) = rest.split_at(slice.len())?;
        place.copy_from(slice.as_slice())?;
        rest = after;
    }
    Ok(())
}

/// Swaps the values with their reduction; returns the number of non-finite elements of the latter.
fn swap(values: &mut [SliceMut<'_>], kept: &mut Buffer) -> Result<u64, Error> {
    match kept.dtype() {
        DType::F32 => swap_of(values, kept, f32::is_finite),
        DType::F64 => swap_of(values, kept, f64::is_finite),
        DType::BF16 => swap_of(values, kept, bf16::is_finite),
        DType::F16 => swap_of(values, kept, f16::is_finite),
        DType::U64 => swap_of(values, kept, |_: u64| true),
        dtype => Err(Error::UnsupportedDType { dtype }),
    }
}

fn swap_of<T: Element>(
    values: &mut [SliceMut<'_>],
    kept: &mut Buffer,
    is_finite: fn(T) -> bool,
) -> Result<u64, Error> {
    let (mut rest, mut found) = (kept.typed_mut::<T>()?, 0);
    for slice in values {
        let (reduced, after) = std::mem::take(&mut rest).split_at_mut(slice.len());
        found += reduced.iter().filter(|&&x| !is_finite(x)).count() as u64;
        slice.typed_mut::<T>()?.swap_with_slice(reduced);
        rest = after;
    }
    Ok(found)
}
