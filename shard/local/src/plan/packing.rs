//! Lanes: vectors of one type that are sent together at one exchange, cut into buckets. The engine sends these lanes, and the
//! planner counts their bytes.

use crate::{LocalPlan, Weights};
use meshstep_tensor::DType;
use std::ops::Range;

/// Elements that a fragment sends from this rank, by wire type.
pub(crate) type Loads = Vec<(DType, usize)>;

/// One packed vector. It holds fragments that are sent and arrive together, in one wire type, and in which each worker has one
/// share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Lane {
    pub(crate) delay: u64,
    pub(crate) wire: DType,
    /// The only fragment of the lane if it is weighted by tokens, since each such fragment has its own shares.
    pub(crate) only: Option<usize>,
    pub(crate) len: usize,
}

impl Lane {
    /// Returns the empty lane for what fragment `f` sends as `wire`.
    fn of(plan: &LocalPlan, f: usize, wire: DType) -> Self {
        let fragment = &plan.fragments[f];
        let only = (fragment.weights == Weights::Tokens).then_some(f);
        Lane { delay: fragment.timing.delay, wire, only, len: 0 }
    }

    /// Returns true if what fragment `f` sends as `wire` belongs to this lane.
    pub(crate) fn takes(&self, plan: &LocalPlan, f: usize, wire: DType) -> bool {
        Lane { len: 0, ..*self } == Lane::of(plan, f, wire)
    }

    /// Returns the lane's buckets, none longer than `bucket_len`.
    pub(crate) fn buckets(&self, bucket_len: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let len = self.len;
        (0..len).step_by(bucket_len.max(1)).map(move |start| start..len.min(start.saturating_add(bucket_len)))
    }
}

impl LocalPlan {
    /// Returns the lanes of an exchange that sends these fragments, in the order of sending.
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
    use super::*;
    use crate::{Fragment, Slots, Timing, What};

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
        // An empty load has a lane that sends nothing.
        let nothing = plan.lanes([3].into_iter(), &[vec![], vec![], vec![], vec![(f32, 0)], vec![]]);
        assert_eq!((nothing.len(), nothing[0].buckets(4).count()), (1, 0));
        // Fragments with a delay are sent in lanes of their own.
        let later = [vec![], vec![(f32, 6)], vec![], vec![(f32, 3)], vec![]];
        let lens: Vec<_> = plan.lanes(0..5, &later).iter().map(|l| (l.delay, l.len)).collect();
        assert_eq!(lens, [(0, 6), (2, 3)]);
    }
}
