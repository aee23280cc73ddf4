//! The naive reference: a loop over whole vectors.

use super::{End, Flat, Isa, Run, Scalars, Segment, TensorSums, with_dtype};
use meshstep_shard::{Combine, SlotRuns};
use meshstep_tensor::{Queue, SliceMut, cast};
use std::ops::Range;

impl Run {
    /// Runs one loop over whole f32 vectors: means in f64, a plain sum of squares, one update per parameter. For gradients on the
    /// grid all sums are exact, so it must agree to the bit.
    pub fn naive(&self) -> End {
        let rule = self.boxed_rule();
        let mut params: Vec<Vec<f32>> = (0..self.lens.len()).map(|i| self.rounded(i)).collect();
        let mut state: Vec<Vec<Vec<f32>>> =
            self.lens.iter().map(|&len| vec![vec![0.0; len]; rule.state().len()]).collect();
        let mut end = End { params: Vec::new(), norms: Vec::new(), coefs: Vec::new() };
        for t in 1..=self.steps {
            let mut grads: Vec<Vec<f32>> = (0..self.lens.len()).map(|i| self.combined(t, i)).collect();
            let batches = self.options.slots.as_ref().map_or(self.micro_batches, SlotRuns::total);
            let factor = if self.options.combine == Combine::Mean { 1.0 / batches as f64 } else { 1.0 };
            let squares: f64 = grads.iter().flatten().map(|&g| f64::from(g) * f64::from(g)).sum();
            let norm = factor * squares.sqrt();
            let coef = self.max_norm.map_or(1.0, |max| (max / (norm + 1e-6)).min(1.0));
            let scalars = Scalars {
                lr: self.at(t).lr,
                grad_scale: factor * coef,
                zero_grads: false,
                ..Scalars::default()
            };
            for i in 0..self.lens.len() {
                let mut slots: Vec<SliceMut<'_>> =
                    state[i].iter_mut().map(|s| SliceMut::from(&mut s[..])).collect();
                let (params, grads) = (SliceMut::from(&mut params[i][..]), SliceMut::from(&mut grads[i][..]));
                let flat = Flat { params, grads, state: &mut slots, copy: None, remainder: None };
                let mut all = [Segment::new(0..self.lens[i], t)];
                let mut sums = [TensorSums::new()];
                rule.measure_on(Isa::Reference, &flat, &all, &scalars, &mut sums, &Queue::cpu()).unwrap();
                all[0].ratio = rule.ratio(&sums[0]);
                rule.update(flat, &all, &scalars, &Queue::cpu()).unwrap();
            }
            end.norms.push(norm.to_bits());
            end.coefs.push(coef.to_bits());
        }
        let bytes = |p: &Vec<f32>| {
            let wide: Vec<f64> = p.iter().map(|&x| x.into()).collect();
            with_dtype(self.dtype, &wide, |p| p.bytes().unwrap().to_vec())
        };
        end.params = params.iter().map(bytes).collect();
        end
    }

    /// Returns the initial values as an update sees them: in f32, after rounding to the parameters' type.
    pub(super) fn rounded(&self, i: usize) -> Vec<f32> {
        let mut wide = vec![0f32; self.lens[i]];
        with_dtype(self.dtype, &self.initial(i), |p| cast(p, SliceMut::from(&mut wide[..])).unwrap());
        wide
    }
    /// Returns the sum of some slots of a step: of a half of them and of the other half, where the first half is the largest power of two
    /// that leaves a second one.
    fn sum_of_slots(&self, t: u64, i: usize, slots: Range<usize>) -> Vec<f32> {
        if slots.len() == 1 {
            return self.gradient(t, slots.start, 0, i).into_iter().map(|g| g as f32).collect();
        }
        let middle = slots.start + slots.len().next_power_of_two() / 2;
        let [left, right] =
            [slots.start..middle, middle..slots.end].map(|half| self.sum_of_slots(t, i, half));
        left.into_iter().zip(right).map(|(l, r)| l + r).collect()
    }

    pub(super) fn combined(&self, t: u64, i: usize) -> Vec<f32> {
        if let Some(slots) = &self.options.slots {
            return self.sum_of_slots(t, i, 0..slots.total());
        }
        let mut sum = vec![0f64; self.lens[i]];
        for batch in 0..self.micro_batches {
            for rank in 0..self.ranks {
                sum.iter_mut().zip(self.gradient(t, batch, rank, i)).for_each(|(s, g)| *s += g);
            }
        }
        let ranks = if self.options.combine == Combine::Mean { self.ranks as f64 } else { 1.0 };
        sum.iter().map(|s| (s / ranks) as f32).collect()
    }
}
