//! The quick start: each of its diffs makes one program another, both print the same losses, on threads and on processes.

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

const CHAPTER: &str = include_str!("src/quick-start.md");

/// Lines of a program that may change: a removed line and the added line in its place count once.
const CHANGED: usize = 15;

/// Largest difference between a loss on whole batches and the mean of four ranks' losses, as a share of the loss. Sums of f32 in other
/// orders differ in their last bits, and a hundred steps carry such a difference on.
const APART: f64 = 1e-4;

const RANKS: usize = 4;
const STEPS: usize = 100;

/// A framework's program and the sharded one.
struct Case {
    /// The framework, which begins the examples' names.
    name: &'static str,
    /// Heading of the diff's section.
    section: &'static str,
    before: &'static str,
    after: &'static str,
}

const CANDLE: Case = Case {
    name: "candle",
    section: "## The change\n",
    before: include_str!("code/candle_before.rs"),
    after: include_str!("code/candle_after.rs"),
};

const BURN: Case = Case {
    name: "burn",
    section: "## A loop of burn\n",
    before: include_str!("code/burn_before.rs"),
    after: include_str!("code/burn_after.rs"),
};

/// Returns the first block of a section that opens with this fence, and the section up to the next heading.
fn block(section: &str, fence: &str) -> (&'static str, &'static str) {
    let (_, rest) = CHAPTER.split_once(section).expect("the chapter has the section");
    let section = rest.split("\n## ").next().unwrap_or(rest);
    let (_, block) = section.split_once(&format!("```{fence}\n")).expect("the section has the block");
    (block.split_once("```").expect("the block ends").0, section)
}

/// Applies a unified diff without line numbers, and returns the text and the number of changed lines.
///
/// A hunk is a run of lines that do not start with `@@`; its lines are found in the text in order.
fn apply(diff: &str, text: &str) -> Result<(String, usize), String> {
    let (mut rest, mut out, mut changed) = (text, String::new(), 0);
    for hunk in diff.split("@@\n").skip(1) {
        let of = |marks: [char; 2]| -> String {
            let lines = hunk.lines().filter(|line| line.starts_with(marks));
            lines.map(|line| format!("{}\n", &line[1..])).collect()
        };
        let (old, new) = (of([' ', '-']), of([' ', '+']));
        if text.matches(&old).count() != 1 {
            return Err(format!("not once in the program:\n{old}"));
        }
        let (before, after) = rest.split_once(&old).ok_or(format!("not in this order:\n{old}"))?;
        out += before;
        out += &new;
        rest = after;
        changed += changed_lines(hunk);
    }
    Ok((out + rest, changed))
}

/// Counts each run of removed and added lines as the longer of both.
fn changed_lines(hunk: &str) -> usize {
    let (mut whole, mut removed, mut added) = (0, 0, 0);
    for line in hunk.lines().chain([" "]) {
        match line.chars().next() {
            Some('-') => removed += 1,
            Some('+') => added += 1,
            _ => {
                whole += removed.max(added);
                (removed, added) = (0, 0);
            }
        }
    }
    whole
}

/// Returns the path of an example, which cargo builds with the tests.
fn program(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("a test has a path");
    let profile = test.parent().and_then(|deps| deps.parent()).expect("tests are in the folder deps");
    profile.join("examples").join(name).with_extension(std::env::consts::EXE_EXTENSION)
}

fn start(name: &str, variables: &[(&str, String)]) -> Child {
    let mut command = Command::new(program(name));
    for launcher in ["RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_STEP_ID", "SLURM_JOB_ID"] {
        command.env_remove(launcher);
    }
    command.envs(variables.iter().map(|(name, value)| (name, value)));
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("cargo has built the example")
}

fn end(child: Child) -> String {
    let output = child.wait_with_output().expect("the program was started");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("the program prints text")
}

/// Returns the losses of each step, in the order in which they were printed.
fn losses(printed: &str) -> BTreeMap<usize, Vec<f64>> {
    let mut losses = BTreeMap::<usize, Vec<f64>>::new();
    for line in printed.lines() {
        let numbers = line.strip_prefix("step ").and_then(|line| line.split_once(": loss "));
        let (step, loss) = numbers.unwrap_or_else(|| panic!("no loss: {line}"));
        losses.entry(step.parse().expect("a step")).or_default().push(loss.parse().expect("a loss"));
    }
    losses
}

/// Compares the losses of the plain program with the means over ranks.
fn assert_equal(alone: &str, ranks: &str) {
    let (alone, ranks) = (losses(alone), losses(ranks));
    assert_eq!((alone.len(), ranks.len()), (STEPS, STEPS));
    let mut most = 0f64;
    for (step, loss) in &alone {
        let (loss, of_ranks) = (loss[0], &ranks[step]);
        assert_eq!(of_ranks.len(), RANKS, "step {step}");
        let mean = of_ranks.iter().sum::<f64>() / RANKS as f64;
        most = most.max((mean - loss).abs() / loss);
    }
    println!("at most {most:.1e} apart");
    assert!(most <= APART, "{most} apart");
    assert!(alone[&(STEPS - 1)][0] < 0.2 * alone[&0][0], "the network learns nothing");
}

impl Case {
    /// Applies the chapter's diff.
    fn assert_the_diff_fits(&self) {
        let (diff, section) = block(self.section, "diff");
        let (after, changed) = apply(diff, self.before).unwrap();
        assert_eq!(after, self.after);
        assert!(changed <= CHANGED, "{changed} changed lines");
        let said = format!("{changed} changed lines");
        assert!(section.contains(&said), "the section must say: {said}");
    }

    /// Runs the plain program, the sharded one on threads, and as four processes with the variables of `meshstep launch` and torchrun.
    fn assert_the_losses_are_equal(&self) {
        let (before, after) = (format!("{}_before", self.name), format!("{}_after", self.name));
        let (alone, threads) = (end(start(&before, &[])), end(start(&after, &[])));
        assert_equal(&alone, &threads);
        let processes = on_processes(&after);
        assert_equal(&alone, &processes);
        let sorted = |printed: &str| {
            let mut losses = losses(printed);
            losses.values_mut().for_each(|of_ranks| of_ranks.sort_by(f64::total_cmp));
            losses
        };
        assert_eq!(sorted(&processes), sorted(&threads), "threads and processes have the same bits");
    }
}

/// Returns the lines of four processes.
fn on_processes(name: &str) -> String {
    let free = || TcpListener::bind("127.0.0.1:0").expect("a free port");
    let ports = [free(), free()].map(|port| port.local_addr().expect("bound").port().to_string());
    let token: String = (0..32).map(|byte| format!("{:02x}", (byte * 37 + 11) % 256)).collect();
    let rank = |rank: usize| {
        let variables = [
            ("RANK", rank.to_string()),
            ("WORLD_SIZE", RANKS.to_string()),
            ("LOCAL_RANK", rank.to_string()),
            ("LOCAL_WORLD_SIZE", RANKS.to_string()),
            ("MASTER_ADDR", "127.0.0.1".to_owned()),
            ("MASTER_PORT", ports[0].clone()),
            ("MESHSTEP_PORT", ports[1].clone()),
            ("MESHSTEP_TOKEN", token.clone()),
        ];
        start(name, &variables)
    };
    let ranks: Vec<Child> = (0..RANKS).map(rank).collect();
    ranks.into_iter().map(end).collect()
}

#[test]
fn the_diffs_make_the_plain_programs_the_sharded_ones() {
    [CANDLE, BURN].iter().for_each(Case::assert_the_diff_fits);
}

#[test]
fn a_diff_that_does_not_fit_is_refused() {
    let cases = [("@@\n-three\n+x\n", "not once"), ("@@\n-one\n+x\n@@\n-zero\n+x\n", "not in this order")];
    for (diff, reason) in cases {
        let error = apply(diff, "zero\none\n").unwrap_err();
        assert!(error.contains(reason), "{error}");
    }
    let applied = apply("@@\n one\n-two\n-three\n+2\n four\n+5\n", "one\ntwo\nthree\nfour\n");
    assert_eq!(applied, Ok(("one\n2\nfour\n5\n".to_owned(), 3)));
}

#[test]
fn four_ranks_of_candle_print_the_losses_of_the_plain_program() {
    CANDLE.assert_the_losses_are_equal();
}

#[test]
fn four_ranks_of_burn_print_the_losses_of_the_plain_program() {
    BURN.assert_the_losses_are_equal();
}
