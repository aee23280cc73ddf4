//! A rank of a worker: an ordinary training loop that compares its state with the model after every call.

mod checks;

use crate::chaos::model::{Did, Model, travels};
use crate::chaos::place::{Place, Seated};
use crate::chaos::schedule::{Happens, Setup, Turn};
use crate::chaos::world::{COMM_DEADLINE, End, Event, INSIDE_DEADLINE, Need, Voted, millis};
use crate::common::{self};
use meshstep_local::{LocalError, LocalOptimizer, Placement};
use meshstep_membership::{Error, Membership, Request, Round};
use meshstep_optim::Rule;
use meshstep_shard::Step;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// Time of all of a worker's operations apart from waits for others.
const SLACK: Duration = Duration::from_secs(2);
/// Most refused or unanswered boundaries in a row.
const PATIENCE: usize = 10;

struct Trainer<'a> {
    place: &'a Place,
    rule: Arc<dyn Rule>,
    /// `None` if the state is unknown, after an incomplete takeover.
    model: Option<Model>,
    epoch: u64,
    /// Fragments that were in flight when the members changed.
    given_up: BTreeSet<usize>,
    /// Number of grants and votes of rank 0 that this rank has read.
    seen: [usize; 2],
    turns: usize,
}

pub(crate) fn live(place: &Place) -> End {
    let end = train(place).unwrap_or_else(|error| End::Error(error.to_string()));
    // A worker that has to give up may leave first.
    if place.rank == 0 && matches!(end, End::Error(_)) && place.chance(500) {
        let _ = Seated(place.clone()).leave();
    }
    end
}

fn train(place: &Place) -> Result<End, LocalError> {
    if place.rank == 0 {
        place.ask(Request::Join)?;
    }
    let (mut trainer, mut local) = Trainer::join(place)?;
    let setup = &place.world.setup;
    let mut refused = 0;
    while local.steps() < setup.target {
        let turn = trainer.turn(local.steps());
        if turn.leaves {
            break;
        }
        let until = place.lock().now + millis(turn.span);
        place.wait(Need::Until(until));
        match trainer.follow(&mut local) {
            Ok(round) => {
                refused = 0;
                trainer.step(&mut local, round, turn)?;
            }
            Err(LocalError::Membership(error)) if again(&error) && refused < PATIENCE => refused += 1,
            Err(error) => return Err(error),
        }
    }
    if place.rank == 0 {
        Seated(place.clone()).leave()?;
    }
    Ok(End::Left)
}

/// Returns the longest additional wait among a worker's ranks.
fn inside(setup: &Setup) -> Duration {
    if setup.ranks == 1 { Duration::ZERO } else { 2 * setup.deadline + INSIDE_DEADLINE }
}

/// Returns true if the call may be repeated.
fn again(error: &Error) -> bool {
    match error {
        Error::Refused(refusal) => !refusal.is_final(),
        Error::Unanswered { .. } => true,
        _ => false,
    }
}

impl<'a> Trainer<'a> {
    fn join(place: &'a Place) -> Result<(Self, LocalOptimizer), LocalError> {
        let setup = &place.world.setup;
        let (run, plan) = (&setup.run, &setup.plan);
        let begun = place.awake();
        let inner = run.build(place.inside())?;
        let connect = |round: &Round| Ok(place.connect(round));
        let joined = match place.rank {
            0 => LocalOptimizer::join(inner, plan.clone(), Arc::new(Seated(place.clone())), connect),
            _ => LocalOptimizer::join_through_rank0(inner, plan.clone(), connect),
        };
        let took = place.awake().saturating_sub(begun);
        let most = 3 * setup.deadline + COMM_DEADLINE + SLACK + inside(setup);
        assert!(took <= most, "joining took {took:?}");
        let local = joined?;
        let mut trainer = Trainer {
            place,
            rule: Arc::from(run.boxed_rule()),
            model: None,
            epoch: 0,
            given_up: BTreeSet::new(),
            seen: [0; 2],
            turns: 0,
        };
        let (granted, _) = trainer.heard();
        let round = granted.unwrap();
        let mut model = Model::new(run, plan);
        if !round.counts() {
            model.enter(&place.lock().truth.entering[&round.number]);
        }
        (trainer.model, trainer.epoch) = (Some(model), round.epoch);
        trainer.check(&local, "as it has joined");
        Ok((trainer, local))
    }

    /// Returns the grant and the vote of rank 0 that are new since the last call: rank 0 continues only together with this rank.
    fn heard(&mut self) -> (Option<Round>, Option<Voted>) {
        let inner = self.place.lock();
        let lead = &inner.lives[self.place.lead];
        let new = (lead.granted[self.seen[0]..].last().cloned(), lead.voted[self.seen[1]..].last().cloned());
        self.seen = [lead.granted.len(), lead.voted.len()];
        new
    }

    /// Returns the turn's events, drawn by the first of the worker's ranks for all of them.
    fn turn(&mut self, step: u64) -> Turn {
        let place = self.place;
        self.turns += 1;
        let known = place.lock().lives[place.lead].turns.get(self.turns - 1).copied();
        known.unwrap_or_else(|| {
            let trouble = &place.world.setup.trouble;
            let (slow, missing, skip) =
                (place.chance(trouble.slow), place.chance(trouble.missing), place.chance(trouble.skip));
            let mut inner = place.lock();
            let mut span = 5 + inner.random.below(if slow { 6_000 } else { 60 });
            for &(_, happens) in
                place.world.setup.script.iter().filter(|(at, _)| place.life == 0 && *at == step)
            {
                span = 1_000;
                let now = inner.now;
                match happens {
                    Happens::Comes(id) => inner.at(now, Event::Spawn(id)),
                    Happens::Dies(life) => inner.at(now, Event::Crash(life)),
                }
            }
            let lead = &mut inner.lives[place.lead];
            let turn = Turn { span, missing, skip, leaves: lead.wants_to_leave };
            lead.turns.push(turn);
            turn
        })
    }

    /// Follows the membership, and checks the round against the model.
    fn follow(&mut self, local: &mut LocalOptimizer) -> Result<Option<Round>, LocalError> {
        let place = self.place;
        let setup = &place.world.setup;
        let begun = place.awake();
        let mut before = self.model.clone();
        let followed = local.follow(|round| {
            let mut model = before.take();
            if let Some(model) = model.as_mut().filter(|_| round.rank == round.source()) {
                model.give_up_away(&setup.plan, setup.run.rule);
                place.lock().truth.entering.insert(round.number, Arc::new(model.clone()));
            }
            Ok(place.connect(round))
        });
        let followed = followed.map(Option::<&Round>::cloned);
        let took = place.awake().saturating_sub(begun);
        // The call asks for the decision on the last exchange, asks for the boundary, and gives up the round.
        let most = 3 * setup.deadline + COMM_DEADLINE + SLACK + inside(setup);
        assert!(took <= most, "following took {took:?}");
        self.unless_lost(&followed)?;
        let (granted, voted) = self.heard();
        let Some(round) = granted else { return followed };
        if let Some(model) = &self.model {
            assert!(model.side(&setup.plan).is_some(), "{} for nothing", round.number);
        }
        place.lock().lives[place.life].rounds.push((round.step, round.counts(), round.divisor()));
        assert!(!round.counts() || round.step == local.steps() + 1);
        // A worker that could not connect has given up the round.
        let gave_up = voted.filter(|(voted, _)| *voted == round.number);
        assert_eq!(gave_up.is_some(), !matches!(followed, Ok(Some(_))), "{followed:?}");
        if round.epoch != self.epoch {
            self.regrouped(&round, gave_up.is_none());
        }
        self.check(local, "as it has followed");
        followed
    }

    /// Updates the model for new communicators; `whole` is false if the worker did not get them.
    fn regrouped(&mut self, round: &Round, whole: bool) {
        let (place, setup) = (self.place, &self.place.world.setup);
        self.epoch = if whole { round.epoch } else { self.epoch };
        if let Some(model) = self.model.as_mut() {
            self.given_up = model.give_up_away(&setup.plan, setup.run.rule);
        }
        if !round.counts() {
            let entering = place.lock().truth.entering.get(&round.number).cloned();
            let mut model = self.model.take().unwrap_or_else(|| Model::new(&setup.run, &setup.plan));
            self.model = entering.filter(|_| whole).map(|source| {
                model.enter(&source);
                model
            });
        }
    }

    /// Returns the error if a rank of this worker was lost: its other ranks cannot continue, and are about to end.
    fn unless_lost<T>(&self, told: &Result<T, LocalError>) -> Result<(), LocalError> {
        match told {
            Err(error @ LocalError::Shard(meshstep_shard::Error::Comm(_)))
                if self.place.world.setup.ranks > 1 =>
            {
                Err(error.clone())
            }
            _ => Ok(()),
        }
    }

    /// Takes a step, alone or with the others.
    fn step(
        &mut self,
        local: &mut LocalOptimizer,
        round: Option<Round>,
        Turn { missing, skip, .. }: Turn,
    ) -> Result<(), LocalError> {
        let (place, setup) = (self.place, &self.place.world.setup);
        let (run, plan) = (&setup.run, &setup.plan);
        let (t, id) = (local.steps() + 1, place.lock().lives[place.life].id);
        let broken = setup.broken == Some((id, local.steps()));
        let weight = 1 + common::hash(&[id, t]) % 7;
        let mb = local.micro_batch(weight)?;
        for i in (0..run.lens.len()).filter(|_| !missing) {
            let mut grad: Vec<f32> = run.gradient(t, 0, id as usize, i).iter().map(|&g| g as f32).collect();
            grad.iter_mut().filter(|_| skip || broken).for_each(|g| *g = f32::NAN);
            mb.grad(&common::name(i), &grad[..])?;
        }
        mb.finish()?;
        let rule = Arc::clone(&self.rule);
        let update = |model: &mut Model| {
            if !missing && !skip {
                model.update(run, &*rule, id, weight, broken);
            }
        };
        let mut model = self.model.clone();
        // At most one side of the update has an exchange.
        let side = model.as_ref().and_then(|model| model.side(plan));
        let mut did = Did::default();
        if let Some(model) = model.as_mut().filter(|_| side != Some(Placement::Before)) {
            did.add(model.exchange(plan, run.rule, (Placement::Before, side), Err(())));
            update(model);
        }
        if let Some(round) = &round {
            let brings = model.clone().unwrap_or_else(|| Model::new(run, plan));
            place.lock().truth.brought.entry(round.number).or_default().insert(round.rank, Arc::new(brings));
        }
        let begun = place.awake();
        let told = local.step(run.at(t));
        let took = place.awake().saturating_sub(begun);
        let most = setup.deadline + 2 * COMM_DEADLINE + SLACK + inside(setup);
        assert!(took <= most, "a step took {took:?}");
        self.unless_lost(&told)?;
        let (_, voted) = self.heard();
        if setup.ranks > 1 && missing && round.is_some() && voted.is_none() {
            // The step's own error takes precedence over the lost rank; the next call reports the loss.
            let lost = Err::<(), LocalError>(local.micro_batch(weight).map(drop).unwrap_err());
            self.unless_lost(&lost)?;
            panic!("{lost:?}");
        }
        assert_eq!(voted.as_ref().map(|(round, _)| *round), round.as_ref().map(|round| round.number));
        let heard = voted.and_then(|(_, decision)| decision.err());
        let committed = round.as_ref().filter(|round| {
            let decision = place.lock().truth.decided.get(&round.number).cloned();
            heard.is_none() && decision.is_some_and(|decision| decision.is_commit())
        });
        if let Some(round) = committed {
            self.applies(round);
        }
        if let Some(model) = &mut model {
            let brought = committed.map(|round| (round, place.lock().truth.brought[&round.number].clone()));
            let exchanged = brought.as_ref().map(|(round, brought)| (*round, brought)).ok_or(());
            if side == Some(Placement::Before) {
                did.add(model.exchange(plan, run.rule, (Placement::Before, side), exchanged));
                update(model);
                did.add(model.exchange(plan, run.rule, (Placement::After, side), Err(())));
            } else {
                did.add(model.exchange(plan, run.rule, (Placement::After, side), exchanged));
            }
            model.step += 1;
        }
        did.failed.append(&mut self.given_up);
        self.model = model;
        if let Some(round) = committed {
            if did.sent.union(&did.merged).any(|&f| travels(&plan.fragments[f])) {
                place.lock().truth.exchanged(round);
            }
            self.agree(round, &did);
        }
        self.check(local, "after its step");
        self.told(told, heard, &did, [missing, skip])
    }
}
