//! Single iterations of L-BFGS with a full history, on a loss that is cheap to compute.

use std::time::Instant;

use anyhow::{Result, anyhow, ensure};
use meshstep_optim::{Alone, History, Lbfgs, LbfgsState, Loss};
use meshstep_tensor::{Buffer, Category, DType, Meter, Slice, SliceMut, Threads};

use crate::race::Contestant;

/// Number of pairs.
pub const HISTORY: usize = 10;

const CHUNK: usize = 64 << 10;

/// An L-BFGS run: the point, the history, and the target and weight of each element of the loss.
pub struct Iterations {
    rule: Lbfgs,
    x: Buffer,
    state: LbfgsState,
    target: Vec<f32>,
    weight: Vec<f32>,
}

impl Iterations {
    /// Creates a run on `len` f32 parameters with a full history.
    pub fn new(len: usize, history: History) -> Result<Self> {
        let mut run = Self::starting(len, history, 0.1)?;
        (0..=HISTORY).try_for_each(|_| run.iterate())?;
        Ok(run)
    }

    fn starting(len: usize, history: History, lr: f64) -> Result<Self> {
        let (meter, stops) = (Meter::new(), Lbfgs { max_iter: 1, max_eval: Some(2), ..Lbfgs::default() });
        let stops = Lbfgs { tolerance_grad: 0.0, tolerance_change: 0.0, ..stops };
        let rule = Lbfgs { lr, history_len: HISTORY, history, ..stops };
        Ok(Iterations {
            x: Buffer::zeroed(len, DType::F32, &meter, Category::Params)?,
            state: rule.state(len, DType::F32, &meter)?,
            target: (0..len).map(|i| (i % 7 + 1) as f32).collect(),
            weight: (0..len).map(|i| 1.0 + i as f32 / len as f32).collect(),
            rule,
        })
    }

    /// Runs one iteration. The gradient is computed from vectors of the same length by the same formula as on the other side.
    pub fn iterate(&mut self) -> Result<()> {
        let Iterations { rule, x, state, target, weight } = self;
        let closure = |x: Slice<'_>, mut grad: SliceMut<'_>| -> Result<Loss, meshstep_tensor::Error> {
            let to = target.chunks(CHUNK).zip(weight.chunks(CHUNK));
            let parts =
                grad.typed_mut::<f32>()?.chunks_mut(CHUNK).zip(x.typed::<f32>()?.chunks(CHUNK).zip(to));
            Threads::shared().for_each(parts, |(grad, (x, (target, weight)))| {
                let terms = x.iter().zip(target).zip(weight);
                grad.iter_mut()
                    .zip(terms)
                    .for_each(|(grad, ((x, target), weight))| *grad = (x - target) * weight);
            });
            Ok(Loss::Whole(1.0))
        };
        let report =
            rule.step(x.as_mut(), closure, &Alone, state).map_err(|error| anyhow!("L-BFGS: {error}"))?;
        ensure!(report.iterations == 1, "L-BFGS took {} iterations instead of one", report.iterations);
        Ok(())
    }

    /// Returns the contestant that runs one iteration of the run that `of` selects.
    pub fn contestant<'a, X>(of: impl Fn(&mut X) -> &mut Iterations + 'a) -> Contestant<'a, X> {
        Box::new(move |on| {
            let start = Instant::now();
            of(on).iterate()?;
            Ok(start.elapsed().as_secs_f64())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn iterations_are_one_at_a_time_and_converge() {
        for history in [History::Exact, History::Bf16, History::F16] {
            let mut run = Iterations::starting(100, history, 0.5).unwrap();
            (0..20).for_each(|_| run.iterate().unwrap());
            let x = run.x.typed::<f32>().unwrap();
            assert!(x.iter().enumerate().all(|(i, x)| (x - (i % 7 + 1) as f32).abs() < 0.1), "{x:?}");
        }
    }
}
