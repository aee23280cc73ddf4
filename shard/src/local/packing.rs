//! What travels together at one exchange: lanes of one type, cut into buckets. The engine sends what this says, and the planner
//! counts it.

use super::{Fragment, LocalPlan, Weights};
use meshstep_tensor::DType;
use std::ops::Range;

/// What a fragment sends from this rank, by the type that it travels in.
pub(crate) type Loads = Vec<(DType, usize)>;

/// What is packed into one vector: of fragments that are sent together and arrive together, that travel in one type and are
/// weighed alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Lane {
    pub(crate) delay: u64,
    pub(crate) wire: DType,
    pub(crate) weights: Weights,
    pub(crate) len: usize,
}

impl Lane {
    /// Whether what `fragment` sends as `wire` goes here.
    pub(crate) fn takes(&self, fragment: &Fragment, wire: DType) -> bool {
        (self.delay, self.weights, self.wire) == (fragment.timing.delay, fragment.weights, wire)
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
            let fragment = &self.fragments[f];
            for &(wire, len) in &loads[f] {
                let lane = match lanes.iter_mut().position(|lane| lane.takes(fragment, wire)) {
                    Some(lane) => lane,
                    None => {
                        let (delay, weights) = (fragment.timing.delay, fragment.weights);
                        lanes.push(Lane { delay, wire, weights, len: 0 });
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
    use super::super::{Slots, Timing, What};
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
        ]);
        let loads =
            [vec![(DType::F32, 5), (DType::F64, 1)], vec![(DType::F32, 6)], vec![(DType::F32, 7)], vec![]];
        let lanes = plan.lanes([0, 1, 2].into_iter(), &loads);
        let found: Vec<_> = lanes.iter().map(|l| (l.wire, l.weights, l.len)).collect();
        let (f32, f64) = (DType::F32, DType::F64);
        let expected = [(f32, Weights::Uniform, 11), (f64, Weights::Uniform, 1), (f32, Weights::Tokens, 7)];
        assert_eq!(found, expected);
        assert_eq!(lanes[0].buckets(4).collect::<Vec<_>>(), [0..4, 4..8, 8..11]);
        assert_eq!(lanes[0].buckets(11).collect::<Vec<_>>(), [Range { start: 0, end: 11 }]);
        assert_eq!(plan.lanes([3].into_iter(), &loads), []);
        // What arrives later travels apart.
        let later = [vec![], vec![(f32, 6)], vec![], vec![(f32, 3)]];
        let lens: Vec<_> = plan.lanes(0..4, &later).iter().map(|l| (l.delay, l.len)).collect();
        assert_eq!(lens, [(0, 6), (2, 3)]);
    }
}
