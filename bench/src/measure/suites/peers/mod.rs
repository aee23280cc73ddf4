//! Comparisons with other systems: the same sizes, as many threads, in turns.

mod alone;
mod muon;
mod one_rank;
mod processes;
mod ranks;
mod rows;

use std::path::Path;

use anyhow::Result;

use crate::args::bench::PeerPart;
use crate::measure::effort::Effort;
use crate::measure::peers::{self, Mpi, TorchPair};
use crate::measure::record::{Bar, Section};
use ranks::{RANKS, largest};

const ABOUT: &str = "Ratio of the other system's time to ours: medians of ratios, round by round, in turns. Updates have as many \
                     threads on both sides. Ranks of PyTorch and of OpenMPI are processes of one thread each; ours are processes \
                     in the tables that say so, and otherwise threads of one process, and this difference is part of the \
                     comparison. A reference is not a bound: it moves the bytes that ours must move and does little else, in \
                     turns with both, and a case can be faster. The socket reference is a plain program that moves the same \
                     bytes over as many sockets; the one with sums also checks every byte and adds the contributions, and writes \
                     no sum. The reference copy moves the bytes of our side at the speed of a loop that reads and writes; reading, \
                     writing, and both in place are measured apart, on memory that is allocated as the work's, and price the bytes \
                     by their kind. PyTorch runs twice, as it is and with malloc keeping freed memory, and the faster one is the \
                     peer. Times of gloo end when the last rank's call returns, and ours in processes after a closing barrier: \
                     gloo's closing barrier is no part of its operation, and its time is printed beside. Bars of work that memory \
                     limits are shares of the ratio that the reference copy reaches in the same run.";

/// Runs the comparisons with the available systems, and lists the reasons for missing ones. Without `parts` it runs all.
pub(crate) fn run(
    effort: Effort,
    folder: &Path,
    parts: &[PeerPart],
    left_out: &mut Vec<String>,
) -> Result<Section> {
    let wants = |part: PeerPart| parts.is_empty() || parts.contains(&part);
    let mut section = Section::new("peers: other systems", ABOUT);
    if wants(PeerPart::Updates) {
        alone::candle(&mut section, effort)?;
    }
    match peers::torch(&folder.join("venv")) {
        Ok(mut torch) => {
            section.about +=
                &format!(" PyTorch {}; malloc keeps memory by {}.", torch.version(), torch.settings);
            with_torch(&mut section, effort, wants, &mut torch)?;
            let sizes = [PeerPart::Processes, PeerPart::SmallMessages].map(wants);
            let mut mpi = |ranks, message| Mpi::best(folder, ranks, message).ok();
            processes::run(&mut section, effort, sizes, &mut torch, &mut mpi)?;
        }
        Err(why) => left_out.push(format!("PyTorch: {why:#}")),
    }
    if wants(PeerPart::Ranks) {
        match Mpi::best(folder, RANKS, (largest(effort), 1)) {
            Ok(mut mpi) => ranks::openmpi(&mut section, effort, &mut mpi)?,
            Err(why) => left_out.push(format!("OpenMPI: {why:#}")),
        }
    }
    section.verdict.extend(compared(&section.bars));
    if effort.quick {
        section.bars.clear();
    }
    Ok(section)
}

/// Returns a sentence on all ratios of the other system's time to ours, if there are any.
fn compared(bars: &[Bar]) -> Option<String> {
    let ratios: Vec<f64> =
        bars.iter().filter(|bar| bar.what.contains("theirs / ours")).map(|bar| bar.found).collect();
    let (least, most) = (ratios.iter().copied().reduce(f64::min)?, ratios.iter().copied().reduce(f64::max)?);
    let faster = ratios.iter().filter(|ratio| **ratio > 1.0).count();
    Some(format!(
        "This library was faster in {faster} of {} comparisons with other systems; their time divided by ours is {least:.2} to {most:.2}.",
        ratios.len()
    ))
}

/// Runs the comparisons with PyTorch in which this library's ranks are threads.
fn with_torch(
    section: &mut Section,
    effort: Effort,
    wants: impl Fn(PeerPart) -> bool,
    torch: &mut TorchPair,
) -> Result<()> {
    if wants(PeerPart::Updates) {
        alone::updates(section, effort, torch)?;
    }
    if wants(PeerPart::OneRank) {
        one_rank::small_updates(section, effort, torch)?;
        one_rank::steps(section, effort, torch)?;
        alone::many(section, effort, torch)?;
    }
    if wants(PeerPart::Lbfgs) {
        alone::lbfgs(section, effort, torch)?;
    }
    if wants(PeerPart::Muon) {
        muon::steps(section, effort, torch)?;
    }
    if wants(PeerPart::Ranks) {
        ranks::steps(section, effort, torch)?;
        ranks::gloo(section, effort, torch)?;
    }
    Ok(())
}
