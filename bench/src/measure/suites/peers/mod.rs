//! Comparisons with other systems: the same sizes, as many threads, in turns.

mod alone;
mod one_rank;
mod processes;
mod ranks;
mod rows;

use std::path::Path;

use anyhow::Result;

use crate::measure::effort::Effort;
use crate::measure::peers::{self, Mpi};
use crate::measure::record::Section;
use ranks::{RANKS, largest};

const ABOUT: &str = "Ratio of the other system's time to ours: medians of ratios, round by round, in turns. Updates have as many \
                     threads on both sides. Ranks of PyTorch and of OpenMPI are processes of one thread each; ours are processes \
                     in the tables that say so, and otherwise threads of one process, and this difference is part of the \
                     comparison. The socket floor is a plain program that moves the same bytes over as many \
                     sockets; the floor with sums also checks every byte and adds the contributions, and writes no \
                     sum. The reference copy moves the bytes that ours must move and does nothing else, in turns with \
                     both: theirs / copy is the ratio that a program without other work would reach.";

/// Runs the comparisons with the available systems, and lists the reasons for missing ones.
pub(crate) fn run(effort: Effort, folder: &Path, left_out: &mut Vec<String>) -> Result<Section> {
    let mut section = Section::new("peers", ABOUT);
    alone::candle(&mut section, effort)?;
    match peers::torch(&folder.join("venv")) {
        Ok(mut torch) => {
            section.about += &format!(" PyTorch {}.", torch.version);
            alone::updates(&mut section, effort, &mut torch)?;
            one_rank::small_updates(&mut section, effort, &mut torch)?;
            one_rank::steps(&mut section, effort, &mut torch)?;
            alone::many(&mut section, effort, &mut torch)?;
            alone::lbfgs(&mut section, effort, &mut torch)?;
            ranks::steps(&mut section, effort, &mut torch)?;
            ranks::gloo(&mut section, effort, &mut torch)?;
            let mut mpi = |ranks| Mpi::best(folder, ranks, largest(effort)).ok();
            processes::run(&mut section, effort, &mut torch, &mut mpi)?;
        }
        Err(why) => left_out.push(format!("PyTorch: {why:#}")),
    }
    match Mpi::best(folder, RANKS, largest(effort)) {
        Ok(mut mpi) => ranks::openmpi(&mut section, effort, &mut mpi)?,
        Err(why) => left_out.push(format!("OpenMPI: {why:#}")),
    }
    if effort.quick {
        section.bars.clear();
    }
    Ok(section)
}
