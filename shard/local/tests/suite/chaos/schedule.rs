//! Schedules from seeds: a plan, workers, and the probabilities and times of failures.

use crate::chaos::world::{Event, World, millis};
use crate::common::{self, Gradients, Run, WhichRule};
use meshstep_local::{Fragment, LocalPlan, Merge, OnFailure, Placement, Slots, Timing, Weights, What};
use meshstep_membership::Digest;
use meshstep_shard::Stage;
use std::sync::Arc;
use std::time::Duration;

pub(crate) const TARGET: u64 = 48;

#[derive(Clone, Debug)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    /// Returns a number below `n`.
    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        common::hash(&[self.0, 11]) % n
    }

    /// Returns true with a probability of `per_mille` / 1000.
    pub(crate) fn chance(&mut self, per_mille: u64) -> bool {
        self.below(1000) < per_mille
    }
}

/// Probabilities of failures, per mille.
#[derive(Clone, Debug, Default)]
pub(crate) struct Trouble {
    /// Loss of a message, repetition, and long delay.
    pub(crate) loss: u64,
    pub(crate) repeat: u64,
    pub(crate) late: u64,
    /// Death of a worker: before a boundary, after it, at each operation of an exchange and before the vote.
    pub(crate) death: u64,
    /// Death of a worker after it has voted.
    pub(crate) death_after_vote: u64,
    /// Death of a worker as it receives a decision.
    pub(crate) death_before_apply: u64,
    /// Death of an arbiter before its log is written, or after that while messages are being sent.
    pub(crate) arbiter_death: u64,
    /// Failure of a collective on some ranks.
    pub(crate) failure: u64,
    /// A step with a missing gradient, or with one that is not finite.
    pub(crate) missing: u64,
    pub(crate) skip: u64,
    /// A step that takes seconds.
    pub(crate) slow: u64,
    /// True if a worker without the decision on an exchange tries to continue.
    pub(crate) stubborn: bool,
}

#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) run: Run,
    pub(crate) plan: LocalPlan,
    pub(crate) digest: Digest,
    /// Ranks of each worker.
    pub(crate) ranks: usize,
    pub(crate) founders: usize,
    pub(crate) min_workers: usize,
    /// Deadline of a worker's membership calls.
    pub(crate) deadline: Duration,
    pub(crate) target: u64,
    pub(crate) trouble: Trouble,
    /// True if all ranks of a group learn of a failure.
    pub(crate) told: bool,
    /// Events after the given number of steps of the first worker, which pauses for a second then.
    pub(crate) script: Vec<(u64, Happens)>,
    /// Id of the worker and step with a NaN gradient.
    pub(crate) broken: Option<(u64, u64)>,
}

/// Events of one turn of a worker's loop, the same on all of its ranks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Turn {
    /// Duration of the computation, in milliseconds.
    pub(crate) span: u64,
    /// True if the gradients are missing, or not finite.
    pub(crate) missing: bool,
    pub(crate) skip: bool,
    /// True if the worker leaves.
    pub(crate) leaves: bool,
}

/// A scripted event.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Happens {
    /// A worker with this id joins.
    Comes(u64),
    /// The rank with this index in the order of spawning is killed.
    Dies(usize),
}

impl Setup {
    /// Creates a setup without failures.
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

/// Returns plans of every kind, each with its rule.
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

/// Returns a plan with moments before updates, second ones half as often, and parameters after every fourth update at this offset.
/// The two sides never exchange in one step.
fn both_sides(moments: Timing, offset: u64) -> LocalPlan {
    let mut plan = LocalPlan::des_loc(4, 4, 8);
    for f in &mut plan.fragments {
        let period = f.timing.period;
        f.timing = match f.what {
            What::Params => Timing { offset, ..Timing::every(4) },
            _ => Timing { period, placement: Placement::Before, ..moments.clone() },
        };
        // A retry waits for a step without an exchange on the other side.
        f.on_failure = if f.what == What::Params { OnFailure::Retry } else { OnFailure::KeepLocal };
    }
    plan
}

/// Returns a plan with an outer step before updates, second moments that are sent and arrive after later updates, and first moments
/// that are reset earlier without an exchange.
fn outer_between() -> LocalPlan {
    let before = |f: &mut Fragment| (f.timing.placement, f.timing.offset) = (Placement::Before, 3);
    let mut plan = LocalPlan::diloco(6).with(before);
    let second = Timing { offset: 3, delay: 2, ..Timing::every(6) };
    plan.fragments.push(Fragment::mean(What::State(Slots::Second), second));
    let first = Timing { offset: 2, placement: Placement::Before, ..Timing::every(6) };
    plan.fragments.push(Fragment { merge: Merge::Reset, ..Fragment::mean(What::State(Slots::First), first) });
    plan
}

/// Creates a world from its seed alone.
pub(crate) fn world(seed: u64) -> Arc<World> {
    let mut random = Random(seed ^ 0x5eed);
    let all = plans();
    let (plan, rule) = all[(seed % all.len() as u64) as usize].clone();
    let policy = [None, Some(OnFailure::KeepLocal), Some(OnFailure::Retry), Some(OnFailure::RollBack)];
    let policy = policy[(seed / all.len() as u64 % 4) as usize];
    // A plan with two sides must not combine a delay with Retry.
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
