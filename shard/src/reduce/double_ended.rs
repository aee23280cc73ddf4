//! Double-ended memory: lends two buffers at a time, of any lengths that fit together.

use meshstep_tensor::{Buffer, DType};

/// A stretch of memory.
#[derive(Debug)]
pub(crate) struct DoubleEnded {
    dtype: DType,
    len: usize,
    /// Memory that is not lent.
    spare: Option<Buffer>,
    /// True if the front and the back are lent.
    lent: [bool; 2],
}

/// Origin of a lent buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum From {
    Front,
    Back,
    /// Allocated outside the stretch.
    Outside,
}

impl DoubleEnded {
    /// Makes a stretch of all of `whole`.
    pub(crate) fn new(whole: Buffer) -> Self {
        DoubleEnded { dtype: whole.dtype(), len: whole.len(), spare: Some(whole), lent: [false; 2] }
    }

    /// Returns the type.
    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the number of elements, lent ones included.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Lends `len` elements, if a free end has as many.
    pub(crate) fn lend(&mut self, len: usize) -> Option<(Buffer, From)> {
        let spare = self.spare.as_mut().filter(|spare| spare.len() >= len)?;
        match self.lent {
            [false, _] => {
                let rest = spare.split_off(len).ok()?;
                self.lent[0] = true;
                Some((std::mem::replace(spare, rest), From::Front))
            }
            [true, false] => {
                let back = spare.split_off(spare.len() - len).ok()?;
                self.lent[1] = true;
                Some((back, From::Back))
            }
            [true, true] => None,
        }
    }

    /// Takes back a lent buffer, or drops one from outside.
    pub(crate) fn put(&mut self, buffer: Buffer, from: From) {
        let Some(spare) = self.spare.take() else { return };
        let joined = match from {
            From::Front => buffer.join(spare),
            From::Back => spare.join(buffer),
            From::Outside => Ok(spare),
        };
        match from {
            From::Front => self.lent[0] = false,
            From::Back => self.lent[1] = false,
            From::Outside => {}
        }
        self.spare = Some(joined.unwrap_or_else(|_| unreachable!("joined where it was cut")));
    }
}
