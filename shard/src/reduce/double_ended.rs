//! Memory that is lent from both its ends: two buffers at a time, of any lengths that it has room for together.

use meshstep_tensor::{Buffer, DType};

/// A stretch of memory.
#[derive(Debug)]
pub(crate) struct Stretch {
    dtype: DType,
    len: usize,
    /// What is not lent.
    spare: Option<Buffer>,
    /// Whether its front and its back are.
    lent: [bool; 2],
}

/// Where a lent buffer comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum From {
    Front,
    Back,
    /// Memory of its own.
    Outside,
}

impl Stretch {
    /// All of `whole`.
    pub(crate) fn new(whole: Buffer) -> Self {
        Stretch { dtype: whole.dtype(), len: whole.len(), spare: Some(whole), lent: [false; 2] }
    }

    /// Its type.
    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    /// Elements, lent ones included.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Lends `len` elements, if there is an end with so many.
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

    /// Takes back what was lent, and drops what is not its own.
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
