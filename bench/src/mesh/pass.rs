//! Pass of a batch through the network unit by unit: copies each unit's parameters from the optimizer, and frees sharded
//! ones after use.

use anyhow::Result;
use candle_core::{Tensor, Var};
use meshstep_shard::MicroBatch;

use super::network::{Network, Tokens};
use super::parameters::Unit;
use crate::gpt::{Param, Segments};

/// Pass of one batch through the network.
#[derive(Debug)]
pub(super) struct Pass<'a> {
    pub(super) units: &'a [Unit],
    pub(super) network: &'a Network,
    pub(super) tokens: Tokens,
    pub(super) micro_batch: &'a MicroBatch<'a>,
    /// True if a rank holds parameters only while it reads them.
    pub(super) sharded: bool,
}

impl Segments for Pass<'_> {
    fn count(&self) -> usize {
        self.units.len()
    }

    fn forward(&self, unit: usize, input: Option<&Tensor>) -> Result<Tensor> {
        self.network.forward(unit, input, &self.tokens)
    }

    fn params(&self, unit: usize) -> Result<Vec<(String, Var)>> {
        let var = |param: &Param| Ok((param.name.clone(), self.network.weights().get(&param.name)?.clone()));
        self.units[unit].params.iter().map(var).collect()
    }

    /// Copies the unit's parameters from the optimizer into candle's variables.
    fn bring(&self, unit: usize, again: bool) -> Result<()> {
        if again && !self.sharded {
            return Ok(());
        }
        let unit = &self.units[unit];
        let gathered = self.micro_batch.gather(&unit.name)?;
        for Param { name, .. } in &unit.params {
            self.network.weights().set(name, gathered.param(name)?.typed::<f32>()?)?;
        }
        Ok(())
    }

    fn release(&self, unit: usize) -> Result<()> {
        if !self.sharded {
            return Ok(());
        }
        self.units[unit].params.iter().try_for_each(|param| self.network.weights().free(&param.name))
    }
}
