//! Tests of the transport between threads and processes.

mod common;
mod faults;
mod leftovers;
mod meeting;
mod processes;
mod splits;
mod streams;
mod throughput;
