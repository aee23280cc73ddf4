//! Random programs ordered by events alone, under random orders of the streams: the bits equal loopback's.

use crate::naive::{What, random};
use crate::nccl::bench::{Rank, alone, available, patient, ranks, seed, stand_in};
use meshstep_comm::{Communicator, InFlight, Reduction, loopback};
use meshstep_tensor::cuda::Stream;
use meshstep_tensor::{Buffer, Category, Meter, Queue};

const RANKS: usize = 3;
const BUFFERS: usize = 3;
const LEN: usize = 4 * RANKS;

/// Operation, its buffer, and the queue that waits for its end.
#[derive(Clone, Copy, Debug)]
struct Step {
    buffer: usize,
    what: What,
    peers: [usize; 2],
    queue: usize,
}

fn program(mut seed: u64) -> Vec<Step> {
    let mut steps = Vec::new();
    for _ in 0..12 {
        let mut pick = |n: usize| (random(&mut seed) % n as u64) as usize;
        let how = [Reduction::Sum, Reduction::Max, Reduction::Min][pick(3)];
        let whats = [
            What::AllReduce(how),
            What::ReduceScatter(how),
            What::AllGather,
            What::AllToAll,
            What::Broadcast,
            What::SendRecv,
        ];
        let step = Step {
            buffer: pick(BUFFERS),
            what: whats[pick(6)],
            peers: [pick(RANKS), pick(RANKS)],
            queue: pick(2),
        };
        steps.push(step);
        if matches!(step.what, What::ReduceScatter(_)) {
            // The contents of the other chunks are unspecified: they are gathered.
            steps.push(Step { what: What::AllGather, queue: pick(2), ..step });
        }
    }
    steps
}

/// Returns the initial values of one of rank `rank`'s buffers.
fn values(seed: u64, rank: usize, buffer: usize) -> Vec<u64> {
    let mut seed = seed ^ (rank * BUFFERS + buffer) as u64;
    (0..LEN).map(|_| random(&mut seed)).collect()
}

fn on_loopback(seed: u64) -> Vec<Vec<Vec<u64>>> {
    let ends = loopback::spawn(RANKS, |comm| {
        let buffer =
            |b| Buffer::from_slice(&values(seed, comm.rank(), b), &Meter::new(), Category::Grads).unwrap();
        let mut buffers: Vec<Buffer> = (0..BUFFERS).map(buffer).collect();
        for Step { buffer, what, peers, .. } in program(seed) {
            if let Some(op) = what.op(comm.rank(), peers) {
                comm.run(op, &mut buffers[buffer]).unwrap();
            }
        }
        buffers.iter().map(|buffer| buffer.typed::<u64>().unwrap().to_vec()).collect()
    });
    ends.unwrap()
}

/// A buffer, in flight or at rest behind the work of a queue.
enum Where {
    Rest(Buffer, usize),
    Flight(InFlight, usize),
}

impl Where {
    fn rest(self, queues: &[Queue]) -> (Buffer, usize) {
        match self {
            Where::Rest(buffer, queue) => (buffer, queue),
            Where::Flight(started, queue) => {
                let (buffer, result) = started.wait(&queues[queue]);
                result.unwrap();
                (buffer, queue)
            }
        }
    }
}

/// Runs the program without any host wait before the end.
fn on_nccl(seed: u64) -> Vec<Vec<Vec<u64>>> {
    ranks(RANKS, &patient(), |comm| {
        let rank = Rank::new(comm);
        let me = rank.comm.rank();
        let queues = [(); 2].map(|()| Queue::cuda(Stream::new(rank.comm.device()).unwrap()));
        let made = |b| Some(Where::Rest(rank.buffer(&values(seed, me, b)), 0));
        let mut places: Vec<Option<Where>> = (0..BUFFERS).map(made).collect();
        for Step { buffer, what, peers, queue } in program(seed) {
            let Some(op) = what.op(me, peers) else { continue };
            let (at_rest, behind) = places[buffer].take().unwrap().rest(&queues);
            let started = rank.comm.start(op, at_rest, &queues[behind]);
            places[buffer] = Some(Where::Flight(started.map_err(|(_, error)| error).unwrap(), queue));
        }
        let end = |place: Option<Where>| {
            let (buffer, queue) = place.unwrap().rest(&queues);
            let mut values = vec![0u64; LEN];
            queues[queue].download(buffer.as_slice(), (&mut values[..]).into()).unwrap();
            values
        };
        places.into_iter().map(end).collect()
    })
}

#[test]
fn programs_end_as_on_loopback() {
    let _alone = alone();
    if !available(RANKS) {
        return;
    }
    for order in 0..100 {
        if stand_in(RANKS) {
            seed(order);
        }
        assert_eq!(on_nccl(order), on_loopback(order), "seed {order}: {:?}", program(order));
    }
}
