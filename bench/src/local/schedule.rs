//! Schedule of leaving and joining workers, drawn from a seed and independent of the machine.

use std::ops::Range;

use anyhow::{Result, ensure};
use meshstep_local::{LocalPlan, Placement};
use serde::{Deserialize, Serialize};

use crate::keyed::Stream;

/// Maximum number of events of a run.
const EVENTS: usize = 6;

/// Way in which a worker ends before the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Loss {
    /// The worker announces that it leaves.
    Leaves,
    /// The worker is lost between two exchanges without notice.
    Dies,
    /// The worker is lost in an exchange, while the others wait for its part.
    DiesWithin,
}

/// Event of a worker, before `step` begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Event {
    pub(crate) step: u64,
    pub(crate) worker: usize,
    /// Way in which the worker is lost; `None` if it joins.
    pub(crate) loss: Option<Loss>,
}

/// All events in order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Schedule {
    pub(crate) events: Vec<Event>,
}

impl Schedule {
    /// Draws a schedule for `workers` workers that take `steps` steps with `plan`. At most one event happens between two
    /// exchanges, so that at each event all present workers have the current state of the run, and one of them suffices to
    /// continue.
    pub(crate) fn draw(seed: u64, workers: usize, steps: u64, plan: &LocalPlan) -> Result<Self> {
        ensure!(
            workers >= 2,
            "--chaos needs a worker that remains when another is lost; use --ranks 2 or more"
        );
        let intervals = intervals(plan, steps);
        ensure!(
            intervals.len() >= 3,
            "--chaos: {steps} steps have {} exchanges, but at least 3 are needed, because workers join and leave between them; use \
             more --steps or a smaller --kx",
            intervals.len()
        );
        // A joining worker needs an exchange before and after it joins.
        let between = &intervals[1..];
        let count = between.len().min(EVENTS);
        let mut chosen: Vec<usize> = (0..between.len()).collect();
        let stream = Stream::new(seed, &[0]);
        chosen.sort_by_key(|&i| stream.bits(i as u64));
        chosen.truncate(count);
        chosen.sort_unstable();
        let (mut alive, mut next): (Vec<usize>, usize) = ((0..workers).collect(), workers);
        let mut events = Vec::new();
        for (i, &interval) in chosen.iter().enumerate() {
            let draw = Draw(Stream::new(seed, &[1, i as u64]));
            // At least one worker is lost and at least one joins.
            let comes = match i {
                0 => false,
                1 => true,
                _ => alive.len() < 2 || alive.len() < 2 * workers && draw.below(0, 2) == 0,
            };
            events.push(if comes {
                alive.push(next);
                next += 1;
                Event { step: draw.step(&between[interval]), worker: next - 1, loss: None }
            } else {
                let worker = alive.remove(draw.below(1, alive.len()));
                draw.loss(worker, &between[interval])
            });
        }
        Ok(Schedule { events })
    }

    /// Returns the schedule that doubles the number of `workers` from step `from` on, at which an exchange has just ended.
    /// The new workers join before the last step of this exchange: they take this step too, and count from the next
    /// exchange on.
    pub(crate) fn doubling(workers: usize, from: u64) -> Self {
        let step = from.saturating_sub(1);
        Schedule { events: (workers..2 * workers).map(|worker| Event { step, worker, loss: None }).collect() }
    }

    /// Returns the same schedule with joining workers at the steps that `began` returns.
    pub(crate) fn coming_at(&self, began: impl Fn(usize) -> Option<u64>) -> Self {
        let moved = |event: &Event| match (event.loss, began(event.worker)) {
            (None, Some(step)) => Event { step, ..*event },
            _ => *event,
        };
        Schedule { events: self.events.iter().map(moved).collect() }
    }

    /// Returns the step before which a worker joins; `None` for workers present from the start.
    pub(crate) fn comes(&self, worker: usize) -> Option<u64> {
        self.of(worker, true).map(|event| event.step)
    }

    /// Returns the step and the way in which a worker is lost.
    pub(crate) fn lost(&self, worker: usize) -> Option<(u64, Loss)> {
        self.of(worker, false).and_then(|event| Some((event.step, event.loss?)))
    }

    /// Returns the workers that join before `step`.
    pub(crate) fn coming(&self, step: u64) -> impl Iterator<Item = usize> + '_ {
        self.events
            .iter()
            .filter(move |event| event.step == step && event.loss.is_none())
            .map(|event| event.worker)
    }

    /// Returns the total number of workers over the run, `first` of them present from the start.
    pub(crate) fn workers(&self, first: usize) -> usize {
        first + self.events.iter().filter(|event| event.loss.is_none()).count()
    }

    fn of(&self, worker: usize, comes: bool) -> Option<&Event> {
        self.events.iter().find(|event| event.worker == worker && event.loss.is_none() == comes)
    }
}

/// Random numbers of one event.
struct Draw(Stream);

impl Draw {
    fn below(&self, index: u64, n: usize) -> usize {
        self.0.below(index, n as u64) as usize
    }

    fn step(&self, interval: &Range<u64>) -> u64 {
        interval.start + self.0.below(2, interval.end - interval.start)
    }

    fn loss(&self, worker: usize, interval: &Range<u64>) -> Event {
        let loss = [Loss::Leaves, Loss::Dies, Loss::DiesWithin][self.below(3, 3)];
        let step = if loss == Loss::DiesWithin { interval.end - 1 } else { self.step(interval) };
        Event { step, worker, loss: Some(loss) }
    }
}

/// Returns ranges of steps that end with a step that sends something, and contain no other such step. (Results that arrive
/// later are dropped if the membership changes meanwhile, so they do not count.)
fn intervals(plan: &LocalPlan, steps: u64) -> Vec<Range<u64>> {
    let placements = [Placement::Before, Placement::After];
    let exchanges =
        |&step: &u64| placements.iter().any(|&placement| plan.due(step, placement).next().is_some());
    let mut from = 0;
    let ends = (0..steps).filter(exchanges).map(|step| step + 1);
    ends.map(|end| std::mem::replace(&mut from, end)..end).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_end_with_what_travels() {
        assert_eq!(intervals(&LocalPlan::des_loc(4, 6, 12), 13), [0..4, 4..6, 6..8, 8..12]);
        let streaming = LocalPlan::streaming_diloco(4, 2, 1, 0.5);
        assert_eq!(intervals(&streaming, 7), [0..2, 2..4, 4..6]);
    }

    #[test]
    fn a_seed_is_one_schedule_and_another_is_another() {
        let plan = LocalPlan::local_adam(4);
        let draw = |seed| Schedule::draw(seed, 4, 64, &plan).unwrap();
        assert_eq!(draw(1), draw(1));
        assert!((2..20).all(|seed| draw(seed) != draw(1)));
        assert!((0..20).any(|seed| draw(seed).events.len() == EVENTS));
    }

    #[test]
    fn somebody_is_always_left_who_has_what_the_run_has() {
        for (plan, workers, steps) in [
            (LocalPlan::local_adam(4), 2, 12),
            (LocalPlan::local_adam(4), 4, 200),
            (LocalPlan::local_sgd(1), 3, 30),
            (LocalPlan::streaming_diloco(8, 2, 3, 0.5), 4, 100),
        ] {
            let intervals = intervals(&plan, steps);
            let within = |step: u64| intervals.iter().position(|interval| interval.contains(&step)).unwrap();
            for seed in 0..300 {
                let Schedule { events } = Schedule::draw(seed, workers, steps, &plan).unwrap();
                let places: Vec<usize> = events.iter().map(|event| within(event.step)).collect();
                assert!(places[0] > 0 && places.windows(2).all(|pair| pair[0] < pair[1]), "{events:?}");
                let mut alive: Vec<usize> = (0..workers).collect();
                for event in &events {
                    match event.loss {
                        None => {
                            assert!(!alive.contains(&event.worker));
                            alive.push(event.worker);
                        }
                        Some(loss) => {
                            let place = alive.iter().position(|&worker| worker == event.worker);
                            alive.remove(place.unwrap());
                            let last = intervals[within(event.step)].end - 1;
                            assert!(loss != Loss::DiesWithin || event.step == last);
                        }
                    }
                    assert!((1..=2 * workers).contains(&alive.len()), "{events:?}");
                }
                assert!(events.iter().any(|event| event.loss.is_some()));
                assert!(events.iter().any(|event| event.loss.is_none()));
            }
        }
    }

    #[test]
    fn doubling_is_as_many_again_and_comings_can_be_moved() {
        let schedule = Schedule::doubling(3, 32);
        assert_eq!((schedule.workers(3), schedule.coming(31).collect::<Vec<_>>()), (6, vec![3, 4, 5]));
        assert!((0..6).all(|worker| schedule.lost(worker).is_none()));
        assert_eq!((schedule.comes(2), schedule.comes(3)), (None, Some(31)));
        let drawn = Schedule::draw(1, 4, 64, &LocalPlan::local_adam(4)).unwrap();
        let moved = drawn.coming_at(|worker| (worker >= 4).then_some(60));
        for (event, moved) in drawn.events.iter().zip(&moved.events) {
            let step = if event.loss.is_none() { 60 } else { event.step };
            assert_eq!(*moved, Event { step, ..*event });
        }
    }

    #[test]
    fn every_way_to_go_is_drawn() {
        let plan = LocalPlan::local_adam(4);
        let all = (0..50).flat_map(|seed| Schedule::draw(seed, 4, 64, &plan).unwrap().events);
        let ways: Vec<Option<Loss>> = all.map(|event| event.loss).collect();
        for way in [None, Some(Loss::Leaves), Some(Loss::Dies), Some(Loss::DiesWithin)] {
            assert!(ways.contains(&way), "{way:?}");
        }
    }

    #[test]
    fn what_cannot_be_drawn_says_what_could() {
        let draw =
            |workers, steps| Schedule::draw(1, workers, steps, &LocalPlan::local_adam(16)).unwrap_err();
        assert!(draw(1, 400).to_string().contains("--ranks 2 or more"));
        assert!(draw(4, 47).to_string().contains("47 steps have 2 exchanges"));
    }
}
