//! Steps of Muon on one matrix of f32.

use anyhow::Result;
use meshstep_optim::{Flat, Muon, Rule as _, Scalars, Segment};
use meshstep_tensor::{Queue, Threads};

/// A matrix with its gradient and buffer.
pub struct MuonSteps {
    shape: (usize, usize),
    params: Vec<f32>,
    grads: Vec<f32>,
    buffer: Vec<f32>,
    queue: Queue,
    t: u64,
}

impl MuonSteps {
    /// Creates a matrix of `(rows, cols)`, updated on these threads.
    pub fn new((rows, cols): (usize, usize), threads: &Threads) -> Self {
        let len = rows * cols;
        let grads = (0..len).map(|i| (i * 2_654_435_761 % 1000) as f32 / 1000.0 - 0.5).collect();
        let queue = Queue::cpu_on(threads);
        MuonSteps { shape: (rows, cols), params: vec![0.0; len], grads, buffer: vec![0.0; len], queue, t: 0 }
    }

    /// Takes a step: momentum, five iterations of Newton and Schulz, the parameters.
    pub fn step(&mut self) -> Result<()> {
        self.t += 1;
        let segment = Segment { matrix: Some(self.shape), ..Segment::new(0..self.params.len(), self.t) };
        let mut state = [(&mut self.buffer[..]).into()];
        let (params, grads) = ((&mut self.params[..]).into(), (&mut self.grads[..]).into());
        let flat = Flat { params, grads, state: &mut state, copy: None, remainder: None };
        Ok(Muon::default().update(flat, &[segment], &Scalars::default(), &self.queue)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_moves_the_parameters_by_the_rate() {
        let mut steps = MuonSteps::new((8, 12), &Threads::caller());
        steps.step().unwrap();
        // Singular values of a step are the rate, 0.001, times 0.7 to 1.2; eight of them make the norm.
        let norm = steps.params.iter().map(|p| p * p).sum::<f32>().sqrt();
        assert!((0.0015..0.0035).contains(&norm), "{norm}");
    }
}
