//! Update of the shard that this rank owns, bucket by bucket.

pub(crate) mod apply;
pub(crate) mod exact_reduce;
#[cfg(feature = "cuda")]
pub(crate) mod gpu_update;
pub(crate) mod owned_bucket;
pub(crate) mod segments;
pub(crate) mod tensor_norms;
