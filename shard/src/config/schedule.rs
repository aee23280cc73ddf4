//! Text of a schedule that ranks compare.

use meshstep_optim::schedule::Schedule;

/// Returns lines for ranks to compare.
pub fn describe(schedule: Option<&Schedule>) -> String {
    let Some(schedule) = schedule else { return "schedule = none\n".to_owned() };
    let line = |(name, value): (&str, String)| format!("{name} of schedule = {value}\n");
    std::iter::once("schedule = some\n".to_owned()).chain(schedule.parameters().map(line)).collect()
}
