//! Sets the number of threads before the first of them starts.
//!
//! candle reads its number of threads only from RAYON_NUM_THREADS. With at least one rank per core, additional threads only
//! make ranks wait for each other: on two cores four ranks train twice as fast with one thread each. A running program
//! cannot change its environment safely, so it restarts itself with the variable set.

use std::env;
use std::num::NonZero;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use meshstep_tensor::Threads;

const VARIABLE: &str = "RAYON_NUM_THREADS";

/// Gives each of `ranks` ranks its part of `threads` threads (`None`: one per core), with a restart of the program if
/// necessary, and starts the threads that updates share. If other processes run the other ranks, updates have only this rank's part.
pub(crate) fn prepare(threads: Option<usize>, ranks: usize, one_rank: bool) -> Result<()> {
    let threads = threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, NonZero::get));
    if env::var_os(VARIABLE).is_none() {
        restart(per_rank(threads, ranks))?;
    }
    let threads = if one_rank { per_rank(threads, ranks) } else { threads };
    rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .build_global()
        .context("starting candle's threads")?;
    let shared = Threads::new(threads).context("starting the threads of updates")?;
    ensure!(Threads::set_shared(shared), "updates have begun before their threads were set");
    Ok(())
}

fn per_rank(threads: usize, ranks: usize) -> usize {
    (threads / ranks).max(1)
}

/// Replaces this process by a new run of this program.
fn restart(threads_per_rank: usize) -> Result<()> {
    let program = env::current_exe().context("finding this program's file")?;
    let mut again = Command::new(&program);
    again.args(env::args_os().skip(1)).env(VARIABLE, threads_per_rank.to_string());
    replace_by(again).with_context(|| format!("starting {} with {VARIABLE} set", program.display()))
}

#[cfg(unix)]
fn replace_by(mut command: Command) -> Result<()> {
    use std::os::unix::process::CommandExt as _;
    Err(command.exec().into())
}

#[cfg(not(unix))]
fn replace_by(mut command: Command) -> Result<()> {
    std::process::exit(command.status()?.code().unwrap_or(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_share_the_threads_and_have_at_least_one_each() {
        assert_eq!([per_rank(2, 4), per_rank(16, 4), per_rank(7, 2), per_rank(1, 1)], [1, 4, 3, 1]);
    }
}
