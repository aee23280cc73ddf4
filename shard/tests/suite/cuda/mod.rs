//! The same steps on GPUs, through NCCL, as on loopback: on real GPUs, or on the stand-ins (`cargo xtask ci --only standin`).

mod among;
mod apart;
mod disagreement;
mod equality;
mod evaluation;
mod events;
mod failing;
mod graph;
mod launches;
mod lbfgs;
mod matrices;
mod missing;
mod pair;
mod propagate;
mod reads;
mod replicas;
mod shared;
mod verify;
mod windows;

use crate::common::gpus::{alone, devices, on_ranks, room_for, seed, some, stand_in};
use crate::common::{End, Run, WhichRule};
use meshstep_comm::nccl;
use meshstep_optim::Norm;
use meshstep_shard::{Optimizer, Options};
use meshstep_tensor::cuda::Stream;
use meshstep_tensor::{Meter, Queue};

/// Runs on GPUs; all ranks must end alike, and leave no memory behind.
fn on_gpus(run: &Run) -> End {
    let ends = on_ranks(run, |comm, run| run.on_rank(comm).unwrap());
    assert!(ends.iter().all(|end| *end == ends[0]), "ranks end apart: {run:?}");
    ends.into_iter().next().unwrap()
}

#[test]
fn what_a_gpu_cannot_do_is_refused_at_construction() {
    let _alone = alone();
    if !room_for(1) {
        return;
    }
    let base = Run { ranks: 1, ..Run::default() };
    let with = |options: Options| Run { options, ..base.clone() };
    let options = || base.options.clone();
    let cases = [
        (Run { rule: WhichRule::Lamb, ..base.clone() }, "lamb has no CUDA kernels"),
        (Run { rule: WhichRule::Lars, ..base.clone() }, "lars has no CUDA kernels"),
        (with(Options { norm: Norm::P(3.0), ..options() }), "on a GPU"),
    ];
    let told = nccl::spawn(&[0], nccl::Options::default(), |comm| {
        let queue = Queue::cuda(Stream::new(comm.device()).unwrap());
        let comm: std::sync::Arc<dyn meshstep_comm::Communicator> = comm;
        let refused = |(run, _): &(Run, &str)| {
            let run = Run { options: Options { queue: queue.clone(), ..run.options.clone() }, ..run.clone() };
            run.build(comm.clone()).map(|_: Optimizer| ()).unwrap_err().to_string()
        };
        cases.iter().map(refused).collect::<Vec<_>>()
    });
    for (told, (run, expected)) in told.unwrap()[0].iter().zip(&cases) {
        assert!(told.to_lowercase().contains(&expected.to_lowercase()), "{:?}: {told}", run.rule);
    }
}

#[test]
fn memory_is_counted_and_given_back() {
    let _alone = alone();
    if !room_for(1) {
        return;
    }
    let meter = Meter::new();
    let run = Run { ranks: 1, ..Run::default() };
    nccl::spawn(&[0], nccl::Options::default(), |comm| {
        let queue = Queue::cuda(Stream::new(comm.device()).unwrap());
        let options = Options { queue, meter: meter.clone(), ..run.options.clone() };
        let zeros = |_: &meshstep_tensor::Param, _: meshstep_tensor::SliceMut<'_>| Ok(());
        let mut optimizer = Optimizer::new(comm, run.layout(), run.groups(), zeros, options).unwrap();
        run.hand_over(&mut optimizer, 1, 0).unwrap_err();
        assert!(meter.live_total() > 0);
    })
    .unwrap();
    assert_eq!(meter.live_total(), 0);
}
