//! What is measured of collectives: here, and by `cargo xtask bench`.

use meshstep_comm::{Op, Reduction};

/// Each operation on `n` ranks, and what they together must read and write at least, in multiples of one buffer.
pub fn operations(n: usize) -> [(&'static str, Op, usize); 3] {
    [
        ("all_reduce", Op::all_reduce(Reduction::Sum), n + n),
        ("reduce_scatter", Op::reduce_scatter(Reduction::Sum), n + 1),
        ("all_gather", Op::all_gather(), 1 + (n - 1)),
    ]
}
