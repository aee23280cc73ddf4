//! Facts about the machine of a run: its GPU and driver as reported by nvidia-smi, and the date.

use super::child::{Launch, Wish};
use super::clock::Clock;
use super::logs::Scratch;
use super::plan::installed;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Time limit of a query program.
const LIMIT: Duration = Duration::from_secs(10);

/// Runs a query program and returns its standard output, or `None` if the program fails or takes too long.
pub(crate) fn answer(
    (program, args): (PathBuf, Vec<OsString>),
    env: Vec<(String, OsString)>,
    scratch: &Scratch,
    clock: &Clock,
) -> Option<String> {
    let name = program.file_name()?.to_string_lossy().into_owned();
    let [stdout, stderr] = ["out", "err"].map(|output| scratch.file(&format!("ask-{name}"), output));
    let mut text = Vec::new();
    let launch = Launch { program, args, env, stdout, stderr };
    let end = launch.run(LIMIT, clock, |piece| {
        text.extend_from_slice(piece);
        Wish::GoOn
    });
    let answered = matches!(end, Ok(super::child::End::Exit(0)));
    answered.then(|| String::from_utf8_lossy(&text).into_owned())
}

/// Returns the names of the GPU and the driver, or "unknown" if nvidia-smi does not report them.
pub(crate) fn gpu_and_driver(scratch: &Scratch, clock: &Clock) -> [String; 2] {
    let args = ["--query-gpu=name,driver_version", "--format=csv,noheader"].map(OsString::from).into();
    let said = installed("nvidia-smi").and_then(|smi| answer((smi, args), Vec::new(), scratch, clock));
    let first = said.as_deref().and_then(|said| said.lines().next()).unwrap_or_default();
    let (name, driver) = first.split_once(',').unwrap_or_default();
    [name, driver].map(|part| match part.trim() {
        "" => "unknown".to_owned(),
        told => told.to_owned(),
    })
}

/// Returns the current time, formatted as 2026-01-02T03:04:05Z.
pub(crate) fn now() -> String {
    date(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs())
}

/// Returns the Gregorian date of a Unix time. Years are counted from March, so that a leap day is the last day of its year.
fn date(seconds: u64) -> String {
    let (day, second) = (seconds / 86_400, seconds % 86_400);
    let day = day + 719_468;
    let (era, of_era) = (day / 146_097, day % 146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let march = (5 * of_year + 2) / 153;
    let day = of_year - (153 * march + 2) / 5 + 1;
    let month = if march < 10 { march + 3 } else { march - 9 };
    let year = 400 * era + year_of_era + u64::from(month <= 2);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_gregorian() {
        assert_eq!(date(0), "1970-01-01T00:00:00Z");
        assert_eq!(date(951_782_399), "2000-02-28T23:59:59Z");
        assert_eq!(date(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(date(1_798_761_599), "2026-12-31T23:59:59Z");
        assert_eq!(date(4_107_542_400), "2100-03-01T00:00:00Z");
    }
}
