//! The table, and the file for bench/records.

use meshstep_bench_cases::gpu::{Measured, Result};
use meshstep_tensor::cuda::{Device, Driver};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// What was measured on, and how.
pub(crate) struct Setup {
    device: String,
    cuda: String,
    stand_in: bool,
    params: usize,
    rounds: usize,
    date: String,
}

impl Setup {
    pub(crate) fn new(device: &Device, driver: &Driver, params: usize, rounds: usize) -> Result<Self> {
        let (major, minor) = (driver.version / 1000, driver.version % 1000 / 10);
        let seconds = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
        Ok(Setup {
            device: device.name()?,
            cuda: format!("{major}.{minor}"),
            stand_in: driver.stand_in,
            params,
            rounds,
            date: date(seconds / 86_400),
        })
    }

    pub(crate) fn print(&self) {
        let Setup { device, cuda, params, rounds, .. } = self;
        let driver = kernel_module().unwrap_or_else(|| "unknown".to_owned());
        println!(
            "{device}, driver {driver} with CUDA {cuda}; {params} parameters, medians of {rounds} rounds"
        );
        if self.stand_in {
            println!("On the stand-in for a driver: no figure here says anything about a GPU.");
        }
        println!(
            "{:40} {:>6} {:>9} {:>9} {:>8} {:>6} {:>6}",
            "case", "B/elem", "ms", "floor ms", "GB/s", "share", "waits"
        );
    }
}

/// What the table says of a case besides what was measured.
pub(crate) struct Row {
    pub(crate) name: &'static str,
    /// Bytes that must be read and written for each of so many parameters.
    pub(crate) bytes_each: usize,
    pub(crate) params: usize,
    /// Waits of the host that one step needs.
    pub(crate) waits: f64,
}

pub(crate) struct Report {
    setup: Setup,
    cases: Vec<Value>,
    /// Cases for which the host waited more often than it needs.
    waited: Vec<&'static str>,
}

impl Report {
    pub(crate) fn new(setup: Setup) -> Self {
        Report { setup, cases: Vec::new(), waited: Vec::new() }
    }

    pub(crate) fn add(&mut self, row: &Row, measured: &Measured) {
        let (&Row { name, bytes_each, params, .. }, Measured { compared, waits, times }) = (row, measured);
        let (took, copy) = (median(&times.case), median(&times.copy));
        let bytes = (bytes_each * params) as f64;
        let floor = copy * bytes / times.copied as f64;
        let (speed, share) = (bytes / took / 1e9, floor / took);
        println!(
            "{name:40} {bytes_each:6} {:9.3} {:9.3} {speed:8.1} {:5.1}% {:6}",
            took * 1e3,
            floor * 1e3,
            share * 100.0,
            waits.per_step
        );
        if waits.per_step > row.waits {
            self.waited.push(name);
        }
        self.cases.push(json!({
            "name": name,
            "params": params,
            "bytes_per_element": bytes_each,
            "ms": took * 1e3,
            "floor_ms": floor * 1e3,
            "share_of_floor": share,
            "gb_per_s": speed,
            "copy_gb_per_s": times.copied as f64 / copy / 1e9,
            "rounds": times.case.len(),
            "compared_with_cpu": compared,
            "host_waits_per_step": waits.per_step,
            "host_was_ahead": waits.ahead,
        }));
    }

    /// Writes the file, where one is asked for. Fails if the host has waited more often within a step than it needs.
    pub(crate) fn end(self) -> Result<()> {
        let waited = self.waited.join("; ");
        self.write()?;
        if waited.is_empty() { Ok(()) } else { Err(format!("the host waited within: {waited}").into()) }
    }

    fn write(self) -> Result<()> {
        let Some(path) = path() else {
            println!("no file is written: OUT is not set");
            return Ok(());
        };
        let Setup { device, cuda, stand_in, params, rounds, date } = self.setup;
        let report = json!({
            "device": device,
            "driver": kernel_module(),
            "cuda": cuda,
            "stand_in": stand_in,
            "date": date,
            "params": params,
            "rounds": rounds,
            "floor": "a copy within the device, in turns with the case; its time for as many bytes",
            "cases": self.cases,
        });
        std::fs::write(&path, format!("{report:#}\n")).map_err(|e| format!("{}: {e}", path.display()))?;
        println!("{}", path.display());
        Ok(())
    }
}

/// The file that is given, or one in $OUT.
fn path() -> Option<PathBuf> {
    let given = std::env::args().skip(1).find(|arg| !arg.starts_with('-')).map(PathBuf::from);
    given.or_else(|| Some(Path::new(&std::env::var_os("OUT")?).join("gpu-bench.json")))
}

/// The version of the driver's part in the kernel, as Linux tells it.
fn kernel_module() -> Option<String> {
    Some(std::fs::read_to_string("/sys/module/nvidia/version").ok()?.trim().to_owned())
}

/// Year-month-day of a day since 1970-01-01.
fn date(mut days: u64) -> String {
    let mut year = 1970;
    loop {
        let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
        let of_year = 365 + u64::from(leap);
        if days >= of_year {
            (year, days) = (year + 1, days - of_year);
            continue;
        }
        let mut month = 1;
        for of_month in [31, 28 + u64::from(leap), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
            if days < of_month {
                break;
            }
            (month, days) = (month + 1, days - of_month);
        }
        return format!("{year}-{month:02}-{:02}", days + 1);
    }
}

/// The middle one, or the mean of the two in the middle.
fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    if sorted.len() % 2 == 1 { sorted[middle] } else { (sorted[middle - 1] + sorted[middle]) / 2.0 }
}
