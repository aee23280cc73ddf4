//! Ranks on GPUs with different parts of one tensor, and replicas of another: the bits of one rank on a CPU, with stochastic
//! rounding, a schedule, and a step that one rank's NaN skips.

use crate::cuda::{alone, devices, room_for};
use meshstep_comm::{Communicator, loopback, nccl};
use meshstep_optim::schedule::{Linear, Schedule};
use meshstep_optim::{AdamW, Rounding, Strided};
use meshstep_shard::{DataRank, Moments, Optimizer, Options, Outcome, Precision, RankRoles, Stage, StepArgs};
use meshstep_tensor::cuda::Stream;
use meshstep_tensor::{Buffer, Category, DType, Layout, Meter, Queue, SliceMut};
use std::collections::HashMap;
use std::sync::Arc;

/// Matrix cut by columns: at two ranks, runs are no whole groups of random bits, and tiles have several runs.
const ROWS: usize = 40;
const COLUMNS: usize = 600;

/// Values of a rank at the end, and the norm of each step that was taken.
type End = (Vec<f32>, Vec<f32>, Vec<Option<u64>>);

fn values(indices: impl Iterator<Item = usize>, t: usize) -> Vec<f32> {
    indices.map(|i| ((i * 7 + t * 13) % 23) as f32 - 11.0).collect()
}

fn train(world: Arc<dyn Communicator>, queue: &Queue) -> End {
    let (rank, columns) = (world.rank(), COLUMNS / world.world_size());
    let precision =
        Precision { moments: Moments::BF16, rounding: Rounding::Stochastic, ..Precision::default() };
    let schedule = Linear { num_warmup_steps: 3, num_training_steps: 10 };
    let schedule = Some(Schedule::new(0.1, schedule).unwrap());
    let queue = queue.clone();
    let options =
        Options { stage: Stage::Zero1, precision, schedule, queue: queue.clone(), ..Options::default() };
    let own = world.split(Some(rank as u32), 0).unwrap().unwrap();
    let strided = Strided { first: (rank * columns) as u64, run: columns as u64, stride: COLUMNS as u64 };
    let parts = HashMap::from([("cut".to_owned(), vec![(0..ROWS * columns, strided)])]);
    let cut = RankRoles {
        shards: Arc::clone(&own),
        extra_reductions: Vec::new(),
        replicas: own,
        counts_in_norm: true,
        parts,
        tensors: None,
    };
    let place = DataRank { index: 0, ranks: world.world_size() as u64, first: rank == 0 };
    let whole = RankRoles {
        replicas: Arc::clone(&world),
        counts_in_norm: rank == 0,
        parts: HashMap::new(),
        ..cut.clone()
    };
    let mut opt = Optimizer::empty(Arc::clone(&world), place, options).unwrap();
    let zeros = |_: &_, _: SliceMut<'_>| Ok(());
    for (name, shape, among) in [("cut", [ROWS, columns], cut), ("whole", [300, 1], whole)] {
        let layout = Layout::builder().param(name, &shape, DType::F32).build().unwrap();
        opt.add_shared(layout, AdamW::default(), among, zeros).unwrap();
    }
    let here = |i: usize| i / columns * COLUMNS + rank * columns + i % columns;
    let mut pending = Vec::new();
    for t in 0..6 {
        let mut grads = [values((0..ROWS * columns).map(here), t), values(0..300, t + 1)];
        if t == 3 && rank == world.world_size() - 1 {
            grads[1][7] = f32::NAN;
        }
        let mb = opt.micro_batch(1).unwrap();
        for (name, grads) in ["cut", "whole"].into_iter().zip(&grads) {
            let mut there =
                Buffer::zeroed_on(&queue, grads.len(), DType::F32, &Meter::new(), Category::Grads).unwrap();
            queue.upload((&grads[..]).into(), there.as_mut()).unwrap();
            mb.grad(name, there.as_slice()).unwrap();
        }
        mb.finish().unwrap();
        let at = StepArgs { max_norm: Some(3.0), ..opt.scheduled().unwrap() };
        pending.push(opt.step(at).unwrap());
    }
    let norm = |outcome| match outcome {
        Outcome::Applied { norm, .. } => Some(norm.to_bits()),
        Outcome::Skipped { .. } => None,
    };
    let norms = pending.into_iter().map(|pending| norm(pending.outcome().unwrap())).collect();
    let read = |name: &str| {
        let param = opt.param(name).unwrap();
        let mut values = vec![0f32; param.len()];
        queue.download(param, (&mut values[..]).into()).unwrap();
        values
    };
    (read("cut"), read("whole"), norms)
}

#[test]
fn parts_of_a_tensor_end_with_the_bits_of_the_whole() {
    let _alone = alone();
    if !room_for(2) {
        return;
    }
    let (cut, whole, norms) =
        loopback::spawn(1, |comm: Arc<dyn Communicator>| train(comm, &Queue::cpu())).unwrap().remove(0);
    assert_eq!(norms.iter().map(Option::is_some).collect::<Vec<_>>(), [true, true, true, false, true, true]);
    let ends = nccl::spawn(&[0, 1 % devices()], nccl::Options::default(), |comm| {
        let queue = Queue::cuda(Stream::new(comm.device()).unwrap());
        train(comm, &queue)
    });
    for (rank, end) in ends.unwrap().into_iter().enumerate() {
        let rows = cut.chunks(COLUMNS).flat_map(|row| &row[rank * COLUMNS / 2..(rank + 1) * COLUMNS / 2]);
        assert_eq!(end, (rows.copied().collect(), whole.clone(), norms.clone()), "rank {rank}");
    }
}
