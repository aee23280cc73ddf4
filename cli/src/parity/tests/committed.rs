//! Replays every trace in bench/traces in every setting, and checks the table of differences.

use std::path::{Path, PathBuf};

use super::super::report::{Line, Report};
use super::*;
use meshstep_cases::{long, stride};
use meshstep_tensor::DType;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../bench/traces")
}

fn traces() -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder()).unwrap().map(|entry| entry.unwrap().path());
    let is_trace = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "safetensors");
    let mut traces: Vec<PathBuf> = entries.filter(is_trace).collect();
    traces.sort();
    assert!(!traces.is_empty(), "no trace in {}", folder().display());
    traces
}

/// Returns every setting of a trace, grouped by the number of ranks.
fn all(trace: &Trace) -> Vec<(usize, Vec<Asked>)> {
    let given = trace.spec.ranks > 1 && trace.spec.problem.is_none();
    let ranks = if given { trace.spec.ranks..=trace.spec.ranks } else { 1..=4 };
    let of = |ranks: usize| {
        let buckets = [(0, None), (1, Some(16)), (2, Some(16))];
        let flat = buckets.map(|(stage, bucket)| (stage, Some(Partition::Flat), bucket));
        let settings = flat.into_iter().chain([(1, Some(Partition::Whole), Some(64))]);
        let asked =
            |(stage, partition, bucket)| Asked { stage: Some(stage), ranks: Some(ranks), partition, bucket };
        (ranks, settings.map(asked).collect())
    };
    ranks.map(of).collect()
}

#[test]
fn every_trace_is_replayed_in_every_setting() {
    // Short runs test every second trace. The test of the table has the others.
    let skipped = usize::from(!long());
    for (n, path) in traces().into_iter().skip(skipped).step_by(stride(2)).enumerate() {
        let bytes = std::fs::read(&path).unwrap();
        let trace = Trace::parse(&bytes).unwrap_or_else(|why| panic!("{}: {why}", path.display()));
        let matrices = trace.spec.optimizer["name"] == "muon";
        let mut all = all(&trace);
        if !long() {
            // Short runs use one number of ranks and compare two settings; they vary with the trace.
            let (ranks, settings) = all.swap_remove(n % all.len());
            let other = if matrices { settings.len() - 1 } else { 1 + n % (settings.len() - 1) };
            all = vec![(ranks, vec![settings[0], settings[other]])];
        }
        for (ranks, settings) in all {
            let mut first: Option<Difference> = None;
            for asked in settings {
                let what = format!("{}, {asked:?}", path.display());
                let difference = match replay_trace(&trace, asked) {
                    Ok(difference) => difference,
                    Err(Reason::Contradiction { .. })
                        if matrices && asked.partition == Some(Partition::Flat) =>
                    {
                        continue;
                    }
                    Err(why) => panic!("{what}: {why}"),
                };
                assert_eq!(difference.worst, None, "{what}");
                // The division of memory among the same number of ranks does not change a bit.
                assert_eq!(first.get_or_insert(difference.clone()), &difference, "{what}, {ranks} ranks");
            }
            assert!(first.is_some(), "{} on {ranks} ranks was not replayed", path.display());
        }
    }
}

/// The norm is compared even if it is nearly 0.
#[test]
fn the_last_gradient_norm_of_lbfgs_is_compared() {
    let is_lbfgs =
        |path: &PathBuf| path.file_name().is_some_and(|n| n.to_string_lossy().starts_with("lbfgs"));
    for path in traces().into_iter().filter(is_lbfgs).step_by(stride(1)) {
        let mut trace = Trace::parse(&std::fs::read(&path).unwrap()).unwrap();
        let got = super::super::replay::replay(&trace, Asked::default()).unwrap();
        let tolerance = trace.spec.tolerance;
        let last = Key::Norm { t: trace.spec.steps };
        let norm =
            &mut trace.tensors.get_mut(&last).unwrap_or_else(|| panic!("{}", path.display())).values[0];
        *norm += 3.0 * (tolerance.atol + tolerance.rtol * *norm);
        let difference = Difference::new(&trace, &got, tolerance).unwrap();
        let worst = difference.worst.map(|worst| worst.at);
        assert_eq!((difference.outside, worst), (1, Some(last.to_string())), "{}", path.display());
    }
}

#[test]
fn the_table_of_differences_is_fresh() {
    let path = folder().join("DIFFERENCES.md");
    let hint =
        "write it with `cargo xtask parity bench/traces/*.safetensors --table bench/traces/DIFFERENCES.md`";
    let committed =
        std::fs::read_to_string(&path).unwrap_or_else(|why| panic!("{}: {why}; {hint}", path.display()));
    // Short runs test every second trace, which covers each rule.
    let (own, traces, stride) = ((None, None), traces(), stride(2));
    let line = |path: &PathBuf| Line::new(path, super::super::file(path, Asked::default(), own));
    let fresh = Report { files: traces.iter().step_by(stride).map(line).collect() }.table();
    let (committed, fresh) = (rows(&committed), rows(&fresh));
    assert_eq!(committed.len(), traces.len(), "{hint}");
    assert_eq!(fresh.len(), traces.len().div_ceil(stride), "{hint}");
    for (old, new) in committed.iter().step_by(stride).zip(&fresh) {
        assert!(alike(old, new), "{old:?} is now {new:?}; {hint}");
    }
}

fn rows(table: &str) -> Vec<Vec<&str>> {
    let rows = table.lines().filter(|line| line.starts_with("| ") && line.contains(".safetensors"));
    rows.map(|row| row.trim_matches('|').split('|').map(str::trim).collect()).collect()
}

/// Returns true for rows of the same run with differences of the same order of magnitude; last bits may differ between
/// machines.
fn alike(old: &[&str], new: &[&str]) -> bool {
    let ([name, rule, dtype, steps, values, old @ .., tolerance], [n, r, d, s, v, new @ .., t]) = (old, new)
    else {
        return false;
    };
    let epsilon = [(DType::BF16, 2f64.powi(-8)), (DType::F16, 2f64.powi(-11)), (DType::F32, 2f64.powi(-24))]
        .into_iter()
        .find(|(of, _)| dtype.contains(&of.to_string()))
        .map_or(f64::EPSILON, |(_, epsilon)| epsilon);
    let mut figures = old.iter().zip(new).zip([epsilon, epsilon, 1.0]);
    let near = |((old, new), least): ((&&str, &&str), f64)| {
        let [old, new] = [old, new].map(|figure| figure.parse::<f64>().unwrap().max(10.0 * least));
        (0.1..=10.0).contains(&(old / new))
    };
    [name, rule, dtype, steps, values, tolerance] == [n, r, d, s, v, t]
        && old.len() == 3
        && new.len() == 3
        && figures.all(near)
}

#[test]
fn a_row_of_another_magnitude_is_stale() {
    let row = |figures: &str| format!("| a.safetensors | adamw | f32 | 20 | 248 | {figures} | 2e-5, 1e-7 |");
    let fresh = |old: &str, new: &str| alike(&rows(&row(old))[0], &rows(&row(new))[0]);
    assert!(fresh("1.7e-6 | 5.0e-6 | 66", "1.2e-6 | 9.0e-6 | 40"));
    assert!(fresh("0.0e0 | 0.0e0 | 0", "6.0e-8 | 3.0e-7 | 3"));
    assert!(!fresh("1.7e-6 | 5.0e-6 | 66", "2.0e-5 | 5.0e-6 | 66"));
    assert!(!fresh("1.7e-6 | 5.0e-6 | 66", "1.7e-6 | 6.0e-5 | 66"));
    assert!(!fresh("1.7e-6 | 5.0e-6 | 66", "1.7e-6 | 5.0e-6 | 700"));
    let (old, new) = (row("1e-6 | 1e-6 | 1"), row("1e-6 | 1e-6 | 1").replace("248", "249"));
    assert!(!alike(&rows(&old)[0], &rows(&new)[0]));
}
