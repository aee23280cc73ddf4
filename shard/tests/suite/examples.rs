//! The crate's examples. Each is a module here, so that it is compiled with the tests, and returns the text that its `main` prints.

#![allow(dead_code, reason = "tests call `run`, and nothing calls `main`")]

#[path = "../../examples/custom_rule.rs"]
mod custom_rule;
#[path = "../../examples/lbfgs.rs"]
mod lbfgs;

#[test]
fn lbfgs() {
    let text = lbfgs::run().unwrap();
    print!("{text}");
    assert!(text.starts_with("loss 1386.3 to "), "{text}");
}

#[test]
fn custom_rule() {
    let text = custom_rule::run().unwrap();
    print!("{text}");
}
