//! Collectives on loopback ranks compared with threads that copy.

use anyhow::Result;
use meshstep_bench_cases::collectives::{COPY, Rank, TURNS, operations, share_of_copy};
use meshstep_bench_cases::copies::PASSES;
use meshstep_bench_cases::ranks::together;
use meshstep_bench_cases::samples::{Median, Samples};
use meshstep_tensor::DType;

use crate::measure::effort::Effort;
use crate::measure::record::{Cell, Plot, Scale, Section, Shape, Table, Wanted};
use crate::measure::show::size;

const ABOUT: &str = "Ranks are threads of this process. The reference copy is the time for the minimum number of bytes that all ranks \
                     together must read and write, at the speed of as many copying threads, in turns with the collectives. The other \
                     references are the speeds of as many threads that only read, only write, and read and write in place. All vectors \
                     are allocated in one way.";

/// Maximum ratio to the reference copy.
const OVER_COPY: f64 = 1.3;

/// Returns the times of all three operations on `ranks` ranks with `bytes` bytes each, of the copy, and of the passes.
pub(super) fn measure(ranks: usize, bytes: usize, rounds: usize) -> Result<Vec<Samples>> {
    together(ranks, (TURNS, rounds), |comm| Rank::new(comm, bytes / DType::F32.size()))
}

/// Returns the bytes of the longest vectors of a quick run.
#[cfg(not(test))]
fn longest_of_quick() -> usize {
    4 << 20
}

/// In tests the vectors are shorter, except in long runs.
#[cfg(test)]
fn longest_of_quick() -> usize {
    match meshstep_cases::effort() {
        meshstep_cases::Effort::Tenth => 64 << 10,
        meshstep_cases::Effort::Normal => 1 << 20,
        meshstep_cases::Effort::Long => 4 << 20,
    }
}

pub(crate) fn run(effort: Effort) -> Result<Section> {
    let mut section = Section::new("comm: collectives", ABOUT);
    let largest = effort.pick(longest_of_quick(), 64 << 20);
    let sizes: Vec<usize> = [64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
        .into_iter()
        .filter(|&size| size <= largest)
        .collect();
    for ranks in [2, 4] {
        let (mut curves, mut slowest) = (Vec::new(), Vec::new());
        let title = format!("{ranks} ranks");
        let mut table =
            Table::new(title, &["each", "time", "reference copy", "moved", "over the reference copy"]);
        for (place, &bytes) in sizes.iter().enumerate() {
            let samples = measure(ranks, bytes, effort.pick(5, 15))?;
            for (i, (name, _, buffers)) in operations(ranks).into_iter().enumerate() {
                let moved = (buffers * bytes) as f64;
                let copy = samples[COPY].times(share_of_copy(ranks, i));
                let over = samples[i].over(&copy).median();
                let time = samples[i].median();
                table.row(
                    format!("{name}, {}", size(bytes as f64)),
                    [
                        Cell::Bytes(bytes as u64),
                        Cell::Time(time),
                        Cell::Time(copy.median()),
                        Cell::Speed(moved / time.median),
                        Cell::Ratio(over),
                    ],
                );
                if bytes == largest && !effort.quick {
                    let what =
                        format!("{name}, {ranks} ranks, {}: ratio to the reference copy", size(bytes as f64));
                    section.bar(what, over.median, Wanted::AtMost(OVER_COPY));
                }
                point(&mut curves, name, (place as f64, over.median));
                if bytes == largest {
                    let Median { low, high, .. } = over;
                    slowest.push(format!("{name} {:.2} ({low:.2} to {high:.2})", over.median));
                }
            }
            // In the cache a pass takes as long as the ranks' start.
            let large = PASSES.into_iter().zip(&samples[COPY + 1..]).filter(|_| bytes >= 1 << 20);
            for (pass, samples) in large {
                let (name, time) =
                    (format!("reference: {}, {}", pass.name(), size(bytes as f64)), samples.median());
                let speed = pass.moved(ranks * bytes) / time.median;
                table.row(
                    name,
                    [Cell::Bytes(bytes as u64), Cell::Time(time), Cell::None, Cell::Speed(speed), Cell::None],
                );
            }
        }
        section.tables.push(table);
        section.verdict.push(format!(
            "{ranks} ranks with {} each: time divided by the reference copy's, with its interval: {}.",
            size(largest as f64),
            slowest.join(", ")
        ));
        curves.push((
            "the reference copy".to_owned(),
            (0..sizes.len()).map(|place| (place as f64, 1.0)).collect(),
        ));
        let x = Scale::named("bytes on each rank", sizes.iter().map(|bytes| size(*bytes as f64)));
        let y = Scale::amount("time / reference copy's time");
        let caption = "Less is better; 1 is the time in which as many threads copy the bytes that must move. A collective can beat it.";
        let title = format!("Collectives on {ranks} loopback ranks");
        section.plots.push(Plot::new(title, caption, Shape::Curves { x, y, curves }));
    }
    Ok(section)
}

/// Adds a point to the curve with this name.
pub(super) fn point(curves: &mut Vec<(String, Vec<(f64, f64)>)>, name: &str, point: (f64, f64)) {
    match curves.iter_mut().find(|(own, _)| own == name) {
        Some((_, points)) => points.push(point),
        None => curves.push((name.to_owned(), vec![point])),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_operation_and_reference_is_timed() {
        let samples = measure(2, 4096, 2).unwrap();
        assert_eq!(samples.len(), 7);
        assert!(samples.iter().all(|samples| samples.median().rounds == 2 && samples.median().low > 0.0));
    }
}
