//! What a seed stands for: a plan, workers, and what goes wrong when and how often.

use crate::chaos_local::world::{Event, World, millis};
use crate::common::{self, Gradients, Run, WhichRule};
use meshstep_membership::Digest;
use meshstep_shard::Stage;
use meshstep_shard::local::{Fragment, LocalPlan, Merge, OnFailure, Placement, Slots, Timing, Weights, What};
use std::sync::Arc;
use std::time::Duration;

pub(crate) const TARGET: u64 = 48;

#[derive(Clone, Debug)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    /// A number below `n`.
    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        common::hash(&[self.0, 11]) % n
    }

    /// True `per_mille` times of a thousand.
    pub(crate) fn chance(&mut self, per_mille: u64) -> bool {
        self.below(1000) < per_mille
    }
}

/// What happens how often, per mille.
#[derive(Clone, Debug, Default)]
pub(crate) struct Trouble {
    /// Of messages.
    pub(crate) loss: u64,
    pub(crate) repeat: u64,
    pub(crate) late: u64,
    /// Of a worker, before a boundary, after it, at each operation of an exchange and before the vote.
    pub(crate) death: u64,
    /// As it has said its word.
    pub(crate) death_after_vote: u64,
    /// As it hears what becomes of an exchange.
    pub(crate) death_before_apply: u64,
    /// Of an arbiter: before it has logged, and after that but before all has been said.
    pub(crate) arbiter_death: u64,
    /// Of a collective, on some ranks.
    pub(crate) failure: u64,
    /// Of a step: a gradient that is missing, or not finite.
    pub(crate) missing: u64,
    pub(crate) skip: u64,
    /// Of a step, to take seconds.
    pub(crate) slow: u64,
    /// Whether a worker that does not hear of an exchange's end tries to go on.
    pub(crate) stubborn: bool,
}

#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) run: Run,
    pub(crate) plan: LocalPlan,
    pub(crate) digest: Digest,
    /// Of a worker.
    pub(crate) ranks: usize,
    pub(crate) founders: usize,
    pub(crate) min_workers: usize,
    /// A worker's, for a call of its membership.
    pub(crate) deadline: Duration,
    pub(crate) target: u64,
    pub(crate) trouble: Trouble,
    /// Whether a failure of a group is known to all of its ranks.
    pub(crate) told: bool,
    /// What happens as the first worker has taken so many steps; it rests for a second then.
    pub(crate) script: Vec<(u64, Happens)>,
    /// The worker, by id, whose gradient is NaN at a step.
    pub(crate) broken: Option<(u64, u64)>,
}

/// What a worker makes of one turn of its loop, on all of its ranks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Turn {
    /// As long as it computes.
    pub(crate) span: u64,
    /// Whether its gradients are missing, or not finite.
    pub(crate) missing: bool,
    pub(crate) skip: bool,
    /// Whether it has had enough.
    pub(crate) leaves: bool,
}

/// Something to somebody.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Happens {
    /// A worker of this id comes.
    Comes(u64),
    /// The one that came as this one is killed.
    Dies(usize),
}

impl Setup {
    /// Without trouble.
    pub(crate) fn new(plan: LocalPlan, rule: WhichRule, founders: usize) -> Self {
        let run = Run {
            lens: vec![5, 0, 3, 2],
            rule,
            gradients: Gradients::Rough,
            max_norm: None,
            options: meshstep_shard::Options { bucket_len: None, ..meshstep_shard::Options::default() },
            ..Run::default()
        };
        Setup {
            run: run.stage(Stage::Zero1),
            plan,
            digest: Digest { plan: 3, rule: 5 },
            ranks: 1,
            founders,
            min_workers: 1,
            deadline: Duration::from_secs(40),
            target: TARGET,
            trouble: Trouble::default(),
            told: true,
            script: Vec::new(),
            broken: None,
        }
    }
}

/// Plans of every kind, with the rule each is for.
pub(crate) fn plans() -> Vec<(LocalPlan, WhichRule)> {
    let des_loc = || LocalPlan::des_loc(4, 12, 24);
    let delayed = |plan: LocalPlan| plan.with(|f| f.timing.delay = 2);
    let mut mixed = des_loc();
    mixed.fragments[0].on_failure = OnFailure::Retry;
    mixed.fragments[1].on_failure = OnFailure::RollBack;
    let mut reset = LocalPlan::local_sgd(3);
    let zeros = Fragment::mean(What::State(Slots::First), Timing::every(6));
    reset.fragments.push(Fragment { merge: Merge::Reset, ..zeros });
    vec![
        (des_loc(), WhichRule::AdamW),
        (mixed, WhichRule::AdamW),
        (LocalPlan::local_adam(4).placed(Placement::Before), WhichRule::AdamW),
        (delayed(des_loc()), WhichRule::AdamW),
        (LocalPlan::diloco(4), WhichRule::AdamW),
        (LocalPlan::streaming_diloco(8, 2, 2, 0.5), WhichRule::SgdMomentum),
        (LocalPlan::local_sgd(4).with(|f| f.weights = Weights::Tokens), WhichRule::Sgd),
        (LocalPlan::mt_dao(4, &[Some(8), Some(12)], Some(24)), WhichRule::TwoMoments),
        (reset, WhichRule::AdamW),
        (both_sides(Timing { offset: 2, ..Timing::every(4) }, 0), WhichRule::AdamW),
        (both_sides(Timing { offset: 1, delay: 2, ..Timing::every(4) }, 3), WhichRule::AdamW),
        (outer_between(), WhichRule::AdamW),
    ]
}

/// Moments before updates, second ones half as often, and parameters every 4 after them, at this offset: never in one step.
fn both_sides(moments: Timing, offset: u64) -> LocalPlan {
    let mut plan = LocalPlan::des_loc(4, 4, 8);
    for f in &mut plan.fragments {
        let period = f.timing.period;
        f.timing = match f.what {
            What::Params => Timing { offset, ..Timing::every(4) },
            _ => Timing { period, placement: Placement::Before, ..moments.clone() },
        };
        // One that waits for a step which the other side has free.
        f.on_failure = if f.what == What::Params { OnFailure::Retry } else { OnFailure::KeepLocal };
    }
    plan
}

/// An outer optimizer's step before updates; second moments after others, and arriving after others still; first ones are reset
/// before that, where nobody is met.
fn outer_between() -> LocalPlan {
    let before = |f: &mut Fragment| (f.timing.placement, f.timing.offset) = (Placement::Before, 3);
    let mut plan = LocalPlan::diloco(6).with(before);
    let second = Timing { offset: 3, delay: 2, ..Timing::every(6) };
    plan.fragments.push(Fragment::mean(What::State(Slots::Second), second));
    let first = Timing { offset: 2, placement: Placement::Before, ..Timing::every(6) };
    plan.fragments.push(Fragment { merge: Merge::Reset, ..Fragment::mean(What::State(Slots::First), first) });
    plan
}

/// A run by its seed alone.
pub(crate) fn world(seed: u64) -> Arc<World> {
    let mut random = Random(seed ^ 0x5eed);
    let all = plans();
    let (plan, rule) = all[(seed % all.len() as u64) as usize].clone();
    let policy = [None, Some(OnFailure::KeepLocal), Some(OnFailure::Retry), Some(OnFailure::RollBack)];
    let policy = policy[(seed / all.len() as u64 % 4) as usize];
    // Of a plan with two sides what arrives late cannot be sent again.
    let two_sided = plan.fragments.iter().any(|f| f.timing.placement != plan.fragments[0].timing.placement);
    let fits = |f: &Fragment| !(two_sided && f.timing.delay > 0 && policy == Some(OnFailure::Retry));
    let plan = plan.clone().with(|f| f.on_failure = policy.filter(|_| fits(f)).unwrap_or(f.on_failure));
    let founders = 1 + random.below(5) as usize;
    let min_workers = 1 + random.below(founders as u64) as usize;
    let mut often = |most: u64| if random.chance(500) { 0 } else { random.below(most) };
    let trouble = Trouble {
        loss: often(200),
        repeat: often(200),
        late: often(40),
        death: often(6),
        death_after_vote: often(20),
        death_before_apply: often(20),
        arbiter_death: often(60),
        failure: often(40),
        missing: often(20),
        skip: often(60),
        slow: often(20),
        stubborn: often(1000) > 0,
    };
    let deadline = [40_000, 40_000, 1_500, 400][random.below(4) as usize];
    let (deadline, told) = (millis(deadline), random.chance(500));
    let ranks = 1 + usize::from(random.chance(400));
    let setup = Setup { ranks, min_workers, deadline, trouble, told, ..Setup::new(plan, rule, founders) };
    let world = World::new(seed, setup);
    let moment = |random: &mut Random| millis(random.below(8_000));
    for _ in 0..random.below(4) {
        let id = if random.chance(300) { random.below(founders as u64) } else { 100 + random.below(4) };
        world.happens_at(moment(&mut random), Event::Spawn(id));
    }
    for _ in 0..random.below(3) {
        world.happens_at(moment(&mut random), Event::Crash(random.below(6) as usize));
    }
    for _ in 0..random.below(3) {
        let span = millis(random.below(8_000));
        world.happens_at(moment(&mut random), Event::Stall(random.below(6) as usize, span));
    }
    for _ in 0..random.below(2) {
        world.happens_at(moment(&mut random), Event::Leave(random.below(6) as usize));
    }
    for _ in 0..random.below(3) {
        world.happens_at(moment(&mut random), Event::ArbiterCrash);
    }
    world
}
