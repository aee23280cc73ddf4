//! The example `classifier`: on threads, and as processes that a launcher starts.

#[path = "../../examples/classifier.rs"]
mod classifier;

use meshstep_cases::process::{launched, role};

/// The example compares its losses and weights with one rank's.
#[test]
fn the_classifier_learns_on_threads() {
    classifier::main().unwrap();
}

/// A rank of the test below. The test does nothing in the parent process.
#[test]
fn rank() {
    if role().is_some() {
        classifier::main().unwrap();
        println!("\nresult learned");
        println!("\nend");
    }
}

#[test]
fn the_classifier_learns_as_processes() {
    assert_eq!(launched("example::rank", 2, "classifier"), [["learned"], ["learned"]]);
}
