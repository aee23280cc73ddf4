//! Results of a run as data: the content of every form of the report, and the baseline of later runs.

use serde::{Deserialize, Serialize};

pub(crate) use crate::report::chart::{Plot, Scale, Shape};
use meshstep_bench_cases::machine::Machine;
use meshstep_bench_cases::samples::Median;

/// Format version of reports; readers reject others.
pub(crate) const FORMAT: u32 = 2;

/// Name of the section of `bench network`, by which the report of local training finds it.
pub(crate) const NETWORK: &str = "network: training over slow links";

/// Results of a whole run; the content of `report.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Report {
    pub(crate) format: u32,
    pub(crate) version: String,
    pub(crate) machine: Machine,
    /// True if sizes and rounds were small.
    pub(crate) quick: bool,
    pub(crate) seconds: f64,
    pub(crate) sections: Vec<Section>,
    /// Requested parts that are missing, with reasons.
    pub(crate) left_out: Vec<String>,
}

/// Results of one suite.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Section {
    pub(crate) name: String,
    /// Description of the comparison and of the tables.
    pub(crate) about: String,
    /// The results in sentences with figures, for a reader who knows no term of the tables; the first one stands on top of the page.
    pub(crate) verdict: Vec<String>,
    pub(crate) tables: Vec<Table>,
    pub(crate) bars: Vec<Bar>,
    pub(crate) plots: Vec<Plot>,
}

/// A table of named rows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Table {
    pub(crate) title: String,
    pub(crate) columns: Vec<String>,
    pub(crate) rows: Vec<Row>,
    pub(crate) notes: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Row {
    pub(crate) name: String,
    pub(crate) cells: Vec<Cell>,
}

/// A figure.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Cell {
    /// No value.
    None,
    Text(String),
    Count(u64),
    Bytes(u64),
    /// Measured seconds.
    Time(Median),
    /// Computed seconds.
    Seconds(f64),
    /// Bytes per second.
    Speed(f64),
    /// Measured ratio of two values.
    Ratio(Median),
    /// Measured relative excess over another value.
    Overhead(Median),
    /// Fraction of a whole.
    Share(f64),
    Number(f64),
}

/// A limit on a figure.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Bar {
    pub(crate) what: String,
    pub(crate) found: f64,
    pub(crate) wanted: Wanted,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Wanted {
    AtLeast(f64),
    AtMost(f64),
}

impl Section {
    pub(crate) fn new(name: &str, about: &str) -> Self {
        let (name, about) = (name.to_owned(), about.to_owned());
        Section { name, about, verdict: Vec::new(), tables: Vec::new(), bars: Vec::new(), plots: Vec::new() }
    }

    pub(crate) fn bar(&mut self, what: impl Into<String>, found: f64, wanted: Wanted) {
        self.bars.push(Bar { what: what.into(), found, wanted });
    }
}

impl Table {
    pub(crate) fn new(title: impl Into<String>, columns: &[&str]) -> Self {
        let columns = columns.iter().map(|&column| column.to_owned()).collect();
        Table { title: title.into(), columns, rows: Vec::new(), notes: Vec::new() }
    }

    /// Adds a row, with cells in the order of the columns.
    pub(crate) fn row(&mut self, name: impl Into<String>, cells: impl IntoIterator<Item = Cell>) {
        self.rows.push(Row { name: name.into(), cells: cells.into_iter().collect() });
    }

    pub(crate) fn note(&mut self, note: impl Into<String>) {
        self.notes.push(note.into());
    }
}

impl Bar {
    /// Returns true if the figure is within the limit; NaN never is.
    pub(crate) fn holds(&self) -> bool {
        match self.wanted {
            Wanted::AtLeast(least) => self.found >= least,
            Wanted::AtMost(most) => self.found <= most,
        }
    }
}
