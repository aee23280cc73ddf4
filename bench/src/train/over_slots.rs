//! `train --slots`: one curve on several numbers of ranks, beside what an ordinary mean of the same micro-batches gives.

use std::fmt::{self, Write as _};

use anyhow::Result;

use super::Run;
use super::compare::{Finals, first_difference};
use crate::report::StageReport;

/// Results on each number of ranks.
#[derive(Debug)]
pub(crate) struct OverSlots {
    slots: usize,
    curves: Vec<Curve>,
    means: Vec<Curve>,
    /// First difference between two curves over slots.
    pub(crate) difference: Option<String>,
}

/// One training.
#[derive(Debug)]
struct Curve {
    ranks: usize,
    report: StageReport,
    finals: Finals,
}

impl Run {
    /// Trains over slots on each number of ranks and at each stage, and on ordinary means where all ranks can have equally many
    /// micro-batches.
    pub(crate) fn over_slots(&mut self, slots: usize) -> Result<OverSlots> {
        let (mut curves, mut means): (Vec<Curve>, Vec<Curve>) = (Vec::new(), Vec::new());
        let (mut difference, counts) = (None, self.asked.ranks.clone());
        for stage in self.asked.stages() {
            for &ranks in &counts {
                for curve in self.curves(ranks, stage, false)? {
                    let name =
                        |curve: &Curve| format!("{} ranks at stage {}", curve.ranks, curve.report.stage);
                    let first = curves.first().unwrap_or(&curve);
                    let pair = ((&*name(first), &first.finals), (&*name(&curve), &curve.finals));
                    difference = difference.or_else(|| first_difference(pair.0, pair.1));
                    curves.push(curve);
                }
            }
        }
        let stage = self.asked.stages().first().copied().unwrap_or_default();
        for &ranks in counts.iter().filter(|&ranks| slots.is_multiple_of(*ranks)) {
            means.extend(self.curves(ranks, stage, true)?.into_iter().take(1));
        }
        self.asked.ranks = counts;
        Ok(OverSlots { slots, curves, means, difference })
    }

    /// Trains one stage; returns the results of all ranks.
    fn curves(&mut self, ranks: usize, stage: u8, ordinary: bool) -> Result<Vec<Curve>> {
        (self.asked.ranks, self.ordinary) = (vec![ranks], ordinary);
        let (report, finals) = self.stage(stage)?;
        Ok(finals.into_iter().map(|finals| Curve { ranks, report: report.clone(), finals }).collect())
    }
}

/// Returns the share of elements with other bits, and the largest difference of two elements.
fn apart(a: &Finals, b: &Finals) -> (f64, f64) {
    let pairs = a.iter().zip(b).flat_map(|((_, x), (_, y))| x.iter().zip(y));
    let (mut all, mut other, mut most) = (0u64, 0u64, 0f64);
    for (x, y) in pairs {
        all += 1;
        other += u64::from(x.to_bits() != y.to_bits());
        most = most.max(f64::from((x - y).abs()));
    }
    (other as f64 / all.max(1) as f64, most)
}

impl fmt::Display for OverSlots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "over {} slots\nranks  stage  held-out loss   ms a step  parameters", self.slots)?;
        let mut lines = String::new();
        let mut last = None;
        for Curve { ranks, report, .. } in &self.curves {
            if last.replace((*ranks, report.stage)) != Some((*ranks, report.stage)) {
                let StageReport { stage, held_out, ms_per_step, digest, .. } = report;
                writeln!(lines, "{ranks:>5}  {stage:>5}  {held_out:>13.6}  {ms_per_step:>10.1}  {digest}")?;
            }
        }
        write!(f, "{lines}")?;
        if let Some(first) = self.means.first() {
            writeln!(f, "\nordinary means of the same micro-batches, stage {}", first.report.stage)?;
            writeln!(f, "ranks  held-out loss  other than on {} ranks  by at most", first.ranks)?;
            for Curve { ranks, report, finals } in &self.means {
                let (share, most) = apart(&first.finals, finals);
                let share = 100.0 * share;
                writeln!(f, "{ranks:>5}  {:>13.6}  {share:>18.1} %  {most:>10.1e}", report.held_out)?;
            }
        }
        match self.difference {
            Some(_) => Ok(()),
            None => write!(f, "\nall {} ranks' parameters over slots have the same bits", self.curves.len()),
        }
    }
}
