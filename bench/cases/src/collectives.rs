//! Cases of collectives, for the benchmark of this crate and for `cargo xtask bench`.

use std::sync::Arc;

use anyhow::Result;
use meshstep_comm::{Communicator, Op, Reduction};
use meshstep_tensor::{Buffer, Category, DType, Meter, Queue};

use crate::ranks::{OURS, Player};

/// Returns each operation on `n` ranks, with the minimum that the ranks together must read and write, in multiples of one
/// buffer.
pub fn operations(n: usize) -> [(&'static str, Op, usize); 3] {
    [
        ("all_reduce", Op::all_reduce(Reduction::Sum), n + n),
        ("reduce_scatter", Op::reduce_scatter(Reduction::Sum), n + 1),
        ("all_gather", Op::all_gather(), 1 + (n - 1)),
    ]
}

/// Turn in which ranks copy, after the turns of all operations.
pub const COPY: usize = 3;

/// Returns the bytes that operation `i` must move, as a fraction of the bytes that its `ranks` read and write in a copy.
pub fn share_of_copy(ranks: usize, i: usize) -> f64 {
    let (_, _, buffers) = operations(ranks)[i];
    buffers as f64 / (2 * ranks) as f64
}

/// Vectors of one rank: a registered one for the collectives, and two for the copy.
pub struct Rank {
    comm: Arc<dyn Communicator>,
    vector: Buffer,
    from: Buffer,
    to: Buffer,
}

impl Rank {
    pub fn new(comm: Arc<dyn Communicator>, len: usize) -> Result<Self> {
        let meter = Meter::new();
        let make = || Buffer::from_slice(&vec![1.0f32; len], &meter, Category::Grads);
        let mut vector = comm.zeroed_on(&Queue::cpu(), len, DType::F32, (&meter, Category::Grads), &[])?;
        comm.register(&vector)?;
        vector.typed_mut::<f32>()?.fill(1.0);
        Ok(Rank { comm, vector, from: make()?, to: make()? })
    }
}

impl Player for Rank {
    fn play(&mut self, turn: usize) -> Result<()> {
        let operations = operations(self.comm.world_size());
        match operations.get(turn) {
            Some((_, op, _)) => Ok(self.comm.run(*op, &mut self.vector)?),
            None => Ok(self.to.as_mut().copy_from(self.from.as_slice())?),
        }
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
        self.0.play(if turn == OURS { self.1 } else { COPY })
    }
}
