//! Workers on meshes join and leave as workers of one rank do.

use crate::local::worker::{Has, Job, assert_same, has};
use meshstep_comm::{Clock, Communicator, loopback};
use meshstep_local::{LocalPlan, Workers};
use meshstep_membership::{Config, Error, InProcess, Membership, Round};
use meshstep_optim::AdamW;
use meshstep_parallel3d::{LocalOptimizer, Mesh};
use meshstep_shard::{Groups, Stage};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

const LONG: Duration = Duration::from_secs(60);
/// Steps of the joining worker, up to an exchange.
const AFTER: u64 = 8;

/// Runs two workers; the second leaves after five steps and a third joins. Returns the step of the join and the final state of each rank.
fn come_and_go(stage: Stage, mesh: &str) -> (u64, Vec<(usize, Has)>) {
    let mesh: Mesh = mesh.parse().unwrap();
    let plan = LocalPlan::local_adam(4);
    let job = Job::new(stage, &plan, &Groups::new(AdamW::default()));
    let digest = loopback::spawn(mesh.world_size(), |comm| job.optimizer(comm, &mesh).digest(&plan));
    let digest = digest.unwrap()[0];
    let members = InProcess::new(Config::new(digest, 2), Clock::real()).unwrap();
    let comes = Barrier::new(3);
    let until = std::sync::OnceLock::new();
    let rank = |id: usize, comm: Arc<dyn Communicator>| {
        let place = [comm.rank(), mesh.world_size()];
        let connect = |round: &Round| -> Result<Workers, Error> {
            let world = members.communicator(round, place, LONG)?;
            let across = world.split(Some(place[0] as u32), round.rank as i64)?;
            Ok(Workers { world, across: across.unwrap() })
        };
        let inner = job.optimizer(comm, &mesh);
        let mut own = None;
        let joined = if place[0] == 0 {
            if id == 2 {
                comes.wait();
            }
            let member = Arc::new(members.join(id as u64, digest, LONG).unwrap());
            own = Some(Arc::clone(&member));
            LocalOptimizer::join(inner, plan.clone(), member, connect)
        } else {
            LocalOptimizer::join_through_rank0(inner, plan.clone(), connect)
        };
        let mut local = joined.unwrap();
        if id == 2 {
            // The third worker joins at the exchange of the next step.
            let _ = until.set(local.local().steps() + 1 + AFTER);
        }
        while until.get().is_none_or(|&until| local.local().steps() < until) {
            if local.local().steps() == 5 && id < 2 && place[0] == 0 {
                comes.wait();
            }
            if (id, local.local().steps()) == (1, 5) {
                own.iter().for_each(|member| member.leave().unwrap());
                break;
            }
            local.follow(connect).unwrap();
            job.step(&mut local, id);
        }
        (id, has(&local))
    };
    let worker = |id: usize| loopback::spawn(mesh.world_size(), |comm| rank(id, comm)).unwrap();
    let ends = thread::scope(|scope| {
        let worker = &worker;
        let threads = [0, 1, 2].map(|id| scope.spawn(move || worker(id)));
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    (until.get().unwrap() - AFTER, ends)
}

#[test]
fn workers_on_meshes_come_and_go_as_whole_ones_do() {
    let all = [(Stage::Zero1, "tp=2"), (Stage::Zero2, "dp_shard=2,tp=2"), (Stage::Zero3, "tp=2,cp=2")];
    for (_, (stage, mesh)) in all.into_iter().enumerate().filter(|(i, _)| meshstep_cases::tried(*i, 1)) {
        // The step of the join depends on timing, so try until both runs agree.
        let same = (0..20).find_map(|_| {
            let (found, whole) = (come_and_go(stage, mesh), come_and_go(Stage::Replicated, "tp=1"));
            (found.0 == whole.0).then_some((found, whole))
        });
        let ((came, found), (_, whole)) = same.unwrap();
        assert!(came >= 8 && came % 4 == 0, "{came}");
        assert_same(&found, &whole, mesh);
        // The joining worker has the same state as the remaining one.
        let of = |id| whole.iter().find(|(own, _)| *own == id).map(|(_, has)| has);
        assert_eq!(of(0), of(2));
    }
}
