//! The exchange of a step on a GPU: its words never leave the device.

use super::LentWords;
use crate::error::Error;
use crate::ranks::host_words::all_reduce_both;
use crate::step::exchange::{Exchange, Words};
use meshstep_comm::Communicator;
use meshstep_optim::NormSum;
use meshstep_optim::cuda::{Answer, Decision, Settings};
use meshstep_tensor::Queue;
use meshstep_tensor::cuda::Stream;

impl Exchange {
    /// Launches the exchange on a GPU, which decides the step; the host does not wait.
    pub(crate) fn run_on_gpu(
        &mut self,
        comm: &dyn Communicator,
        norm: &NormSum,
        decision: &mut Decision,
        settings: &Settings,
        present: impl Iterator<Item = bool>,
    ) -> Result<Answer, Error> {
        self.lent.take_back(&self.queue)?;
        let Exchange { queue, sum: Words { gpu: sum, .. }, max: Words { gpu: max, .. }, .. } = self;
        norm.write(sum.as_mut(), max.as_mut(), queue)?;
        decision.set(settings, present, queue)?;
        decision.bring(sum.as_mut(), max.as_mut(), queue)?;
        all_reduce_both(comm, [queue; 2], sum, max)?;
        decision.decide(sum.as_slice(), max.as_slice(), queue)?;
        Ok(decision.answer(queue)?)
    }

    /// Exchanges the norm of a step that was decided without it: the stream `side_stream` waits for it and reports it, the queue goes
    /// on.
    pub(crate) fn norm_on_gpu(
        &mut self,
        comm: &dyn Communicator,
        norm: &NormSum,
        decision: &mut Decision,
        side_stream: &Stream,
    ) -> Result<Answer, Error> {
        let Exchange { queue, sum: Words { gpu: sum, .. }, max: Words { gpu: max, .. }, .. } = self;
        norm.write(sum.as_mut(), max.as_mut(), queue)?;
        let other = Queue::cuda(side_stream.clone());
        all_reduce_both(comm, [queue, &other], sum, max)?;
        decision.norm(sum.as_slice(), max.as_slice(), &other)?;
        let answer = decision.answer(&other)?;
        self.lent = LentWords::until(side_stream)?;
        Ok(answer)
    }
}
