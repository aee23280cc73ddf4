//! A step of Muon beside PyTorch's orthogonalisation in the same type.

use anyhow::Result;
use meshstep_bench_cases::race::{Contestant, race};
use meshstep_bench_cases::samples::Samples;
use meshstep_bench_cases::update::muon::MuonSteps;
use meshstep_tensor::Threads;
use serde_json::json;
use std::time::Instant;

use crate::measure::effort::Effort;
use crate::measure::peers::TorchPair;
use crate::measure::record::{Cell, Section, Table, Wanted};

/// Least ratio of PyTorch's time to ours.
const LEAST: f64 = 0.85;

pub(super) fn steps(section: &mut Section, effort: Effort, torch: &mut TorchPair) -> Result<()> {
    let (rows, cols) = effort.pick((64, 256), (1024, 4096));
    let mut table = Table::new(
        format!("Muon on a matrix of {rows} x {cols} in f32"),
        &["ours", "theirs", "theirs / ours", "wanted", "torch's malloc"],
    );
    let all = Threads::shared().count();
    let counts = if all == 1 { vec![1] } else { vec![1, all] };
    for threads in counts {
        let case = json!({ "case": "newton-schulz", "rows": rows, "columns": cols, "threads": threads });
        torch.case(case)?;
        let mut own = MuonSteps::new((rows, cols), &Threads::new(threads)?);
        let ours: Contestant<'_, MuonSteps> = Box::new(|own| {
            let start = Instant::now();
            own.step()?;
            Ok(start.elapsed().as_secs_f64())
        });
        let theirs: Contestant<'_, MuonSteps> = Box::new(|_| torch.run());
        let samples = race(&mut own, effort.pick(3, 11), vec![ours, theirs])?;
        let [ours, _] = &samples[..] else { continue };
        let times = torch.times();
        row(section, &mut table, threads, (ours, times.better()));
    }
    table.note(
        "ours is a whole step: momentum, five iterations of Newton and Schulz in an order of their own, the parameters; theirs is \
         the orthogonalisation of torch.optim.Muon alone, in f32 instead of bf16",
    );
    section.tables.push(table);
    Ok(())
}

fn row(
    section: &mut Section,
    table: &mut Table,
    threads: usize,
    (ours, theirs): (&Samples, (&str, &Samples)),
) {
    let (malloc, theirs) = theirs;
    let ratio = theirs.over(ours).median();
    let found = ratio.median;
    let times = [ours, theirs].map(|samples| Cell::Time(samples.median()));
    let rest = [Cell::Ratio(ratio), Cell::Number(LEAST), Cell::Text(malloc.to_owned())];
    let what = if threads == 1 { "1 thread".to_owned() } else { format!("{threads} threads") };
    section.bar(format!("Muon, {what}: theirs / ours"), found, Wanted::AtLeast(LEAST));
    table.row(what, times.into_iter().chain(rest));
}
