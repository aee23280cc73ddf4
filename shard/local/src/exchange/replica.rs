//! Ranks of one worker that act as one member: rank 0 talks to the arbiter, and all ranks get its answers.

use crate::LocalError;
use meshstep_comm::{Communicator, Op, Reduction};
use meshstep_membership::relay::{self, Wire};
use meshstep_membership::{Ballot, Decision, Error as MembershipError, Membership, Round};
use meshstep_shard::extend::host_words;
use meshstep_shard::{Error, Optimizer, Options, gather_words, same_everywhere};
use meshstep_tensor::{Buffer, Category, DType};
use std::sync::Arc;
use std::time::Duration;

/// Membership of a worker as one of its ranks holds it.
#[derive(Debug)]
pub(crate) struct Replica {
    /// Communicator of its own, separate from those of a step; aborting the worker's communicator ends it.
    comm: Arc<dyn Communicator>,
    options: Options,
    /// Set on rank 0 until the worker has left.
    member: Option<Arc<dyn Membership>>,
    /// Longest time that the other ranks wait for rank 0's answer.
    patience: Option<Duration>,
}

impl Replica {
    /// Checks that only rank 0 has a membership, and that all ranks have the same `text` describing the run. Collective over the
    /// worker's ranks; an error is returned on every rank.
    pub(crate) fn new(
        inner: &Optimizer,
        member: Option<Arc<dyn Membership>>,
        text: &str,
    ) -> Result<Self, LocalError> {
        let options = inner.options().clone();
        let comm = inner.comm().split(Some(0), 0).map_err(Error::from)?.ok_or(Error::NoRanks)?;
        same_everywhere(&*comm, &options, text)?;
        let waits = member.as_ref().and_then(|member| member.deadline());
        let waits = waits.map_or(0, |waits| u64::try_from(waits.as_micros()).unwrap_or(u64::MAX));
        let all = gather_words(&*comm, &options, &[u64::from(member.is_some()), waits])?;
        let speaks = |rank: usize| all[2 * rank] != 0;
        if let Some(rank) = (0..comm.world_size()).find(|&rank| speaks(rank) != (rank == 0)) {
            return Err(LocalError::Speaks { rank });
        }
        // Rank 0 asks once all ranks have arrived, and returns within its own deadline; twice that leaves room for the broadcast.
        let patience = (all[1] != 0).then(|| Duration::from_micros(all[1]).saturating_mul(2));
        Ok(Replica { comm, options, member, patience })
    }

    /// Calls [`Membership::boundary`] for the worker. Collective over its ranks, which get the same answer; after an outer error
    /// they can no longer work together.
    pub(crate) fn boundary(&self, step: u64) -> Result<Result<Round, MembershipError>, Error> {
        self.worst(0)?;
        self.share_answer(|member| member.boundary(step))
    }

    /// Calls [`Membership::vote`] for the worker with the most severe ballot of its ranks: the rank at fault votes
    /// [`Ballot::Veto`], while the others only see a failure. Collective like [`boundary`](Self::boundary).
    pub(crate) fn vote(
        &self,
        round: &Round,
        ballot: Ballot,
    ) -> Result<Result<Decision, MembershipError>, Error> {
        const BALLOTS: [Ballot; 4] = [Ballot::Ready, Ballot::Idle, Ballot::Failed, Ballot::Veto];
        let word = BALLOTS.iter().position(|known| *known == ballot).unwrap_or_default();
        let ballot = BALLOTS[(self.worst(word as u64)? as usize).min(BALLOTS.len() - 1)];
        self.share_answer(|member| member.vote(round, ballot))
    }

    /// Returns the largest word of the worker's ranks. Collective.
    pub(crate) fn worst(&self, word: u64) -> Result<u64, Error> {
        let (Options { queue, meter, .. }, mut words) = (&self.options, [word]);
        host_words::all_reduce(&*self.comm, queue, meter, &mut words, Reduction::Max)?;
        Ok(words[0])
    }

    /// Returns this rank's own error, or an error if any other rank has one. Collective.
    pub(crate) fn together<T>(&self, own: Result<T, LocalError>) -> Result<T, LocalError> {
        let text = own.as_ref().err().map(|error| format!("this call = {error}\n"));
        let same = same_everywhere(&*self.comm, &self.options, &text.unwrap_or_default());
        own.and_then(|value| same.map(|()| value).map_err(LocalError::from))
    }

    /// Leaves the run after the worker's ranks have lost each other: the worker's state is lost, and the others must not wait for
    /// it.
    pub(crate) fn leave(&mut self) {
        self.comm.abort();
        // If the arbiter does not answer, the others wait until it drops the worker.
        let _ = self.member.take().map(|member| member.leave());
    }

    /// Returns rank 0's answer on every rank.
    fn share_answer<T: Wire>(
        &self,
        ask: impl FnOnce(&dyn Membership) -> Result<T, MembershipError>,
    ) -> Result<Result<T, MembershipError>, Error> {
        let told = match &self.member {
            Some(member) => ask(&**member),
            // On other ranks this value is ignored; rank 0 has left.
            None => Err(MembershipError::Left),
        };
        if self.comm.world_size() == 1 {
            return Ok(told);
        }
        let mut bytes = relay::encode(told);
        let mut len = [bytes.len() as u64];
        self.broadcast(&mut len)?;
        bytes.resize(len[0] as usize, 0);
        let mut words: Vec<u64> = bytes.chunks(8).map(word).collect();
        self.broadcast(&mut words)?;
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).take(bytes.len()).collect();
        Ok(relay::decode(&bytes).unwrap_or_else(|| unreachable!("rank 0 has written an answer")))
    }

    /// Broadcasts rank 0's words.
    fn broadcast(&self, words: &mut [u64]) -> Result<(), Error> {
        let op = Op::broadcast(0);
        let op = self.patience.map_or(op, |patience| op.within(patience));
        let Options { queue, meter, .. } = &self.options;
        let mut buffer = Buffer::zeroed(words.len(), DType::U64, meter, Category::Staging)?;
        buffer.as_mut().copy_from((&*words).into())?;
        host_words::run(&*self.comm, queue, op, &mut buffer)?;
        words.copy_from_slice(buffer.typed::<u64>()?);
        Ok(())
    }
}

fn word(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte))
}

#[cfg(test)]
mod tests {
    use super::*;
    use meshstep_comm::{Clock, loopback};
    use meshstep_tensor::Layout;
    use std::sync::Mutex;
    use std::thread::sleep;

    /// Membership that takes a while to answer, and records the ballots.
    #[derive(Debug)]
    struct Recording {
        ballots: Mutex<Vec<Ballot>>,
        clock: Clock,
    }

    const PATIENCE: Duration = Duration::from_secs(60);

    impl Membership for Recording {
        fn boundary(&self, step: u64) -> Result<Round, MembershipError> {
            // The sleep makes it likely that the others wait when time passes: longer than their own operations would.
            sleep(Duration::from_millis(50));
            self.clock.advance(2 * PATIENCE);
            Ok(Round { number: 9, epoch: 8, step, rank: 0, members: Vec::new(), gone: Vec::new() })
        }

        fn vote(&self, round: &Round, ballot: Ballot) -> Result<Decision, MembershipError> {
            self.ballots.lock().unwrap().push(ballot);
            Err(MembershipError::OtherRound { asked: round.number, round: 7 })
        }

        fn decided(&self, _: &Round) -> Option<Decision> {
            None
        }

        fn leave(&self) -> Result<(), MembershipError> {
            Ok(())
        }

        fn deadline(&self) -> Option<Duration> {
            Some(2 * PATIENCE)
        }
    }

    fn ranks<T: Send>(member: &Arc<Recording>, body: impl Fn(Replica, usize) -> T + Sync) -> Vec<T> {
        let (timeout, clock) = (PATIENCE, member.clock.clone());
        let config = loopback::Config { timeout, clock, ..loopback::Config::new(3) };
        let all = loopback::spawn_with(config, |comm| {
            let rank = comm.rank();
            let layout = Layout::builder().param("x", &[4], DType::F32).build().unwrap();
            let rule = meshstep_optim::Sgd::default();
            let inner = Optimizer::new(comm, layout, rule, |_, _| Ok(()), Options::default()).unwrap();
            let member = (rank == 0).then(|| Arc::clone(member) as Arc<dyn Membership>);
            body(Replica::new(&inner, member, "").unwrap(), rank)
        });
        all.unwrap()
    }

    #[test]
    fn all_ranks_wait_for_one_answer_to_the_gravest_of_their_ballots() {
        let member = Arc::new(Recording { ballots: Mutex::default(), clock: Clock::manual() });
        for (word, others, own) in [
            (Ballot::Ready, Ballot::Ready, 0),
            (Ballot::Veto, Ballot::Ready, 1),
            (Ballot::Failed, Ballot::Ready, 2),
            (Ballot::Veto, Ballot::Failed, 2),
        ] {
            let told = ranks(&member, |replica, rank| {
                let round = replica.boundary(5).unwrap().unwrap();
                let ballot = if rank == own { word } else { others };
                (round.step, replica.vote(&round, ballot).unwrap())
            });
            let expected = Err(MembershipError::OtherRound { asked: 9, round: 7 });
            assert!(told.iter().all(|told| *told == (5, expected.clone())));
            assert_eq!(member.ballots.lock().unwrap().drain(..).collect::<Vec<_>>(), [word]);
        }
    }
}
