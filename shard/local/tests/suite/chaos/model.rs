//! Reference model: a worker's state as plain vectors, and the effects of a plan and a round on it, slow and obvious.

use crate::common::{Run, WhichRule};
use crate::naive::left;
use meshstep_local::{Fragment, LocalPlan, Merge, OnFailure, Placement, Select, Weights, What};
use meshstep_membership::Round;
use meshstep_optim::{Flat, Rule, Scalars, Segment};
use meshstep_tensor::{Queue, SliceMut};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

/// Values of a fragment: one f64 for each element of each vector.
type Values = Vec<Vec<f64>>;

#[derive(Clone, Debug)]
pub(crate) struct Model {
    /// By parameter: its values, then each of its state vectors.
    pub(crate) vectors: Vec<Vec<Vec<f32>>>,
    pub(crate) t: u64,
    /// The next step, from 0.
    pub(crate) step: u64,
    /// Indexed by fragment.
    pub(crate) tokens: Vec<u64>,
    /// Result of the last exchange, by fragment.
    anchors: Vec<Values>,
    /// State and step count of the outer optimizer, by fragment.
    outer: Vec<(Vec<Values>, u64)>,
    again: BTreeSet<usize>,
    away: Vec<Away>,
}

/// A fragment in flight.
#[derive(Clone, Debug)]
struct Away {
    fragment: usize,
    arrives: u64,
    own: Values,
    t: u64,
    tokens: u64,
    mean: Values,
}

/// Expected outcome of a step, as fragments.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Did {
    pub(crate) sent: BTreeSet<usize>,
    pub(crate) merged: BTreeSet<usize>,
    pub(crate) failed: BTreeSet<usize>,
}

impl Did {
    pub(crate) fn add(&mut self, mut other: Did) {
        self.sent.append(&mut other.sent);
        self.merged.append(&mut other.merged);
        self.failed.append(&mut other.failed);
    }
}

impl Model {
    pub(crate) fn new(run: &Run, plan: &LocalPlan) -> Self {
        let slots = run.boxed_rule().state().len();
        let vectors = |i: usize| {
            let first: Vec<f32> = run.initial(i).iter().map(|&x| x as f32).collect();
            let zeros = (0..slots).map(|_| vec![0.0; first.len()]);
            std::iter::once(first.clone()).chain(zeros.collect::<Vec<_>>()).collect()
        };
        let vectors = (0..run.lens.len()).map(vectors).collect();
        let mut model = Model {
            vectors,
            t: 0,
            step: 0,
            tokens: vec![0; plan.fragments.len()],
            anchors: Vec::new(),
            outer: Vec::new(),
            again: BTreeSet::new(),
            away: Vec::new(),
        };
        for fragment in &plan.fragments {
            let point = model.take(fragment, run.rule);
            let zeros: Values = point.iter().map(|values| vec![0.0; values.len()]).collect();
            let state = if let Merge::Outer(outer) = &fragment.merge { outer.rule.state().len() } else { 0 };
            model.outer.push((vec![zeros; state], 0));
            model.anchors.push(point);
        }
        model
    }

    /// Takes over the state of `source` for a joining worker, but for its own token counts.
    pub(crate) fn enter(&mut self, source: &Model) {
        let tokens = std::mem::take(&mut self.tokens);
        *self = Model { tokens, ..source.clone() };
    }

    /// Applies the rule with the gradients of worker `id`, which are NaN if `broken`.
    pub(crate) fn update(&mut self, run: &Run, rule: &dyn Rule, id: u64, weight: u64, broken: bool) {
        self.t += 1;
        for (i, vectors) in self.vectors.iter_mut().enumerate() {
            let grads = run.gradient(self.step + 1, 0, id as usize, i);
            let mut grads: Vec<f32> =
                grads.iter().map(|&g| if broken { f32::NAN } else { g as f32 }).collect();
            let (params, state) = vectors.split_first_mut().unwrap();
            let mut slots: Vec<SliceMut<'_>> = state.iter_mut().map(|s| SliceMut::from(&mut s[..])).collect();
            let (n, params) = (params.len(), SliceMut::from(&mut params[..]));
            let grads = SliceMut::from(&mut grads[..]);
            let flat = Flat { params, grads, state: &mut slots, copy: None, remainder: None };
            let scalars = Scalars { lr: run.at(self.step + 1).lr, ..Scalars::default() };
            rule.update(flat, &[Segment::new(0..n, self.t)], &scalars, &Queue::cpu()).unwrap();
        }
        self.tokens.iter_mut().for_each(|tokens| *tokens += weight);
    }

    /// Returns the side of this step's update with an exchange: the plan's side, or else the side of fragments to send again.
    pub(crate) fn side(&self, plan: &LocalPlan) -> Option<Placement> {
        let both = [Placement::Before, Placement::After];
        let meets = |side: &Placement, again: bool| {
            let of = |f: &usize| plan.fragments[*f].timing.placement == *side;
            let free = |f: &usize| !self.away.iter().any(|away| away.fragment == *f);
            let planned = |f: &usize| self.planned(plan, *f) && free(f);
            let all = (0..plan.fragments.len()).filter(|&f| travels(&plan.fragments[f])).filter(of);
            let mut now = all.filter(|f| if again { self.again.contains(f) && free(f) } else { planned(f) });
            now.next().is_some()
                || !again && self.away.iter().any(|away| away.arrives == self.step && of(&away.fragment))
        };
        both.into_iter()
            .find(|side| meets(side, false))
            .or_else(|| both.into_iter().find(|side| meets(side, true)))
    }

    /// Returns true if the plan has the fragment due in this step.
    fn planned(&self, plan: &LocalPlan, f: usize) -> bool {
        let timing = &plan.fragments[f].timing;
        let count = self.step + u64::from(timing.placement == Placement::After);
        timing.period.is_some_and(|period| count % period == timing.offset) && timing.during.contains(&count)
    }

    /// Returns the fragments due on one side of this step's update: sent, reset, arriving. Fragments that travel are sent again
    /// only if the step `exchanges` on this side.
    fn due(&self, plan: &LocalPlan, placement: Placement, exchanges: bool) -> [BTreeSet<usize>; 3] {
        let mut due = [BTreeSet::new(), BTreeSet::new(), BTreeSet::new()];
        let here = |f: usize| plan.fragments[f].timing.placement == placement;
        for (f, fragment) in plan.fragments.iter().enumerate().filter(|(f, _)| here(*f)) {
            let again = self.again.contains(&f) && (exchanges || !travels(fragment));
            let away = self.away.iter().any(|away| away.fragment == f);
            match fragment.merge {
                _ if !again && !self.planned(plan, f) => false,
                Merge::Keep => false,
                Merge::Reset => due[1].insert(f),
                _ => !away && due[0].insert(f),
            };
        }
        let arriving = self.away.iter().filter(|away| away.arrives == self.step && here(away.fragment));
        due[2].extend(arriving.map(|away| away.fragment));
        due
    }

    /// Runs one side of the step's update. The step exchanges on `side`; `committed` has the state of all members if the exchange
    /// succeeded.
    pub(crate) fn exchange(
        &mut self,
        plan: &LocalPlan,
        rule: WhichRule,
        (placement, side): (Placement, Option<Placement>),
        committed: Result<(&Round, &BTreeMap<usize, Arc<Model>>), ()>,
    ) -> Did {
        let [sent, reset, arriving] = self.due(plan, placement, side == Some(placement));
        let mut did = Did::default();
        self.again.retain(|f| !sent.contains(f) && !reset.contains(f));
        let meets = !sent.is_empty() || !arriving.is_empty();
        if let (true, Err(())) = (meets, committed) {
            did.failed = sent.into_iter().chain(reset).chain(arriving).collect();
            self.away.retain(|away| !did.failed.contains(&away.fragment));
            did.failed.iter().for_each(|&f| self.give_up(plan, rule, f));
            return did;
        }
        if let Ok((round, brought)) = committed {
            for &f in &sent {
                let fragment = &plan.fragments[f];
                let mean = mean(brought, round, fragment, f, rule);
                let (own, arrives) = (self.take(fragment, rule), self.step + fragment.timing.delay);
                self.away.push(Away { fragment: f, arrives, own, t: self.t, tokens: self.tokens[f], mean });
            }
        }
        let step = self.step;
        did.sent = sent.iter().copied().filter(|&f| plan.fragments[f].timing.delay > 0).collect();
        let arrives = |away: &mut Away| {
            away.arrives == step && plan.fragments[away.fragment].timing.placement == placement
        };
        for away in self.away.extract_if(.., arrives).collect::<Vec<_>>() {
            did.merged.insert(away.fragment);
            self.arrive(plan, rule, away);
        }
        for f in reset {
            let zeros = self.take(&plan.fragments[f], rule).iter().map(|v| vec![0.0; v.len()]).collect();
            self.put(&plan.fragments[f], rule, &zeros);
            did.merged.insert(f);
        }
        did
    }

    /// Applies the fragment's policy after a failed exchange.
    fn give_up(&mut self, plan: &LocalPlan, rule: WhichRule, f: usize) {
        match plan.fragments[f].on_failure {
            OnFailure::KeepLocal => {}
            OnFailure::Retry => drop(self.again.insert(f)),
            OnFailure::RollBack => {
                let travels = !matches!(plan.fragments[f].merge, Merge::Reset);
                let anchor = self.anchors[f].clone();
                travels.then(|| self.put(&plan.fragments[f], rule, &anchor));
            }
        }
    }

    /// Gives up all flights, and returns their fragments.
    pub(crate) fn give_up_away(&mut self, plan: &LocalPlan, rule: WhichRule) -> BTreeSet<usize> {
        let away: BTreeSet<usize> = self.away.drain(..).map(|away| away.fragment).collect();
        away.iter().for_each(|&f| self.give_up(plan, rule, f));
        away
    }

    fn arrive(&mut self, plan: &LocalPlan, rule: WhichRule, away: Away) {
        let (f, fragment) = (away.fragment, &plan.fragments[away.fragment]);
        let result = match &fragment.merge {
            Merge::Outer(_) => self.outer_step(plan, f, &away.mean),
            _ => away.mean.clone(),
        };
        let mut x = self.take(fragment, rule);
        let (names, (then, now)) = (places(&self.vectors, fragment, rule), (away.t, self.t));
        let slots = Run { rule, ..Run::default() }.boxed_rule();
        let of = |k: usize| if k == 0 { 1.0 } else { left(slots.slot(k - 1), then, now) };
        let left: Vec<f64> = names.iter().map(|(_, k, _)| of(*k)).collect();
        for (k, x) in x.iter_mut().enumerate() {
            for (j, x) in x.iter_mut().enumerate() {
                *x = match fragment.merge {
                    Merge::Mean if fragment.timing.delay > 0 => {
                        *x + fragment.taken * left[k] * (result[k][j] - away.own[k][j])
                    }
                    _ if fragment.taken == 1.0 => result[k][j],
                    _ => *x + fragment.taken * (result[k][j] - *x),
                };
            }
        }
        self.put(fragment, rule, &x);
        self.anchors[f] = result.iter().map(|v| v.iter().map(|&x| f64::from(x as f32)).collect()).collect();
        self.tokens[f] -= away.tokens;
    }

    /// Returns `mean + (p - (x0 - d))`, where the rule moves `x0` to `p` with the gradient `d = x0 - mean`, all in f64.
    fn outer_step(&mut self, plan: &LocalPlan, f: usize, mean: &Values) -> Values {
        let Merge::Outer(outer) = &plan.fragments[f].merge else { unreachable!() };
        let (state, t) = &mut self.outer[f];
        *t += 1;
        let mut result = Values::new();
        for (k, mean) in mean.iter().enumerate() {
            let (mut p, n) = (self.anchors[f][k].clone(), mean.len());
            let mut d: Vec<f64> = p.iter().zip(mean).map(|(p, m)| p - m).collect();
            let moved: Vec<f64> = p.iter().zip(&d).map(|(p, d)| p - d).collect();
            let mut slots: Vec<SliceMut<'_>> =
                state.iter_mut().map(|slot| SliceMut::from(&mut slot[k][..])).collect();
            let (params, grads) = (SliceMut::from(&mut p[..]), SliceMut::from(&mut d[..]));
            let flat = Flat { params, grads, state: &mut slots, copy: None, remainder: None };
            let scalars = Scalars { lr: outer.lr, ..Scalars::default() };
            outer.rule.update(flat, &[Segment::new(0..n, *t)], &scalars, &Queue::cpu()).unwrap();
            result.push((0..n).map(|j| mean[j] + (p[j] - moved[j])).collect());
        }
        result
    }

    /// Returns the values of a fragment.
    pub(crate) fn take(&self, fragment: &Fragment, rule: WhichRule) -> Values {
        let places = places(&self.vectors, fragment, rule);
        let values = |(i, k, range): (usize, usize, Range<usize>)| {
            self.vectors[i][k][range].iter().map(|&x| x.into()).collect()
        };
        places.into_iter().map(values).collect()
    }

    fn put(&mut self, fragment: &Fragment, rule: WhichRule, values: &Values) {
        for ((i, k, range), values) in places(&self.vectors, fragment, rule).into_iter().zip(values) {
            let into = self.vectors[i][k][range].iter_mut();
            into.zip(values).for_each(|(x, &value)| *x = value as f32);
        }
    }
}

/// Returns true if values of the fragment are sent to other workers.
pub(crate) fn travels(fragment: &Fragment) -> bool {
    matches!(fragment.merge, Merge::Mean | Merge::Outer(_)) && fragment.timing.period.is_some()
}

/// Returns the places of a fragment: parameter, vector and range of elements.
fn places(
    vectors: &[Vec<Vec<f32>>],
    fragment: &Fragment,
    rule: WhichRule,
) -> Vec<(usize, usize, Range<usize>)> {
    let known = Run { rule, ..Run::default() }.boxed_rule();
    let total: usize = vectors.iter().map(|own| own[0].len()).sum();
    let (mut before, mut places) = (0, Vec::new());
    for (i, own) in vectors.iter().enumerate() {
        let len = own[0].len();
        let chosen = match &fragment.params {
            Select::All => true,
            Select::Part { index, of } => (2 * before + len) * of / (2 * total) == *index,
            other => panic!("{other:?}"),
        };
        before += len;
        let vector = |k: usize| match &fragment.what {
            What::Params => k == 0,
            What::State(slots) => k > 0 && slots.of(&*known).contains(&(k - 1)),
            What::OuterMomentum(_) => panic!("not here"),
        };
        let wanted = (0..own.len()).filter(|&k| chosen && len > 0 && vector(k));
        places.extend(wanted.map(|k| (i, k, 0..len)));
    }
    places
}

/// Returns the mean in f64 of the counting members, rounded once to the f32 that is sent.
fn mean(
    brought: &BTreeMap<usize, Arc<Model>>,
    round: &Round,
    fragment: &Fragment,
    f: usize,
    rule: WhichRule,
) -> Values {
    assert_eq!(brought.len(), round.members.len());
    let weight = |(seat, model): (&meshstep_membership::Seat, &Arc<Model>)| match fragment.weights {
        _ if !seat.counts => 0,
        Weights::Uniform => 1,
        Weights::Tokens => model.tokens[f],
    };
    let weights: Vec<u64> = round.members.iter().zip(brought.values()).map(weight).collect();
    let total: u64 = weights.iter().sum();
    let alike = weights.iter().all(|w| *w == weights[0]);
    let all: Vec<Values> = brought.values().map(|model| model.take(fragment, rule)).collect();
    let rounded = |x: f64| f64::from(x as f32);
    let element = |k: usize, j: usize| {
        let values = all.iter().zip(&weights).filter(|(_, w)| **w > 0).map(|(values, w)| (values[k][j], *w));
        match alike {
            true => rounded(values.map(|(x, _)| x).sum::<f64>() / weights.len() as f64),
            false => rounded(values.map(|(x, w)| x * (w as f64 / total as f64)).sum()),
        }
    };
    (0..all[0].len()).map(|k| (0..all[0][k].len()).map(|j| element(k, j)).collect()).collect()
}
