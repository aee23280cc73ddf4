//! AdamW of candle.

use std::time::Instant;

use anyhow::Result;
use candle_core::backprop::GradStore;
use candle_core::{Device, Tensor, Var};
use candle_nn::{AdamW, Optimizer as _, ParamsAdamW};

/// An optimizer of one tensor with a fixed gradient.
pub(crate) struct Candle {
    optimizer: AdamW,
    grads: GradStore,
}

impl Candle {
    pub(crate) fn new(len: usize) -> Result<Self> {
        let device = Device::Cpu;
        let x = Var::rand(0f32, 1.0, len, &device)?;
        let slope = Tensor::rand(-0.5f32, 0.5, len, &device)?;
        let grads = x.mul(&slope)?.sum_all()?.backward()?;
        let optimizer = AdamW::new(vec![x], ParamsAdamW { lr: 1e-9, ..ParamsAdamW::default() })?;
        Ok(Candle { optimizer, grads })
    }

    /// Runs one update and returns its seconds.
    pub(crate) fn run(&mut self) -> Result<f64> {
        let start = Instant::now();
        self.optimizer.step(&self.grads)?;
        Ok(start.elapsed().as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The timed update must change the parameters.
    #[test]
    fn an_update_moves_what_has_a_gradient() {
        let device = Device::Cpu;
        let x = Var::zeros(3, candle_core::DType::F32, &device).unwrap();
        let grads = x.sum_all().unwrap().backward().unwrap();
        let params = ParamsAdamW { lr: 0.5, weight_decay: 0.0, ..ParamsAdamW::default() };
        let mut candle = Candle { optimizer: AdamW::new(vec![x.clone()], params).unwrap(), grads };
        assert!(candle.run().unwrap() > 0.0);
        let moved = x.to_vec1::<f32>().unwrap();
        assert!(moved.iter().all(|x| (x + 0.5).abs() < 1e-3), "{moved:?}");
        assert!(Candle::new(16).unwrap().run().unwrap() > 0.0);
    }
}
