//! Resource budget of the kernels: a committed table, and its comparison with measurements.

use super::ptxas::{CHIPS, Usage};
use anyhow::{Context, bail};
use std::collections::BTreeMap;
use std::fmt;

/// Path of the table.
pub(crate) const PATH: &str = "optim/kernels.budget";

const HEADER: &str = "\
# Resource limits of the kernels. `cargo xtask kernels --check` compares the limits with the output of ptxas, and
# `--budget` rewrites this file. Raise local memory (spills, arrays outside of registers) by hand only. The column `turn` has
# the instructions of a thread on sm_90 for its elements of a whole tile: 8 elements of an update, 4 if f64; 16 of a norm of
# f32, 32 of 16-bit numbers.
";

/// Index in [`CHIPS`] of the chip on which instructions are counted.
const COUNTED_ON: usize = 1;

/// Granularity in which registers are allocated to a thread.
const UNIT: u32 = 8;

/// Resource limits of each kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Budget {
    rows: BTreeMap<String, Row>,
}

/// Fields as in [`Usage`]: registers for each of [`CHIPS`], memory as the maximum over the chips.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Row {
    registers: [u32; CHIPS.len()],
    local: u32,
    shared: u32,
    /// Instructions per turn of the main loop; 0 if the kernel has no such loop, or none were counted.
    turn: u32,
}

/// A kernel that must keep the memory of an H200 busy. `most_percent` limits the instructions of a turn, in percent of the
/// instructions that the GPU can issue while it moves the turn's bytes at the rate of a copy.
struct Stream {
    kernel: &'static str,
    /// Elements of a turn.
    elements: u32,
    /// Bytes read and written per element.
    bytes: u32,
    most_percent: f64,
}

const STREAMS: [Stream; 2] = [
    Stream { kernel: "norm_l2_bf16", elements: 32, bytes: 2, most_percent: 60.0 },
    Stream { kernel: "adam_f32_state_bf16", elements: 8, bytes: 20, most_percent: 72.0 },
];

/// Resource usage of the kernels on each of [`CHIPS`].
#[derive(Clone, Debug, Default)]
pub(crate) struct Measured {
    rows: BTreeMap<String, Row>,
}

impl Measured {
    /// Adds the measurements on the chip with this index.
    pub(crate) fn add(&mut self, chip: usize, all: &[Usage]) -> anyhow::Result<()> {
        for usage in all {
            let row = self.rows.entry(usage.kernel.clone()).or_default();
            if row.registers[chip] != 0 {
                bail!("two kernels are named {}; rename one", usage.kernel);
            }
            row.registers[chip] = usage.registers;
            row.local = row.local.max(usage.local);
            row.shared = row.shared.max(usage.shared);
        }
        Ok(())
    }

    /// Adds the instructions per turn, by kernel.
    pub(crate) fn add_turns(&mut self, turns: &BTreeMap<String, u32>) {
        for (kernel, &turn) in turns {
            self.rows.entry(kernel.clone()).or_default().turn = turn;
        }
    }

    /// Returns the percentage of an H200's issue slots for each of [`STREAMS`] with counted instructions.
    fn shares(&self) -> impl Iterator<Item = (&'static Stream, f64)> {
        let counted = STREAMS.iter().filter_map(|stream| Some((stream, self.rows.get(stream.kernel)?.turn)));
        counted.filter(|&(_, turn)| turn > 0).map(|(stream, turn)| (stream, stream.percent(turn)))
    }

    /// Describes the kernels in [`STREAMS`] in one line each.
    pub(crate) fn summary(&self) -> String {
        let share = |(stream, percent): (&Stream, f64)| {
            format!(
                "{} takes {percent:.1} % of an H200's issue slots; the limit is {}",
                stream.kernel, stream.most_percent
            )
        };
        self.shares().map(share).collect::<Vec<_>>().join("\n")
    }

    /// Returns the number of measured kernels.
    pub(crate) fn len(&self) -> usize {
        self.rows.len()
    }
}

impl Stream {
    /// Returns the instructions of a turn in percent of the instructions that an H200 can issue while it moves the turn's
    /// bytes at the rate of a copy.
    fn percent(&self, turn: u32) -> f64 {
        const MULTIPROCESSORS: f64 = 132.0;
        const THREADS_A_CLOCK: f64 = 4.0 * 32.0;
        const CLOCKS_A_SECOND: f64 = 1.98e9;
        const BYTES_A_SECOND: f64 = 4.3e12;
        let seconds = f64::from(self.bytes * self.elements) / BYTES_A_SECOND;
        100.0 * f64::from(turn) / (seconds * MULTIPROCESSORS * THREADS_A_CLOCK * CLOCKS_A_SECOND)
    }
}

impl Budget {
    pub(crate) fn parse(text: &str) -> anyhow::Result<Self> {
        let mut rows = BTreeMap::new();
        for line in text.lines().filter(|line| !line.starts_with('#') && !line.trim().is_empty()) {
            let (name, row) = parse_row(line).with_context(|| format!("{PATH}: not a row: {line}"))?;
            if rows.insert(name.to_owned(), row).is_some() {
                bail!("{PATH}: two rows for {name}; remove one");
            }
        }
        Ok(Self { rows })
    }

    /// Returns the violations of the budget, one line each.
    pub(crate) fn complaints(&self, measured: &Measured) -> Vec<String> {
        let gone = self.rows.keys().filter(|name| !measured.rows.contains_key(*name));
        let gone = gone.map(|name| format!("{name} has a row in the budget, but there is no such kernel"));
        let over = measured.rows.iter().flat_map(|(name, used)| match self.rows.get(name) {
            None => vec![format!("{name} has no row in the budget")],
            Some(most) => exceeded(name, used, most),
        });
        let slow = measured.shares().filter(|(stream, percent)| *percent > stream.most_percent);
        let slow = slow.map(|(stream, percent)| {
            format!("{} takes {percent:.1} % of issue slots, above {}", stream.kernel, stream.most_percent)
        });
        gone.chain(over).chain(slow).collect()
    }

    /// Returns a budget that the measurements meet, with registers rounded up to the allocation unit. Limits of local
    /// memory do not grow; somebody has to raise them by hand.
    pub(crate) fn renewed(&self, measured: &Measured) -> Self {
        let rows = measured.rows.iter().map(|(name, used)| {
            let registers = used.registers.map(|registers| registers.next_multiple_of(UNIT));
            let allowed = self.rows.get(name).map_or(0, |row| row.local);
            let (shared, turn) = (used.shared, used.turn);
            (name.clone(), Row { registers, local: used.local.min(allowed), shared, turn })
        });
        Self { rows: rows.collect() }
    }
}

fn exceeded(name: &str, used: &Row, most: &Row) -> Vec<String> {
    let registers = CHIPS.iter().zip(used.registers).zip(most.registers);
    let registers = registers.map(|((chip, used), most)| (format!("registers on {chip}"), used, most));
    let rest = [("local", used.local, most.local), ("shared", used.shared, most.shared)];
    let rest = rest.map(|(what, used, most)| (format!("bytes of {what} memory"), used, most));
    // Other turns were counted in this run, so a kernel without a count lost its loop.
    let uncounted = used.registers[COUNTED_ON] > 0 && used.turn == 0 && most.turn > 0;
    let lost =
        uncounted.then(|| format!("{name} has no loop of wide loads, but the budget has a turn for it"));
    let turn = ("instructions a turn".to_owned(), used.turn, most.turn);
    let over = registers.chain(rest).chain([turn]).filter(|(_, used, most)| used > most);
    over.map(|(what, used, most)| format!("{name} uses {used} {what}, above {most}")).chain(lost).collect()
}

fn parse_row(line: &str) -> anyhow::Result<(&str, Row)> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let [name, a, b, c, local, shared, turn] = words[..] else {
        bail!("a name and six numbers are expected")
    };
    let registers = [a.parse()?, b.parse()?, c.parse()?];
    let turn = if turn == "-" { 0 } else { turn.parse()? };
    Ok((name, Row { registers, local: local.parse()?, shared: shared.parse()?, turn }))
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(HEADER)?;
        let wide = self.rows.keys().map(String::len).max().unwrap_or(0).max(8);
        writeln!(f, "#{:1$} registers a thread            bytes instructions", "", wide)?;
        let [a, b, c] = CHIPS;
        writeln!(
            f,
            "{:wide$} {a:>6} {b:>6} {c:>6}   {:>6} {:>6} {:>6}",
            "# kernel", "local", "shared", "turn"
        )?;
        for (name, row) in &self.rows {
            let [a, b, c] = row.registers;
            let turn = if row.turn == 0 { "-".to_owned() } else { row.turn.to_string() };
            writeln!(f, "{name:wide$} {a:6} {b:6} {c:6}   {:6} {:6} {turn:>6}", row.local, row.shared)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(kernels: &[(&str, [u32; 3], u32, u32)]) -> Measured {
        let mut all = Measured::default();
        for (chip, _) in CHIPS.iter().enumerate() {
            let usages = kernels.iter().map(|&(kernel, registers, local, shared)| {
                // Only the second chip uses local and shared memory.
                let (local, shared) = if chip == 1 { (local, shared) } else { (0, 0) };
                Usage { kernel: kernel.to_owned(), registers: registers[chip], local, shared }
            });
            all.add(chip, &usages.collect::<Vec<_>>()).unwrap();
        }
        all
    }

    const TABLE: &str =
        "# What a kernel may use.\nadam_f32  40 48  56  0 0 500\n\nsgd_f32 32 32 32 16 4352 -\n";

    #[test]
    fn what_keeps_to_the_budget_passes() {
        let budget = Budget::parse(TABLE).unwrap();
        let mut fits = measured(&[("adam_f32", [40, 48, 56], 0, 0), ("sgd_f32", [1, 2, 3], 16, 4352)]);
        fits.add_turns(&BTreeMap::from([("adam_f32".to_owned(), 500)]));
        assert_eq!(budget.complaints(&fits), [""; 0]);
    }

    #[test]
    fn each_excess_is_named_with_both_numbers() {
        let budget = Budget::parse(TABLE).unwrap();
        let sgd = ("sgd_f32", [32, 32, 32], 16, 4352);
        let cases = [
            (([41, 48, 56], 0, 0), "adam_f32 uses 41 registers on sm_80, above 40"),
            (([40, 49, 56], 0, 0), "adam_f32 uses 49 registers on sm_90, above 48"),
            (([40, 48, 57], 0, 0), "adam_f32 uses 57 registers on sm_100, above 56"),
            (([40, 48, 56], 1, 0), "adam_f32 uses 1 bytes of local memory, above 0"),
            (([40, 48, 56], 0, 1), "adam_f32 uses 1 bytes of shared memory, above 0"),
        ];
        for ((registers, local, shared), expected) in cases {
            let mut all = measured(&[("adam_f32", registers, local, shared), sgd]);
            all.add_turns(&BTreeMap::from([("adam_f32".to_owned(), 500)]));
            assert_eq!(budget.complaints(&all), [expected]);
        }
    }

    #[test]
    fn turns_keep_to_the_budget_and_to_the_memorys_pace() {
        let budget = Budget::parse("adam_f32 8 8 8 0 0 500\nnorm_l2_bf16 8 8 8 0 0 900\n").unwrap();
        let with = |adam: u32, norm: u32| {
            let mut all = measured(&[("adam_f32", [8; 3], 0, 0), ("norm_l2_bf16", [8; 3], 0, 0)]);
            all.add_turns(&BTreeMap::from([
                ("adam_f32".to_owned(), adam),
                ("norm_l2_bf16".to_owned(), norm),
            ]));
            budget.complaints(&all)
        };
        // A GPU can issue 498 instructions while 64 bytes per thread are moved.
        assert_eq!(with(500, 298), [""; 0]);
        assert_eq!(with(501, 1), ["adam_f32 uses 501 instructions a turn, above 500"]);
        assert_eq!(with(1, 300), ["norm_l2_bf16 takes 60.3 % of issue slots, above 60"]);
        assert_eq!(with(0, 1), ["adam_f32 has no loop of wide loads, but the budget has a turn for it"]);
    }

    #[test]
    fn rows_and_kernels_must_match() {
        let budget = Budget::parse(TABLE).unwrap();
        let mut other = measured(&[("adam_f32", [1, 1, 1], 0, 0), ("new", [1, 1, 1], 0, 0)]);
        other.add_turns(&BTreeMap::from([("adam_f32".to_owned(), 1)]));
        let complaints = budget.complaints(&other);
        assert!(
            complaints[0].contains("sgd_f32") && complaints[0].contains("no such kernel"),
            "{complaints:?}"
        );
        assert_eq!(complaints[1..], ["new has no row in the budget"]);
    }

    #[test]
    fn a_new_budget_fits_what_it_was_made_from_except_local_memory() {
        let all = measured(&[("adam_f32", [33, 40, 41], 8, 7), ("sgd_f32", [8, 9, 10], 8, 7)]);
        let budget = Budget::parse(TABLE).unwrap().renewed(&all);
        assert_eq!(budget.complaints(&all), ["adam_f32 uses 8 bytes of local memory, above 0"]);
        let expected = "adam_f32 40 40 48 0 7 -\nsgd_f32 8 16 16 8 7 -\n";
        assert_eq!(budget, Budget::parse(expected).unwrap());
        assert_eq!(Budget::parse(&budget.to_string()).unwrap(), budget);
    }

    #[test]
    fn rubbish_and_repetition_are_refused() {
        for text in [
            "a 1 2 3 4 5",
            "a 1 2 3 4 5 6 7",
            "a 1 2 3 4 -5 6",
            "a 1 2 x 4 5 6",
            "a 1 2 3 4 5 x",
            "a 1 1 1 1 1 1\na 1 1 1 1 1 1",
        ] {
            assert!(Budget::parse(text).is_err(), "{text}");
        }
        let mut all = measured(&[("a", [1, 1, 1], 0, 0)]);
        let again = [Usage { kernel: "a".to_owned(), registers: 1, local: 0, shared: 0 }];
        assert!(all.add(0, &again).unwrap_err().to_string().contains("two kernels are named a"));
    }
}
