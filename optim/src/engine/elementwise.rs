//! Helpers for rules outside this crate, for any recipe of memory: the rule defines the arithmetic of one element, and
//! [`update_elements`] does the rest, as for the rules of this crate.
//!
//! A [`Flat`] may hold gradients in bf16 or f16, state in bf16, a rounded copy of the parameters, and bf16 parameters with a
//! remainder. [`update_elements`] checks the types, converts block by block, rounds to nearest or stochastically, writes copy and
//! remainder, resets gradients, and spreads long vectors over the queue's threads. The rule sees numbers of one type [`Real`]: f64 for
//! f64 parameters, else f32.
//!
//! ```
//! use meshstep_optim::elementwise::{ElementRule, Real, Step, update_elements};
//! use meshstep_optim::{Error, Flat, Isa, Rule, Scalars, Segment, StateSlot};
//! use meshstep_tensor::{Queue, bf16};
//!
//! /// m = beta m + g, p = p - lr m.
//! #[derive(Debug)]
//! struct HeavyBall {
//!     beta: f64,
//! }
//!
//! #[derive(Clone, Copy)]
//! struct Constants<T> {
//!     scale: T,
//!     beta: T,
//!     minus_lr: T,
//! }
//!
//! impl<T: Real> Step<T, 1> for Constants<T> {
//!     #[inline(always)]
//!     fn step(&self, p: T, g: T, [m]: [T; 1]) -> (T, [T; 1]) {
//!         let m = self.beta.fma(m, g * self.scale);
//!         (self.minus_lr.fma(m, p), [m])
//!     }
//! }
//!
//! impl ElementRule<1> for HeavyBall {
//!     type Step<T: Real> = Constants<T>;
//!
//!     fn constants<T: Real>(&self, scalars: &Scalars, segment: &Segment) -> Constants<T> {
//!         let [scale, beta, minus_lr] = [scalars.grad_scale, self.beta, -scalars.lr * segment.ratio].map(T::from_f64);
//!         Constants { scale, beta, minus_lr }
//!     }
//! }
//!
//! impl Rule for HeavyBall {
//!     fn name(&self) -> &'static str {
//!         "heavy_ball"
//!     }
//!
//!     fn state(&self) -> &'static [&'static str] {
//!         &["m"]
//!     }
//!
//!     fn check(&self) -> Result<(), Error> {
//!         let (name, works) = ("beta", "a number >= 0 and < 1");
//!         match (0.0..1.0).contains(&self.beta) {
//!             true => Ok(()),
//!             false => Err(Error::Hyperparameter { rule: self.name(), name, value: self.beta, works }),
//!         }
//!     }
//!
//!     fn each_hyperparameter(&self, each: &mut dyn FnMut(&'static str, f64)) {
//!         each("beta", self.beta);
//!     }
//!
//!     fn slot(&self, _: usize) -> StateSlot {
//!         StateSlot::average(self.beta)
//!     }
//!
//!     fn update_on(&self, isa: Isa, flat: Flat, segments: &[Segment], scalars: &Scalars, queue: &Queue) -> Result<(), Error> {
//!         update_elements(self, isa, flat, segments, scalars, queue)
//!     }
//! }
//!
//! // bf16 parameters with remainders, and bf16 gradients.
//! let (mut p, mut low, mut g, mut m) = ([bf16::ONE; 3], [0u16; 3], [bf16::ONE; 3], [0f32; 3]);
//! let mut state = [(&mut m).into()];
//! let flat = Flat {
//!     params: (&mut p).into(),
//!     grads: (&mut g).into(),
//!     state: &mut state,
//!     copy: None,
//!     remainder: Some((&mut low).into()),
//! };
//! let scalars = Scalars { lr: 1e-3, ..Scalars::default() };
//! HeavyBall { beta: 0.9 }.update(flat, &[Segment::new(0..3, 1)], &scalars, &Queue::cpu())?;
//! assert_eq!(p, [bf16::ONE; 3]); // the step is too small for bf16
//! assert_eq!(meshstep_optim::remainder::join(p[0], low[0]), 1.0 - 1e-3); // and the remainder keeps it
//! # Ok::<(), Error>(())
//! ```
//!
//! # Limits
//! Memory on the CPU. Rules that see more than an element, and kernels for GPUs, are of this crate alone.

pub use crate::engine::sweep::Step;
pub use crate::precision::number::{Divide, Real};

use crate::engine::cpu::Cpu;
use crate::engine::pass::{PassKind, pass};
use crate::{Error, Flat, Isa, Rule, Scalars, Segment};
use meshstep_tensor::Queue;

/// Rule with `S` state vectors that updates each element on its own.
pub trait ElementRule<const S: usize>: Rule {
    /// Update of one element, with the constants of one segment.
    type Step<T: Real>: Step<T, S>;

    /// Returns the constants of a segment. [`Scalars::grad_scale`] is a factor on every gradient, [`Segment::ratio`] one on the
    /// learning rate. Compute in f64 and convert once: `1 - 0.999` in f32 is off by 1.3e-5.
    fn constants<T: Real>(&self, scalars: &Scalars, segment: &Segment) -> Self::Step<T>;
}

/// Checks all arguments, then advances the elements of `segments` by one step: [`Rule::update_on`] for an [`ElementRule`].
pub fn update_elements<const S: usize>(
    rule: &impl ElementRule<S>,
    isa: Isa,
    flat: Flat<'_, '_>,
    segments: &[Segment],
    scalars: &Scalars,
    queue: &Queue,
) -> Result<(), Error> {
    rule.check()?;
    let expected = rule.state();
    if expected.len() != S {
        return Err(Error::StateCount { rule: rule.name(), given: S, expected });
    }
    pass(&Outside(rule), rule, Cpu { isa, threads: queue.threads() }, flat, segments, scalars)
}

struct Outside<'r, R>(&'r R);

impl<R: ElementRule<S>, const S: usize> PassKind<S> for Outside<'_, R> {
    type Step<T: Real> = R::Step<T>;

    fn constants<T: Real>(&self, scalars: &Scalars, segment: &Segment) -> R::Step<T> {
        self.0.constants(scalars, segment)
    }
}
