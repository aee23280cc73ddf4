//! What follows from how many ranks have a gradient for each parameter.

use crate::exchange::{FaultCode, decode_fault, encode_fault};
use crate::{Error, Missing, Optimizer};
use meshstep_comm::{Communicator, Reduction};
use meshstep_tensor::{Buffer, Category};
use std::sync::atomic::Ordering::SeqCst;

impl Optimizer {
    /// Under [`Missing::AllOrNone`], after the exchange: an error on every rank if some have a parameter's gradient and some
    /// do not. Costs nothing where there is no such parameter; otherwise one more word to learn who lacks it.
    pub(crate) fn check_presence(&self, comm: &dyn Communicator) -> Result<(), Error> {
        if self.options.missing != Missing::AllOrNone {
            return Ok(());
        }
        for (param, entry) in self.entries.iter().enumerate() {
            let count = self.exchange.present_on(param)?;
            if count == 0 || count == comm.world_size() {
                continue;
            }
            let here = self.progress.present[param].load(SeqCst);
            let word = if here { 0 } else { encode_fault(&FaultCode::Missing(param), comm.rank()) };
            let mut words = Buffer::from_slice(&[word], &self.options.meter, Category::Staging)?;
            comm.all_reduce(&mut words, Reduction::Max)?;
            let (rank, fault) = decode_fault(words.typed::<u64>()?[0], |_| entry.param.name().to_owned());
            return Err(Error::Fault { rank, fault });
        }
        Ok(())
    }
}
