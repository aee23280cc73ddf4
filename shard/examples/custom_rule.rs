//! An update rule of one's own on sharded state: `cargo run -p meshstep-shard --example custom_rule`.
//!
//! Signum (Bernstein et al. 2018, arXiv:1802.04434, algorithm 2): m = beta m + (1 - beta) g, p = p - lr sign(m). The rule implements six
//! methods of `Rule`: `name`, `state`, `check`, `each_hyperparameter`, `slot`, and `update_on`, which passes the arithmetic of one element
//! (`Step::step`) and its constants (`ElementRule::constants`) to `update_elements`. Sharding, 16-bit recipes, threads and checkpoints
//! need no more.

#![allow(clippy::print_stdout)] // a program

use meshstep_optim::elementwise::{ElementRule, Real, Step as ElementStep, update_elements};
use meshstep_optim::{Error as RuleError, Flat, Isa, Scalars, Segment, StateSlot};
use meshstep_shard::prelude::*;
use std::error::Error;
use std::fmt::Write;
use std::sync::Arc;

/// The rule holds hyperparameters; the optimizer holds its state.
#[derive(Debug)]
struct Signum {
    beta: f64,
}

/// Constants of one segment, in the type of the computation.
#[derive(Clone, Copy)]
struct SignumStep<T> {
    scale: T,
    beta: T,
    one_less_beta: T,
    lr: T,
}

impl<T: Real> ElementStep<T, 1> for SignumStep<T> {
    #[inline(always)]
    fn step(&self, p: T, g: T, [m]: [T; 1]) -> (T, [T; 1]) {
        let (zero, m) = (T::from_f32(0.0), self.beta * m + self.one_less_beta * (g * self.scale));
        let p = if m > zero { p - self.lr } else { p };
        (if m < zero { p + self.lr } else { p }, [m])
    }
}

impl ElementRule<1> for Signum {
    type Step<T: Real> = SignumStep<T>;

    fn constants<T: Real>(&self, scalars: &Scalars, segment: &Segment) -> SignumStep<T> {
        let [scale, beta, one_less_beta, lr] =
            [scalars.grad_scale, self.beta, 1.0 - self.beta, scalars.lr * segment.ratio].map(T::from_f64);
        SignumStep { scale, beta, one_less_beta, lr }
    }
}

impl Rule for Signum {
    /// In reports and errors.
    fn name(&self) -> &'static str {
        "signum"
    }

    /// Names in checkpoints; each vector starts as zeros.
    fn state(&self) -> &'static [&'static str] {
        &["m"]
    }

    fn check(&self) -> Result<(), RuleError> {
        let (name, works) = ("beta", "a number >= 0 and < 1");
        match (0.0..1.0).contains(&self.beta) {
            true => Ok(()),
            false => Err(RuleError::Hyperparameter { rule: self.name(), name, value: self.beta, works }),
        }
    }

    /// Ranks compare these in every step.
    fn each_hyperparameter(&self, each: &mut dyn FnMut(&'static str, f64)) {
        each("beta", self.beta);
    }

    /// Effect of an update on `m`: for 16-bit state, and for merges of workers.
    fn slot(&self, _: usize) -> StateSlot {
        StateSlot::average(self.beta)
    }

    #[rustfmt::skip]
    fn update_on(
        &self, isa: Isa, flat: Flat<'_, '_>, segments: &[Segment], scalars: &Scalars, queue: &Queue,
    ) -> Result<(), RuleError> {
        update_elements(self, isa, flat, segments, scalars, queue)
    }
}

/// Moves 256 elements from 0 to 1; returns the elements of state on this rank, and the parameters.
fn train(comm: Arc<dyn Communicator>) -> Result<(u64, Vec<f32>), meshstep_shard::Error> {
    let layout = Layout::builder().param("w", &[256], DType::F32).build()?;
    let meter = Meter::new();
    let options = Options { stage: Stage::Zero2, meter: meter.clone(), ..Options::default() };
    let mut opt = Optimizer::new(comm, layout, Signum { beta: 0.5 }, |_, _| Ok(()), options)?;
    for t in 0..200 {
        let grad: Vec<f32> = opt.param("w")?.typed::<f32>()?.iter().map(|w| w - 1.0).collect();
        let mb = opt.micro_batch(1)?;
        mb.grad("w", &grad[..])?;
        mb.finish()?;
        opt.step(StepArgs { lr: 0.1 * 0.96f64.powi(t), ..StepArgs::default() })?.outcome()?;
    }
    Ok((meter.live(Category::State) / 4, opt.param("w")?.typed::<f32>()?.to_vec()))
}

pub(crate) fn run() -> Result<String, Box<dyn Error + Send + Sync>> {
    let (mut text, mut ends) = (String::new(), Vec::new());
    for end in loopback::spawn(1, train)?.into_iter().chain(loopback::spawn(4, train)?) {
        let (state, w) = end?;
        let far = w.iter().map(|w| (w - 1.0).abs()).fold(0.0, f32::max);
        writeln!(text, "{state} elements of m on this rank, w within 0.01 of its minimum: {}", far < 0.01)?;
        ends.push(w);
    }
    writeln!(text, "the same bits on 1 and on 4 ranks: {}", ends.iter().all(|w| *w == ends[0]))?;
    Ok(text)
}

fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    print!("{}", run()?);
    Ok(())
}
