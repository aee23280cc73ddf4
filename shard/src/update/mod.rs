//! Update of the shard that this rank owns, bucket by bucket.

pub(crate) mod evaluation;
pub(crate) mod exact_reduce;
#[cfg(feature = "cuda")]
pub(crate) mod gpu;
#[cfg(feature = "cuda")]
pub(crate) mod gpu_matrices;
pub(crate) mod hooks;
pub(crate) mod matrix_exchange;
#[cfg(not(feature = "cuda"))]
pub(crate) mod no_gpu;
pub(crate) mod owned_bucket;
pub(crate) mod params;
pub(crate) mod piece_travel;
pub(crate) mod scatter;
pub(crate) mod segments;
pub(crate) mod tensor_norms;
pub(crate) mod updater;
pub(crate) mod values;
pub(crate) mod vector_memory;

#[cfg(not(feature = "cuda"))]
pub(crate) use no_gpu as gpu;
