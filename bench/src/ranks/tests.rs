//! Tests of ranks as processes: loopback communicators given to threads, each of which acts as a process.

use std::time::{Duration, Instant};

use anyhow::bail;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::*;
use crate::{local, mesh, train};

/// Runs `body` as on processes of a launch, and returns the results by rank.
pub(crate) fn processes<T: Send>(ranks: usize, body: impl Fn(Ranks) -> T + Sync) -> Vec<T> {
    loopback::spawn(ranks, |world| body(Ranks::Process(world))).unwrap()
}

/// Returns the JSON of a report, without what differs between two runs of the same program: times, memory of processes, and the bytes
/// sent at a moment.
fn comparable(report: &impl Serialize) -> Value {
    let mut json = serde_json::to_value(report).unwrap();
    strip(&mut json);
    json
}

fn strip(json: &mut Value) {
    match json {
        Value::Object(fields) => {
            // Bytes that are in flight after a step depend on the time.
            let in_flight = fields.get("method").is_some_and(|method| method == "streaming-diloco");
            fields.retain(|name, _| !["ms_per_step", "seconds_per_step", "process"].contains(&&**name));
            if in_flight {
                fields.remove("sent");
                fields.remove("sent_most");
            }
            fields.values_mut().for_each(strip);
        }
        Value::Array(values) => values.iter_mut().for_each(strip),
        _ => {}
    }
}

/// A rank, and a value that it computed.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Sample {
    rank: usize,
    values: Vec<f32>,
}

impl Portable for Sample {
    fn values(&mut self) -> Vec<&mut Vec<f32>> {
        vec![&mut self.values]
    }
}

fn sample(comm: &dyn Communicator) -> Sample {
    Sample { rank: comm.rank(), values: vec![comm.world_size() as f32; comm.rank()] }
}

#[test]
fn every_process_gets_the_results_of_all_ranks_and_some_may_only_wait() {
    let all = processes(3, |ranks| {
        let run = |count| ranks.run(count, |comm| Ok(sample(&*comm))).unwrap();
        // Each run has a communicator of its own size.
        [3, 1, 2].map(|count| run(count).results.into_iter().map(Result::unwrap).collect::<Vec<_>>())
    });
    for results in all {
        for (results, count) in results.iter().zip([3, 1, 2]) {
            let expected = |rank| Sample { rank, values: vec![count as f32; rank] };
            assert_eq!(*results, (0..count).map(expected).collect::<Vec<_>>());
        }
    }
}

#[test]
fn the_memory_of_processes_is_their_sum() {
    let seen = processes(2, |ranks| {
        let own = Process::watch().seen().before;
        (own, ranks.run(2, |comm| Ok(sample(&*comm))).unwrap().process.before)
    });
    // Both figures are of one process.
    for (own, sum) in seen {
        assert!(own.zip(sum).is_none_or(|(own, sum)| sum > own), "{own:?} {sum:?}");
    }
}

#[test]
fn an_error_of_one_process_ends_all() {
    let begin = Instant::now();
    let errors = processes(3, |ranks| {
        let run = ranks.run(3, |comm| match comm.rank() {
            1 => bail!("out of paper"),
            0 => Ok(sample(&*comm)),
            _ => comm.barrier().map(|()| sample(&*comm)).map_err(Into::into),
        });
        format!("{:#}", run.map(|_| ()).unwrap_err())
    });
    assert_eq!(errors[1], "rank 1: out of paper");
    assert!(errors[0].starts_with("rank 0: ") && errors[2].starts_with("rank 2: "), "{errors:?}");
    assert!(begin.elapsed() < Duration::from_secs(60));
    let more = processes(2, |ranks| {
        format!("{:#}", ranks.run(3, |comm| Ok(sample(&*comm))).map(|_| ()).unwrap_err())
    });
    assert!(more.iter().all(|error| error.contains("3 ranks, but 2 processes")), "{more:?}");
}

#[test]
fn stages_on_processes_are_those_on_threads_to_the_bit() {
    let run = || train::tests::short("--ranks 3 --steps 3 --batch 1");
    let threads = run().train().unwrap();
    assert_eq!(threads.difference, None);
    for report in processes(3, |ranks| run().among(ranks).train().unwrap()) {
        assert_eq!(comparable(&report), comparable(&threads));
        assert_eq!((report.table().lines().count(), report.digests()), (14, threads.digests()));
    }
}

#[test]
fn another_seed_has_another_digest() {
    let digests = |options: &str| {
        train::tests::short(&format!("--ranks 2 --batch 1 {options}")).train().unwrap().digests()
    };
    let first = digests("--steps 2 --seed 1");
    assert_eq!(first.lines().count(), 3);
    assert_eq!(digests("--steps 2 --seed 1"), first);
    assert_ne!(digests("--steps 2 --seed 2"), first);
}

#[test]
fn checkpoints_of_processes_and_threads_continue_each_other() {
    let dir = tempfile::tempdir().unwrap();
    let options = |more: &str| {
        let dir = dir.path().display();
        format!("--stage 2 --ranks 3 --steps 5 --batch 1 --checkpoints {dir} {more}")
    };
    let threads = |more: &str| train::tests::short(&options(more)).train().unwrap();
    let on_processes = |more: &str| {
        let run = |ranks| train::tests::short(&options(more)).among(ranks).train().unwrap();
        processes(3, run).swap_remove(2)
    };
    let whole = threads("");
    on_processes("--save-every 2 --until 2");
    let by_threads = threads("--resume --save-every 1 --until 4");
    assert_eq!(by_threads.stages[0].losses, whole.stages[0].losses[..4]);
    let resumed = on_processes("--resume");
    assert_eq!(
        (&resumed.stages[0].losses, resumed.stages[0].held_out, resumed.digests()),
        (&whole.stages[0].losses, whole.stages[0].held_out, whole.digests())
    );
}

#[test]
fn meshes_on_processes_are_those_on_threads_to_the_bit() {
    // The first mesh has fewer ranks than there are processes.
    let run = || mesh::tests::run("--mesh tp=2 --mesh tp=2,dp=2 --stage 3 --steps 3 --bucket 500").unwrap();
    let threads = run().train().unwrap();
    for trained in processes(4, |ranks| run().among(ranks).train().unwrap()) {
        assert_eq!(comparable(&trained), comparable(&threads));
        assert!(trained.iter().zip(&threads).all(|(a, b)| a.finals == b.finals));
        assert!(mesh::Verdict::of(&trained).holds());
    }
}

#[test]
fn a_mesh_on_processes_continues_from_a_checkpoint_of_another_on_threads() {
    let dir = tempfile::tempdir().unwrap();
    let run = |more: &str| {
        let dir = dir.path().display();
        mesh::tests::run(&format!("--steps 4 --checkpoints {dir} {more}")).unwrap()
    };
    run("--mesh dp=4 --stage 1 --save-every 2 --until 2").train().unwrap();
    let resume = || run("--mesh tp=2,dp=2 --stage 3 --resume");
    let threads = resume().train().unwrap();
    for trained in processes(4, |ranks| resume().among(ranks).train().unwrap()) {
        assert_eq!(comparable(&trained), comparable(&threads));
    }
}

#[test]
fn workers_on_processes_are_those_on_threads_to_the_bit() {
    for method in
        ["des-loc --kx 2 --ku 3 --kv never", "every-step", "streaming-diloco --kx 4 --parts 2 --delay 1"]
    {
        let run = || local::tests::run(&format!("--local {method} --workers 3 --steps 5 --batch 1"));
        let threads = run().train(&mut Vec::new()).unwrap();
        for trained in processes(3, |ranks| run().among(ranks).unwrap().train(&mut Vec::new()).unwrap()) {
            assert_eq!(comparable(&trained), comparable(&threads), "{method}");
        }
    }
}

#[test]
fn workers_that_come_and_go_as_threads_are_refused_on_processes() {
    let errors = processes(2, |ranks| {
        let run = local::tests::run("--local local-adam --kx 1 --workers 2 --steps 8 --batch 1 --chaos 1");
        run.among(ranks).map(|_| ()).unwrap_err().to_string()
    });
    assert!(errors.iter().all(|error| error.contains("--arbiter")), "{errors:?}");
}
