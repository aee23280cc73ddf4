//! What follows from how many ranks have a gradient for each parameter.

use crate::exchange::{FaultCode, decode_fault, encode_fault};
use crate::{Error, Missing, Optimizer, Options, wire};
use meshstep_comm::{Communicator, Reduction};
use std::sync::atomic::Ordering::SeqCst;

impl Optimizer {
    /// Under [`Missing::AllOrNone`], after the exchange: an error on every rank if some have a parameter's gradient and some
    /// do not. Costs nothing where there is no such parameter; otherwise one more word to learn who lacks it.
    pub(crate) fn check_presence(&self, comm: &dyn Communicator) -> Result<(), Error> {
        if self.options.missing != Missing::AllOrNone {
            return Ok(());
        }
        for (param, entry) in self.entries.iter().enumerate() {
            let count = self.exchange.present_on(param);
            if count == 0 || count == comm.world_size() {
                continue;
            }
            let here = self.progress.present[param].load(SeqCst);
            let word = if here { 0 } else { encode_fault(&FaultCode::Missing(param), comm.rank()) };
            let (Options { queue, meter, .. }, mut words) = (&self.options, [word]);
            wire::all_reduce(comm, queue, meter, &mut words, Reduction::Max)?;
            let (rank, fault) = decode_fault(words[0], |_| entry.param.name().to_owned());
            return Err(Error::Fault { rank, fault });
        }
        Ok(())
    }
}
