//! A worker computes the same as one rank for any arrangement of its ranks, and every byte is planned.

use crate::local::worker::{Job, STEPS, assert_same, cases, plans, run};
use meshstep_cases::long;
use meshstep_comm::loopback;
use meshstep_local::{Fragment, LocalPlan, Ring, Timing, What};
use meshstep_parallel3d::{Axis, LocalOptimizer, Mesh, Plan, replicas};
use meshstep_shard::{Owners, Stage};

const MESHES: [&str; 6] = [
    "dp_replicate=2,tp=2",
    "dp_replicate=2,tp=4",
    "dp_replicate=2,dp_shard=2,tp=2",
    "dp_replicate=2,dp_shard=2,cp=2",
    "dp_replicate=4,tp=2",
    "dp_replicate=4,dp_shard=2",
];
const STAGES: [Stage; 5] =
    [Stage::Replicated, Stage::Zero1, Stage::Zero2, Stage::Zero3, Stage::WholeParams(Owners::SortedGreedy)];

/// Returns the meshes and stages for a case: all of them in long runs, else the `nth` in a mixed order.
fn arrangements(nth: usize) -> impl Iterator<Item = (&'static str, Stage)> {
    let all = MESHES.into_iter().flat_map(|mesh| STAGES.map(|stage| (mesh, stage)));
    // 13 and the number of all are coprime: no arrangement repeats before all have been used.
    let own = 13 * nth % (MESHES.len() * STAGES.len());
    all.enumerate().filter(move |(i, _)| long() || *i == own).map(|(_, arrangement)| arrangement)
}

#[test]
fn workers_on_meshes_are_workers_of_one_rank() {
    for (case, (name, job)) in cases().into_iter().enumerate() {
        let mut wholes = [("dp_replicate=2", None), ("dp_replicate=4", None)];
        for (mesh, stage) in arrangements(case) {
            let (workers, whole) = wholes.iter_mut().find(|(workers, _)| mesh.starts_with(*workers)).unwrap();
            let expected = whole.get_or_insert_with(|| run(&job(Stage::Replicated), workers, STEPS));
            let ranks = run(&job(stage), mesh, STEPS);
            assert_same(&ranks, expected, &format!("{name} on {mesh}, {stage:?}"));
        }
    }
}

/// The `dp_replicate` axis may be anywhere in the mesh.
#[test]
fn replicas_may_be_the_innermost_axis() {
    let (_, plan, rule) = plans().remove(0);
    let mesh = Mesh::new([(Axis::Tp, 2), (Axis::DpShard, 2), (Axis::DpReplicate, 2)]).unwrap();
    let expected = run(&Job::new(Stage::Replicated, &plan, &rule), "dp_replicate=2", STEPS);
    let job = Job::new(Stage::Zero1, &plan, &rule);
    let ranks = loopback::spawn(8, |world| {
        let rank = world.rank();
        let (mut local, worker) = job.build(world, &mesh);
        assert_eq!((worker, local.mesh().to_string()), (rank % 2, "tp=2,dp_shard=2".to_owned()));
        job.steps(&mut local, worker, STEPS);
        (worker, crate::local::worker::has(&local))
    });
    assert_same(&ranks.unwrap(), &expected, "the innermost");
}

#[test]
fn every_byte_is_planned_and_none_more_travels_within_a_worker() {
    // The first count ends before every fragment has been sent.
    let steps = [3, if long() { STEPS } else { 6 }];
    for (case, (name, job)) in cases().into_iter().enumerate() {
        // Different arrangements from those in the comparison with workers of one rank.
        let all = arrangements(case + plans().len());
        for ((mesh, stage), steps) in all.flat_map(|of| steps.map(|steps| (of, steps))) {
            let (job, mesh): (Job, Mesh) = (job(stage), mesh.parse().unwrap());
            let never = LocalPlan::new(vec![Fragment::mean(What::Params, Timing::never())]);
            let alone = sent(&Job { plan: never, ..job.clone() }, &mesh, steps);
            let planned = Plan::new(&mesh.replica(), &job.model, job.rules.clone(), &job.options()).unwrap();
            let (workers, inside) = (mesh.degree(Axis::DpReplicate), mesh.replica().world_size());
            for (rank, sent) in sent(&job, &mesh, steps).into_iter().enumerate() {
                let [of_all, across] = [(mesh.world_size(), rank), (workers, rank / inside)]
                    .map(|(ranks, rank)| Ring { ranks, rank });
                let of = planned.rank(rank % inside).unwrap();
                let expected = of.local_traffic(&job.plan, across, of_all, 0..steps).unwrap();
                let what = format!("{name} on {mesh}, {stage:?}, rank {rank}, {steps} steps");
                assert_eq!(sent, [alone[rank][0], expected.payload, expected.words], "{what}");
            }
        }
    }
}

/// Returns the bytes that each rank sends within its worker, to its peers in other workers, and for decisions.
fn sent(job: &Job, mesh: &Mesh, steps: u64) -> Vec<[u64; 3]> {
    let ranks = loopback::spawn(mesh.world_size(), |world| {
        let (comm, own, workers) = replicas(world, mesh).unwrap();
        let optimizer = job.optimizer(comm, &own);
        let mut local = LocalOptimizer::new(optimizer, workers.clone(), job.plan.clone()).unwrap();
        let bytes = || [&workers.across, &workers.world].map(|comm| comm.stats().total().bytes);
        let before = bytes();
        let inside = job.steps(&mut local, workers.across.rank(), steps);
        // Traffic in flight counts once it has arrived.
        workers.across.barrier().unwrap();
        let after = bytes();
        [inside, after[0] - before[0], after[1] - before[1]]
    });
    ranks.unwrap()
}
