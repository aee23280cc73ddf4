//! Events of the simulated world: the messages, deaths and ends that each causes.

use super::{End, Event, HORIZON, Inner, Killed, Life, Need, millis};
use crate::chaos::baton::Gate;
use meshstep_comm::Error as CommError;
use meshstep_membership::{Arbiter, Member, Output, State};
use std::any::Any;
use std::cmp::Reverse;
use std::sync::Arc;
use std::time::Duration;

impl Inner {
    pub(crate) fn at(&mut self, time: Duration, event: Event) {
        self.next_event += 1;
        self.events.insert(self.next_event, event);
        self.queue.push(Reverse((time.max(self.now), self.next_event)));
    }

    pub(crate) fn note(&mut self, text: String) {
        self.log.push((self.now, text));
    }

    pub(super) fn next(&mut self) -> Event {
        let Some(Reverse((time, number))) = self.queue.pop() else { panic!("nothing happens any more") };
        self.now = time;
        self.events.remove(&number).unwrap()
    }

    pub(super) fn all_over(&self) -> bool {
        let spawning = || self.events.values().any(|event| matches!(event, Event::Spawn(_)));
        self.lives.iter().all(|life| life.end.is_some()) && !spawning()
    }

    /// Handles an event, and returns the ranks that may be able to continue.
    pub(super) fn happen(&mut self, event: Event) -> Vec<usize> {
        match event {
            Event::ToArbiter(message) => {
                if let Some(arbiter) = &mut self.arbiter {
                    let output = arbiter.hear(message, self.now);
                    self.arbiter_says(output);
                }
            }
            Event::ArbiterWake => {
                let due = |arbiter: &&mut Arbiter| arbiter.wake_at().is_some_and(|at| at <= self.now);
                if let Some(arbiter) = self.arbiter.as_mut().filter(due) {
                    let output = arbiter.tick(self.now);
                    self.arbiter_says(output);
                }
            }
            Event::ArbiterStart => {
                let last = self.disk.as_deref().map(|bytes| State::decode(bytes).unwrap());
                let (arbiter, output) = Arbiter::new(self.setup.config(), last, self.now).unwrap();
                self.note(format!("arbiter of term {}", arbiter.state().term));
                self.arbiter = Some(arbiter);
                self.arbiter_says(output);
            }
            Event::ArbiterCrash => self.arbiter_dies(),
            Event::FromArbiter(message) => {
                let is =
                    |life: &Life| life.member.as_ref().is_some_and(|member| member.worker() == message.to);
                let to = self.lives.iter().position(is).unwrap();
                self.lives[to].inbox.push(message);
                return vec![to];
            }
            Event::Wake(life) if self.lives[life].wake_at == self.now => return vec![life],
            Event::Stall(life, span) => {
                let until = self.now + span;
                let Some(stalled) = self.lives.get_mut(life) else { return Vec::new() };
                (stalled.stalled_until, stalled.wake_at) = (until, until);
                stalled.stalled += span;
                self.at(until, Event::Wake(life));
                self.note(format!("{life} stands still for {span:?}"));
            }
            Event::Leave(life) => {
                let lead = self.lives.get(life).map(|life| life.lead);
                lead.into_iter().for_each(|lead| self.lives[lead].wants_to_leave = true);
            }
            Event::Moved(group, number, without) => {
                self.groups[group].complete(number, &without);
                return self.members_of(group);
            }
            Event::Late(group, rank, number) => {
                self.groups[group].late(rank, number);
                return self.members_of(group);
            }
            Event::Gone(group, rank) => {
                self.groups[group].leave(rank);
                return self.members_of(group);
            }
            Event::Look(life) => return vec![life],
            Event::Wake(_) => {}
            Event::Spawn(_) | Event::Crash(_) => unreachable!("the world does this itself"),
        }
        Vec::new()
    }

    pub(super) fn members_of(&self, group: usize) -> Vec<usize> {
        self.groups[group].lives.iter().flatten().copied().collect()
    }

    pub(super) fn arbiter_dies(&mut self) {
        self.note("the arbiter dies".to_owned());
        self.arbiter = None;
        let down = millis(self.random.below(3000));
        self.at(self.now + down, Event::ArbiterStart);
    }

    /// Logs, then sends; the arbiter may die before, between and during these.
    pub(super) fn arbiter_says(&mut self, output: Output) {
        assert!(self.arbiter.as_ref().unwrap().superseded().is_none());
        let may_die = output.log.is_some();
        if may_die && self.random.chance(self.setup.trouble.arbiter_death) {
            return self.arbiter_dies();
        }
        if let Some(state) = output.log {
            let (round, decision) = (state.round, &state.decision);
            self.log.push((self.now, format!("epoch {} round {round}: {decision:?}", state.epoch)));
            self.truth.log(&state);
            self.disk = Some(state.encode());
        }
        let dies = may_die && self.random.chance(self.setup.trouble.arbiter_death);
        let said =
            if dies { self.random.below(output.send.len() as u64 + 1) as usize } else { output.send.len() };
        for message in output.send.into_iter().take(said) {
            self.travel(|| Event::FromArbiter(message.clone()));
        }
        if dies {
            return self.arbiter_dies();
        }
        if let Some(at) = self.arbiter.as_ref().and_then(Arbiter::wake_at) {
            self.at(at.max(self.now + millis(1)), Event::ArbiterWake);
        }
    }

    pub(super) fn travel(&mut self, event: impl Fn() -> Event) {
        if !self.random.chance(self.setup.trouble.loss) {
            let copies = 1 + u64::from(self.random.chance(self.setup.trouble.repeat));
            for _ in 0..copies {
                let late = if self.random.chance(self.setup.trouble.late) { 2000 } else { 20 };
                let delay = millis(1 + self.random.below(late));
                self.at(self.now + delay, event());
            }
        }
    }

    /// Returns the gate of a rank that can continue.
    pub(super) fn ready(&mut self, life: usize) -> Option<Arc<Gate>> {
        let now = self.now;
        let one = &mut self.lives[life];
        if one.end.is_some() || one.dead || one.stalled_until > now {
            return None;
        }
        let heard = std::mem::take(&mut one.inbox);
        one.member
            .iter_mut()
            .for_each(|member| heard.iter().for_each(|message| member.hear(message.clone())));
        let ready = match one.need? {
            Need::Until(time) => now >= time,
            Need::Answer(number) => {
                one.answer = one.member.as_mut().and_then(|member| member.take(number, now));
                one.answer.is_some()
            }
            Need::Operation { group, rank, number } => self.groups[group].end(rank, number).is_some(),
        };
        let one = &mut self.lives[life];
        ready.then(|| {
            one.need = None;
            Arc::clone(&one.gate)
        })
    }

    /// Sends the rank's messages, and schedules its next wake.
    pub(crate) fn settle(&mut self, life: usize) {
        let now = self.now;
        let one = &mut self.lives[life];
        if one.end.is_some() || one.dead || one.stalled_until > now {
            return;
        }
        let said = one.member.as_mut().map(|member| member.tick(now)).unwrap_or_default();
        let until = match one.need {
            Some(Need::Until(time)) => time,
            _ => HORIZON,
        };
        let speaks_at = one.member.as_ref().map_or(HORIZON, Member::wake_at);
        one.wake_at = speaks_at.min(until).max(now + millis(1));
        let wake_at = one.wake_at;
        self.at(wake_at, Event::Wake(life));
        for message in said {
            self.travel(|| Event::ToArbiter(message.clone()));
        }
    }

    pub(super) fn ended(&mut self, life: usize, lived: Result<End, Box<dyn Any + Send>>) {
        let end = lived.unwrap_or_else(|panic| {
            if !panic.is::<Killed>() {
                self.failure.get_or_insert(panic);
            }
            End::Died
        });
        self.note(format!("{life} ends: {end:?}"));
        self.lives[life].end = Some(end);
    }

    /// Removes a rank from a group; whether the others are notified depends on the cause.
    pub(crate) fn leave(&mut self, group: usize, rank: usize, life: usize) {
        let told = !self.lives[life].dead || self.random.chance(700);
        if told {
            let delay = millis(1 + self.random.below(30));
            self.at(self.now + delay, Event::Gone(group, rank));
        }
    }

    /// Ends all operations of a group.
    pub(crate) fn abort(&mut self, group: usize, rank: usize) {
        self.groups[group].fail_all(&CommError::Aborted { rank });
        for life in self.members_of(group) {
            self.at(self.now, Event::Look(life));
        }
        for below in self.groups[group].below.clone() {
            self.abort(below, rank);
        }
    }

    /// Creates a group split from another, for the first rank that asks.
    pub(crate) fn part_of(&mut self, above: usize, ranks: usize) -> usize {
        let (next, part) = (self.groups.len(), self.groups[above].part(ranks));
        self.groups.push(part);
        self.groups[above].below.push(next);
        next
    }
}
