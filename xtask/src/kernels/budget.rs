//! What kernels may use: a committed table, and where measurements break it.

use super::ptxas::{CHIPS, Usage};
use anyhow::{Context, bail};
use std::collections::BTreeMap;
use std::fmt;

/// Where the table is.
pub(crate) const PATH: &str = "optim/kernels.budget";

const HEADER: &str = "\
# The most that kernels may use. `cargo xtask kernels --check` compares it with what ptxas says, and
# `--budget` writes it anew. Local memory (spills, arrays outside of registers) is granted by hand only.
";

/// Registers are given to threads in units of this many.
const UNIT: u32 = 8;

/// What each kernel may use at most.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Budget {
    rows: BTreeMap<String, Row>,
}

/// As in [`Usage`]; registers for each of [`CHIPS`], the rest on any of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Row {
    registers: [u32; CHIPS.len()],
    local: u32,
    shared: u32,
}

/// What the kernels use on each of [`CHIPS`].
#[derive(Clone, Debug, Default)]
pub(crate) struct Measured {
    rows: BTreeMap<String, Row>,
}

impl Measured {
    /// Adds what was measured on the chip of this index.
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

    /// Kernels measured.
    pub(crate) fn len(&self) -> usize {
        self.rows.len()
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

    /// What breaks the budget, one line each.
    pub(crate) fn complaints(&self, measured: &Measured) -> Vec<String> {
        let gone = self.rows.keys().filter(|name| !measured.rows.contains_key(*name));
        let gone = gone.map(|name| format!("{name} has a row in the budget, but there is no such kernel"));
        let over = measured.rows.iter().flat_map(|(name, used)| match self.rows.get(name) {
            None => vec![format!("{name} has no row in the budget")],
            Some(most) => exceeded(name, used, most),
        });
        gone.chain(over).collect()
    }

    /// A budget that holds what was measured, with what fills a unit of registers. More local memory than this budget
    /// allows is not granted: somebody has to type that.
    pub(crate) fn renewed(&self, measured: &Measured) -> Self {
        let rows = measured.rows.iter().map(|(name, used)| {
            let registers = used.registers.map(|registers| registers.next_multiple_of(UNIT));
            let allowed = self.rows.get(name).map_or(0, |row| row.local);
            (name.clone(), Row { registers, local: used.local.min(allowed), shared: used.shared })
        });
        Self { rows: rows.collect() }
    }
}

fn exceeded(name: &str, used: &Row, most: &Row) -> Vec<String> {
    let registers = CHIPS.iter().zip(used.registers).zip(most.registers);
    let registers = registers.map(|((chip, used), most)| (format!("registers on {chip}"), used, most));
    let rest = [("local", used.local, most.local), ("shared", used.shared, most.shared)];
    let rest = rest.map(|(what, used, most)| (format!("bytes of {what} memory"), used, most));
    let over = registers.chain(rest).filter(|(_, used, most)| used > most);
    over.map(|(what, used, most)| format!("{name} uses {used} {what}, above {most}")).collect()
}

fn parse_row(line: &str) -> anyhow::Result<(&str, Row)> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let [name, a, b, c, local, shared] = words[..] else { bail!("a name and five numbers are expected") };
    let registers = [a.parse()?, b.parse()?, c.parse()?];
    Ok((name, Row { registers, local: local.parse()?, shared: shared.parse()? }))
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(HEADER)?;
        let wide = self.rows.keys().map(String::len).max().unwrap_or(0).max(8);
        writeln!(f, "#{:1$} registers a thread            bytes", "", wide)?;
        let [a, b, c] = CHIPS;
        writeln!(f, "{:wide$} {a:>6} {b:>6} {c:>6}   {:>6} {:>6}", "# kernel", "local", "shared")?;
        for (name, row) in &self.rows {
            let [a, b, c] = row.registers;
            writeln!(f, "{name:wide$} {a:6} {b:6} {c:6}   {:6} {:6}", row.local, row.shared)?;
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
                // Local and shared memory on the second chip alone.
                let (local, shared) = if chip == 1 { (local, shared) } else { (0, 0) };
                Usage { kernel: kernel.to_owned(), registers: registers[chip], local, shared }
            });
            all.add(chip, &usages.collect::<Vec<_>>()).unwrap();
        }
        all
    }

    const TABLE: &str = "# What a kernel may use.\nadam_f32  40 48  56  0 0\n\nsgd_f32 32 32 32 16 4352\n";

    #[test]
    fn what_keeps_to_the_budget_passes() {
        let budget = Budget::parse(TABLE).unwrap();
        let fits = measured(&[("adam_f32", [40, 48, 56], 0, 0), ("sgd_f32", [1, 2, 3], 16, 4352)]);
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
            let all = measured(&[("adam_f32", registers, local, shared), sgd]);
            assert_eq!(budget.complaints(&all), [expected]);
        }
    }

    #[test]
    fn rows_and_kernels_must_match() {
        let budget = Budget::parse(TABLE).unwrap();
        let other = measured(&[("adam_f32", [1, 1, 1], 0, 0), ("new", [1, 1, 1], 0, 0)]);
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
        let expected = "adam_f32 40 40 48 0 7\nsgd_f32 8 16 16 8 7\n";
        assert_eq!(budget, Budget::parse(expected).unwrap());
        assert_eq!(Budget::parse(&budget.to_string()).unwrap(), budget);
    }

    #[test]
    fn rubbish_and_repetition_are_refused() {
        for text in ["a 1 2 3 4", "a 1 2 3 4 5 6", "a 1 2 3 4 -5", "a 1 2 x 4 5", "a 1 1 1 1 1\na 1 1 1 1 1"]
        {
            assert!(Budget::parse(text).is_err(), "{text}");
        }
        let mut all = measured(&[("a", [1, 1, 1], 0, 0)]);
        let again = [Usage { kernel: "a".to_owned(), registers: 1, local: 0, shared: 0 }];
        assert!(all.add(0, &again).unwrap_err().to_string().contains("two kernels are named a"));
    }
}
