//! The three phases of Muon's update: momentum, orthogonalisation, descent.

use super::orthogonalize::NewtonSchulz;
use super::product::Product;
use super::steps::{Descent, Momentum};
use super::{Muon, NAME};
use crate::engine::check::check_isa;
use crate::engine::cpu::Cpu;
use crate::engine::pass;
use crate::engine::streams::Streams;
use crate::engine::sweep::Sweep;
use crate::{Error, Flat, Isa, MatrixRule, Rule, Scalars, Segment, cuda};
use meshstep_tensor::{DType, Queue, SliceMut};

impl MatrixRule for Muon {
    fn cost(&self, len: usize, matrix: (usize, usize)) -> u64 {
        let block = self.blocks.of_matrix(matrix).unwrap_or_default();
        let each = block.0.saturating_mul(block.1);
        // Half of the Gram matrix and of its square is computed.
        let (short, long) = (block.0.min(block.1) as u64, block.0.max(block.1) as u64);
        let iteration =
            short.saturating_mul(short).saturating_mul(long.saturating_mul(3).saturating_add(short));
        let blocks = len.checked_div(each).unwrap_or(0) as u64;
        iteration.saturating_mul(u64::from(self.ns_steps)).saturating_mul(blocks)
    }

    fn advance(
        &self,
        isa: Isa,
        flat: Flat<'_, '_>,
        segments: &[Segment],
        scalars: &Scalars,
        queue: &Queue,
    ) -> Result<(), Error> {
        self.check()?;
        pass::check(self, isa, &flat, segments, scalars)?;
        let on = Cpu { isa, threads: queue.threads() };
        match flat.params.dtype() {
            DType::F64 => self.momentum::<f64>(pass::streams(flat)?, segments, scalars, on),
            _ => self.momentum::<f32>(pass::streams(flat)?, segments, scalars, on),
        }
        Ok(())
    }

    fn transform(
        &self,
        isa: Isa,
        step: SliceMut<'_>,
        matrix: (usize, usize),
        queue: &Queue,
    ) -> Result<(), Error> {
        self.check()?;
        check_isa(isa)?;
        let whole = Segment { matrix: Some(matrix), ..Segment::new(0..step.len(), 1) };
        let (block, on) = (self.block(0, &whole)?, Cpu { isa, threads: queue.threads() });
        match step.dtype() {
            DType::F32 => self.orthogonalize::<f32>(step.into_typed()?, block, on),
            DType::F64 => self.orthogonalize::<f64>(step.into_typed()?, block, on),
            given => return Err(Error::DType { what: "a step", given, works: "f32 or f64" }),
        }
        Ok(())
    }

    fn apply(
        &self,
        isa: Isa,
        flat: Flat<'_, '_>,
        segments: &[Segment],
        scalars: &Scalars,
        queue: &Queue,
    ) -> Result<(), Error> {
        self.check()?;
        pass::check_stateless(self, isa, &flat, segments, scalars)?;
        segments.iter().enumerate().try_for_each(|(index, segment)| self.block_of_part(index, segment))?;
        let on = Cpu { isa, threads: queue.threads() };
        match flat.params.dtype() {
            DType::F64 => self.descend::<f64>(pass::streams(flat)?, segments, scalars, on),
            _ => self.descend::<f32>(pass::streams(flat)?, segments, scalars, on),
        }
        Ok(())
    }

    fn orthogonalization(&self, matrix: (usize, usize)) -> Option<cuda::Orthogonalization> {
        let block = self.blocks.of_matrix(matrix)?;
        Some(cuda::Orthogonalization {
            block,
            // A matrix without elements has no valid adjustment, and nothing uses it.
            adjustment: if block.0 == 0 || block.1 == 0 { 0.0 } else { self.adjustment(block) },
            coefficients: self.ns_coefficients,
            steps: self.ns_steps,
            eps: self.eps,
            add_eps: self.add_eps,
        })
    }
}

impl Muon {
    /// Updates the buffer; the step takes the parameters' place.
    pub(super) fn momentum<T: Product>(
        &self,
        streams: Streams<'_, T, 1>,
        segments: &[Segment],
        scalars: &Scalars,
        on: Cpu<'_>,
    ) {
        let constants = |_: &Segment| Momentum::<T>::new(self, scalars.grad_scale);
        Sweep { constants, on, zero_grads: scalars.zero_grads, rounding: scalars.rounding }
            .run(streams, segments);
    }

    /// Orthogonalises blocks of these rows and columns, which follow one another.
    pub(super) fn orthogonalize<T: Product>(
        &self,
        step: &mut [T],
        (rows, cols): (usize, usize),
        on: Cpu<'_>,
    ) {
        let newton_schulz = NewtonSchulz {
            coefficients: self.ns_coefficients.map(T::from_f64),
            steps: self.ns_steps,
            eps: self.eps,
            add_eps: self.add_eps,
            isa: on.isa,
            threads: on.threads,
        };
        step.chunks_exact_mut((rows * cols).max(1))
            .for_each(|block| newton_schulz.orthogonalize(block, (rows, cols)));
    }

    /// Updates the parameters along the orthogonalised step, which has the gradients' place.
    pub(super) fn descend<T: Product>(
        &self,
        streams: Streams<'_, T, 0>,
        segments: &[Segment],
        scalars: &Scalars,
        on: Cpu<'_>,
    ) {
        let constants = |segment: &Segment| {
            let block = segment.matrix.and_then(|matrix| self.blocks.of_matrix(matrix));
            let length = scalars.lr * block.map_or(1.0, |block| self.adjustment(block));
            Descent::<T>::new(length, scalars.lr * self.weight_decay)
        };
        Sweep { constants, on, zero_grads: false, rounding: scalars.rounding }.run(streams, segments);
    }

    /// Refuses a segment that is not a part of matrices that the rule updates.
    fn block_of_part(&self, index: usize, segment: &Segment) -> Result<(), Error> {
        let shape = segment.matrix;
        let (len, blocks) = (segment.range.len(), self.blocks);
        let block = shape.and_then(|matrix| blocks.of_matrix(matrix));
        block.map(drop).ok_or(Error::NotAMatrix { rule: NAME, index, len, shape, blocks })
    }
}
