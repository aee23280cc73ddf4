//! Words that workers gather around an exchange: an agreement before it, a vote after it.

use crate::plan::traffic::AGREEMENT_HEAD;
use crate::{LocalPlan, Weights};
use meshstep_comm::{Communicator, Reduction};
use meshstep_shard::extend::host_words;
use meshstep_shard::{Error, Options, gather_words};

/// Reason why an exchange failed on all workers. Ranks are numbered among all workers.
#[derive(Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum Veto {
    /// A worker's own step was an error.
    #[error("rank {rank} could not take its step")]
    Fault {
        /// The lowest such rank.
        rank: usize,
    },
    /// Ranks are at different steps, or expect different fragments.
    #[error("rank {rank} is at another step than rank 0, or expects other fragments")]
    Parted {
        /// The lowest such rank.
        rank: usize,
    },
    /// All weights are 0.
    #[error("the weights of all workers are 0 in fragment {fragment}; a weighted mean needs a positive one")]
    NoWeight {
        /// The fragment.
        fragment: usize,
    },
    /// A value was infinite or NaN, on some worker or in the mean.
    #[error("rank {rank} found an infinite or NaN value in the exchange")]
    NotFinite {
        /// The lowest such rank.
        rank: usize,
    },
    /// A collective failed. In an elastic run without a lost worker each worker names a rank of its own.
    #[error("the exchange failed on rank {rank}")]
    Failed {
        /// The lowest such rank.
        rank: usize,
    },
    /// In an elastic run, a worker died, or was dropped, before it voted.
    #[error("worker {worker} was lost during the exchange")]
    Lost {
        /// The lowest id of a lost worker.
        worker: u64,
    },
}

meshstep_tensor::debug_is_display!(Veto);

/// Contribution of one rank to an agreement.
#[derive(Clone, Debug)]
pub(crate) struct Brought {
    /// Digest of the plan, the step and the fragments due.
    pub(crate) digest: u64,
    /// True if the rank's own step was an error.
    pub(crate) fault: bool,
    /// The rank's worker.
    pub(crate) worker: usize,
    /// True if the worker's values count.
    pub(crate) active: bool,
    /// Tokens since the last exchange, for each fragment weighted by tokens.
    pub(crate) tokens: Vec<u64>,
}

/// Result of an agreement, the same on all ranks: the weight of each worker in each fragment.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Agreed {
    active: Vec<bool>,
    /// By worker, then by fragment weighted by tokens.
    tokens: Vec<Vec<u64>>,
}

/// Share of a worker in a mean: the same for all workers, or a fraction of the mean.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum VoteShare {
    Unsharded,
    Of(f64),
}

impl VoteShare {
    /// Returns the reduction of this worker's values to the mean.
    pub(crate) fn reduction(self) -> Reduction {
        match self {
            VoteShare::Unsharded => Reduction::Mean,
            VoteShare::Of(factor) => Reduction::PreMulSum { factor },
        }
    }
}

impl Brought {
    fn words(&self) -> Vec<u64> {
        let head = [self.digest, u64::from(self.fault), self.worker as u64, u64::from(self.active)];
        head.into_iter().chain(self.tokens.iter().copied()).collect()
    }
}

impl LocalPlan {
    /// Gathers the contributions of all ranks. Collective over `world`; the same result on every rank.
    pub(crate) fn agree(
        &self,
        world: &dyn Communicator,
        workers: usize,
        brought: &Brought,
        options: &Options,
    ) -> Result<Result<Agreed, Veto>, Error> {
        let words = gather_words(world, options, &brought.words())?;
        Ok(self.judge(workers, &words))
    }

    fn judge(&self, workers: usize, words: &[u64]) -> Result<Agreed, Veto> {
        let ranks: Vec<&[u64]> = words.chunks(self.words()).collect();
        if let Some(rank) = ranks.iter().position(|words| words[0] != ranks[0][0]) {
            return Err(Veto::Parted { rank });
        }
        if let Some(rank) = ranks.iter().position(|words| words[1] != 0) {
            return Err(Veto::Fault { rank });
        }
        let weighed = self.words() - AGREEMENT_HEAD;
        let mut agreed = Agreed { active: vec![true; workers], tokens: vec![vec![0; weighed]; workers] };
        for words in ranks {
            let worker = (words[2] as usize).min(workers - 1);
            agreed.active[worker] &= words[3] != 0;
            let sums = agreed.tokens[worker].iter_mut().zip(&words[AGREEMENT_HEAD..]);
            sums.for_each(|(sum, tokens)| *sum = sum.saturating_add(*tokens));
        }
        Ok(agreed)
    }

    /// Returns the share of worker `own` in fragment `f`.
    pub(crate) fn share(&self, f: usize, own: usize, agreed: &Agreed) -> Result<VoteShare, Veto> {
        let weights = agreed.weights(self.weighed(f));
        let total: u128 = weights.iter().map(|&w| u128::from(w)).sum();
        match () {
            () if total == 0 => Err(Veto::NoWeight { fragment: f }),
            () if weights.iter().all(|&w| w == weights[0]) => Ok(VoteShare::Unsharded),
            () => Ok(VoteShare::Of(weights[own] as f64 / total as f64)),
        }
    }

    /// Returns the index of fragment `f` among the fragments weighted by tokens.
    pub(crate) fn weighed(&self, f: usize) -> Option<usize> {
        let is = |f: &crate::Fragment| f.weights == Weights::Tokens;
        is(&self.fragments[f]).then(|| self.fragments[..f].iter().filter(|f| is(f)).count())
    }
}

impl Agreed {
    /// Returns the weight of each worker: equal for all that take part, or their tokens.
    fn weights(&self, weighed: Option<usize>) -> Vec<u64> {
        let weight = |(active, tokens): (&bool, &Vec<u64>)| match weighed {
            _ if !active => 0,
            None => 1,
            Some(i) => tokens[i],
        };
        self.active.iter().zip(&self.tokens).map(weight).collect()
    }
}

/// This rank's vote on an exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Seen {
    Good,
    NotFinite,
    Failed,
}

/// Votes on an exchange: it counts if no rank has seen an error. Collective over `world`.
pub(crate) fn vote(
    world: &dyn Communicator,
    seen: Seen,
    options: &Options,
) -> Result<Result<(), Veto>, Error> {
    // The maximum is the lowest rank with the most severe error.
    let mut words = [match seen {
        Seen::Good => 0,
        seen => (seen as u64) << 32 | (u64::from(u32::MAX) - world.rank() as u64),
    }];
    host_words::all_reduce(world, &options.queue, &options.meter, &mut words, Reduction::Max)?;
    let rank = (u64::from(u32::MAX) - (words[0] & u64::from(u32::MAX))) as usize;
    Ok(match words[0] >> 32 {
        0 => Ok(()),
        1 => Err(Veto::NotFinite { rank }),
        _ => Err(Veto::Failed { rank }),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Slots, Timing, What};

    fn plan() -> LocalPlan {
        let tokens = |f: &mut crate::Fragment| f.weights = Weights::Tokens;
        let params = LocalPlan::local_sgd(2);
        let moment = crate::Fragment::mean(What::State(Slots::First), Timing::every(2));
        LocalPlan::new([params.fragments, LocalPlan::new(vec![moment]).with(tokens).fragments].concat())
    }

    fn rank(digest: u64, fault: bool, worker: usize, active: bool, tokens: u64) -> Vec<u64> {
        Brought { digest, fault, worker, active, tokens: vec![tokens] }.words()
    }

    #[test]
    fn divisors_count_those_that_take_part() {
        let plan = plan();
        let judge = |ranks: [Vec<u64>; 4]| plan.judge(2, &ranks.concat());
        let good = judge([
            rank(7, false, 0, true, 10),
            rank(7, false, 0, true, 20),
            rank(7, false, 1, true, 5),
            rank(7, false, 1, true, 5),
        ]);
        let good = good.unwrap();
        assert_eq!(plan.share(0, 0, &good), Ok(VoteShare::Unsharded));
        assert_eq!(
            [0, 1].map(|w| plan.share(1, w, &good)),
            [Ok(VoteShare::Of(0.75)), Ok(VoteShare::Of(0.25))]
        );
        // One inactive rank makes its whole worker inactive.
        let joining = judge([
            rank(7, false, 0, true, 10),
            rank(7, false, 0, true, 20),
            rank(7, false, 1, false, 5),
            rank(7, false, 1, true, 5),
        ]);
        let joining = joining.unwrap();
        assert_eq!(
            [0, 1].map(|w| plan.share(0, w, &joining)),
            [Ok(VoteShare::Of(1.0)), Ok(VoteShare::Of(0.0))]
        );
        assert_eq!(
            [0, 1].map(|w| plan.share(1, w, &joining)),
            [Ok(VoteShare::Of(1.0)), Ok(VoteShare::Of(0.0))]
        );
        let idle = judge([0, 0, 1, 1].map(|worker| rank(7, false, worker, true, 0))).unwrap();
        assert_eq!(plan.share(0, 1, &idle), Ok(VoteShare::Unsharded));
        assert_eq!(plan.share(1, 1, &idle), Err(Veto::NoWeight { fragment: 1 }));
    }

    #[test]
    fn the_first_difference_or_fault_is_a_veto() {
        let plan = plan();
        let with = |i: usize, words: Vec<u64>| {
            let mut ranks = [0, 0, 1, 1].map(|worker| rank(7, false, worker, true, 1));
            ranks[i] = words;
            plan.judge(2, &ranks.concat()).unwrap_err()
        };
        assert_eq!(with(2, rank(8, false, 1, true, 1)), Veto::Parted { rank: 2 });
        assert_eq!(with(1, rank(7, true, 0, true, 1)), Veto::Fault { rank: 1 });
    }
}
