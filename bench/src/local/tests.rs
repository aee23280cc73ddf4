//! Tests of methods, chaos and rejected options of `train --local`, with tiny models.

use clap::Parser as _;
use meshstep_cases::{Effort, cases, effort, long, tried};

use super::schedule::Loss;
use super::*;
use crate::cli::{Cli, Command};

/// This crate's own text; only a part of it in short runs.
fn corpus() -> String {
    format!("{}/src{}", env!("CARGO_MANIFEST_DIR"), if long() { "" } else { "/local" })
}

fn asked(options: &str) -> Result<Train, String> {
    let corpus = corpus();
    let words = ["meshstep-bench", "train", "--corpus", corpus.as_str()];
    let words = words.into_iter().chain(options.split_whitespace());
    match Cli::try_parse_from(words).map_err(|error| error.to_string())?.command {
        Command::Train(asked) => Ok(asked),
        _ => panic!("not train"),
    }
}

/// Prepares a run of a small network on this crate's own text. In short runs sequences are short, and few of them are held
/// out.
pub(crate) fn run(options: &str) -> Run {
    let run = Run::prepare(&asked(options).unwrap(), Path::new("nowhere")).unwrap();
    let model = Config { layers: 1, heads: 2, width: 16, ..SIZES };
    if long() {
        return Run { model, ..run };
    }
    let (context, text) = (8, Text::from_path(corpus().as_ref(), CORPUS_CAP).unwrap());
    let corpus = Corpus::new(&text.bytes, context).unwrap();
    let corpus = if run.asked.local.unlike { corpus.by_kind() } else { corpus };
    Run { model: Config { context, ..model }, corpus, held_out: 3, ..run }
}

pub(crate) fn train(options: &str) -> Vec<Trained> {
    run(options).train(&mut Vec::new()).unwrap()
}

/// Returns the error of the command line or of the preparation of a run.
fn refused(options: &str) -> String {
    let run = asked(options)
        .and_then(|asked| Run::prepare(&asked, Path::new("nowhere")).map_err(|error| format!("{error:#}")));
    run.map(|_| format!("nothing was refused of {options}")).unwrap_or_else(|error| error)
}

#[test]
fn every_method_trains_and_sends_the_planned_bytes() {
    // Short runs test only the first.
    let methods = [
        "des-loc --kx 2 --ku 3 --kv never",
        "every-step",
        "every-step-sgd --unlike",
        "every-step-qhadamw --moments 0.9:0.5",
        "local-sgd --kx 2",
        "post-local-sgd --kx 2 --every-step 1",
        "local-adam --kx 2",
        "des-loc --half-lives --kx 1",
        "mt-dao --kx 2 --moments 0.9:0.5,0.99:0.4 --ku 2,4 --kv 3",
        "diloco --kx 2 --outer-lr 0.5 --outer-momentum 0",
        "streaming-diloco --kx 4 --parts 2 --delay 1 --alpha 0.25",
        "streaming-diloco --kx 4 --parts 3 --delay 3",
    ];
    for (_, options) in methods.into_iter().enumerate().filter(|(i, _)| tried(*i, 1)) {
        let runs = train(&format!("--local {options} --workers 3 --steps 5 --batch 1"));
        let [run] = runs.as_slice() else { panic!("{options}: {} runs", runs.len()) };
        assert_eq!((run.losses.len(), run.unplanned, run.besides), (5, 0, 0), "{options}: {run:?}");
        assert_eq!((run.planned, &run.difference, run.differing), (Some(run.sent()), &None, 0), "{options}");
        assert_eq!(run.present, [3; 5], "{options}");
        assert!(run.sent() > 0 && run.held_out() < 6.0, "{options}: {run:?}");
        assert!(run.workers.iter().all(|worker| worker.planned == Some(worker.sent)), "{options}");
        let parts: Vec<usize> = run.workers.iter().map(|worker| worker.part.start).collect();
        assert!(parts.windows(2).all(|pair| pair[0] < pair[1]), "{options}: {parts:?}");
    }
}

#[test]
fn methods_have_defaults_and_all_of_them_are_one_report() {
    let runs = train("--local all --kx 1 --workers 2 --steps 2 --batch 1");
    assert_eq!(runs.iter().map(|run| run.method).collect::<Vec<_>>(), METHODS.repeat(3));
    assert!(runs.iter().all(|run| run.unplanned == 0 && run.difference.is_none()), "{runs:?}");
    // Reducing gradients in two steps sends as many bytes as averaging parameters after each, except for control words.
    let [every, local] = [&runs[1], &runs[3]].map(|run| run.sent() as f64);
    assert!((every / local - 1.0).abs() < 0.1, "{every} {local}");
    assert!(runs.iter().all(|run| run.every_step as f64 == every), "{every}");
    // Each is compared with its own baseline and the same seed.
    let besides = beside::pairs(&runs, beside::allowed).unwrap();
    assert_eq!(besides.iter().map(|beside| beside.method).collect::<Vec<_>>(), METHODS[3..]);
    for beside in &besides {
        assert_eq!(beside.losses.iter().map(|pair| pair.seed).collect::<Vec<_>>(), [1, 2, 3]);
        for pair in &beside.losses {
            let of = |method| runs.iter().find(|run| (run.method, run.seed) == (method, pair.seed)).unwrap();
            let [method, baseline] = [beside.method, beside.baseline].map(of);
            assert_eq!((pair.method, pair.baseline), (method.held_out(), baseline.held_out()));
            let rule = |run: &Trained| run.about.split([' ', ',', ';']).next().unwrap().to_owned();
            assert_eq!(rule(method), rule(baseline), "{}", beside.method);
        }
    }
    assert!(beside::pairs(&runs[3..4], beside::allowed).unwrap_err().to_string().contains("every-step-sgd"));
    let periods = |options: &str| -> Vec<Option<u64>> {
        let run = run(&format!("--local {options}"));
        run.methods[0].plan.iter().flat_map(|plan| &plan.fragments).map(|f| f.timing.period).collect()
    };
    assert_eq!(periods("des-loc"), [16, 48, 96].map(Some));
    assert_eq!(periods("des-loc --kx 10 --kv never"), [Some(10), Some(30), None]);
    assert_eq!(periods("des-loc --half-lives"), [16, 16, 69].map(Some));
    assert_eq!(periods("mt-dao --kx 8"), [8, 24, 48].map(Some));
    assert_eq!(periods("streaming-diloco"), [Some(16); 4]);
}

#[test]
fn workers_read_different_text_and_a_seed_is_one_run() {
    let runs = |seed| train(&format!("--local des-loc --kx 1 --workers 2 --steps 3 --batch 1 --seed {seed}"));
    let bits = |runs: &[Trained]| runs[0].losses.iter().map(|loss| loss.to_bits()).collect::<Vec<_>>();
    let first = bits(&runs(1));
    assert_eq!(bits(&runs(1)), first);
    assert_ne!(bits(&runs(2)), first);
}

#[test]
fn workers_come_and_go_as_the_seed_says() {
    let methods = [
        ("des-loc --kx 2 --ku 4 --kv 6", cases(1, 4)),
        ("diloco --kx 2", cases(1, 2)),
        ("streaming-diloco --kx 4 --parts 2 --delay 1", cases(1, 3)),
        ("post-local-sgd --every-step 6 --kx 2", cases(1, 2)),
    ];
    for (_, (options, seeds)) in methods.into_iter().enumerate().filter(|(i, _)| tried(*i, 1)) {
        for seed in 0..seeds {
            let what = format!("--local {options} --workers 3 --steps 18 --batch 1 --chaos {seed}");
            let runs = train(&what);
            let [run, baseline] = runs.as_slice() else { panic!("{} runs", runs.len()) };
            assert_eq!((run.unplanned, &run.difference, run.differing), (0, &None, 0), "{what}: {run:?}");
            assert_eq!(run.losses.len(), 18);
            // Both trainings have the same number of workers in each step.
            let taken = |run: &Trained| run.workers.iter().map(|life| life.steps.clone()).collect::<Vec<_>>();
            assert_eq!((taken(baseline), &baseline.present), (taken(run), &run.present), "{what}");
            assert!(run.present.iter().any(|count| *count != 3), "{what}: {:?}", run.present);
            assert_eq!(
                (baseline.method, run.method.baseline()),
                (run.method.baseline().unwrap(), Some(baseline.method))
            );
            assert_eq!((baseline.unplanned, &baseline.difference), (0, &None), "{what}");
            assert_eq!(run.outer, options.contains("diloco"), "{what}");

            assert!(run.losses.iter().all(|loss| loss.is_finite()), "{what}");
            for event in &run.schedule.events {
                let life = &run.workers[event.worker];
                match event.loss {
                    None => assert!(life.steps.start >= event.step, "{what}: {life:?}"),
                    Some(loss) => assert_eq!((life.lost, life.steps.end), (Some(loss), event.step), "{what}"),
                }
            }
            let stayed = run.workers.iter().filter(|life| life.lost.is_none());
            assert!(stayed.clone().count() > 0 && stayed.clone().all(|life| life.steps.end == 18), "{what}");
            // An exchange fails only if a worker is lost in it.
            let lost_within = run.schedule.events.iter().filter(|event| event.loss == Some(Loss::DiesWithin));
            assert_eq!(run.failed, lost_within.map(|event| event.step).collect::<Vec<_>>(), "{what}");
            let last = run.epochs.last().unwrap();
            let alive: Vec<u64> =
                (0..).zip(&run.workers).filter(|(_, life)| life.lost.is_none()).map(|(i, _)| i).collect();
            if run.schedule.events.last().is_some_and(|event| event.loss.is_none() || event.step < 14) {
                let mut members = last.members.clone();
                members.sort_unstable();
                assert_eq!(members, alive, "{what}: {run:?}");
            }
        }
    }
}

#[test]
fn bytes_of_every_step_are_those_of_the_workers_that_took_it() {
    let of = |options: &str, workers: usize, steps: usize| {
        train(&format!("--local {options} --workers {workers} --steps {steps} --batch 1"))
    };
    let (two, four) = (of("every-step", 2, 1)[0].sent(), of("every-step", 4, 1)[0].sent());
    let runs = of("doubling --kx 2", 2, 8);
    assert_eq!(runs.len(), 6);
    for run in &runs {
        // Half way is after four steps; the new workers join in the step before, and count from then on.
        assert_eq!(
            (run.present.as_slice(), run.every_step),
            (&[2, 2, 2, 4, 4, 4, 4, 4][..], 3 * two + 5 * four)
        );
        assert_eq!((run.unplanned, &run.difference, run.workers.len()), (0, &None, 4), "{run:?}");
    }
    let periods = |run: &Trained| run.about.clone();
    assert!(periods(&runs[0]).contains("first moments every 2"), "{}", periods(&runs[0]));
    assert!(periods(&runs[1]).contains("first moments never"), "{}", periods(&runs[1]));
    let doubled = doubling::losses(&runs, 2).unwrap();
    assert_eq!(doubled.iter().map(|run| run.seed).collect::<Vec<_>>(), [1, 1, 2, 2, 3, 3]);
    // Both exchange parameters, and losses are measured from then on.
    assert!(doubled.iter().all(|run| run.before.is_finite() && run.after.is_finite() && run.end.is_finite()));
    assert!(doubling::losses(&runs[1..], 2).is_err());
}

#[test]
fn workers_can_read_unlike_text() {
    let letters = |options: &str| {
        let runs = train(&format!("--local local-adam --kx 1 --workers 3 --steps 1 --batch 1 {options}"));
        runs[0].workers.iter().map(|life| life.letters).collect::<Vec<_>>()
    };
    let apart = |letters: &[f64]| letters.windows(2).all(|pair| pair[0] + 0.02 < pair[1]);
    assert!(
        apart(&letters("--unlike")) && !apart(&letters("")),
        "{:?} {:?}",
        letters("--unlike"),
        letters("")
    );
}

#[test]
fn the_same_chaos_is_the_same_run_to_the_bit() {
    let steps = if effort() == Effort::Tenth { 8 } else { 16 };
    let options = format!("--local des-loc --kx 2 --workers 3 --steps {steps} --batch 1 --chaos 5");
    let runs = || train(&options).swap_remove(0);
    let (first, again) = (runs(), runs());
    assert!(first.schedule.events.len() > 1);
    let bits = |run: &Trained| run.losses.iter().map(|loss| loss.to_bits()).collect::<Vec<_>>();
    assert_eq!((bits(&first), first.sent, first.epochs), (bits(&again), again.sent, again.epochs));
}

#[test]
fn what_makes_no_sense_is_refused_with_what_would() {
    for (options, hint) in [
        (
            "--local des-lok",
            "every-step-qhadamw, local-sgd, post-local-sgd, local-adam, des-loc, mt-dao, diloco",
        ),
        (
            "--local des-loc --parts 2",
            "--parts does not apply to --local des-loc, which takes --kx, --ku, --kv",
        ),
        ("--local local-sgd --ku 3", "--ku does not apply to --local local-sgd, which takes --kx, --chaos"),
        (
            "--local every-step --chaos 1",
            "--chaos does not apply to --local every-step, which takes --unlike",
        ),
        ("--local compare --unlike", "--unlike does not apply to --local compare, which takes none"),
        (
            "--local doubling --chaos 1",
            "--chaos does not apply to --local doubling, which takes --kx, --unlike",
        ),
        ("--local doubling --steps 40", "use --steps 64"),
        ("--local doubling --steps 100", "use --steps 112"),
        ("--local compare --kx 8", "--kx does not apply to --local compare"),
        ("--local compare --steps 500", "use a multiple of 192"),
        ("--local compare --workers 3", "has 4 workers"),
        ("--local all --chaos 1", "--chaos does not apply to --local all, which takes --kx"),
        ("--local des-loc --kx 0", "from 1 to 1000000"),
        ("--local des-loc --ku 0", "from 1 to 1000000, or never"),
        ("--local des-loc --kv often", "or never"),
        ("--local des-loc --ku 3,4", "--ku has 2 periods for 1 first moments"),
        ("--local des-loc --half-lives --ku 4", "cannot be used with"),
        ("--local mt-dao --moments 0.9", "for example 0.995:0.7"),
        ("--local mt-dao --moments 1.5:0.5", "beta"),
        ("--local mt-dao --moments 0.9:0.2,0.9:0.2,0.9:0.2,0.9:0.2,0.9:0.1", "1 to 4 pairs"),
        ("--local mt-dao --moments 0.9:0.5,0.99:0.4 --ku 4", "--ku has 1 periods for 2 first moments"),
        ("--local streaming-diloco --kx 8 --delay 8", "use less than 8"),
        ("--local streaming-diloco --alpha 1", "above 0, at most 1"),
        ("--local streaming-diloco --parts 0", "from 1 to 4096"),
        ("--local diloco --outer-lr -1", "0 or above"),
        ("--local diloco --outer-lr nan", "0 or above"),
        ("--local diloco --outer-momentum 2", "momentum"),
        ("--local des-loc --workers 0", "from 1 to 64"),
        ("--local des-loc --workers 1 --chaos 1", "--ranks 2 or more"),
        ("--local des-loc --chaos 1 --steps 40", "40 steps have 2 exchanges"),
        ("--local des-loc --stage 1", "cannot be used with"),
        ("--local des-loc --optimizer sgd", "cannot be used with"),
        ("--local des-loc --mesh dp=2", "cannot be used with"),
        ("--kx 3", "--local"),
        ("--unlike", "--local"),
        ("--chaos 3", "--local"),
    ] {
        let error = refused(options);
        assert!(error.contains(hint), "{options}: {error}");
    }
}

#[test]
fn text_that_is_too_short_for_its_workers_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("short.txt");
    fs::write(&file, "ab".repeat(1000)).unwrap();
    let options = format!("--local des-loc --workers 40 --corpus {}", file.display());
    let error = {
        let words = ["meshstep-bench", "train"].into_iter().chain(options.split_whitespace());
        let Command::Train(asked) = Cli::parse_from(words).command else { panic!("not train") };
        Run::prepare(&asked, Path::new("nowhere")).unwrap_err().to_string()
    };
    assert!(error.contains("fewer --ranks"), "{error}");
}

#[test]
fn one_worker_alone_sends_nothing() {
    let runs = train("--local des-loc --kx 1 --workers 1 --steps 2 --batch 1 --seed 18446744073709551615");
    assert_eq!((runs[0].sent(), runs[0].unplanned), (0, 0));
    assert!(runs[0].held_out().is_finite());
}

#[test]
fn the_report_is_written_whole_and_a_byte_that_was_not_planned_is_a_miss() {
    let dir = tempfile::tempdir().unwrap();
    let options = "--local local-adam --kx 1 --workers 3 --steps 5 --batch 1 --chaos 2";
    let mut printed = Vec::new();
    let prepared = match long() {
        true => Run::prepare(&asked(options).unwrap(), Path::new("nowhere")).unwrap(),
        false => run(options),
    };
    // A few steps learn little.
    let verdict = Run { entropy: 9.0, ..prepared }.report(dir.path(), &mut printed).unwrap();
    let printed = String::from_utf8(printed).unwrap();
    assert_eq!(verdict, Verdict::Holds, "{printed}");
    assert!(printed.contains("== members ==") && printed.contains("6 of 6 bars hold"), "{printed}");
    assert!(printed.contains("== held-out loss compared with the baseline =="), "{printed}");
    let page = fs::read_to_string(dir.path().join("local.html")).unwrap();
    assert!(
        ["Loss against bytes", "Membership over time", "Held-out loss against bytes", "Seconds, simulated"]
            .iter()
            .all(|text| page.contains(text))
    );
    // Before the contents: the verdict, with both losses and the share of the bytes.
    let top = &page[page.find("class=\"answer\"").unwrap()..page.find("<nav").unwrap()];
    for text in ["All 6 limits hold", " of every-step. It sends ", "% of the bytes of gradients"] {
        assert!(top.contains(text), "{text}: {top}");
    }
    assert!(page.contains("There are no measured seconds"));
    let json: serde_json::Value =
        serde_json::from_slice(&fs::read(dir.path().join("local.json")).unwrap()).unwrap();
    assert_eq!((&json["holds"], &json["local"]["chaos"]), (&true.into(), &2.into()));
    assert_eq!(
        (&json["beside"][0]["method"], &json["beside"][0]["baseline"]),
        (&"local-adam".into(), &"every-step".into())
    );
    assert!(json["beside"][0]["losses"][0]["baseline"].is_number());
    assert!(json["trained"][0]["epochs"].as_array().is_some_and(|epochs| epochs.len() > 1));

    let mut run = run("--local local-adam --kx 1 --workers 2 --steps 2 --batch 1")
        .train(&mut Vec::new())
        .unwrap()
        .swap_remove(0);
    let holds = |run: &Trained| report::methods(std::slice::from_ref(run), 3.3).bars.iter().all(Bar::holds);
    assert!(holds(&run));
    run.differing = 1;
    assert!(!holds(&run));
    // Also if only outer parameters are compared.
    (run.compared, run.outer) = (false, true);
    assert!(!holds(&run));
    (run.differing, run.unplanned) = (0, 1);
    assert!(!holds(&run));
}
