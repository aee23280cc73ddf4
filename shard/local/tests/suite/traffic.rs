//! Traffic of workers, as their communicators count it: equal to the plan's prediction, to the byte.

use crate::common::{Run, cases, draws, turns};
use crate::equal::{End, never, plans, run, train};
use meshstep_comm::{Communicator, loopback};
use meshstep_local::{LocalPlan, LocalTraffic, Ring, Worker};
use meshstep_shard::{Options, Part, Plan, Sizes, Stage};
use std::sync::Arc;

const STAGES: [Stage; 4] = [Stage::Replicated, Stage::Zero1, Stage::Zero2, Stage::Zero3];

/// Returns the planned traffic of the rank.
pub fn planned(run: &Run, plan: &LocalPlan, workers: usize, rank: usize) -> LocalTraffic {
    let inside = run.ranks / workers;
    let options = Options { grads: Some(run.grads), ..run.options.clone() };
    let part = Part::new(run.layout(), Sizes::all(inside), [], &options).unwrap();
    let across = Ring { ranks: workers, rank: rank / inside };
    let worker = Worker { shard: rank % inside, across, world: Ring { ranks: run.ranks, rank } };
    plan.traffic(&part, &run.groups(), worker, 0..run.steps).unwrap()
}

#[test]
fn the_planner_knows_every_byte_and_a_worker_sends_none_more_inside() {
    let mut drawn = draws(1);
    for (p, (name, rule, plan)) in plans().into_iter().enumerate().filter(|_| drawn()) {
        for (w, workers) in turns(&[(0, 2), (1, 4)], p, 1) {
            for stage in turns(&STAGES, w + p / 2, 1) {
                let run = Run { rule, ..run(workers, 2) }.stage(stage);
                let alone = train(&Run { ranks: 2, ..run.clone() }, &never(), 1);
                for (rank, end) in train(&run, &plan, workers).iter().enumerate() {
                    let expected = planned(&run, &plan, workers, rank);
                    let [inside, payload, words] = end.sent;
                    let what = format!("{name}, {stage:?}, rank {rank} of {workers} x 2");
                    assert_eq!((payload, words), (expected.payload, expected.words), "{what}");
                    assert_eq!(inside, alone[rank % 2].sent[0], "{what}: inside the worker");
                }
            }
        }
    }
}

/// DES-LOC's shortest period. A short run has as many periods, but shorter ones, and so as many payloads.
fn period() -> u64 {
    u64::from(cases(12, 256))
}

/// Returns a run of these elements with as many steps as DES-LOC's longest period.
fn long(ranks: usize, stage: Stage, lens: &[usize]) -> Run {
    let options = Options { bucket_len: None, ..Options::default() };
    Run { ranks, lens: lens.to_vec(), steps: 6 * period(), options, ..Run::default() }.stage(stage)
}

/// Returns the bytes of payload and of words that each rank sent, and checks them against the plan.
fn counted(run: &Run, plan: &LocalPlan, workers: usize) -> (Vec<u64>, Vec<u64>) {
    let count = |(rank, end): (usize, &End)| {
        let [_, payload, words] = end.sent;
        let expected = planned(run, plan, workers, rank);
        assert_eq!((payload, words), (expected.payload, expected.words), "rank {rank} of {workers} workers");
        (payload, words)
    };
    train(run, plan, workers).iter().enumerate().map(count).unzip()
}

/// Returns the bytes that each rank sends to reduce gradients if all workers step together, every step.
fn every_step(run: &Run) -> Vec<u64> {
    let sent = |steps: u64| {
        let run = Run { steps, ..run.clone() };
        let count = |comm: Arc<dyn Communicator>| {
            let _ = run.on_rank(Arc::clone(&comm)).unwrap();
            comm.stats().total().bytes
        };
        loopback::spawn(run.ranks, count).unwrap()
    };
    let plan = Plan::new(&run.layout(), run.ranks, &run.options).unwrap();
    let (begun, all) = (sent(0), sent(run.steps));
    let payload = |rank: usize| {
        let wire = plan.wire(rank, &*run.boxed_rule());
        assert_eq!(all[rank] - begun[rank], run.steps * wire.total(), "rank {rank}");
        run.steps * wire.reduce
    };
    (0..run.ranks).map(payload).collect()
}

#[test]
fn des_loc_sends_nine_payloads_in_its_longest_period() {
    let (k, steps) = (period(), 6 * period());
    let plans = [LocalPlan::des_loc(k, 3 * k, steps), LocalPlan::local_adam(k), LocalPlan::local_sgd(1)];
    let worlds = [(4, 1, Stage::Replicated), (2, 2, Stage::Zero1), (2, 2, Stage::Zero2)];
    for (workers, inside, stage) in worlds {
        let run = long(workers * inside, stage, &[128, 64, 64]);
        // Bytes that a rank sends to reduce its 256 elements, or its half of them, once.
        let once = (2 * (workers - 1) * (256 / inside / workers) * 4) as u64;
        let sent = plans.each_ref().map(|plan| counted(&run, plan, workers));
        for ((payload, words), (payloads, exchanges)) in sent.iter().zip([(9, 6), (18, 6), (steps, steps)]) {
            assert_eq!(*payload, [payloads * once; 4], "{workers} x {inside}, {stage:?}");
            // Four words to three others; of a vote's one word each rank sends the part it does not own twice.
            assert_eq!(*words, [96, 112, 112, 112].map(|bytes| exchanges * bytes));
        }
        // Over 1536 steps 170.67 times less.
        assert!((0..4).all(|rank| sent[2].0[rank] * 9 == sent[0].0[rank] * steps));
        if inside == 1 {
            // Reducing gradients takes as many bytes.
            assert_eq!(every_step(&run), sent[2].0);
        }
    }
    // With elements that ranks do not divide evenly, the sum over the ranks is exact.
    let run = long(4, Stage::Zero2, &Run::default().lens);
    assert_eq!(counted(&run, &plans[0], 2).0.iter().sum::<u64>(), 9 * 2 * 268 * 4);
}
