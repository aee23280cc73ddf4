//! State of GPUs, whole on one rank, in a file with PyTorch's names, and as bytes: the same as on the CPU.

use crate::common::gpus::{alone, devices, room_for};
use crate::common::{Gradients, PRECISIONS, Run, state};
use meshstep_checkpoint as checkpoint;
use meshstep_checkpoint::pytorch::{Import, PyTorchFile};
use meshstep_comm::{Communicator, loopback, nccl};
use meshstep_shard::{Master, Optimizer, Options, Stage};
use meshstep_tensor::Queue;
use meshstep_tensor::cuda::Stream;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// Vectors by parameter and name.
type Vectors = BTreeMap<(String, String), Vec<u8>>;

fn take(run: &Run, opt: &mut Optimizer, t: u64) {
    run.read_and_hand_over(opt, t, 0).unwrap();
    opt.step(run.at(t)).unwrap().outcome().unwrap();
}

fn whole(opt: &mut Optimizer) -> Vectors {
    let mut all = Vectors::new();
    checkpoint::consolidate(opt, 1, &mut |window| {
        let key = (window.param.to_owned(), window.slot.to_owned());
        all.entry(key).or_default().extend(window.values.bytes().unwrap());
        Ok(())
    })
    .unwrap();
    all
}

/// Takes two steps and writes a file; takes a third, goes back by bytes, and continues; imports the file and continues. Returns
/// the whole vectors on rank 1 at every stop.
fn stops(comm: Arc<dyn Communicator>, run: &Run, path: &Path) -> Vec<Vectors> {
    let mut opt = run.build(comm).unwrap();
    let exports = run.options.precision.master != Master::Remainder;
    let file = PyTorchFile::new(path);
    (1..3).for_each(|t| take(run, &mut opt, t));
    let mut stops = vec![whole(&mut opt)];
    if exports {
        checkpoint::export_pytorch(&mut opt, &file, 0).unwrap();
    }
    let (bytes, then) = (checkpoint::serialize(&mut opt).unwrap(), state(&opt));
    take(run, &mut opt, 3);
    stops.push(whole(&mut opt));
    checkpoint::deserialize(&mut opt, &bytes).unwrap();
    assert!(state(&opt) == then, "as it was");
    (3..5).for_each(|t| take(run, &mut opt, t));
    stops.push(whole(&mut opt));
    if exports {
        assert_eq!(checkpoint::import_pytorch(&mut opt, &file, Import::default()).unwrap().steps, 2);
        stops.push(whole(&mut opt));
        take(run, &mut opt, 3);
        stops.push(whole(&mut opt));
        assert_eq!(stops[0], stops[3]);
        assert_eq!(stops[1], stops[4]);
    }
    stops
}

#[test]
fn what_gpus_hold_leaves_them_and_comes_back_as_on_the_cpu() {
    let _alone = alone();
    if !room_for(2) {
        return;
    }
    let stages = [Stage::Replicated, Stage::Zero1, Stage::Zero2, Stage::Zero3];
    for (i, (dtype, precision)) in PRECISIONS.into_iter().enumerate() {
        let options = Options { precision, ..Run::default().options };
        let run =
            Run { ranks: 2, dtype, grads: dtype, gradients: Gradients::Equal, options, ..Run::default() };
        let run = run.stage(stages[i % stages.len()]);
        let dir = tempfile::tempdir().unwrap();
        let [there, here] = ["gpu", "cpu"].map(|name| dir.path().join(name));
        let devices: Vec<usize> = (0..2).map(|rank| rank % devices()).collect();
        let options = nccl::Options { check: false, ..nccl::Options::default() };
        let on_gpus = nccl::spawn(&devices, options, |comm| {
            let queue = Queue::cuda(Stream::new(comm.device()).unwrap());
            let run = Run { options: Options { queue, ..run.options.clone() }, ..run.clone() };
            stops(comm, &run, &there)
        });
        let on_cpus = loopback::spawn(2, |comm| stops(comm, &run, &here));
        assert!(on_gpus.unwrap() == on_cpus.unwrap(), "{dtype} {precision:?}");
        if there.exists() || here.exists() {
            assert_eq!(
                std::fs::read(&there).unwrap(),
                std::fs::read(&here).unwrap(),
                "{dtype} {precision:?}"
            );
        }
    }
}
