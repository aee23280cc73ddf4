//! Flight recorder: the last operations of a rank, for diagnosing a hang.

use crate::Called;
use std::collections::VecDeque;
use std::fmt::Write as _;
use std::time::Duration;

/// Number of operations kept.
const ROOM: usize = 1000;

/// Ring buffer of the operations that a rank has called, with the times of its clock.
#[derive(Debug)]
pub(super) struct Recorder {
    entries: VecDeque<Entry>,
}

/// Record of one operation.
#[derive(Clone, Copy, Debug)]
struct Entry {
    called: Called,
    /// Number of operations that this process had launched before, on any communicator.
    launch: u64,
    launched: Duration,
    began: Option<Duration>,
    ended: Option<Duration>,
}

impl Recorder {
    pub(super) fn new() -> Self {
        Recorder { entries: VecDeque::with_capacity(ROOM) }
    }

    /// Records the launch of the operation after the last one.
    pub(super) fn launched(&mut self, called: Called, launch: u64, now: Duration) {
        if self.entries.len() == ROOM {
            self.entries.pop_front();
        }
        self.entries.push_back(Entry { called, launch, launched: now, began: None, ended: None });
    }

    pub(super) fn began(&mut self, op_number: u64, now: Duration) {
        if let Some(entry) = self.entry(op_number) {
            entry.began = Some(now);
        }
    }

    pub(super) fn ended(&mut self, op_number: u64, now: Duration) {
        if let Some(entry) = self.entry(op_number) {
            entry.ended = Some(now);
        }
    }

    /// Returns one line per operation, oldest first.
    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        for entry in &self.entries {
            let Entry { called, launch, .. } = entry;
            // Writing to a string cannot fail.
            let _ = writeln!(
                text,
                "operation {} (launch {launch} of the process): {called}; launched {}, began {}, ended {}",
                called.op_number,
                seconds(Some(entry.launched)),
                seconds(entry.began),
                seconds(entry.ended)
            );
        }
        text
    }

    fn entry(&mut self, op_number: u64) -> Option<&mut Entry> {
        let first = self.entries.front()?.called.op_number;
        self.entries.get_mut(usize::try_from(op_number.checked_sub(first)?).ok()?)
    }
}

fn seconds(time: Option<Duration>) -> String {
    time.map_or_else(|| "not seen".to_owned(), |time| format!("{:.6} s", time.as_secs_f64()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Action;
    use meshstep_tensor::DType;

    fn called(op_number: u64) -> Called {
        Called { op_number, action: Action::AllGather, len: 8, dtype: DType::F32, by: None }
    }

    #[test]
    fn the_last_thousand_are_kept_with_their_times() {
        let mut recorder = Recorder::new();
        for number in 0..1500 {
            recorder.launched(called(number), 2 * number, Duration::from_millis(number));
        }
        recorder.began(1499, Duration::from_secs(2));
        recorder.began(3, Duration::from_secs(2)); // long forgotten
        recorder.ended(500, Duration::from_secs(3));
        let text = recorder.text();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 1000);
        assert_eq!(
            lines[0],
            "operation 500 (launch 1000 of the process): all_gather of 8 f32; launched 0.500000 s, began not seen, ended \
             3.000000 s"
        );
        assert!(
            lines[999].starts_with("operation 1499 ")
                && lines[999].contains("began 2.000000 s, ended not seen")
        );
    }
}
