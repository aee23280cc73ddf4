//! Cases of collectives, for the benchmark of this crate and for `cargo xtask bench`.

use std::sync::Arc;

use anyhow::Result;
use meshstep_comm::{Communicator, Op, Reduction};
use meshstep_tensor::{Buffer, Category, DType, Meter, Queue, Threads};

use crate::copies::{MovedBytes, PASSES, Pages};
use crate::ranks::{OURS, Player, pass_of};

/// Returns each operation on `n` ranks, with the minimum that the ranks together must read and write, in multiples of one
/// buffer.
pub fn operations(n: usize) -> [(&'static str, Op, usize); 3] {
    [
        ("all_reduce", Op::all_reduce(Reduction::Sum), n + n),
        ("reduce_scatter", Op::reduce_scatter(Reduction::Sum), n + 1),
        ("all_gather", Op::all_gather(), 1 + (n - 1)),
    ]
}

/// Turn in which ranks copy, after the turns of all operations; [`PASSES`] follow.
pub const COPY: usize = 3;

/// Number of turns of a [`Rank`].
pub const TURNS: usize = COPY + 1 + PASSES.len();

/// Returns the buffers that operation `i` of `n` ranks reads and those that it writes, in bytes of one buffer of `bytes`.
pub fn moved(n: usize, i: usize, bytes: usize) -> MovedBytes {
    let (_, _, buffers) = operations(n)[i];
    let read = [n, n, 1][i];
    MovedBytes { read: read * bytes, written: (buffers - read) * bytes, in_place: 0 }
}

/// Returns the bytes that operation `i` must move, as a fraction of the bytes that its `ranks` read and write in a copy.
pub fn share_of_copy(ranks: usize, i: usize) -> f64 {
    let (_, _, buffers) = operations(ranks)[i];
    buffers as f64 / (2 * ranks) as f64
}

/// Vectors of one rank, allocated in one way: a registered one for the collectives, two for the copy, and one for the passes.
pub struct Rank {
    comm: Arc<dyn Communicator>,
    vector: Buffer,
    from: Buffer,
    to: Buffer,
    pages: Pages,
}

impl Rank {
    pub fn new(comm: Arc<dyn Communicator>, len: usize) -> Result<Self> {
        let meter = Meter::new();
        let make = || -> Result<Buffer> {
            let counted = (&meter, Category::Grads);
            let mut vector = comm.zeroed_on(&Queue::cpu(), len, DType::F32, counted, &[])?;
            vector.typed_mut::<f32>()?.fill(1.0);
            Ok(vector)
        };
        let (vector, from, to) = (make()?, make()?, make()?);
        comm.register(&vector)?;
        let pages = Pages::of_communicator(comm.as_ref(), len * DType::F32.size())?;
        Ok(Rank { comm, vector, from, to, pages })
    }
}

impl Player for Rank {
    fn play(&mut self, turn: usize) -> Result<()> {
        let operations = operations(self.comm.world_size());
        match (operations.get(turn), turn) {
            (Some((_, op, _)), _) => self.comm.run(*op, &mut self.vector)?,
            (None, COPY) => self.to.as_mut().copy_from(self.from.as_slice())?,
            // As many threads as ranks pass over memory together.
            (None, _) => self.pages.pass(PASSES[turn - COPY - 1], &Threads::caller()),
        }
        Ok(())
    }
}

/// A rank that runs one operation in its turn, and the copy in the other turns.
pub struct Only(Rank, usize);

impl Only {
    /// Creates a rank for operation `i` on `len` elements.
    pub fn new(comm: Arc<dyn Communicator>, len: usize, i: usize) -> Result<Self> {
        Ok(Only(Rank::new(comm, len)?, i))
    }
}

impl Player for Only {
    fn play(&mut self, turn: usize) -> Result<()> {
        self.0.play(match (turn, pass_of(turn)) {
            (OURS, _) => self.1,
            (_, Some(pass)) => COPY + 1 + pass as usize,
            (_, None) => COPY,
        })
    }
}
