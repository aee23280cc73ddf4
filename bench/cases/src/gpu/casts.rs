//! Casts of whole vectors, as for gradients and gathered parameters.

use super::Result;
use super::check::{downloaded, parts};
use super::measure::timed;
use super::race::{Copy, Measured};
use super::vectors::made;
use meshstep_optim::cast;
use meshstep_optim::cuda::{self, THREADS, tile};
use meshstep_tensor::DType::{self, BF16, F16, F32};
use meshstep_tensor::{Buffer, Category, Meter, Queue};

#[derive(Clone, Copy)]
pub struct Cast {
    from: DType,
    to: DType,
}

/// Returns every cast that a GPU supports.
pub(super) fn casts() -> impl Iterator<Item = Cast> {
    let all = [(F32, BF16), (BF16, F32), (F32, F16), (F16, F32), (BF16, F16), (F16, BF16)];
    all.into_iter().map(|(from, to)| Cast { from, to })
}

impl Cast {
    pub fn name(self) -> String {
        format!("cast {} to {}", self.from, self.to)
    }

    /// Returns the bytes that must be read and written for each element.
    pub fn bytes(self) -> usize {
        self.from.size() + self.to.size()
    }

    pub fn measure(self, copy: &mut Copy, (len, rounds): (usize, usize), queue: &Queue) -> Result<Measured> {
        let src = made(self.from, (1, 1.0), &(0..len), queue)?;
        let mut dst = Buffer::zeroed_on(queue, len, self.to, &Meter::new(), Category::Staging)?;
        cast(src.as_slice(), dst.as_mut(), queue)?;
        let compared = self.compare(&dst, queue)?;
        let name = cuda::cast(self.from, self.to).ok_or("no such cast on a GPU")?;
        let kernels = vec![(name, tile(F32) / u64::from(THREADS))];
        let mut go = || Ok(cast(src.as_slice(), dst.as_mut(), queue)?);
        Ok(Measured { compared, ..timed(copy, (len, rounds), &kernels, &mut go, queue)? })
    }

    /// Compares parts of the result with the CPU's. Returns the number of compared elements.
    fn compare(self, dst: &Buffer, queue: &Queue) -> Result<usize> {
        let parts = parts(dst.len());
        for range in &parts {
            let src = made(self.from, (1, 1.0), range, &Queue::cpu())?;
            let mut expected = Buffer::zeroed(range.len(), self.to, &Meter::new(), Category::Staging)?;
            cast(src.as_slice(), expected.as_mut(), &Queue::cpu())?;
            if downloaded(dst, range, queue)?.as_slice().bytes()? != expected.as_slice().bytes()? {
                return Err(format!("{}: elements {range:?} differ from the CPU's", self.name()).into());
            }
        }
        Ok(parts.iter().map(std::ops::Range::len).sum())
    }
}
