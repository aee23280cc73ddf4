//! Random plans compared with the plain loop: delays, offsets, placements, weights and mixing of every kind of fragment.

use crate::common::{Run, WhichRule, cases, hash};
use crate::equal::{assert_equal, run, train};
use crate::naive::Naive;
use meshstep_local::{Fragment, LocalPlan, Merge, Outer, Placement, Select, Slots, Timing, Weights, What};
use meshstep_optim::AdamW;
use meshstep_shard::{Options, Stage};
use std::sync::Arc;

/// Rules with state vectors that can all be merged late.
const RULES: [WhichRule; 9] = [
    WhichRule::SgdMomentum,
    WhichRule::SgdAverage,
    WhichRule::SgdLrInside,
    WhichRule::AdamW,
    WhichRule::RmsProp,
    WhichRule::Adagrad,
    WhichRule::Lion,
    WhichRule::Adopt,
    WhichRule::TwoMoments,
];
const STAGES: [Stage; 4] = [Stage::Replicated, Stage::Zero1, Stage::Zero2, Stage::Zero3];
const STEPS: u64 = 17;

/// Random numbers of one seed.
struct Draw(u64, u64);

impl Draw {
    fn below(&mut self, n: u64) -> u64 {
        self.1 += 1;
        hash(&[self.0, self.1]) % n
    }

    fn of<T: Clone>(&mut self, all: &[T]) -> T {
        all[self.below(all.len() as u64) as usize].clone()
    }

    fn timing(&mut self) -> Timing {
        let period = 1 + self.below(7);
        Timing {
            period: Some(period),
            offset: self.below(period),
            delay: self.below(period),
            placement: self.of(&[Placement::Before, Placement::After]),
            during: self.of(&[Timing::ALWAYS, 3..u64::MAX, 0..11]),
        }
    }

    fn fragment(&mut self, params: Select, what: What) -> Fragment {
        let timing = self.timing();
        let mut fragment = Fragment { params, ..Fragment::mean(what, timing) };
        fragment.weights = self.of(&[Weights::Uniform, Weights::Tokens]);
        fragment.taken = self.of(&[1.0, 1.0, 0.5, 0.125]);
        fragment
    }

    fn plan(&mut self) -> LocalPlan {
        let mut fragments = Vec::new();
        let outer = [Outer::nesterov(0.7, 0.5), Outer { rule: Arc::new(AdamW::default()), lr: 0.1 }];
        let parts = 1 + self.below(3) as usize;
        for index in 0..parts {
            let params = if parts == 1 { Select::All } else { Select::Part { index, of: parts } };
            let mut fragment = self.fragment(params.clone(), What::Params);
            if self.below(4) == 0 {
                fragment.merge = Merge::Outer(self.of(&outer));
            }
            fragments.push(fragment);
            for slots in [Slots::First, Slots::Second] {
                if self.below(4) > 0 {
                    fragments.push(self.fragment(params.clone(), What::State(slots)));
                }
            }
        }
        LocalPlan { bucket_len: self.of(&[7, 64, 1 << 24]), ..LocalPlan::new(fragments) }
    }
}

#[test]
fn any_plan_is_what_the_plain_loop_makes_of_it_1() {
    any_plan(0);
}

#[test]
fn any_plan_is_what_the_plain_loop_makes_of_it_2() {
    any_plan(1);
}

#[test]
fn any_plan_is_what_the_plain_loop_makes_of_it_3() {
    any_plan(2);
}

#[test]
fn any_plan_is_what_the_plain_loop_makes_of_it_4() {
    any_plan(3);
}

/// Tests a quarter of the seeds: every bit of parameters and state must be equal on every rank, and every number finite.
fn any_plan(part: u64) {
    let (mut tried, mut late) = (0, 0);
    for seed in (part..u64::from(cases(2000, 20_000))).step_by(4) {
        let mut draw = Draw(seed, 0);
        let (workers, inside) = (1 + draw.below(3) as usize, 1 + draw.below(2) as usize);
        let options = Options { stage: draw.of(&STAGES), bucket_len: Some(100), ..Options::default() };
        let rule = draw.of(&RULES);
        let lens = vec![5, 70, 1, 20];
        let run = Run { lens, steps: STEPS, rule, seed, options, ..run(workers, inside) };
        let plan = draw.plan();
        let mut naive = Naive::new(&run, &plan, workers);
        // Slots that a rule lacks make a plan invalid.
        let lacks = |f: &Fragment| naive.places(f).is_empty();
        if plan.fragments.iter().any(lacks) {
            continue;
        }
        tried += 1;
        late += usize::from(plan.fragments.iter().any(|f| f.timing.delay > 0 && f.what != What::Params));
        (0..STEPS).for_each(|step| naive.step(step));
        let what = format!("seed {seed}, {rule:?}, {plan:?}");
        for (rank, end) in train(&run, &plan, workers).iter().enumerate() {
            assert_equal(end, &naive.workers[rank / inside], &format!("{what}, rank {rank}"));
            assert!(end.params.iter().flatten().all(|x| x.is_finite()), "{what}");
        }
    }
    assert!(
        tried > cases(2000, 20_000) as usize / 16 && late > tried / 3,
        "{tried} plans, {late} with delays"
    );
}
