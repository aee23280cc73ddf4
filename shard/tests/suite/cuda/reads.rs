//! Whole parameters read from GPUs at every stage, into memory of the CPU and of the GPU; freezing is refused there.

use super::{alone, devices, room_for};
use crate::common::{STAGES, adamw};
use meshstep_comm::{Communicator, loopback, nccl};
use meshstep_shard::{Error, Optimizer, Options, Stage, StepArgs};
use meshstep_tensor::cuda::Stream;
use meshstep_tensor::{Buffer, Category, DType, Layout, Meter, Param, Queue, SliceMut};
use std::sync::Arc;

const LEN: usize = 21;

fn stepped(comm: Arc<dyn Communicator>, stage: Stage, queue: &Queue) -> Optimizer {
    let layout = Layout::builder().frozen("table", &[5], DType::F32).unit("h").param("w", &[LEN], DType::F32);
    let from = |p: &Param, mut out: SliceMut<'_>| {
        out.copy_from((&(0..p.len()).map(|i| i as f32 - 1.5).collect::<Vec<_>>()).into())
    };
    let options = Options { stage, queue: queue.clone(), ..Options::default() };
    let mut opt = Optimizer::new(comm, layout.build().unwrap(), adamw(), from, options).unwrap();
    let mut grad = Buffer::zeroed_on(queue, LEN, DType::F32, &Meter::new(), Category::Grads).unwrap();
    queue.upload((&[0.5f32; LEN]).into(), grad.as_mut()).unwrap();
    let mb = opt.micro_batch(1).unwrap();
    mb.grad("w", grad.as_slice()).unwrap();
    mb.finish().unwrap();
    opt.step(StepArgs::default()).unwrap().outcome().unwrap();
    opt
}

#[test]
fn gpus_read_what_loopback_does() {
    let _alone = alone();
    for ranks in [1, 2] {
        if !room_for(ranks) {
            continue;
        }
        let devices: Vec<usize> = (0..ranks).map(|rank| rank % devices()).collect();
        for stage in STAGES {
            let known = loopback::spawn(1, |comm| {
                let mut w = vec![0f32; LEN];
                stepped(comm, stage, &Queue::cpu()).read("w", &mut w).unwrap();
                w
            });
            let known = known.unwrap().remove(0);
            let read = nccl::spawn(&devices, nccl::Options::default(), |comm| {
                let queue = Queue::cuda(Stream::new(comm.device()).unwrap());
                let mut opt = stepped(comm, stage, &queue);
                let (mut table, mut here) = ([0f32; 5], vec![0f32; LEN]);
                opt.read("table", &mut table).unwrap();
                assert_eq!(table, [-1.5, -0.5, 0.5, 1.5, 2.5]);
                opt.read("w", &mut here).unwrap();
                let mut there =
                    Buffer::zeroed_on(&queue, LEN, DType::F32, &Meter::new(), Category::Params).unwrap();
                opt.read("w", there.as_mut()).unwrap();
                let mut back = vec![0f32; LEN];
                queue.download(there.as_slice(), (&mut back).into()).unwrap();
                assert_eq!(here, back);
                assert!(matches!(opt.set_frozen(["w"], true), Err(Error::NotOnGpu { .. })));
                here
            });
            assert!(read.unwrap().into_iter().all(|w| w == known), "{stage:?} on {ranks} ranks");
        }
    }
}
