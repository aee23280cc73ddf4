//! Tests with small networks on small meshes.

use clap::Parser as _;
use meshstep_cases::{Effort, effort, long, tried};

use super::*;
use crate::args::meshes::compared;
use crate::cli::{Cli, Command};
use crate::train::compare::Finals;
use crate::train::signals::Stopped;

const SMALL: Config = Config { layers: 1, heads: 4, width: 16, context: 16 };

fn asked(options: &str) -> Train {
    let words = ["meshstep-bench", "train"].into_iter().chain(options.split_whitespace());
    let Command::Train(asked) = Cli::parse_from(words).command else { panic!("not train") };
    asked
}

/// Prepares a run of a small network on this crate's own text.
pub(crate) fn run(options: &str) -> Result<Run> {
    let text = Text::from_path(concat!(env!("CARGO_MANIFEST_DIR"), "/src/train/mod.rs").as_ref(), 1 << 20)?;
    Run::of(&asked(options), SMALL, 4, &text, Path::new("nowhere"))
}

#[test]
fn meshes_agree_with_one_rank_and_stages_with_each_other() {
    // Long runs test every stage on every mesh.
    let (asked, count) = match effort() {
        Effort::Tenth => (vec!["--mesh tp=1 --mesh tp=2,dp=2 --stage 3", "--mesh tp=2,dp=2 --stage 1"], 3),
        Effort::Normal => {
            let others = "--mesh cp=4 --mesh tp=2,cp=2 --mesh tp=4 --stage 3";
            (vec!["--mesh tp=1 --stage 0", "--mesh tp=2,dp=2", "--mesh cp=4 --stage 1", others], 9)
        }
        Effort::Long => (vec!["--mesh tp=1 --mesh tp=2,dp=2 --mesh cp=4 --mesh tp=2,cp=2 --mesh tp=4"], 20),
    };
    let train = |meshes: &str| run(&format!("{meshes} --steps 8 --bucket 500")).unwrap().train().unwrap();
    let trained: Vec<Trained> = asked.into_iter().flat_map(train).collect();
    let verdict = Verdict::of(&trained);
    assert!(verdict.holds(), "{verdict}");
    assert_eq!(trained.len(), count);
    assert!(trained.iter().all(|run| run.losses.last() < run.losses.first()));
    let text = table(&trained);
    assert_eq!(text.lines().count(), 1 + trained.len(), "{text}");
}

#[test]
fn another_seed_is_another_run_and_is_seen() {
    let finals =
        |seed: u64| run(&format!("--mesh tp=2 --stage 0 --steps 2 --seed {seed}")).unwrap().train().unwrap();
    let (mut first, other) = (finals(1), finals(2));
    assert!(Verdict::of(&first).holds());
    first.extend(other);
    assert!(!Verdict::of(&first).holds());
}

#[test]
fn what_does_not_divide_is_refused_before_anything_runs() {
    for (mesh, hint) in [
        ("tp=3", "3 ranks along tp do not divide 4 heads"),
        ("dp=8", "8 ranks along dp do not divide 4 sequences"),
        ("cp=16,tp=2", "32 ranks along cp and tp do not divide 16 tokens"),
        ("pp=2", "leave pp out"),
    ] {
        let error = run(&format!("--mesh {mesh}")).unwrap_err().to_string();
        assert!(error.contains(hint), "{mesh}: {error}");
    }
}

#[test]
fn six_meshes_are_compared_and_all_of_them_fit() {
    let names: Vec<String> = compared().iter().map(Mesh::to_string).collect();
    assert_eq!(names[..3], ["dp=1,cp=1,tp=1", "dp=2,cp=2,tp=2", "dp=4,cp=1,tp=2"]);
    assert_eq!(names[3..], ["dp=2,cp=4,tp=1", "dp=1,cp=1,tp=8", "dp=8,cp=1,tp=1"]);
    assert!(compared().iter().all(|mesh| check(&SIZES, ROWS, mesh).is_ok()));
}

/// Returns the bits of the losses and norms of a run, and its final parameters.
fn bits(run: &Trained) -> (Vec<u64>, Vec<u64>, &Finals) {
    let bits = |values: &[f64]| values.iter().map(|value| value.to_bits()).collect();
    (bits(&run.losses), bits(&run.norms), &run.finals)
}

#[test]
fn a_run_that_goes_on_is_the_one_that_never_stopped_and_another_mesh_may_take_over() {
    let dir = tempfile::tempdir().unwrap();
    // Number of steps, and the steps at which the run stops.
    let (steps, first, second) = match effort() {
        Effort::Tenth => (3, 1, 2),
        Effort::Normal => (5, 1, 3),
        Effort::Long => (7, 3, 5),
    };
    let at = |options: &str| {
        let dir = dir.path().display();
        run(&format!("--steps {steps} --checkpoints {dir} {options}")).and_then(|run| run.train())
    };
    // A run continues from its own checkpoint, and another stage continues from it too; long runs test more stages.
    let stages = if long() { &[(3, 1), (2, 1), (1, 1), (0, 1)][..] } else { &[(3, 0), (1, 2)] };
    for (_, (stage, other)) in stages.iter().enumerate().filter(|(i, _)| tried(*i, 1)) {
        let mesh = format!("--mesh tp=2,dp=2 --stage {stage}");
        let whole = at(&mesh).unwrap().swap_remove(0);
        at(&format!("{mesh} --save-every 2 --until {first}")).unwrap();
        // Twice, so that old and new results are merged more than once.
        at(&format!("{mesh} --resume --save-every 2 --until {second}")).unwrap();
        let resumed = at(&format!("{mesh} --resume")).unwrap().swap_remove(0);
        assert_eq!(bits(&resumed), bits(&whole), "stage {stage}");
        let elsewhere = at(&format!("--mesh cp=2,tp=2 --stage {other} --resume")).unwrap().swap_remove(0);
        assert_eq!(bits(&elsewhere).0[..second], bits(&whole).0[..second]);
        let verdict = Verdict::of(&[whole, elsewhere]);
        assert!(verdict.holds(), "{verdict}");
        std::fs::remove_dir_all(dir.path()).unwrap();
        std::fs::create_dir(dir.path()).unwrap();
    }
}

#[test]
fn what_cannot_go_on_says_why() {
    let dir = tempfile::tempdir().unwrap();
    let at = |options: &str| {
        let dir = dir.path().display();
        run(&format!("--steps 3 --checkpoints {dir} {options}")).and_then(|run| run.train())
    };
    let refused = |options: &str, hint: &str| {
        let error = format!("{:#}", at(options).unwrap_err());
        assert!(error.contains(hint), "{options}: {error}");
    };
    refused("--mesh tp=2 --stage 1 --resume", "holds no checkpoint");
    refused("--mesh tp=2 --resume", "add --stage");
    refused("--mesh tp=2 --mesh tp=1 --stage 1 --save-every 1", "at most one --mesh");
    at("--mesh tp=2 --stage 1 --save-every 2 --until 2").unwrap();
    refused("--mesh tp=2 --stage 1 --resume --seed 2", "of another run");
    at("--mesh tp=2 --stage 1 --save-every 2 --resume").unwrap();
    refused("--mesh tp=2 --stage 1 --save-every 1 --resume --until 2", "of step 3, after the last one, 2");
}

#[test]
fn a_run_on_a_mesh_that_is_asked_to_end_goes_on_where_it_saved() {
    let dir = tempfile::tempdir().unwrap();
    let of = |options: &str| {
        let dir = dir.path().display();
        run(&format!("--mesh dp=2 --stage 2 --steps 2 --checkpoints {dir} {options}")).unwrap()
    };
    let whole = of("").train().unwrap().swap_remove(0);
    // The second time it is asked in its last step.
    for steps in [1, 2] {
        let run = of(if steps == 1 { "--save-every 5" } else { "--save-every 5 --resume" });
        run.preemption.request();
        let stopped = run.train().unwrap_err().downcast::<Stopped>().unwrap();
        assert_eq!(stopped, Stopped { steps, saved: Some(dir.path().to_owned()) });
    }
    let resumed = of("--resume").train().unwrap().swap_remove(0);
    assert_eq!(bits(&resumed), bits(&whole));
    assert_eq!(resumed.digest, whole.digest);
    assert!(resumed.ms_per_step.is_finite() && resumed.sent == 0);
}
