//! Ranks over sockets and through shared memory have loopback's bits in every collective, and one error on every rank.

use meshstep_comm::rendezvous::Environment;
use meshstep_comm::tcp::{self, Encrypt, Options, World};
use meshstep_comm::{Communicator, Error, Op, Reduction, loopback};
use meshstep_tensor::{Buffer, Category, Meter, bf16};
use std::net::TcpListener;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// Elements for each rank: one message, one tile, and several.
const LENS: [usize; 4] = [1, 33, 4097, 40_000];

/// Ways by which bytes travel: sockets, encrypted sockets, shared memory.
const WAYS: [(Encrypt, bool); 3] =
    [(Encrypt::Never, false), (Encrypt::Always, false), (Encrypt::Remote, true)];

/// Joins `n` ranks, each a thread, and runs `body` on them.
fn on_ranks<T: Send>(
    n: usize,
    (encrypt, shared_memory): (Encrypt, bool),
    body: impl Fn(World) -> T + Sync,
) -> Vec<T> {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let rank = |rank| {
        let environment = Environment {
            rank,
            world_size: n,
            local_rank: rank,
            host: "127.0.0.1".to_owned(),
            port,
            run_id: "test".to_owned(),
            restart: 0,
            token: None,
        };
        let options = Options { encrypt, shared_memory, ..Options::default() };
        body(tcp::join(&environment, &options).unwrap())
    };
    thread::scope(|scope| {
        let ranks: Vec<_> = (0..n).map(|index| scope.spawn(move || rank(index))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn collectives_have_loopbacks_bits() {
    for way in WAYS {
        for n in [1, 2, 3, 4] {
            for len in LENS {
                let expected = loopback::spawn(n, |comm| all(&comm, len * n)).unwrap();
                let here = on_ranks(n, way, |world| all(&world.communicator(), len * n));
                assert!(here == expected, "{len} elements for each of {n} ranks, {way:?}");
            }
        }
    }
}

#[test]
fn groups_are_split_and_a_mismatch_is_one_error_for_all() {
    for way in WAYS {
        let errors = on_ranks(4, way, |world| {
            let comm = world.communicator();
            let half = comm.split(Some((comm.rank() % 2) as u32), 0).unwrap().unwrap();
            let mut sum = Buffer::from_slice(&[comm.rank() as f32], &Meter::new(), Category::Grads).unwrap();
            half.all_reduce(&mut sum, Reduction::Sum).unwrap();
            assert_eq!(sum.typed::<f32>().unwrap(), [[2.0f32, 4.0][comm.rank() % 2]]);
            comm.barrier().unwrap();
            let op = if comm.rank() == 0 { Op::all_gather() } else { Op::all_reduce(Reduction::Sum) };
            let mut buffer = values(&comm, 64);
            comm.run(op.within(Duration::from_secs(20)), &mut buffer).unwrap_err().to_string()
        });
        assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
        assert!(errors[0].contains("does not match"), "{errors:?}");
    }
}

#[test]
fn a_new_generation_follows_an_abort() {
    for way in WAYS {
        on_ranks(3, way, |world| {
            let comm = world.communicator();
            comm.barrier().unwrap();
            if comm.rank() == 1 {
                comm.abort();
            }
            assert!(matches!(comm.barrier().unwrap_err(), Error::Aborted { rank: 1 }));
            drop(comm);
            let next = world.next_generation(Duration::from_secs(30)).unwrap();
            let mut sum = values(&next.communicator(), 5);
            next.communicator().all_reduce(&mut sum, Reduction::Sum).unwrap();
            next.communicator().barrier().unwrap();
        });
    }
}

/// Returns the bytes of this rank after each collective.
fn all(comm: &Arc<dyn Communicator>, len: usize) -> Vec<Vec<u8>> {
    let n = comm.world_size();
    let ops = [
        Op::all_reduce(Reduction::Sum),
        Op::all_reduce(Reduction::Mean),
        Op::all_reduce(Reduction::Max),
        Op::reduce_scatter(Reduction::Sum),
        Op::all_gather(),
        Op::all_to_all(),
        Op::broadcast(n - 1),
    ];
    let chunk = len / n * comm.rank()..len / n * (comm.rank() + 1);
    let run = |op: &Op| {
        let mut buffer = values(comm, len);
        comm.run(*op, &mut buffer).unwrap();
        let values = buffer.typed::<f32>().unwrap();
        // A reduce_scatter specifies this rank's chunk alone.
        let kept = if *op == Op::reduce_scatter(Reduction::Sum) { &values[chunk.clone()] } else { values };
        kept.iter().flat_map(|x| x.to_bits().to_le_bytes()).collect()
    };
    let mut all: Vec<Vec<u8>> = ops.iter().map(run).collect();
    let halves: Vec<bf16> = floats(comm, len).into_iter().map(bf16::from_f32).collect();
    let mut halves = Buffer::from_slice(&halves, &Meter::new(), Category::Grads).unwrap();
    comm.all_reduce(&mut halves, Reduction::Mean).unwrap();
    all.push(halves.typed::<bf16>().unwrap().iter().flat_map(|x| x.to_bits().to_le_bytes()).collect());
    all
}

fn values(comm: &Arc<dyn Communicator>, len: usize) -> Buffer {
    Buffer::from_slice(&floats(comm, len), &Meter::new(), Category::Grads).unwrap()
}

/// Values of many magnitudes, which differ between ranks.
fn floats(comm: &Arc<dyn Communicator>, len: usize) -> Vec<f32> {
    let mut state = 0x9e37_79b9_u32.wrapping_mul(comm.rank() as u32 + 1);
    let next = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state as i32 as f32) * 2f32.powi((state >> 28) as i32 - 40)
    };
    (0..len).map(next).collect()
}
