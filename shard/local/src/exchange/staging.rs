//! Staging memory into which exchanges are packed, kept from one exchange to the next.

use meshstep_shard::{Error, Options};
use meshstep_tensor::{Buffer, Category, DType};

/// Free buffers. The pool allocates as much as the exchanges need at one time, and no more.
#[derive(Debug, Default)]
pub(crate) struct Staging(Vec<Buffer>);

impl Staging {
    /// Takes a buffer of `len` elements with arbitrary values.
    pub(crate) fn take(&mut self, len: usize, dtype: DType, options: &Options) -> Result<Buffer, Error> {
        let fits = |buffer: &Buffer| buffer.dtype() == dtype && buffer.len() >= len;
        let fitting = self.0.iter().enumerate().filter(|(_, buffer)| fits(buffer));
        // Best fit: lengths that come again get the buffer they had before.
        if let Some((found, _)) = fitting.min_by_key(|(_, buffer)| buffer.len()) {
            let mut buffer = self.0.swap_remove(found);
            let rest = buffer.split_off(len)?;
            self.0.extend(Some(rest).filter(|rest| !rest.is_empty()));
            return Ok(buffer);
        }
        // Shorter buffers would stay unused beside the new one.
        self.0.retain(|buffer| buffer.dtype() != dtype);
        Ok(Buffer::zeroed_on(&options.queue, len, dtype, &options.meter, Category::Staging)?)
    }

    /// Returns buffers to the pool, joined with the buffers they were cut from.
    pub(crate) fn give(&mut self, buffers: impl IntoIterator<Item = Buffer>) {
        for mut buffer in buffers {
            let mut apart = Vec::new();
            for other in self.0.drain(..) {
                let joined = buffer.join(other).or_else(|(buffer, other)| other.join(buffer));
                buffer = joined.unwrap_or_else(|(other, buffer)| {
                    apart.push(other);
                    buffer
                });
            }
            self.0 = apart;
            self.0.extend(Some(buffer).filter(|buffer| !buffer.is_empty()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use meshstep_tensor::Meter;

    #[test]
    fn what_was_cut_is_joined_and_nothing_is_allocated_twice() {
        let meter = Meter::new();
        let (options, mut staging) =
            (Options { meter: meter.clone(), ..Options::default() }, Staging::default());
        let mut take = |lens: &[usize]| {
            let taken: Vec<Buffer> =
                lens.iter().map(|&len| staging.take(len, DType::F32, &options).unwrap()).collect();
            assert!(taken.iter().zip(lens).all(|(buffer, len)| buffer.len() == *len));
            // In reverse order.
            staging.give(taken.into_iter().rev());
            meter.live(Category::Staging)
        };
        assert_eq!(take(&[100]), 400);
        // The longer buffer replaces the shorter one.
        assert_eq!(take(&[300]), 1200);
        for lens in [[100, 100, 100].as_slice(), &[299], &[150, 150], &[10, 250, 40], &[0, 300]] {
            assert_eq!(take(lens), 1200, "{lens:?}");
        }
        assert_eq!(staging.0.len(), 1);
    }

    /// Lengths of several exchanges at once, returned in varying order.
    #[test]
    fn lengths_that_come_again_allocate_nothing() {
        let meter = Meter::new();
        let (options, mut staging) =
            (Options { meter: meter.clone(), ..Options::default() }, Staging::default());
        let (mut before, mut address) = (None, Vec::new());
        for round in 0..6 {
            let lens = [300, 100, 200];
            let taken = lens.map(|len| staging.take(len, DType::F32, &options).unwrap());
            let mut now: Vec<usize> = taken.iter().map(|buffer| buffer.as_ptr().addr().get()).collect();
            now.sort_unstable();
            let held = meter.live(Category::Staging);
            assert_eq!((*before.get_or_insert(held), round == 0 || now == address), (held, true), "{round}");
            address = now;
            let [lane, first, second] = taken;
            if round % 2 == 0 {
                staging.give([lane, first, second])
            } else {
                staging.give([second, lane, first])
            }
        }
    }
}
