//! What is measured of collectives: here, and by `cargo xtask bench`.

use std::sync::Arc;

use anyhow::Result;
use meshstep_comm::{Communicator, Op, Reduction};
use meshstep_tensor::{Buffer, Category, Meter};

use crate::ranks::{OURS, Player};

/// Each operation on `n` ranks, and what they together must read and write at least, in multiples of one buffer.
pub fn operations(n: usize) -> [(&'static str, Op, usize); 3] {
    [
        ("all_reduce", Op::all_reduce(Reduction::Sum), n + n),
        ("reduce_scatter", Op::reduce_scatter(Reduction::Sum), n + 1),
        ("all_gather", Op::all_gather(), 1 + (n - 1)),
    ]
}

/// The turn in which ranks copy, after those of all operations.
pub const COPY: usize = 3;

/// The bytes that operation `i` must move, as a share of those that its `ranks` read and write in a copy.
pub fn share_of_copy(ranks: usize, i: usize) -> f64 {
    let (_, _, buffers) = operations(ranks)[i];
    buffers as f64 / (2 * ranks) as f64
}

/// One rank's vectors: the collectives', and those it copies between.
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
        Ok(Rank { comm, vector: make()?, from: make()?, to: make()? })
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

/// A rank that has one operation, and its copy in the other turns.
pub struct Only(Rank, usize);

impl Only {
    /// Operation `i` on `len` elements.
    pub fn new(comm: Arc<dyn Communicator>, len: usize, i: usize) -> Result<Self> {
        Ok(Only(Rank::new(comm, len)?, i))
    }
}

impl Player for Only {
    fn play(&mut self, turn: usize) -> Result<()> {
        self.0.play(if turn == OURS { self.1 } else { COPY })
    }
}
