//! The bytes a plan sends, counted as ring algorithms send them: every one of them, before there is a rank.

use super::packing::Loads;
use super::{Chosen, Fragment, LocalError, LocalPlan, Placement, Trained, Weights, What};
use crate::plan::bytes::ring_all_reduce;
use crate::{Groups, Part};
use meshstep_tensor::DType;
use std::ops::Range;

/// A rank's place in a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ring {
    /// Ranks of the group.
    pub ranks: usize,
    /// Which of them.
    pub rank: usize,
}

/// A rank's place among workers that consist of several ranks each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Worker {
    /// Its place among the ranks that divide its worker's state.
    pub shard: usize,
    /// Among the ranks that have the same shard, one of each worker.
    pub across: Ring,
    /// Among all ranks of all workers.
    pub world: Ring,
}

/// What one rank sends to other workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct LocalTraffic {
    /// Elements that it brought, each once: of a vector of P elements that is reduced every step P a step.
    pub elements: u64,
    /// Bytes of reducing them.
    pub payload: u64,
    /// Bytes of what workers agree and vote by.
    pub words: u64,
    /// Exchanges.
    pub exchanges: u64,
}

impl LocalTraffic {
    /// All bytes.
    pub fn total(&self) -> u64 {
        self.payload + self.words
    }
}

/// Words of an agreement before those of fragments, and words of a vote.
pub(crate) const AGREEMENT_HEAD: usize = 4;
pub(crate) const VOTE: usize = 1;

/// Parameters that a worker's ranks share in the same way.
#[derive(Clone, Debug)]
pub struct Shares<'a> {
    /// What of them a rank owns.
    pub part: &'a Part,
    /// How they are updated.
    pub rules: Groups,
    /// The rank's place among those that divide their state.
    pub shard: usize,
}

impl LocalPlan {
    /// What a rank sends in `steps`, counted from 0, where every exchange comes about: exactly what its communicators count.
    pub fn traffic(
        &self,
        part: &Part,
        rules: &Groups,
        worker: Worker,
        steps: Range<u64>,
    ) -> Result<LocalTraffic, LocalError> {
        let shares = Shares { part, rules: rules.clone(), shard: worker.shard };
        self.traffic_of(&[shares], worker.across, worker.world, steps)
    }

    /// The same where ranks of a worker share parameters in several ways: of rank `across` among those with the same shards, one of
    /// each worker, which is rank `world` of all ranks of all workers.
    pub fn traffic_of(
        &self,
        shares: &[Shares<'_>],
        across: Ring,
        world: Ring,
        steps: Range<u64>,
    ) -> Result<LocalTraffic, LocalError> {
        let mut params: Vec<(Trained, &Shares<'_>)> = Vec::new();
        let mut first = 0;
        for of in shares {
            for trained in Trained::of(of.part, &of.rules)? {
                params.push((Trained { position: first + trained.position, ..trained }, of));
            }
            if of.part.positions().is_none() {
                first += of.part.layout().params().len();
            }
        }
        params.sort_by_key(|(trained, _)| trained.position);
        let (params, of): (Vec<Trained>, Vec<&Shares<'_>>) = params.into_iter().unzip();
        let owned = |chosen: &Chosen| owned(of[chosen.param], &params[chosen.param].name, &chosen.range);
        let loads = self.loads(&params, owned)?;
        let mut sum = LocalTraffic::default();
        for step in steps {
            for placement in [Placement::Before, Placement::After] {
                self.count(step, placement, &loads, [across, world], &mut sum);
            }
        }
        Ok(sum)
    }

    fn count(
        &self,
        step: u64,
        placement: Placement,
        loads: &[Loads],
        [across, world]: [Ring; 2],
        sum: &mut LocalTraffic,
    ) {
        if !self.meets(step, placement) {
            return;
        }
        let Ring { ranks, rank } = across;
        for lane in self.lanes(self.due(step, placement), loads) {
            sum.elements += lane.len as u64;
            let bytes = |bucket: Range<usize>| ring_all_reduce(bucket.len(), ranks, rank, lane.wire.size());
            sum.payload += lane.buckets(self.bucket_len).map(bytes).sum::<u64>();
        }
        let Ring { ranks, rank } = world;
        let agreement = ((ranks - 1) * self.words() * size_of::<u64>()) as u64;
        sum.words += agreement + ring_all_reduce(VOTE, ranks, rank, size_of::<u64>());
        sum.exchanges += 1;
    }

    /// Whether workers exchange anything there: what is only reset needs no one else.
    pub(crate) fn meets(&self, step: u64, placement: Placement) -> bool {
        let travels = |f: usize| self.fragments[f].travels();
        self.due(step, placement).any(travels) || self.arriving(step, placement).any(travels)
    }

    /// Words that each rank brings to an agreement.
    pub(crate) fn words(&self) -> usize {
        AGREEMENT_HEAD + self.fragments.iter().filter(|f| f.weights == Weights::Tokens).count()
    }

    /// What each fragment sends from a rank, which holds so many of the elements chosen.
    pub(crate) fn loads(
        &self,
        params: &[Trained],
        owned: impl Fn(&Chosen) -> usize,
    ) -> Result<Vec<Loads>, LocalError> {
        self.check(params)?;
        let all = self.fragments.iter().enumerate();
        all.map(|(i, f)| {
            let mut loads = Loads::new();
            for chosen in self.chosen(i, params)? {
                let param = &params[chosen.param];
                let (wire, vectors) = (f.wire_of(param), self.vectors(&f.what, param));
                let len = owned(&chosen) * vectors;
                match loads.iter_mut().find(|(known, _)| *known == wire) {
                    Some((_, sum)) => *sum += len,
                    None => loads.push((wire, len)),
                }
            }
            Ok(loads)
        })
        .collect()
    }

    /// How many vectors of a parameter a fragment has.
    fn vectors(&self, what: &What, param: &Trained) -> usize {
        match what {
            What::Params => 1,
            What::State(slots) => slots.of(&*param.rule).len(),
            What::OuterMomentum(of) => self.outer_state(*of).len(),
        }
    }
}

impl Fragment {
    /// The type in which it sends of a parameter.
    pub(crate) fn wire_of(&self, param: &Trained) -> DType {
        self.wire.unwrap_or(match self.what {
            What::Params => param.values,
            What::State(_) => param.state,
            What::OuterMomentum(_) => DType::F64,
        })
    }
}

/// How many of the elements `range` of a parameter the rank owns.
fn owned(Shares { part, shard, .. }: &Shares<'_>, name: &str, range: &Range<usize>) -> usize {
    let Some(param) = part.layout().index(name) else { return 0 };
    let mut sum = 0;
    for (b, bucket) in part.buckets().iter().enumerate() {
        for placed in bucket.params.iter().filter(|placed| placed.param == param) {
            let wanted = placed.start + range.start..placed.start + range.end;
            let owned = part.owned(b, *shard).into_iter();
            sum += owned
                .filter_map(|run| crate::update::segments::overlap(&run, &wanted))
                .map(|both| both.len())
                .sum::<usize>();
        }
    }
    sum
}
