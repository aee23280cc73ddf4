//! Vectors that travel in memory allocated by NCCL and registered as windows.

use crate::common::{End, Gradients, Run, STAGES};
use crate::cuda::{alone, devices, room_for, stand_in};
use meshstep_comm::nccl;
use meshstep_shard::{Options, Stage};
use meshstep_tensor::Queue;
use meshstep_tensor::cuda::Stream;
use std::sync::Barrier;

/// Windows of all ranks, and NCCL's allocations, as the stand-in counts them.
fn windows() -> (u32, u32) {
    // SAFETY: the stand-in is loaded and stays, and documents this type.
    let both = unsafe {
        let nccl = libloading::Library::new("libnccl.so.2").unwrap();
        nccl.get::<extern "C" fn() -> u64>(b"meshstep_standin_windows").unwrap()()
    };
    (both as u32, (both >> 32) as u32)
}

fn with_windows(run: &Run) -> (End, (u32, u32)) {
    let devices: Vec<usize> = (0..run.ranks).map(|rank| rank % devices()).collect();
    let options = nccl::Options { check: false, windows: true, ..nccl::Options::default() };
    let barrier = Barrier::new(run.ranks);
    let ends = nccl::spawn(&devices, options, |comm| {
        let queue = Queue::cuda(Stream::new(comm.device()).unwrap());
        let run = Run { options: Options { queue, ..run.options.clone() }, ..run.clone() };
        let optimizer = run.build(comm.clone()).unwrap();
        barrier.wait();
        let during = windows();
        barrier.wait();
        drop(optimizer);
        (run.on_rank(comm).unwrap(), during)
    });
    ends.unwrap().swap_remove(0)
}

#[test]
fn registered_vectors_end_with_the_bits_of_others() {
    let _alone = alone();
    if !room_for(2) || !stand_in() {
        return println!("skipped: needs the stand-ins");
    }
    for stage in STAGES {
        let run = Run { ranks: 2, gradients: Gradients::Grid, ..Run::default() }.stage(stage);
        let (end, (made, allocated)) = with_windows(&run);
        assert_eq!(end, run.run(), "{stage:?}");
        // At stage 3 vectors travel whole only in lent memory.
        assert_eq!(made > 0, stage != Stage::Zero3, "{stage:?}");
        assert_eq!((made, windows()), (allocated, (0, 0)), "{stage:?}");
    }
}
