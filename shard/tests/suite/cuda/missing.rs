//! Gradients that are missing on some ranks, or on all: skipped parameters, zeros and errors equal loopback's, bit for bit, and
//! the host does not wait.

use crate::common::{self, Gradients, PRECISIONS, Run, STAGES, WhichRule};
use crate::cuda::{alone, devices, room_for, seed, some, stand_in};
use meshstep_comm::{Communicator, loopback, nccl};
use meshstep_shard::{Error, Fault, Missing, Optimizer, Options, Outcome, Pending, Stage};
use meshstep_tensor::cuda::Stream;
use meshstep_tensor::{DType, Layout, Queue};
use std::sync::Arc;

const POLICIES: [Missing; 2] = [Missing::SkipIfMissingEverywhere, Missing::AllOrNone];

/// Pattern of gradients: true if a rank has parameter `i`'s gradient at step `t`.
type Has = fn(t: u64, rank: usize, i: usize) -> bool;

/// Patterns by name. Under `AllOrNone` the ones that depend on the rank are errors.
const PATTERNS: [(&str, Has); 11] = [
    ("all", |_, _, _| true),
    ("none", |_, _, _| false),
    ("some parameters nowhere", |_, _, i| i % 2 == 0),
    ("parameters in turn", |t, _, i| (t as usize + i).is_multiple_of(2)),
    ("one parameter a step", |t, _, i| t as usize % 6 == i),
    ("nothing at first", |t, _, _| t > 2),
    ("nothing at last", |t, _, i| t < 4 || i == 3),
    ("one parameter not on the last rank", |_, rank, i| i != 3 || rank == 0),
    ("only on rank 0", |t, rank, i| rank == 0 || i as u64 == t),
    ("ranks in turn", |t, rank, i| (t as usize + rank + i).is_multiple_of(2)),
    ("anything", |t, rank, i| !common::hash(&[t, rank as u64 / 2, i as u64]).is_multiple_of(3)),
];

/// Other events of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Ends {
    Well,
    /// The last rank has a non-finite gradient, if it has any.
    Overflowing,
    /// Every rank requests an impossible rate.
    Refused,
}

const STEPS: u64 = 6;

/// Steps 2 and 3 are skipped, step 5 is refused.
fn disturbed(t: u64) -> Ends {
    match t {
        2 | 3 => Ends::Overflowing,
        5 => Ends::Refused,
        _ => Ends::Well,
    }
}

fn well(_: u64) -> Ends {
    Ends::Well
}

/// A run with missing gradients.
#[derive(Clone)]
struct Story {
    run: Run,
    has: Has,
    ends: fn(u64) -> Ends,
    /// True if outcomes are read only at the end.
    asks_late: bool,
}

impl Story {
    fn new(run: &Run, missing: Missing, has: Has) -> Story {
        let options = Options { missing, meter: meshstep_tensor::Meter::new(), ..run.options.clone() };
        Story { run: Run { options, ..run.clone() }, has, ends: well, asks_late: false }
    }

    /// Returns the outcome of each step, and the parameters, state and `t` after it.
    fn on(&self, comm: Arc<dyn Communicator>) -> Vec<String> {
        let mut optimizer = self.run.build(comm).unwrap();
        let (mut told, mut pending) = (Vec::new(), Vec::new());
        for t in 1..=STEPS {
            pending.push(self.step(&mut optimizer, t));
            if !self.asks_late {
                let now = pending.pop().map(outcome);
                told.push(format!("{now:?} {}", self.left(&optimizer)));
            }
        }
        // The host does not know the last step's outcome when `t` is read.
        let left = self.left(&optimizer);
        told.extend(pending.into_iter().map(outcome));
        told.push(left);
        told
    }

    fn step(&self, optimizer: &mut Optimizer, t: u64) -> Result<Pending, Error> {
        let (rank, last) = (optimizer.comm().rank(), optimizer.comm().world_size() - 1);
        let batch = optimizer.micro_batch(1)?;
        for i in (0..self.run.lens.len()).rev().filter(|&i| (self.has)(t, rank, i)) {
            let mut grad = self.run.gradient(t, 0, rank, i);
            if (self.ends)(t) == Ends::Overflowing && rank == last {
                grad.iter_mut().take(1).for_each(|g| *g = f64::NAN);
            }
            common::with_dtype(self.run.grads, &grad, |grad| {
                batch.grad(&common::name(i), common::put(grad, &self.run.options.queue).as_slice())
            })?;
        }
        batch.finish()?;
        let mut at = self.run.at(t);
        if (self.ends)(t) == Ends::Refused {
            at.lr = -1.0;
        }
        optimizer.step(at)
    }

    fn left(&self, optimizer: &Optimizer) -> String {
        format!("{:?}\n{:?}", common::params(optimizer), common::state(optimizer))
    }

    fn here(&self) -> Vec<Vec<String>> {
        loopback::spawn(self.run.ranks, |comm| self.on(comm)).unwrap()
    }

    fn there(&self) -> Vec<Vec<String>> {
        let devices: Vec<usize> = (0..self.run.ranks).map(|rank| rank % devices()).collect();
        let ends = nccl::spawn(&devices, nccl::Options::default(), |comm| {
            let queue = Queue::cuda(Stream::new(comm.device()).unwrap());
            let options = Options { queue, ..self.run.options.clone() };
            Story { run: Run { options, ..self.run.clone() }, ..self.clone() }.on(comm)
        });
        ends.unwrap()
    }

    /// Checks that the story is the same on both; `what` identifies it in messages.
    fn compare(&self, what: &str) {
        let Run { ranks, options, .. } = &self.run;
        let (here, there) = (self.here(), self.there());
        for (rank, (here, there)) in here.iter().zip(&there).enumerate() {
            for (t, (here, there)) in here.iter().zip(there).enumerate() {
                let (stage, missing) = (options.stage, options.missing);
                assert_eq!(there, here, "{what}, {stage:?}, {missing:?}: step {t} of rank {rank} of {ranks}");
            }
        }
    }
}

fn outcome(step: Result<Pending, Error>) -> String {
    match step.and_then(Pending::outcome) {
        Ok(Outcome::Applied { norm, coef, .. }) => format!("applied {norm:e} {coef:e}"),
        Ok(Outcome::Skipped { non_finite, in_a_row, .. }) => format!("skipped {non_finite} {in_a_row}"),
        Err(error) => error.to_string(),
    }
}

/// Combinations of stage and policy.
fn ways() -> Vec<(Stage, Missing)> {
    STAGES.into_iter().flat_map(|stage| POLICIES.map(|missing| (stage, missing))).collect()
}

fn base(ranks: usize) -> Run {
    Run { ranks, gradients: Gradients::Grid, ..Run::default() }
}

#[test]
fn what_is_missing_is_left_alone_or_told_as_on_loopback() {
    let _alone = alone();
    for ranks in [1, 2, 4].into_iter().filter(|&ranks| room_for(ranks)) {
        // One rank takes the patterns that ignore the rank, four ranks the patterns that use it, two ranks take both kinds.
        let patterns = PATTERNS.into_iter().enumerate();
        for (i, (name, has)) in patterns.filter(|(i, _)| ranks == 2 || (*i < 7) == (ranks == 1)) {
            // Each pattern meets both policies, on two numbers of ranks.
            for (stage, missing) in some(&ways(), 5 * i + ranks / 2, 1) {
                let rule = [WhichRule::AdamW, WhichRule::SgdMomentum][i % 2];
                let run = Run { rule, ..base(ranks) }.stage(stage);
                Story::new(&run, missing, has).compare(name);
            }
        }
    }
}

/// Some steps are skipped or refused, and no outcome is read before the last.
#[test]
fn steps_that_do_not_count_leave_every_t_as_it_was() {
    let _alone = alone();
    if !room_for(2) {
        return;
    }
    for (i, (name, has)) in PATTERNS.into_iter().enumerate() {
        for (stage, missing) in some(&ways(), 5 * i, 3) {
            let story = Story::new(&base(2).stage(stage), missing, has);
            let asks_late = (i % 2 == 0) == matches!(stage, Stage::Zero1 | Stage::Replicated);
            Story { ends: disturbed, asks_late, ..story }.compare(name);
        }
    }
}

/// Stochastic rounding depends on `t` too; masters, remainders and narrow moments stay with skipped parameters.
#[test]
fn every_precision_is_left_alone() {
    let _alone = alone();
    if !room_for(2) {
        return;
    }
    for (i, (dtype, precision)) in PRECISIONS.into_iter().enumerate() {
        let options = Options { precision, ..Run::default().options };
        let run = Run { dtype, grads: dtype, gradients: Gradients::Equal, options, ..base(2) };
        let run = run.stage([Stage::Zero1, Stage::Zero2][i % 2]);
        let (name, has) = PATTERNS[3];
        Story::new(&run, POLICIES[i % 2], has).compare(&format!("{name}, {dtype}, {precision:?}"));
    }
}

#[test]
fn no_order_of_streams_shows_who_has_what() {
    let _alone = alone();
    if !stand_in() {
        return println!("skipped: needs the stand-ins");
    }
    let (_, anything) = PATTERNS[10];
    for (stage, missing) in STAGES.into_iter().zip(POLICIES.into_iter().cycle()) {
        let story = Story::new(&base(2).stage(stage), missing, anything);
        let story = Story { ends: disturbed, asks_late: stage != Stage::Zero1, ..story };
        let expected = story.here();
        for order in 0..u64::from(common::cases(8, 100)) {
            seed(order);
            assert_eq!(story.there(), expected, "order {order}, {stage:?} {missing:?}");
        }
    }
}

/// Counted by hand: `t` is the number of steps with a gradient on some rank, the same on every rank.
#[test]
fn each_parameter_counts_its_own_steps() {
    let _alone = alone();
    if !room_for(2) {
        return;
    }
    let lens = Run::default().lens.len();
    for (name, has) in PATTERNS {
        let expected: Vec<u64> = (0..lens)
            .map(|i| (1..=STEPS).filter(|&t| (0..2).any(|rank| has(t, rank, i))).count() as u64)
            .collect();
        let story = Story::new(&base(2), Missing::SkipIfMissingEverywhere, has);
        let counts = nccl::spawn(&[0, 1 % devices()], nccl::Options::default(), |comm| {
            let queue = Queue::cuda(Stream::new(comm.device()).unwrap());
            let options = Options { queue, ..story.run.options.clone() };
            let story = Story { run: Run { options, ..story.run.clone() }, ..story.clone() };
            let mut optimizer = story.run.build(comm).unwrap();
            (1..=STEPS).for_each(|t| drop(story.step(&mut optimizer, t).unwrap()));
            // The host knows the outcomes of some steps, then of all.
            let unheard = common::state(&optimizer);
            optimizer.accumulate(1).unwrap().finish().unwrap();
            optimizer.discard_gradients().unwrap();
            assert_eq!(common::state(&optimizer), unheard);
            unheard.into_iter().map(|(t, _)| t).collect::<Vec<_>>()
        });
        assert_eq!(counts.unwrap(), [expected.clone(), expected], "{name}");
    }
}

/// An error names the lowest rank without the first such parameter, on every rank; ranks send as much as in a step that counts.
#[test]
fn an_uneven_step_names_rank_and_parameter_and_parts_nobody() {
    let _alone = alone();
    let ranks = if room_for(4) { 4 } else { 2 };
    if !room_for(ranks) {
        return;
    }
    // Ranks 1 and 2 lack p3, rank 0 lacks p4, all ranks lack p0.
    let has: Has = |t, rank, i| match i {
        0 => false,
        3 => t != 2 || !(1..3).contains(&rank),
        4 => t != 2 || rank != 0,
        _ => true,
    };
    for stage in STAGES {
        let story = Story::new(&base(ranks).stage(stage), Missing::AllOrNone, has);
        let devices: Vec<usize> = (0..ranks).map(|rank| rank % devices()).collect();
        nccl::spawn(&devices, nccl::Options::default(), |comm| {
            let queue = Queue::cuda(Stream::new(comm.device()).unwrap());
            let options = Options { queue, ..story.run.options.clone() };
            let story = Story { run: Run { options, ..story.run.clone() }, ..story.clone() };
            let mut optimizer = story.run.build(comm.clone()).unwrap();
            let mut sent = Vec::new();
            for t in 1..=4 {
                let (left, before) = (story.left(&optimizer), comm.stats().total());
                let told = story.step(&mut optimizer, t).unwrap().outcome();
                let (now, after) = (story.left(&optimizer), comm.stats().total());
                sent.push((after.operations - before.operations, after.bytes - before.bytes));
                if t != 2 {
                    assert!(matches!(told, Ok(Outcome::Applied { .. })), "{told:?}");
                    continue;
                }
                let Err(Error::Fault { rank: 1, fault: Fault::MissingGradient { name } }) = told else {
                    panic!("{stage:?}: {told:?}")
                };
                assert_eq!((&*name, now), ("p3", left));
            }
            // The first step's bytes include those of building the optimizer.
            assert_eq!(sent[1..], [sent[3]; 3], "{stage:?}");
        })
        .unwrap();
    }
}

/// Parameters that join later are counted from then on, beside frozen and empty ones.
#[test]
fn parameters_that_join_are_counted_too() {
    let _alone = alone();
    if !room_for(2) {
        return;
    }
    let layout = |first: usize| {
        let [a, frozen, empty, b] = [0, 1, 2, 3].map(|i| common::name(first + i));
        let layout = Layout::builder().param(a, &[70], DType::F32).frozen(frozen, &[9], DType::F32);
        layout.param(empty, &[0], DType::F32).param(b, &[3], DType::F32).build().unwrap()
    };
    let run = |missing: Missing, stage: Stage, queue: Queue, comm: Arc<dyn Communicator>| {
        let meter = meshstep_tensor::Meter::new();
        let options = Options { missing, stage, queue: queue.clone(), meter, ..base(2).options };
        let rank = comm.rank();
        let mut optimizer = Optimizer::new(comm, layout(0), common::adamw(), |_, _| Ok(()), options).unwrap();
        let mut told = Vec::new();
        for t in 1..=9u64 {
            if t.is_multiple_of(3) {
                let first = optimizer.params().count();
                optimizer.add_param_group(layout(first), common::adamw(), |_, _| Ok(())).unwrap();
            }
            let trained = optimizer.params().filter(|p| !p.frozen());
            let params: Vec<_> = trained.map(|p| (p.name().to_owned(), p.len())).collect();
            let batch = optimizer.micro_batch(1).unwrap();
            for (i, (name, len)) in params.into_iter().enumerate() {
                let uneven = t == 5 && i == 4 && rank == 1;
                if uneven || common::hash(&[t, i as u64]).is_multiple_of(3) {
                    continue;
                }
                let grad: Vec<f32> = (0..len).map(|j| ((i + j + rank) % 7) as f32 - 3.0).collect();
                batch.grad(&name, common::put((&grad[..]).into(), &queue).as_slice()).unwrap();
            }
            batch.finish().unwrap();
            told.push(outcome(optimizer.step(base(2).at(t))));
            told.push(format!("{:?} {:?}", common::params(&optimizer), common::state(&optimizer)));
        }
        told
    };
    for stage in STAGES {
        for missing in POLICIES {
            let here = loopback::spawn(2, |comm| run(missing, stage, Queue::cpu(), comm)).unwrap();
            let there = nccl::spawn(&[0, 1 % devices()], nccl::Options::default(), |comm| {
                run(missing, stage, Queue::cuda(Stream::new(comm.device()).unwrap()), comm)
            });
            assert_eq!(there.unwrap(), here, "{stage:?} {missing:?}");
        }
    }
}
