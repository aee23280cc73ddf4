//! The example `classifier`: on threads, and as processes with a launcher's variables; and the example `burn_speed`. Their programs are built
//! with the tests.

use meshstep_cases::process::free_addr;
use std::process::{Child, Command, Stdio};

/// Returns a command for the example.
fn program(name: &str) -> Command {
    let test = std::env::current_exe().unwrap();
    let program = test.parent().and_then(|deps| deps.parent()).unwrap().join("examples").join(name);
    assert!(program.exists(), "{}: build the examples", program.display());
    Command::new(program)
}

/// Starts the classifier with these variables.
fn start(variables: &[(&str, String)]) -> Child {
    let mut command = program("classifier");
    command.envs(variables.iter().map(|(name, value)| (name, value))).stdout(Stdio::piped());
    command.spawn().unwrap()
}

/// Asserts that a rank's loss has fallen, and returns its distance from one rank's weights.
fn learned(line: &str) -> f32 {
    let words: Vec<&str> = line.split([' ', ';']).collect();
    let number = |after: &str| -> f32 {
        let at = words.iter().position(|word| *word == after).unwrap_or_else(|| panic!("{line}"));
        words[at + 1].parse().unwrap()
    };
    assert!(number("to") < 0.5 * number("loss"), "{line}");
    number("most")
}

fn check(processes: Vec<Child>, ranks: usize) {
    let mut lines = Vec::new();
    for process in processes {
        let output = process.wait_with_output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{text}");
        lines.extend(text.lines().map(str::to_owned));
    }
    let apart: Vec<f32> = lines.iter().map(|line| learned(line)).collect();
    assert_eq!(apart.len(), ranks, "{lines:?}");
    assert!(apart.iter().all(|x| *x < 1e-3 && *x == apart[0]), "ranks differ: {lines:?}");
}

#[test]
fn the_classifier_learns_on_threads() {
    check(vec![start(&[])], 4);
}

#[test]
fn the_classifier_learns_as_processes() {
    let store = free_addr();
    let rank = |rank: usize| {
        let place = ["RANK", "LOCAL_RANK"].map(|name| (name, rank.to_string()));
        let world = [("WORLD_SIZE", "2".to_owned()), ("MASTER_ADDR", store.ip().to_string())];
        let port = [("MESHSTEP_PORT", store.port().to_string())];
        start(&[&place[..], &world[..], &port[..]].concat())
    };
    check((0..2).map(rank).collect(), 2);
}

#[test]
fn speeds_are_printed_as_a_table() {
    let output = program("burn_speed").arg("brief").output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let row: Vec<f64> =
        text.lines().nth(2).unwrap().split_whitespace().map(|word| word.parse().unwrap()).collect();
    assert!(output.status.success() && row.len() == 4 && row[0] == 800.0 && row[1] > 0.0, "{text}");
}
