//! Regrouping between two steps: workers leave or join, and new workers take over the state of the others.

use crate::error::LocalError;
use crate::worker::optimizer::{LocalOptimizer, describe};
use crate::{Veto, Workers};
use meshstep_comm::{Communicator, Op};
use meshstep_shard::extend::{OptimizerExchange, host_words};
use meshstep_shard::{Error, gather_words, same_everywhere};
use meshstep_tensor::{Buffer, Category, DType};

/// Broadcast from the source, which is the first rank of its group.
const FIRST: Op = Op::broadcast(0);

impl LocalOptimizer {
    /// Continues with other workers between two steps, after some have left or with new ones. Collective over all ranks of the new
    /// `workers`, and checked like [`new`](Self::new). After an error, a worker that counts keeps its values, but its flights may
    /// have been given up. A worker that entered may have part of the source's values, and must regroup again before it steps.
    ///
    /// Workers that began together or have taken part in an exchange count; all of them must be at the same step. A worker that
    /// [entered](Self::enter) takes over the parameters, the state, `t`, the step, the outer optimizer's state and the list of
    /// fragments to send again from the first worker that counts; its own values count from the second exchange on. Flights are
    /// given up, by their fragments' failure policy.
    pub fn regroup(&mut self, workers: Workers) -> Result<(), LocalError> {
        let idle = self.inner.check_idle().map_err(LocalError::from);
        let text = idle.and_then(|()| describe(&self.inner, &workers, &self.engine.plan));
        let told = text.as_ref().map_or_else(|error| format!("this call = {error}\n"), String::clone);
        let same = same_everywhere(&*workers.world, self.inner.options(), &told);
        text?;
        same?;
        let mine = [u64::from(self.engine.active), workers.across.rank() as u64, self.engine.step];
        let all = gather_words(&*workers.world, self.inner.options(), &mine)?;
        let (root, step) = first_with_a_say(&all)?;
        let rank = workers.world.rank();
        self.engine.give_up(self.inner.own_params_mut(), Veto::Failed { rank })?;
        self.inner.keep_if_due()?;
        if self.engine.changed {
            self.inner.gather_all()?;
        }
        // The state is sent only if a worker is new.
        if all.chunks(3).any(|words| words[0] == 0) {
            let taken = self.take_over(&*workers.across, root).and_then(|()| self.inner.keep_if_due());
            // The abort ends the waits of the other ranks, and the barrier lets them continue only if all have their values.
            taken.inspect_err(|_| {
                [&workers.world, &workers.across].into_iter().for_each(|comm| comm.abort())
            })?;
            workers.world.barrier().map_err(Error::from)?;
        }
        self.engine.step = step;
        self.engine.workers = workers;
        // The next step reports the fragments that were given up.
        (self.engine.changed, self.engine.failure) = (false, None);
        Ok(())
    }

    /// Broadcasts the state of worker `root` to the new workers, and to no others. Collective over `across`.
    fn take_over(&mut self, across: &dyn Communicator, root: usize) -> Result<(), Error> {
        let gives = across.rank() == root;
        let concerned = gives || !self.engine.active;
        let Some(group) = across.split(concerned.then_some(0), i64::from(!gives))? else { return Ok(()) };
        // The host has the counts, and may not have read those of the last steps yet.
        let counts = self.inner.update_counts()?;
        let meshstep_shard::Options { queue, meter, .. } = self.inner.options().clone();
        let (comm, inner, engine) = (&*group, &mut self.inner, &mut self.engine);
        let buckets = inner.own_params_mut().buffers_mut();
        for vector in buckets.chain(engine.parts.buffers()).filter(|vector| !vector.is_empty()) {
            if gives {
                // A failed operation loses the buffer lent to it, so the source sends a copy.
                let (len, dtype) = (vector.len(), vector.dtype());
                let mut copy = Buffer::zeroed_on(&queue, len, dtype, &meter, Category::Staging)?;
                queue.copy(vector.as_slice(), copy.as_mut())?;
                host_words::run(comm, &queue, FIRST, &mut copy)?;
            } else {
                host_words::run(comm, &queue, FIRST, vector)?;
            }
        }
        let of_inner = counts.len();
        let again = (0..engine.plan.fragments.len()).map(|f| u64::from(engine.again.contains(&f)));
        let again: Vec<u64> = again.collect();
        let mut counts: Vec<u64> =
            counts.into_iter().chain(engine.parts.outer_steps().map(|t| *t)).chain(again).collect();
        let mut words = Buffer::zeroed_on(&queue, counts.len(), DType::U64, &meter, Category::Staging)?;
        queue.upload((&counts[..]).into(), words.as_mut())?;
        host_words::run(comm, &queue, FIRST, &mut words)?;
        queue.download(words.as_slice(), (&mut counts[..]).into())?;
        comm.sound()?;
        if !gives {
            let (of_inner, of_engine) = counts.split_at(of_inner);
            let mut words = of_engine.iter();
            engine.parts.outer_steps().zip(&mut words).for_each(|(place, t)| *place = *t);
            let again = words.enumerate().filter(|(_, again)| **again != 0);
            engine.again = again.map(|(f, _)| f).collect();
            inner.set_update_counts(of_inner)?;
        }
        Ok(())
    }
}

/// Returns the first worker that counts, and the step that all of these share.
fn first_with_a_say(words: &[u64]) -> Result<(usize, u64), LocalError> {
    let mut having = words.chunks(3).enumerate().filter(|(_, words)| words[0] != 0);
    let Some((_, first)) = having.next() else { return Err(LocalError::NobodyHasASay) };
    match having.find(|(_, words)| words[2] != first[2]) {
        Some((rank, other)) => Err(LocalError::Apart { rank, step: other[2], first: first[2] }),
        None => Ok((first[1] as usize, first[2])),
    }
}
