//! Comparisons of ranks as processes: collectives through shared memory, on registered buffers, and over sockets, small messages, and
//! whole steps.

mod passes;
mod steps;
mod times;

use anyhow::{Context as _, Result};
use meshstep_bench_cases::collectives::{moved, operations};
use meshstep_bench_cases::race::{Contestant, race};
use meshstep_bench_cases::samples::Samples;
use serde_json::{Value, json};

use super::ranks::largest;
use crate::measure::effort::Effort;
use crate::measure::peers::{Group, Mpi, TorchPair};
use crate::measure::rank::Way;
use crate::measure::record::{Section, Table, Wanted};
use passes::ProcessPasses;
use times::{COLUMNS, Times};

/// Operations in a row of one sample of a small message.
const TIMES: usize = 100;
/// Bytes of small messages, with their names.
const SMALL: [(&str, usize); 2] = [("8 B", 8), ("4 KiB", 4 << 10)];

/// Least ratios of an operation: of gloo's and OpenMPI's time to that of shared memory, and of gloo's to that of sockets.
struct Bars {
    gloo: f64,
    mpi: f64,
    sockets: fn(usize) -> f64,
}

/// Largest ratio of sockets to their reference.
const OVER_REFERENCE: f64 = 1.4;

const BARS: [Bars; 3] = [
    Bars { gloo: 6.0, mpi: 3.0, sockets: |_| 1.5 },
    Bars { gloo: 8.0, mpi: 4.0, sockets: |ranks| if ranks == 2 { 3.0 } else { 6.0 } },
    Bars { gloo: 8.0, mpi: 1.0, sockets: |_| 1.5 },
];

/// Runs the comparisons of large and of small messages and steps on 2 and on 4 processes; `mpi` starts OpenMPI's, if it is installed,
/// with the settings that are fastest for a number of messages of some bytes.
pub(super) fn run(
    section: &mut Section,
    effort: Effort,
    [large, small]: [bool; 2],
    torch: &mut TorchPair,
    mut mpi: impl FnMut(usize, (usize, usize)) -> Option<Mpi>,
) -> Result<()> {
    for ranks in [2, 4].into_iter().filter(|_| large || small) {
        let mut contest = Contest { ranks, ways: Ways::start(ranks)?, torch, mpi: None };
        if large {
            contest.mpi = mpi(ranks, (largest(effort), 1));
            contest.collectives(section, effort)?;
        }
        if large && ranks == 4 {
            contest.step(section, effort)?;
        }
        if small {
            contest.mpi = mpi(ranks, (SMALL[0].1, TIMES));
            contest.small_messages(section, effort)?;
            contest.small_steps(section, effort)?;
        }
    }
    Ok(())
}

/// This library's processes, by the way of their bytes, and the references.
struct Ways {
    shared: Group,
    sockets: Group,
    encrypted: Group,
    plain: Group,
    plain_with_sums: Group,
    passes: ProcessPasses,
}

impl Ways {
    fn start(ranks: usize) -> Result<Self> {
        let start = |way| Group::start(way, ranks);
        Ok(Ways {
            shared: start(Way::SharedMemory)?,
            sockets: start(Way::Sockets)?,
            encrypted: start(Way::Encrypted)?,
            plain: start(Way::PlainSockets)?,
            plain_with_sums: start(Way::PlainSocketsWithSums)?,
            passes: ProcessPasses::start(ranks)?,
        })
    }

    fn case(&mut self, case: &Value) -> Result<()> {
        let Ways { shared, sockets, encrypted, plain, plain_with_sums, .. } = self;
        [shared, sockets, encrypted, plain, plain_with_sums]
            .into_iter()
            .try_for_each(|group| group.case(case.clone()))
    }
}

/// All contestants with the same number of processes.
struct Contest<'t> {
    ranks: usize,
    ways: Ways,
    torch: &'t mut TorchPair,
    mpi: Option<Mpi>,
}

impl Contest<'_> {
    /// Prepares `times` collectives of `bytes` bytes everywhere and runs all contestants in turns.
    fn race(&mut self, operation: &str, bytes: usize, (times, rounds): (usize, usize)) -> Result<Times> {
        let case = json!({
            "case": "collective", "operation": operation, "bytes": bytes, "times": times, "ranks": self.ranks
        });
        self.ways.case(&case)?;
        self.ways.passes.prepare(bytes)?;
        self.torch.case(case).context("gloo")?;
        if let Some(mpi) = &mut self.mpi {
            mpi.case(operation, bytes, times)?;
        }
        let Ways { shared, sockets, encrypted, plain, plain_with_sums, passes } = &mut self.ways;
        let torch = &mut *self.torch;
        let mut contestants: Vec<Contestant<'_, ()>> = vec![
            Box::new(|()| shared.run()),
            Box::new(|()| sockets.run()),
            Box::new(|()| encrypted.run()),
            Box::new(|()| plain.run()),
            Box::new(|()| plain_with_sums.run()),
            Box::new(|()| torch.run()),
            Box::new(|()| passes.run()),
        ];
        if let Some(mpi) = &mut self.mpi {
            contestants.push(Box::new(|()| mpi.run()));
        }
        let mut samples = race(&mut (), rounds, contestants)?.into_iter();
        let mut next = || samples.next().unwrap_or_default();
        let [shared, sockets, encrypted, plain, plain_with_sums, _, _] = std::array::from_fn(|_| next());
        let (gloo, mpi) = (self.torch.times(), samples.next());
        Ok(Times { shared, sockets, encrypted, plain, plain_with_sums, gloo, mpi }.over(times))
    }

    fn collectives(&mut self, section: &mut Section, effort: Effort) -> Result<()> {
        let bytes = largest(effort);
        let mut table = Table::new(self.title("collectives"), COLUMNS);
        let mut references = passes::table(&self.title("memory references of the collectives"));
        for (i, ((name, ..), bars)) in operations(self.ranks).into_iter().zip(BARS).enumerate() {
            let times = self.race(name, bytes, (1, effort.pick(3, 11)))?;
            table.row(name, times.cells());
            let passes = self.ways.passes.times();
            references.row(name, passes::cells(&passes, moved(self.ranks, i, bytes), &times.shared));
            self.judge(section, name, &times, &bars);
        }
        section.tables.extend([table, references]);
        Ok(())
    }

    fn small_messages(&mut self, section: &mut Section, effort: Effort) -> Result<()> {
        let title = format!("small messages, each the mean of {TIMES} in a row,");
        let mut table = Table::new(self.title(&title), COLUMNS);
        for (size, bytes) in SMALL {
            let times = self.race("all_reduce", bytes, (TIMES, effort.pick(3, 11)))?;
            let what = format!("all_reduce, {size}");
            table.row(&what, times.cells());
            let gloo = times.gloo.better().1;
            for (name, ours) in [("shared memory", &times.shared), ("sockets", &times.sockets)] {
                let what = format!("{what}, {} processes: {name} / gloo", self.ranks);
                section.bar(what, ours.over(gloo).median().median, Wanted::AtMost(1.0));
            }
        }
        section.tables.push(table);
        Ok(())
    }

    fn title(&self, what: &str) -> String {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let crowded = if self.ranks > cores { ", more than cores" } else { "" };
        let settings =
            self.mpi.as_ref().map_or(String::new(), |mpi| format!("; OpenMPI with {}", mpi.settings()));
        format!("{what} of {} processes{crowded}{settings}", self.ranks)
    }

    fn judge(&self, section: &mut Section, name: &str, times: &Times, bars: &Bars) {
        let what = format!("{name}, {} processes", self.ranks);
        let mut bar = |about: &str, above: &Samples, below: &Samples, wanted| {
            section.bar(format!("{what}: {about}"), above.over(below).median().median, wanted);
        };
        let gloo = times.gloo.better().1;
        if self.ranks == 4 {
            bar("gloo / shared memory", gloo, &times.shared, Wanted::AtLeast(bars.gloo));
            if let Some(mpi) = &times.mpi {
                bar("OpenMPI / shared memory", mpi, &times.shared, Wanted::AtLeast(bars.mpi));
            }
        }
        bar("gloo / sockets", gloo, &times.sockets, Wanted::AtLeast((bars.sockets)(self.ranks)));
        let most = Wanted::AtMost(OVER_REFERENCE);
        bar("sockets / socket reference", &times.sockets, &times.plain, most);
        bar("sockets / socket reference with sums", &times.sockets, &times.plain_with_sums, most);
    }
}
