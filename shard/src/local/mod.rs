//! Workers that step alone and exchange now and then.

pub mod membership;
