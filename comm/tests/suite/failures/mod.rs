//! Every misuse and failure, on 2 and 4 ranks: the right typed error on every rank, and no hang.

mod common;
mod deadlines;
mod departures;
mod keeping;
mod misuse;
