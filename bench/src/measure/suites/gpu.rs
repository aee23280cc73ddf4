//! Cases of `cargo bench -p meshstep-bench-cases --features cuda --bench gpu` on this machine's first GPU, compared with
//! the device's own memory copy and with PyTorch.

use std::path::Path;

use anyhow::{Context as _, Result as Anyhow, anyhow};
use meshstep_bench_cases::gpu::{Copy, Measured, cases, fitting, lbfgs, measure};
use meshstep_bench_cases::samples::Samples;
use meshstep_tensor::Queue;
use meshstep_tensor::cuda::{self, Device, Stream};

use crate::measure::effort::Effort;
use crate::measure::peers::TorchOnGpu;
use crate::measure::record::{Cell, Section, Table, Wanted};
use crate::measure::suites::kernels;

/// Result type of the shared cases.
type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const ABOUT: &str = "Every case's first step is compared with the CPU's, bit for bit; then the device's memory copy and the case take \
                     turns, timed by the device's clock. A step is an exact norm, the decision and the clipped update.";

const COLUMNS: [&str; 8] = [
    "bytes each",
    "case",
    "reference copy",
    "moved",
    "of the reference copy's speed",
    "compared",
    "PyTorch",
    "PyTorch / ours",
];

/// A GPU to measure on.
pub(crate) struct Gpu {
    queue: Queue,
    /// Name of the GPU, and the driver's CUDA version.
    pub(crate) name: String,
    stand_in: bool,
}

impl Gpu {
    /// Opens the first GPU of this machine.
    pub(crate) fn open() -> Anyhow<Self> {
        let driver = cuda::probe().context("--device cuda")?;
        let device = Device::open(0)?;
        let (major, minor) = (driver.version / 1000, driver.version % 1000 / 10);
        let name = format!("{}, CUDA {major}.{minor}", device.name()?);
        Ok(Gpu { queue: Queue::cuda(Stream::new(&device)?), name, stand_in: driver.stand_in })
    }

    /// Measures all cases; also runs PyTorch if `peers` is the folder for it.
    pub(crate) fn run(
        &self,
        effort: Effort,
        peers: Option<&Path>,
        left_out: &mut Vec<String>,
    ) -> Anyhow<Section> {
        let full = if self.stand_in { 12 } else { effort.pick(24, 30) };
        let rounds = effort.pick(5, 51);
        let len = fallible(fitting(full, &self.queue))?;
        let mut theirs = peers.and_then(|folder| match self.torch(folder, len, rounds) {
            Ok(torch) => Some(torch),
            Err(why) => {
                left_out.push(format!("PyTorch on the GPU: {why:#}"));
                None
            }
        });
        let mut found = Vec::new();
        let mut copy = fallible(Copy::new(len, &self.queue))?;
        for case in cases() {
            let measured = measure(&case, &mut copy, (len, rounds), &self.queue);
            let row = Row { name: case.name, bytes_each: case.bytes(), params: len, waits: 0.0 };
            found.push((row, fallible(measured).context(case.name)?));
        }
        let params = lbfgs::params(len);
        let row = Row { name: lbfgs::NAME, bytes_each: lbfgs::BYTES, params, waits: 1.0 };
        let measured = lbfgs::measure(&mut copy, params, rounds, &self.queue);
        found.push((row, fallible(measured).context(lbfgs::NAME)?));
        drop(copy);
        // PyTorch runs again, so that a slow device in the first run does not make PyTorch look slow.
        if let Some(torch) = &mut theirs
            && let Err(why) = torch.run()
        {
            left_out.push(format!("PyTorch's second run: {why:#}"));
        }
        Ok(self.section(&found, theirs.as_ref()))
    }

    fn torch(&self, folder: &Path, len: usize, rounds: usize) -> Anyhow<TorchOnGpu> {
        if self.stand_in {
            return Err(anyhow!("PyTorch cannot run on the stand-in for a driver"));
        }
        let mut torch = TorchOnGpu::prepare(folder, len, rounds)?;
        torch.run()?;
        Ok(torch)
    }

    fn section(&self, found: &[(Row, Measured)], theirs: Option<&TorchOnGpu>) -> Section {
        let mut section = Section::new("kernels: update rules on the GPU", ABOUT);
        let params = found.first().map_or(0, |(row, _)| row.params);
        let mut table = Table::new(format!("{params} parameters on {}", self.name), &COLUMNS);
        let mut shares: Vec<(&str, f64)> = Vec::new();
        for (row, Measured { times, waits, compared, .. }) in found {
            let samples = |seconds: &[f64]| {
                let mut samples = Samples::default();
                seconds.iter().for_each(|&s| samples.push(s));
                samples
            };
            let (case, copy) = (samples(&times.case), samples(&times.copy));
            let bytes = (row.bytes_each * row.params) as f64;
            let reference = copy.times(bytes / times.copied as f64);
            let share = reference.over(&case).median().median;
            shares.push((row.name, share));
            let torch = theirs.and_then(|torch| torch.seconds(row.name));
            let ratio = torch.map(|theirs| theirs / case.median().median);
            table.row(
                row.name,
                [
                    Cell::Count(row.bytes_each as u64),
                    Cell::Time(case.median()),
                    Cell::Time(reference.median()),
                    Cell::Speed(bytes / case.median().median),
                    Cell::Share(share),
                    Cell::Count(*compared as u64),
                    torch.map_or(Cell::None, Cell::Seconds),
                    ratio.map_or(Cell::None, Cell::Number),
                ],
            );
            let what = format!("{}: host waits within a step", row.name);
            section.bar(what, waits.per_step, Wanted::AtMost(row.waits));
            if row.waits == 0.0 && !waits.ahead {
                table.note(format!(
                    "{}: the device had finished before the host enqueued more work",
                    row.name
                ));
            }
        }
        table.note(
            "reference copy: the time in which the device copies as many bytes, in turns with the case",
        );
        table.note("compared: elements with equal bits on the CPU after the first step");
        table.note(format!(
            "{}: with a quarter of the parameters, because it needs many vectors",
            lbfgs::NAME
        ));
        if let Some(torch) = theirs {
            table.note(format!("PyTorch {}: the faster of its runs before and after ours", torch.version()));
        }
        if self.stand_in {
            table.note("on the stand-in for a driver: no time applies to a GPU");
        }
        section.verdict.extend(kernels::spread(&shares, "cases"));
        section.plots.push(kernels::by_share(&shares, "Speed of every case"));
        section.tables.push(table);
        section
    }
}

/// Properties of a case in the table.
struct Row {
    name: &'static str,
    bytes_each: usize,
    params: usize,
    /// Host waits that one step needs.
    waits: f64,
}

fn fallible<T>(result: Result<T>) -> Anyhow<T> {
    result.map_err(|error| anyhow!("{error}"))
}
