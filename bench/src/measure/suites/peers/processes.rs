//! Comparisons of ranks as processes: collectives through shared memory, on registered buffers, and over sockets, and a whole step.

use anyhow::{Context as _, Result};
use meshstep_bench_cases::collectives::operations;
use meshstep_bench_cases::peers::Torch;
use meshstep_bench_cases::race::{Contestant, race};
use meshstep_bench_cases::samples::Samples;
use serde_json::{Value, json};

use super::ranks::largest;
use crate::measure::effort::Effort;
use crate::measure::peers::{Group, Mpi};
use crate::measure::rank::Way;
use crate::measure::record::{Cell, Section, Table, Wanted};

/// Operations in a row of one latency sample.
const TIMES: usize = 200;
/// Bytes of the latency's buffer.
const SMALL: usize = 4 << 10;

/// Least ratios of an operation: of gloo's and OpenMPI's time to that of shared memory, and of gloo's to that of sockets.
struct Bars {
    gloo: f64,
    mpi: f64,
    sockets: fn(usize) -> f64,
}

/// Largest ratio of sockets to their floor.
const OVER_FLOOR: f64 = 1.4;
/// Least ratio of gloo's step to that of shared memory.
const STEP: f64 = 6.0;

const BARS: [Bars; 3] = [
    Bars { gloo: 6.0, mpi: 3.0, sockets: |_| 1.5 },
    Bars { gloo: 8.0, mpi: 4.0, sockets: |ranks| if ranks == 2 { 3.0 } else { 6.0 } },
    Bars { gloo: 8.0, mpi: 1.0, sockets: |_| 1.5 },
];

/// Runs the comparisons on 2 and on 4 processes; `mpi` starts OpenMPI's, if it is installed.
pub(super) fn run(
    section: &mut Section,
    effort: Effort,
    torch: &mut Torch,
    mut mpi: impl FnMut(usize) -> Option<Mpi>,
) -> Result<()> {
    for ranks in [2, 4] {
        let mut contest = Contest { ranks, ways: Ways::start(ranks)?, torch, mpi: mpi(ranks) };
        contest.collectives(section, effort)?;
        contest.latency(section, effort)?;
        if ranks == 4 {
            contest.step(section, effort)?;
        }
    }
    Ok(())
}

/// This library's processes, by the way of their bytes, and the floor.
struct Ways {
    shared: Group,
    sockets: Group,
    encrypted: Group,
    floor: Group,
    floor_with_sums: Group,
}

impl Ways {
    fn start(ranks: usize) -> Result<Self> {
        let start = |way| Group::start(way, ranks);
        Ok(Ways {
            shared: start(Way::SharedMemory)?,
            sockets: start(Way::Sockets)?,
            encrypted: start(Way::Encrypted)?,
            floor: start(Way::Floor)?,
            floor_with_sums: start(Way::FloorWithSums)?,
        })
    }

    fn case(&mut self, case: &Value) -> Result<()> {
        let Ways { shared, sockets, encrypted, floor, floor_with_sums } = self;
        [shared, sockets, encrypted, floor, floor_with_sums]
            .into_iter()
            .try_for_each(|group| group.case(case.clone()))
    }
}

/// All contestants with the same number of processes.
struct Contest<'t> {
    ranks: usize,
    ways: Ways,
    torch: &'t mut Torch,
    mpi: Option<Mpi>,
}

/// Samples of one case.
struct Times {
    shared: Samples,
    sockets: Samples,
    encrypted: Samples,
    floor: Samples,
    floor_with_sums: Samples,
    gloo: Samples,
    mpi: Option<Samples>,
}

impl Contest<'_> {
    /// Prepares a case everywhere and runs all contestants in turns.
    fn race(&mut self, case: Value, rounds: usize) -> Result<Times> {
        self.ways.case(&case)?;
        self.torch.case(case).context("gloo")?;
        let Ways { shared, sockets, encrypted, floor, floor_with_sums } = &mut self.ways;
        let torch = &mut *self.torch;
        let mut contestants: Vec<Contestant<'_, ()>> = vec![
            Box::new(|()| shared.run()),
            Box::new(|()| sockets.run()),
            Box::new(|()| encrypted.run()),
            Box::new(|()| floor.run()),
            Box::new(|()| floor_with_sums.run()),
            Box::new(|()| torch.run()),
        ];
        if let Some(mpi) = &mut self.mpi {
            contestants.push(Box::new(|()| mpi.run()));
        }
        let mut samples = race(&mut (), rounds, contestants)?.into_iter();
        let mut next = || samples.next().unwrap_or_default();
        let [shared, sockets, encrypted, floor, floor_with_sums, gloo] = std::array::from_fn(|_| next());
        Ok(Times { shared, sockets, encrypted, floor, floor_with_sums, gloo, mpi: samples.next() })
    }

    fn collectives(&mut self, section: &mut Section, effort: Effort) -> Result<()> {
        let bytes = largest(effort);
        let mut table = Table::new(self.title("collectives"), COLUMNS);
        for ((name, ..), bars) in operations(self.ranks).into_iter().zip(BARS) {
            if let Some(mpi) = &mut self.mpi {
                mpi.case(name, bytes)?;
            }
            let case = self.case(name, bytes, 1);
            let times = self.race(case, effort.pick(3, 11))?;
            table.row(name, times.cells());
            self.judge(section, name, &times, &bars);
        }
        section.tables.push(table);
        Ok(())
    }

    fn latency(&mut self, section: &mut Section, effort: Effort) -> Result<()> {
        let mut table = Table::new(self.title("latency"), COLUMNS);
        let case = self.case("all_reduce", SMALL, TIMES);
        // OpenMPI's program runs one operation a turn.
        let mpi = self.mpi.take();
        let times = self.race(case, effort.pick(3, 11))?.over(TIMES);
        self.mpi = mpi;
        table.row("all_reduce, 4 KiB", times.cells());
        let what = format!("all_reduce, 4 KiB, {} processes: shared memory / gloo", self.ranks);
        section.bar(what, times.shared.over(&times.gloo).median().median, Wanted::AtMost(1.0));
        let what = format!("all_reduce, 4 KiB, {} processes: sockets / gloo", self.ranks);
        section.bar(what, times.sockets.over(&times.gloo).median().median, Wanted::AtMost(1.0));
        section.tables.push(table);
        Ok(())
    }

    /// Compares a whole clipped step with 16 tensors of 1 Mi elements.
    fn step(&mut self, section: &mut Section, effort: Effort) -> Result<()> {
        let (count, length) = (16, effort.pick(1 << 14, 1 << 20));
        let case = json!({ "case": "ddp", "count": count, "length": length, "ranks": self.ranks });
        self.ways.shared.case(case.clone())?;
        self.torch.case(case)?;
        let (shared, torch) = (&mut self.ways.shared, &mut *self.torch);
        let contestants: Vec<Contestant<'_, ()>> =
            vec![Box::new(|()| shared.run()), Box::new(|()| torch.run())];
        let samples = race(&mut (), effort.pick(3, 11), contestants)?;
        let ratio = samples[1].over(&samples[0]).median();
        let mut table = Table::new(
            format!("a clipped step of {} processes, {} parameters", self.ranks, count * length),
            &["shared memory, stage 1", "all_reduce, clip, fused AdamW over gloo", "theirs / ours"],
        );
        let times = samples.iter().map(|samples| Cell::Time(samples.median()));
        table.row("step", times.chain([Cell::Ratio(ratio)]));
        section.bar("a step through shared memory: gloo's / ours", ratio.median, Wanted::AtLeast(STEP));
        section.tables.push(table);
        Ok(())
    }

    fn case(&self, operation: &str, bytes: usize, times: usize) -> Value {
        json!({
            "case": "collective", "operation": operation, "bytes": bytes, "times": times, "ranks": self.ranks
        })
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
        if self.ranks == 4 {
            bar("gloo / shared memory", &times.gloo, &times.shared, Wanted::AtLeast(bars.gloo));
            if let Some(mpi) = &times.mpi {
                bar("OpenMPI / shared memory", mpi, &times.shared, Wanted::AtLeast(bars.mpi));
            }
        }
        bar("gloo / sockets", &times.gloo, &times.sockets, Wanted::AtLeast((bars.sockets)(self.ranks)));
        bar("sockets / floor", &times.sockets, &times.floor, Wanted::AtMost(OVER_FLOOR));
        bar("sockets / floor with sums", &times.sockets, &times.floor_with_sums, Wanted::AtMost(OVER_FLOOR));
    }
}

const COLUMNS: &[&str] = &[
    "shared memory",
    "sockets",
    "encrypted",
    "floor",
    "floor with sums",
    "gloo",
    "OpenMPI",
    "gloo / shared memory",
    "OpenMPI / shared memory",
    "gloo / sockets",
    "gloo / floor",
    "sockets / floor",
    "sockets / floor with sums",
    "encrypted / sockets",
];

impl Times {
    /// Divides all times by a number of operations.
    fn over(self, times: usize) -> Self {
        let each = |samples: Samples| samples.times(1.0 / times as f64);
        Times {
            shared: each(self.shared),
            sockets: each(self.sockets),
            encrypted: each(self.encrypted),
            floor: each(self.floor),
            floor_with_sums: each(self.floor_with_sums),
            gloo: each(self.gloo),
            mpi: self.mpi.map(each),
        }
    }

    fn cells(&self) -> Vec<Cell> {
        let Times { shared, sockets, encrypted, floor, floor_with_sums, gloo, mpi } = self;
        let time = |samples: &Samples| Cell::Time(samples.median());
        let ratio = |above: &Samples, below: &Samples| Cell::Ratio(above.over(below).median());
        let missing = || Cell::Text("not measured".to_owned());
        let mut cells: Vec<Cell> =
            [shared, sockets, encrypted, floor, floor_with_sums, gloo].map(time).into();
        cells.push(mpi.as_ref().map_or_else(missing, time));
        cells.push(ratio(gloo, shared));
        cells.push(mpi.as_ref().map_or_else(missing, |mpi| ratio(mpi, shared)));
        cells.extend([ratio(gloo, sockets), ratio(gloo, floor), ratio(sockets, floor)]);
        cells.extend([ratio(sockets, floor_with_sums), ratio(encrypted, sockets)]);
        cells
    }
}
