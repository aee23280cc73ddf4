//! Every misuse and failure, on 2 and 4 ranks: the right typed error on every rank, and nobody waits for ever.

mod common;
mod deadlines;
mod departures;
mod misuse;
