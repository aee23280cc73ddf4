//! What a pass on CPU memory runs with.

use crate::Isa;
use meshstep_tensor::Threads;

/// Instructions and threads of a pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cpu<'a> {
    pub(crate) isa: Isa,
    pub(crate) threads: &'a Threads,
}
