//! Description of the GPU in a record: its driver, clocks, power and temperature, and the date.

use super::Result;
use meshstep_tensor::cuda::{self, Device, Driver, Unavailable};
use serde_json::{Map, Value, json};
use std::io::Read;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Returns the driver, or the reason for its absence if none is required. The stand-in is an error unless
/// GPU_BENCH_STANDIN=1.
pub fn driver() -> Result<std::result::Result<&'static Driver, Unavailable>> {
    let driver = match cuda::probe() {
        Ok(driver) => driver,
        Err(missing) if std::env::var_os("REQUIRE_GPU").is_some() => return Err(missing.into()),
        Err(missing) => return Ok(Err(missing)),
    };
    if driver.stand_in && std::env::var("GPU_BENCH_STANDIN").as_deref() != Ok("1") {
        return Err(
            "the stand-in for a driver cannot be benchmarked; set GPU_BENCH_STANDIN=1 to test this program with it".into()
        );
    }
    Ok(Ok(driver))
}

/// Returns the head of a record, a JSON object.
pub fn about(device: &Device, driver: &Driver) -> Result<Value> {
    let (major, minor) = (driver.version / 1000, driver.version % 1000 / 10);
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
    Ok(json!({
        "device": device.name()?,
        "multiprocessors": device.multiprocessors()?,
        "clock_mhz": device.clock_rate()? as f64 / 1e6,
        "driver": kernel_module(),
        "cuda": format!("{major}.{minor}"),
        "stand_in": driver.stand_in,
        "date": date(seconds / 86_400),
        "before": clocks(),
        "after": null,
    }))
}

/// Fields to query from nvidia-smi, for the machine's first GPU.
const FIELDS: &str =
    "pstate,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.draw,power.limit,temperature.gpu";

/// Time limit of nvidia-smi.
const LIMIT: Duration = Duration::from_secs(5);

/// Returns the current values of the fields from nvidia-smi; null if nvidia-smi fails.
pub fn clocks() -> Value {
    let args = [&format!("--query-gpu={FIELDS}"), "--format=csv,noheader", "--id=0"];
    let Some(answer) = answer(Command::new("nvidia-smi").args(args)) else { return Value::Null };
    let values = answer.lines().next().unwrap_or_default().split(", ");
    let fields = FIELDS.split(',').zip(values);
    Value::Object(fields.map(|(name, value)| (name.to_owned(), value.trim().into())).collect::<Map<_, _>>())
}

/// Returns the standard output of a command that succeeds in time.
fn answer(command: &mut Command) -> Option<String> {
    let command = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().ok()?;
    let begun = Instant::now();
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if begun.elapsed() < LIMIT => sleep(Duration::from_millis(10)),
            _ => {
                // Do not wait for the process: it may hang in the driver for ever.
                let _ = child.kill();
                return None;
            }
        }
    };
    let mut text = String::new();
    child.stdout.take()?.read_to_string(&mut text).ok()?;
    status.success().then_some(text)
}

/// Returns the version of the driver's kernel module, as reported by Linux.
fn kernel_module() -> Option<String> {
    Some(std::fs::read_to_string("/sys/module/nvidia/version").ok()?.trim().to_owned())
}

/// Formats days since 1970-01-01 as year-month-day.
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
