//! What travels together at one exchange: lanes of one type, cut into buckets. The engine sends what this says, and the planner
//! counts it.

use super::{LocalPlan, Weights};
use meshstep_tensor::DType;
use std::ops::Range;

/// What a fragment sends from this rank, by the type that it travels in.
pub(crate) type Loads = Vec<(DType, usize)>;

/// What is packed into one vector: of fragments that are sent together and arrive together, that travel in one type and in
/// which each worker has the same share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Lane {
    pub(crate) delay: u64,
    pub(crate) wire: DType,
    /// The fragment it is all of, where that is weighed by tokens, of which each fragment has its own.
    pub(crate) only: Option<usize>,
    pub(crate) len: usize,
}

impl Lane {
    /// Where what fragment `f` sends as `wire` goes, without elements.
    fn of(plan: &LocalPlan, f: usize, wire: DType) -> Self {
        let fragment = &plan.fragments[f];
        let only = (fragment.weights == Weights::Tokens).then_some(f);
        Lane { delay: fragment.timing.delay, wire, only, len: 0 }
    }

    /// Whether what fragment `f` sends as `wire` goes here.
    pub(crate) fn takes(&self, plan: &LocalPlan, f: usize, wire: DType) -> bool {
        Lane { len: 0, ..*self } == Lane::of(plan, f, wire)
    }

    /// Its buckets, none longer than `bucket_len`.
    pub(crate) fn buckets(&self, bucket_len: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let len = self.len;
        (0..len).step_by(bucket_len.max(1)).map(move |start| start..len.min(start.saturating_add(bucket_len)))
    }
}

impl LocalPlan {
    /// The lanes of an exchange in which these fragments are sent, in the order they travel.
    pub(crate) fn lanes(&self, sent: impl Iterator<Item = usize>, loads: &[Loads]) -> Vec<Lane> {
        let mut lanes: Vec<Lane> = Vec::new();
        for f in sent.filter(|&f| self.fragments[f].travels()) {
            for &(wire, len) in &loads[f] {
                let lane = match lanes.iter().position(|lane| lane.takes(self, f, wire)) {
                    Some(lane) => lane,
                    None => {
                        lanes.push(Lane::of(self, f, wire));
                        lanes.len() - 1
                    }
                };
                lanes[lane].len += len;
            }
        }
        lanes
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Fragment, Slots, Timing, What};
    use super::*;

    #[test]
    fn what_goes_together_is_fused_and_cut_anywhere() {
        let mean = |what, delay, weights| {
            let timing = Timing { delay, ..Timing::every(4) };
            Fragment { weights, ..Fragment::mean(what, timing) }
        };
        let moment = || What::State(Slots::First);
        let plan = LocalPlan::new(vec![
            mean(What::Params, 0, Weights::Uniform),
            mean(moment(), 0, Weights::Uniform),
            mean(moment(), 0, Weights::Tokens),
            mean(moment(), 2, Weights::Uniform),
            mean(moment(), 0, Weights::Tokens),
        ]);
        let (f32, f64) = (DType::F32, DType::F64);
        let loads =
            [vec![(f32, 5), (f64, 1)], vec![(f32, 6)], vec![(f32, 7), (f64, 2)], vec![], vec![(f32, 8)]];
        let lanes = plan.lanes([0, 1, 2, 4].into_iter(), &loads);
        let found: Vec<_> = lanes.iter().map(|l| (l.wire, l.only, l.len)).collect();
        let alone = [(f32, Some(2), 7), (f64, Some(2), 2), (f32, Some(4), 8)];
        assert_eq!(found, [[(f32, None, 11), (f64, None, 1)].as_slice(), &alone].concat());
        assert_eq!(lanes[0].buckets(4).collect::<Vec<_>>(), [0..4, 4..8, 8..11]);
        assert_eq!(lanes[0].buckets(11).collect::<Vec<_>>(), [Range { start: 0, end: 11 }]);
        assert_eq!(plan.lanes([3].into_iter(), &loads), []);
        // A load of nothing has a lane, which sends nothing.
        let nothing = plan.lanes([3].into_iter(), &[vec![], vec![], vec![], vec![(f32, 0)], vec![]]);
        assert_eq!((nothing.len(), nothing[0].buckets(4).count()), (1, 0));
        // What arrives later travels apart.
        let later = [vec![], vec![(f32, 6)], vec![], vec![(f32, 3)], vec![]];
        let lens: Vec<_> = plan.lanes(0..5, &later).iter().map(|l| (l.delay, l.len)).collect();
        assert_eq!(lens, [(0, 6), (2, 3)]);
    }
}
