//! Printed reports: a line for each row as it is measured, and the roofline at the end.

use meshstep_bench_cases::gpu::{Result, machine};
use meshstep_tensor::cuda::{Device, Driver};
use serde_json::Value;

/// Returns the record's head: the machine and the settings.
pub(crate) fn about(device: &Device, driver: &Driver, params: usize, rounds: usize) -> Result<Value> {
    let mut about = machine::about(device, driver)?;
    about["params"] = params.into();
    about["rounds"] = rounds.into();
    about["reference"] =
        "a copy of random data within the device, in turns with the case; its time for as many bytes".into();
    Ok(about)
}

pub(crate) fn print_head(about: &Value) {
    let told = |key: &str| about[key].as_str().unwrap_or("unknown").to_owned();
    println!(
        "{}, driver {} with CUDA {}; {} parameters, medians of {} rounds",
        told("device"),
        told("driver"),
        told("cuda"),
        about["params"],
        about["rounds"]
    );
    if about["stand_in"] == true {
        println!("On the stand-in for a driver: no figure applies to a GPU.");
    }
}

pub(crate) fn print_columns() {
    println!(
        "{:46} {:>10} {:>6} {:>9} {:>9} {:>6} {:>6} {:>9}",
        "case", "params", "B/elem", "ms", "ref. ms", "share", "waits", "first ms"
    );
}

pub(crate) fn print_row(row: &Value) {
    let (name, number) = (text(row, "name"), |key: &str| row[key].as_f64().unwrap_or(f64::NAN));
    if row["ms"].is_number() {
        println!(
            "{name:46} {:10} {:6} {:9.3} {:9.3} {:5.1}% {:6} {:>9}",
            row["params"],
            row["bytes_per_element"],
            number("ms"),
            number("reference_ms"),
            number("share_of_reference") * 100.0,
            number("host_waits_per_step"),
            row["first_step_ms"].as_f64().map_or("-".to_owned(), |ms| format!("{ms:.1}"))
        );
    }
    for (key, said) in [("error", "error"), ("not_run", "not run")] {
        if let Some(reason) = row[key].as_str() {
            println!("{name:46} {said}: {reason}");
        }
    }
}

/// Prints each measured row's bytes, speed, and share of the copy's speed; and if its instructions are counted, its share
/// of the device's issue slots.
pub(crate) fn print_roofline(rows: &[Value]) {
    println!(
        "\n{:46} {:>10} {:>9} {:>12} {:>10} {:>11}",
        "roofline", "MB", "GB/s", "copy GB/s", "of copy", "issue slots"
    );
    for row in rows.iter().filter(|row| row["ms"].is_number()) {
        let number = |key: &str| row[key].as_f64().unwrap_or(f64::NAN);
        println!(
            "{:46} {:10.1} {:9.1} {:12.1} {:9.1}% {:>11}",
            text(row, "name"),
            number("bytes") / 1e6,
            number("gb_per_s"),
            number("copy_gb_per_s"),
            number("share_of_reference") * 100.0,
            row["issue_slots_percent"].as_f64().map_or("-".to_owned(), |percent| format!("{percent:.1}%"))
        );
    }
}

fn text<'a>(row: &'a Value, key: &str) -> &'a str {
    row[key].as_str().unwrap_or_default()
}
