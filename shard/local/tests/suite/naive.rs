//! Reference: workers in one loop over whole vectors, slow and obvious.

use crate::common::Run;
use meshstep_local::{Fragment, LocalPlan, Merge, Placement, Select, Weights, What};
use meshstep_optim::{Carry, Flat, Rule, Scalars, Segment, StateSlot};
use meshstep_tensor::{Queue, SliceMut};
use std::ops::Range;

/// One whole worker in f32.
#[derive(Clone, Debug, PartialEq)]
pub struct Worker {
    pub params: Vec<Vec<f32>>,
    /// By state vector, then by parameter.
    pub state: Vec<Vec<Vec<f32>>>,
    pub t: u64,
    tokens: Vec<u64>,
}

/// Values of a fragment that a worker sends: one f64 for each element of each vector.
type Sent = Vec<Vec<f64>>;

/// Values that a worker sent, with `t` and its tokens at that time.
type Snapshot = (Sent, u64, u64);

type Away = (usize, u64, Sent, Vec<Snapshot>);

/// Tokens are counted in sixths, so that workers of up to three ranks have the same number as whole ones.
const SIXTHS: u64 = 6;

pub struct Naive<'a> {
    run: &'a Run,
    plan: LocalPlan,
    rule: Box<dyn Rule>,
    pub workers: Vec<Worker>,
    /// By fragment: point and state of the outer optimizer, by vector, and its steps.
    outer: Vec<Option<(Sent, Vec<Sent>, u64)>>,
    /// Fragment, step of arrival, mean that arrives, and each worker's snapshot with `t` and tokens.
    away: Vec<Away>,
    /// Ranks of each worker.
    inside: usize,
}

impl<'a> Naive<'a> {
    pub fn new(run: &'a Run, plan: &LocalPlan, workers: usize) -> Self {
        let rule = run.boxed_rule();
        let first = |i: usize| run.initial(i).iter().map(|&x| x as f32).collect::<Vec<f32>>();
        let params: Vec<Vec<f32>> = (0..run.lens.len()).map(first).collect();
        let zeros = || run.lens.iter().map(|&len| vec![0.0; len]).collect::<Vec<Vec<f32>>>();
        let state = rule.state().iter().map(|_| zeros()).collect();
        let worker = Worker { params, state, t: 0, tokens: vec![0; plan.fragments.len()] };
        let mut naive = Naive {
            run,
            plan: plan.clone(),
            rule,
            workers: vec![worker; workers],
            outer: Vec::new(),
            away: Vec::new(),
            inside: run.ranks / workers,
        };
        for f in &plan.fragments {
            let outer = match &f.merge {
                Merge::Outer(outer) => {
                    let point = naive.take(f, 0);
                    let zeros: Sent = point.iter().map(|v| vec![0.0; v.len()]).collect();
                    Some((point, outer.rule.state().iter().map(|_| zeros.clone()).collect(), 0))
                }
                _ => None,
            };
            naive.outer.push(outer);
        }
        naive
    }

    /// Returns `workers` workers that continue from the mean of these (by tokens where those weigh), each with an equal part of the
    /// tokens.
    pub fn merged(&self, run: &'a Run, workers: usize) -> Naive<'a> {
        let mut one = self.workers[0].clone();
        let all = &self.workers;
        let mean = |values: Vec<f32>| {
            (values.iter().map(|&x| f64::from(x)).sum::<f64>() / values.len() as f64) as f32
        };
        for i in 0..run.lens.len() {
            for j in 0..run.lens[i] {
                one.params[i][j] = mean(all.iter().map(|worker| worker.params[i][j]).collect());
                for s in 0..one.state.len() {
                    one.state[s][i][j] = mean(all.iter().map(|worker| worker.state[s][i][j]).collect());
                }
            }
        }
        for (f, fragment) in self.plan.fragments.iter().enumerate() {
            let tokens: Vec<f64> = all.iter().map(|worker| worker.tokens[f] as f64).collect();
            if fragment.weights != Weights::Tokens || tokens.iter().all(|own| *own == tokens[0]) {
                continue;
            }
            let total: f64 = tokens.iter().sum();
            for (slot, i, range) in self.places(fragment) {
                for j in range {
                    let value = |worker: &Worker| {
                        f64::from(slot.map_or(worker.params[i][j], |slot| worker.state[slot][i][j]))
                    };
                    let shares = all.iter().zip(&tokens).map(|(worker, own)| value(worker) * (own / total));
                    let mean = shares.sum::<f64>() as f32;
                    *slot.map_or(&mut one.params[i][j], |slot| &mut one.state[slot][i][j]) = mean;
                }
            }
        }
        let divided = |tokens: u64| tokens.div_ceil(workers as u64);
        for (f, tokens) in one.tokens.iter_mut().enumerate() {
            *tokens = divided(all.iter().map(|worker| worker.tokens[f]).sum());
        }
        let away = |(f, at, mean, sent): &Away| {
            // Sent values count like the workers' own.
            let tokens = |worker: &Worker| match self.plan.fragments[*f].weights {
                Weights::Tokens => worker.tokens[*f] as f64,
                _ => 1.0,
            };
            let one = self::mean(sent, &all.iter().map(tokens).collect::<Vec<_>>());
            let tokens = divided(sent.iter().map(|(.., tokens)| tokens).sum());
            (*f, *at, mean.clone(), vec![(one, sent[0].1, tokens); workers])
        };
        Naive {
            run,
            plan: self.plan.clone(),
            rule: run.boxed_rule(),
            workers: vec![one; workers],
            outer: self.outer.clone(),
            away: self.away.iter().map(away).collect(),
            inside: 1,
        }
    }

    /// Returns `workers` workers that begin `plan` at the mean of these.
    pub fn anew(&self, run: &'a Run, plan: &LocalPlan, workers: usize) -> Naive<'a> {
        let merged = self.merged(run, workers);
        let mut begun = Naive::new(run, plan, run.ranks);
        let tokens = vec![0; plan.fragments.len()];
        begun.workers = vec![Worker { tokens, ..merged.workers[0].clone() }; workers];
        for (f, fragment) in plan.fragments.iter().enumerate() {
            let point = begun.take(fragment, 0);
            begun.outer[f].iter_mut().for_each(|outer| outer.0 = point.clone());
        }
        begun
    }

    /// Takes step `step`, from 0.
    pub fn step(&mut self, step: u64) {
        self.meet(step, Placement::Before);
        for w in 0..self.workers.len() {
            self.update(w, step);
        }
        self.meet(step, Placement::After);
    }

    fn update(&mut self, w: usize, step: u64) {
        let run = self.run;
        let ranks = w * self.inside..(w + 1) * self.inside;
        let mut grads: Vec<Vec<f32>> = Vec::new();
        for (i, &len) in run.lens.iter().enumerate() {
            let mut sum = vec![0f64; len];
            for rank in ranks.clone() {
                sum.iter_mut().zip(run.gradient(step + 1, 0, rank, i)).for_each(|(s, g)| *s += g);
            }
            grads.push(sum.iter().map(|s| (s / self.inside as f64) as f32).collect());
        }
        let squares: f64 = grads.iter().flatten().map(|&g| f64::from(g) * f64::from(g)).sum();
        let at = run.at(step + 1);
        let coef = at.max_norm.map_or(1.0, |max| (max / (squares.sqrt() + 1e-6)).min(1.0));
        let scalars = Scalars { lr: at.lr, grad_scale: coef, ..Scalars::default() };
        let worker = &mut self.workers[w];
        worker.t += 1;
        for (i, grads) in grads.iter_mut().enumerate() {
            let mut slots: Vec<SliceMut<'_>> =
                worker.state.iter_mut().map(|slot| SliceMut::from(&mut slot[i][..])).collect();
            let (params, grads) = (SliceMut::from(&mut worker.params[i][..]), SliceMut::from(&mut grads[..]));
            let flat = Flat { params, grads, state: &mut slots, copy: None, remainder: None };
            let all = [Segment::new(0..run.lens[i], worker.t)];
            self.rule.update(flat, &all, &scalars, &Queue::cpu()).unwrap();
        }
        let tokens = ranks.map(|rank| tokens(rank, step)).sum::<u64>();
        worker.tokens.iter_mut().for_each(|sum| *sum += SIXTHS * tokens);
    }

    fn meet(&mut self, step: u64, placement: Placement) {
        for f in self.plan.due(step, placement).collect::<Vec<_>>() {
            let fragment = self.plan.fragments[f].clone();
            if let Merge::Reset = fragment.merge {
                for w in 0..self.workers.len() {
                    let zeros = self.take(&fragment, w).iter().map(|v| vec![0.0; v.len()]).collect();
                    self.put(&fragment, w, &zeros);
                }
                continue;
            }
            let sent: Vec<Snapshot> = (0..self.workers.len())
                .map(|w| (self.take(&fragment, w), self.workers[w].t, self.workers[w].tokens[f]))
                .collect();
            let weight = |(.., tokens): &Snapshot| match fragment.weights {
                Weights::Tokens => *tokens as f64,
                _ => 1.0,
            };
            let mean = mean(&sent, &sent.iter().map(weight).collect::<Vec<_>>());
            self.away.push((f, step + fragment.timing.delay, mean, sent));
        }
        let here = |plan: &LocalPlan, (f, at, ..): &Away| {
            *at == step && plan.fragments[*f].timing.placement == placement
        };
        for arrived in self.away.extract_if(.., |away| here(&self.plan, away)).collect::<Vec<_>>() {
            self.arrive(arrived.0, arrived.2, arrived.3);
        }
    }

    fn arrive(&mut self, f: usize, mean: Sent, sent: Vec<Snapshot>) {
        let fragment = self.plan.fragments[f].clone();
        let result = match &fragment.merge {
            Merge::Outer(_) => self.outer_step(f, &mean),
            _ => mean.clone(),
        };
        for (w, (snapshot, then, tokens)) in sent.iter().enumerate() {
            let mut x = self.take(&fragment, w);
            let now = self.workers[w].t;
            let left: Vec<f64> =
                self.places(&fragment).iter().map(|place| self.left(place.0, *then, now)).collect();
            for (k, x) in x.iter_mut().enumerate() {
                for (j, x) in x.iter_mut().enumerate() {
                    *x = match fragment.merge {
                        Merge::Mean if fragment.timing.delay > 0 => {
                            *x + fragment.taken * left[k] * (result[k][j] - snapshot[k][j])
                        }
                        _ if fragment.taken == 1.0 => result[k][j],
                        _ => *x + fragment.taken * (result[k][j] - *x),
                    };
                }
            }
            self.put(&fragment, w, &x);
            self.workers[w].tokens[f] -= tokens;
        }
    }

    /// Returns `x = mean + (p - (x0 - d))`, where the rule moves `x0` to `p` with the gradient `d = x0 - mean`, all in f64.
    fn outer_step(&mut self, f: usize, mean: &Sent) -> Sent {
        let Merge::Outer(outer) = self.plan.fragments[f].merge.clone() else { unreachable!() };
        let (point, state, t) = self.outer[f].as_mut().unwrap();
        *t += 1;
        let mut result = Sent::new();
        for (k, mean) in mean.iter().enumerate() {
            let (mut p, n) = (point[k].clone(), mean.len());
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
        *point = result.iter().map(|v| v.iter().map(|&x| f64::from(x as f32)).collect()).collect();
        result
    }

    /// Returns the share of a vector's value at `then` that is still in it at `now`: 1 for parameters.
    fn left(&self, slot: Option<usize>, then: u64, now: u64) -> f64 {
        slot.map_or(1.0, |slot| left(self.rule.slot(slot), then, now))
    }

    /// Returns the vectors of a fragment: parameters by registration order, then state vectors.
    pub fn places(&self, fragment: &Fragment) -> Vec<(Option<usize>, usize, Range<usize>)> {
        let chosen = self.chosen(&fragment.params);
        let slots: Vec<Option<usize>> = match &fragment.what {
            What::Params => vec![None],
            What::State(slots) => slots.of(&*self.rule).into_iter().map(Some).collect(),
            What::OuterMomentum(_) => panic!("not here"),
        };
        let of = |(i, range): (usize, Range<usize>)| {
            slots.iter().map(move |&slot| (slot, i, range.clone())).collect::<Vec<_>>()
        };
        chosen.into_iter().flat_map(of).collect()
    }

    fn chosen(&self, select: &Select) -> Vec<(usize, Range<usize>)> {
        let lens = &self.run.lens;
        let total: usize = lens.iter().sum();
        let mut before = 0;
        let mut chosen = Vec::new();
        for (i, &len) in lens.iter().enumerate() {
            let name = crate::common::name(i);
            let wanted = match select {
                Select::All => 0..len,
                Select::Names(names) if names.contains(&name) => 0..len,
                Select::Part { index, of } if (2 * before + len) * of / (2 * total) == *index => 0..len,
                Select::Elements { name: wanted, range } if *wanted == name => range.clone(),
                _ => 0..0,
            };
            before += len;
            chosen.push((i, wanted));
        }
        chosen.retain(|(_, range)| !range.is_empty());
        chosen
    }

    fn take(&self, fragment: &Fragment, w: usize) -> Sent {
        let worker = &self.workers[w];
        let vector = |(slot, i, range): (Option<usize>, usize, Range<usize>)| {
            let from = slot.map_or(&worker.params[i], |slot| &worker.state[slot][i]);
            from[range].iter().map(|&x| x.into()).collect()
        };
        self.places(fragment).into_iter().map(vector).collect()
    }

    fn put(&mut self, fragment: &Fragment, w: usize, values: &Sent) {
        for ((slot, i, range), values) in self.places(fragment).into_iter().zip(values) {
            let worker = &mut self.workers[w];
            let into = match slot {
                None => &mut worker.params[i][range],
                Some(slot) => &mut worker.state[slot][i][range],
            };
            into.iter_mut().zip(values).for_each(|(x, &value)| *x = value as f32);
        }
    }
}

/// Returns the share of a state vector's value at `then` that is still in it at `now`.
pub fn left(slot: StateSlot, then: u64, now: u64) -> f64 {
    let Carry::Linear { keeps, first } = slot.carry else { panic!("a maximum has no share") };
    // Only the update with t = 1 may differ from the others.
    let fresh = first.filter(|_| then == 0 && now > 0);
    fresh.map_or(keeps.powi((now - then) as i32), |first| first * keeps.powi(now as i32 - 1))
}

/// Returns the mean by these weights in f64, rounded once to the f32 that is sent.
fn mean(sent: &[Snapshot], weights: &[f64]) -> Sent {
    let total: f64 = weights.iter().sum();
    let alike = weights.iter().all(|w| *w == weights[0]);
    let element = |k: usize, j: usize| -> f64 {
        let values = sent.iter().map(|(sent, ..)| sent[k][j]);
        let mean: f64 = match alike {
            true => values.sum::<f64>() / sent.len() as f64,
            false => values.zip(weights).map(|(x, w)| x * (w / total)).sum(),
        };
        f64::from(mean as f32)
    };
    let first = &sent[0].0;
    (0..first.len()).map(|k| (0..first[k].len()).map(|j| element(k, j)).collect()).collect()
}

/// Returns the weight of a rank's micro-batch.
pub fn tokens(rank: usize, step: u64) -> u64 {
    1 + (rank as u64 * 7 + step * 3) % 11
}
