//! The crate's example and the text that it prints.

#![allow(dead_code, reason = "tests call `run`, and nothing calls `main`")]

#[path = "../../examples/workers.rs"]
mod workers;

#[test]
fn workers() {
    let text = workers::run().unwrap();
    print!("{text}");
}
