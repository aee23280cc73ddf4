//! Check of the number of ranks that have a gradient for each parameter.

use crate::step::exchange::decode_fault;
use crate::{Error, Missing, Optimizer};
use meshstep_comm::Communicator;

impl Optimizer {
    /// Checks under [`Missing::AllOrNone`], after the exchange, that all ranks or none have each parameter's gradient; the error
    /// is the same on every rank.
    pub(crate) fn check_presence(&self, comm: &dyn Communicator) -> Result<(), Error> {
        if self.options.missing != Missing::AllOrNone {
            return Ok(());
        }
        let even = |&param: &usize| [0, comm.world_size()].contains(&self.exchange.present_on(param));
        let uneven = (0..self.entries.len()).find(|param| !even(param));
        uneven.map_or(Ok(()), |param| {
            let (rank, fault) = decode_fault(self.exchange.lacking(param), |p| self.name(p));
            Err(Error::Fault { rank, fault })
        })
    }

    fn name(&self, param: usize) -> String {
        self.entries.get(param).map_or(String::new(), |entry| entry.param.name().to_owned())
    }
}
