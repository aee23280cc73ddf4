//! The crate's examples and the texts that they print; the tests of `with_torch` are in its folder.

#![allow(dead_code, reason = "tests call `run`, and nothing calls `main`")]

#[path = "../../examples/pytorch.rs"]
mod pytorch;
#[path = "../../examples/with_torch/main.rs"]
mod with_torch;

#[test]
fn pytorch() {
    let text = pytorch::run().unwrap();
    print!("{text}");
}
