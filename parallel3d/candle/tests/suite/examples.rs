//! The crate's examples and the texts that they print.

#![allow(dead_code, reason = "tests call `run`, and nothing calls `main`")]

#[path = "../../examples/gpt.rs"]
mod gpt;
#[path = "../../examples/mlp.rs"]
mod mlp;
#[path = "../../examples/candle_speed.rs"]
mod speed;

use meshstep_cases::process::{launched, role};

/// Returns the numbers after `before` in each line.
fn numbers(text: &str, before: &str) -> Vec<f32> {
    let after = |line: &str| line.split_once(before).map(|(_, rest)| rest.to_owned());
    let number = |rest: String| rest.split([' ', ';']).next().unwrap().parse().unwrap();
    text.lines().filter_map(after).map(number).collect()
}

#[test]
fn speed() {
    let text =
        speed::run(&speed::Race { lens: &[800, 80], turns: 1, turn: std::time::Duration::ZERO }).unwrap();
    let rows: Vec<Vec<f64>> = text
        .lines()
        .skip(1)
        .map(|line| line.split_whitespace().map(|word| word.parse().unwrap()).collect())
        .collect();
    assert!(
        rows.len() == 2 && rows[0][0] == 800.0 && rows.iter().all(|row| row.len() == 4 && row[1] > 0.0),
        "{text}"
    );
}

#[test]
fn gpt() {
    let text = gpt::run().unwrap();
    print!("{text}");
    let (first, last) = (numbers(&text, "loss "), numbers(&text, " to "));
    assert!(first.len() == 4 && last.len() == 4, "{text}");
    assert!(first.iter().all(|loss| *loss > 4.0) && last.iter().all(|loss| *loss < 2.0), "{text}");
}

/// Checks the line of each rank.
fn check_mlp(text: &str, ranks: usize) {
    let (first, last) = (numbers(text, "loss "), numbers(text, " to "));
    assert_eq!((first.len(), text.matches("one rank's parameters: true").count()), (ranks, ranks), "{text}");
    assert!(first.iter().zip(last).all(|(first, last)| last < 0.2 * first), "{text}");
}

#[test]
fn mlp() {
    check_mlp(&mlp::run().unwrap(), 4);
}

/// A rank of the test below. The test does nothing in the parent process.
#[test]
fn mlp_rank() {
    if role().is_some() {
        print!("\nresult {}\nend\n", mlp::run().unwrap().trim_end());
    }
}

#[test]
fn mlp_as_processes() {
    let ranks = launched("examples::mlp_rank", 2, "rank");
    assert_eq!(ranks.len(), 2);
    ranks.iter().for_each(|lines| check_mlp(&lines.concat(), 1));
}
