//! Two hosts of two ranks each: bytes of collectives that cross the link between the hosts.

use std::path::Path;

use anyhow::{Result, bail, ensure};

use super::fleet::{Fleet, Places};
use super::worker::{Answer, Command};
use crate::measure::effort::Effort;
use crate::measure::record::{Cell, Section, Table, Wanted};

const HOSTS: Places = Places { namespaces: 2, each: 2 };
/// Fast, because bytes are counted here.
const BITS: u64 = 1_000_000_000;
/// Largest ratio of the planned bytes to those of a hierarchical ring, both without headers.
const OVER_RING: f64 = 2.0;
/// Largest ratio of the bytes that cross a link to the planned ones: headers and acknowledgements.
const OVER_PLAN: f64 = 1.1;

/// Collectives, with the number of times that a buffer is scattered among the ranks, and gathered from them.
const OPERATIONS: [(&str, [usize; 2]); 3] =
    [("reduce_scatter", [1, 0]), ("all_gather", [0, 1]), ("all_reduce", [1, 1])];

/// Adds the table and its limits.
pub(super) fn add(section: &mut Section, effort: Effort, text: &Path) -> Result<()> {
    let (bytes, times) = (effort.pick(4 << 20, 16 << 20), effort.pick(1, 4));
    let mut fleet = Fleet::start(HOSTS, BITS, text)?;
    let title = format!("{} MiB on 2 hosts of 2 ranks, bytes over the link of a host", bytes >> 20);
    let mut table = Table::new(
        title,
        &["time", "planned", "crossed", "crossed / planned", "hierarchical ring", "planned / ring"],
    );
    for (name, [scatters, gathers]) in OPERATIONS {
        let (seconds, crossed) = measure(&mut fleet, name, bytes, times)?;
        let planned = scatters * scattered(bytes) + gathers * gathered(bytes);
        let ring = (scatters + gathers) * ring(bytes);
        let (over_plan, over_ring) = (crossed / planned as f64, planned as f64 / ring as f64);
        table.row(
            name,
            [
                Cell::Seconds(seconds),
                Cell::Bytes(planned as u64),
                Cell::Bytes(crossed as u64),
                Cell::Number(over_plan),
                Cell::Bytes(ring as u64),
                Cell::Number(over_ring),
            ],
        );
        let what = format!("2 hosts of 2 ranks, {name}: bytes over a link / planned");
        section.bar(what, over_plan, Wanted::AtMost(OVER_PLAN));
        let what = format!("2 hosts of 2 ranks, {name}: planned bytes over a link / a hierarchical ring's");
        section.bar(what, over_ring, Wanted::AtMost(OVER_RING));
    }
    table.note(
        "planned, scattered: every rank sends each rank of the other host that rank's part of the buffer",
    );
    table.note(
        "planned, gathered: every rank sends its own part to one rank of the other host, which passes it on",
    );
    table.note("a hierarchical ring sends each part over the link once, in the buffer's type; headers are in `crossed` alone");
    section.tables.push(table);
    Ok(())
}

/// Returns the seconds of one collective, and the bytes that cross the busiest link in it.
fn measure(fleet: &mut Fleet, operation: &str, bytes: usize, times: usize) -> Result<(f64, f64)> {
    let command = |times| Command::Collective { operation: operation.to_owned(), bytes, times };
    // The first one opens connections.
    fleet.run(&command(1))?;
    let done = fleet.run(&command(times))?;
    let mut longest = 0.0;
    for answer in &done.answers {
        let Answer::Seconds(seconds) = answer else { bail!("a worker answered {answer:?} to a collective") };
        longest = f64::max(longest, *seconds);
    }
    ensure!(done.crossed.len() == HOSTS.namespaces, "{} links", done.crossed.len());
    let most = done.crossed.iter().max().copied().unwrap_or(0);
    Ok((longest, most as f64 / times as f64))
}

/// Returns the bytes from one host to the others if each rank sends every rank there that rank's part.
fn scattered(bytes: usize) -> usize {
    let (ranks, each) = (HOSTS.ranks(), HOSTS.each);
    each * (ranks - each) * bytes / ranks
}

/// Returns the bytes from one host to the others if each rank sends its own part to one rank of each.
fn gathered(bytes: usize) -> usize {
    HOSTS.each * (HOSTS.namespaces - 1) * bytes / HOSTS.ranks()
}

/// Returns the bytes from one host to the next if the hosts form a ring.
fn ring(bytes: usize) -> usize {
    (HOSTS.namespaces - 1) * bytes / HOSTS.namespaces
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_crosses_the_link_for_each_pair_of_ranks_or_once_for_each_host() {
        // Each of 2 ranks sends a quarter to each of 2 ranks, or to one; a ring sends the host's half.
        assert_eq!([scattered, gathered, ring].map(|of| of(1 << 20)), [1 << 20, 1 << 19, 1 << 19]);
    }
}
