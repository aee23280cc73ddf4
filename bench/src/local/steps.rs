//! Optimizer of a worker: one that all workers share, or one of its own that exchanges seldom.

use anyhow::Result;
use meshstep_candle::Sharded;
use meshstep_local::{LocalOptimizer, Workers};
use meshstep_membership::{Error as MembershipError, Round};
use meshstep_shard::Optimizer;

use crate::train::compare::Finals;
use crate::train::trainer::Stepper;

/// Optimizer of one worker, or of all workers together.
pub(super) trait Steps: Stepper {
    /// Returns the number of steps taken.
    fn steps(&self) -> u64;

    /// Prepares an exchange: waits for the other workers, and connects to the current members.
    fn follow(&mut self, connect: &mut dyn FnMut(&Round) -> Result<Workers, MembershipError>) -> Result<()>;

    /// Returns the parameters of the outer optimizers by fragment.
    fn outer(&self) -> Result<Finals>;
}

impl Steps for Optimizer {
    fn steps(&self) -> u64 {
        Optimizer::steps(self)
    }

    /// Nothing to do: the ranks of one optimizer stay.
    fn follow(&mut self, _: &mut dyn FnMut(&Round) -> Result<Workers, MembershipError>) -> Result<()> {
        Ok(())
    }

    fn outer(&self) -> Result<Finals> {
        Ok(Finals::new())
    }
}

impl<S: Steps> Steps for Sharded<S> {
    fn steps(&self) -> u64 {
        Sharded::optimizer(self).steps()
    }

    fn follow(&mut self, connect: &mut dyn FnMut(&Round) -> Result<Workers, MembershipError>) -> Result<()> {
        self.optimizer_mut().follow(connect)
    }

    fn outer(&self) -> Result<Finals> {
        Sharded::optimizer(self).outer()
    }
}

impl Steps for LocalOptimizer {
    fn steps(&self) -> u64 {
        LocalOptimizer::steps(self)
    }

    fn follow(&mut self, connect: &mut dyn FnMut(&Round) -> Result<Workers, MembershipError>) -> Result<()> {
        LocalOptimizer::follow(self, connect)?;
        Ok(())
    }

    fn outer(&self) -> Result<Finals> {
        let mut all = Finals::new();
        for fragment in 0..self.plan().fragments.len() {
            for values in self.outer_params(fragment) {
                let name = format!("outer parameters of fragment {fragment}");
                all.push((name, values.typed::<f32>()?.to_vec()));
            }
        }
        Ok(all)
    }
}
