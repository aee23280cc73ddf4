//! Bytes that a plan sends, counted for ring algorithms before a rank exists.

use crate::plan::packing::Loads;
use crate::{Chosen, Fragment, LocalError, LocalPlan, ParamSpec, Placement, Weights, What};
use meshstep_shard::extend::{overlap, ring_all_reduce};
use meshstep_shard::{Groups, Part};
use meshstep_tensor::DType;
use std::ops::Range;

/// A rank's position in a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ring {
    /// Number of ranks in the group.
    pub ranks: usize,
    /// Index of this rank.
    pub rank: usize,
}

/// A rank's position among workers of several ranks each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Worker {
    /// Index among the ranks that divide the worker's state.
    pub shard: usize,
    /// Position among the ranks with the same shard, one of each worker.
    pub across: Ring,
    /// Position among all ranks of all workers.
    pub world: Ring,
}

/// Traffic of one rank to other workers.
///
/// ```
/// use meshstep_local::{LocalPlan, LocalTraffic, Ring, Shares};
/// use meshstep_optim::AdamW;
/// use meshstep_shard::{Options, Part, Sizes};
/// use meshstep_tensor::{DType, Layout};
///
/// // Four workers of one rank each, 1000 parameters, means every 10 steps.
/// let layout = Layout::builder().param("w", &[1000], DType::F32).build()?;
/// let part = Part::new(layout, Sizes::all(1), [], &Options::default())?;
/// let shares = Shares { part: &part, rules: AdamW::default().into(), shard: 0 };
/// let place = Ring { ranks: 4, rank: 0 };
/// let sent: LocalTraffic = LocalPlan::local_sgd(10).traffic_of(&[shares], place, place, 0..100)?;
/// assert_eq!((sent.exchanges, sent.elements, sent.payload), (10, 10_000, 10 * 2 * 750 * 4));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct LocalTraffic {
    /// Elements contributed, each counted once: a vector of P elements reduced every step counts P in every step.
    pub elements: u64,
    /// Bytes sent to reduce the elements.
    pub payload: u64,
    /// Bytes sent for agreements and votes.
    pub words: u64,
    /// Number of exchanges.
    pub exchanges: u64,
}

impl LocalTraffic {
    /// Returns the sum of all bytes.
    pub fn total(&self) -> u64 {
        self.payload + self.words
    }
}

/// Words of an agreement before those of the fragments, and words of a vote.
pub(crate) const AGREEMENT_HEAD: usize = 4;
pub(crate) const VOTE: usize = 1;

/// Parameters with state that a worker's ranks divide in the same way.
#[derive(Clone, Debug)]
pub struct Shares<'a> {
    /// Division of the parameters among the ranks.
    pub part: &'a Part,
    /// Update rules.
    pub rules: Groups,
    /// Index of this rank among those that divide the state.
    pub shard: usize,
}

impl LocalPlan {
    /// Returns the traffic of a rank in `steps`, counted from 0, if every exchange succeeds: exactly the bytes that its
    /// communicators count.
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

    /// Returns the traffic for parameters divided in several ways. `across` is the position among the ranks with the same shards,
    /// one of each worker, and `world` the position among all ranks of all workers.
    pub fn traffic_of(
        &self,
        shares: &[Shares<'_>],
        across: Ring,
        world: Ring,
        steps: Range<u64>,
    ) -> Result<LocalTraffic, LocalError> {
        let mut params: Vec<(ParamSpec, &Shares<'_>)> = Vec::new();
        let mut first = 0;
        for of in shares {
            for trained in ParamSpec::of(of.part, &of.rules)? {
                params.push((ParamSpec { position: first + trained.position, ..trained }, of));
            }
            if of.part.positions().is_none() {
                first += of.part.layout().params().len();
            }
        }
        params.sort_by_key(|(trained, _)| trained.position);
        let (params, of): (Vec<ParamSpec>, Vec<&Shares<'_>>) = params.into_iter().unzip();
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

    /// Returns true if workers communicate here: a reset alone does not need other workers.
    pub(crate) fn meets(&self, step: u64, placement: Placement) -> bool {
        let travels = |f: usize| self.fragments[f].travels();
        self.due(step, placement).any(travels) || self.arriving(step, placement).any(travels)
    }

    /// Returns the number of words that each rank contributes to an agreement.
    pub(crate) fn words(&self) -> usize {
        AGREEMENT_HEAD + self.fragments.iter().filter(|f| f.weights == Weights::Tokens).count()
    }

    /// Returns the elements that each fragment sends from a rank, by type; `owned` counts the chosen elements that the rank holds.
    pub(crate) fn loads(
        &self,
        params: &[ParamSpec],
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

    /// Returns the number of vectors that a fragment has of each parameter.
    fn vectors(&self, what: &What, param: &ParamSpec) -> usize {
        match what {
            What::Params => 1,
            What::State(slots) => slots.of(&*param.rule).len(),
            What::OuterMomentum(of) => self.outer_state(*of).len(),
        }
    }
}

impl Fragment {
    /// Returns the type in which values of a parameter are sent.
    pub(crate) fn wire_of(&self, param: &ParamSpec) -> DType {
        self.wire.unwrap_or(match self.what {
            What::Params => param.values,
            What::State(_) => param.state,
            What::OuterMomentum(_) => DType::F64,
        })
    }
}

/// Returns how many of the elements `range` of a parameter the rank owns.
fn owned(Shares { part, shard, .. }: &Shares<'_>, name: &str, range: &Range<usize>) -> usize {
    let Some(param) = part.layout().index(name) else { return 0 };
    let mut sum = 0;
    for (b, bucket) in part.buckets().iter().enumerate() {
        for placed in bucket.params.iter().filter(|placed| placed.param == param) {
            let wanted = placed.start + range.start..placed.start + range.end;
            let owned = part.owned(b, *shard).into_iter();
            sum += owned.filter_map(|run| overlap(&run, &wanted)).map(|both| both.len()).sum::<usize>();
        }
    }
    sum
}
