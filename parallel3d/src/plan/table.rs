//! Table output of plans, for people.

use super::{Holds, Plan, Purpose, RankPlan, Sends, TotalKind, Totals};
use crate::{Axes, Piece, Sharing};
use meshstep_shard::{BucketPlan, Memory, Part, Stage};
use std::fmt;

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kinds = self.kinds();
        let totals = Totals::of(&kinds);
        let (elements, tensors) = (self.model.len(), self.model.parameters().len());
        let (mesh, ranks) = (&self.mesh, totals.ranks as u64);
        let rule = self.rules.rule_names().join(" + ");
        writeln!(f, "{} parameters in {} tensors", grouped(elements), grouped(tensors as u64))?;
        writeln!(f, "on {mesh}: {} ranks, {:?}, {rule}", grouped(ranks), self.stage)?;
        let sections = [
            ("Sharing of parameters", together(self.shared(), 0)),
            (
                "Bytes held, by the first rank of each pipeline stage that holds most",
                together(self.held(&kinds), 1),
            ),
            (
                "Bytes sent in a step, by the first rank of each that sends most",
                together(self.sent(&kinds), 1),
            ),
            ("All ranks", all_ranks(&totals)),
        ];
        sections.iter().try_for_each(|(title, rows)| write!(f, "\n{title}\n{}", table(rows)))
    }
}

fn all_ranks(totals: &Totals) -> Vec<Vec<String>> {
    let row = |what: &str, all, (rank, most)| {
        let first = format!("rank {}", grouped(rank as u64));
        [what.to_owned(), bytes(all), bytes(most), first].to_vec()
    };
    let Totals { memory, wire, most_held, most_sent, .. } = totals;
    vec![
        ["bytes", "by all ranks", "most by one", "first of these"].map(String::from).to_vec(),
        row("held", memory.total(), (most_held.0, most_held.1.total())),
        row("sent", wire.total(), (most_sent.0, most_sent.1.total())),
    ]
}

impl Plan {
    /// One row for each sharing of each pipeline stage.
    fn shared(&self) -> Vec<Vec<String>> {
        let head = [
            "pp",
            "the same along",
            "state divided along",
            "reduced further along",
            "tensors",
            "elements",
            "buckets",
            "pads",
        ];
        // Parts of one sharing differ in their rules.
        let is_mixed = self.rules.rule_names().len() > 1;
        let of_part = |part: &Part| self.rules.within(part.layout());
        let sees_matrices =
            self.pipeline.iter().flat_map(|of| of.families()).any(|(_, part)| of_part(part).see_matrices());
        let head = head.into_iter().chain(sees_matrices.then_some("matrices"));
        let head = head.chain(is_mixed.then_some("rule"));
        let mut rows = vec![head.map(String::from).collect::<Vec<_>>()];
        for (stage, of) in self.pipeline.iter().enumerate() {
            let own = |(sharing, part): (Sharing, &Part)| {
                let extra_reductions: Vec<String> =
                    sharing.extra_reductions(&self.mesh).into_iter().map(short).collect();
                let elements: usize = part.layout().params().iter().map(|p| p.len()).sum();
                let padded: usize = part.buckets().iter().map(|b: &BucketPlan| b.len).sum();
                let row = [
                    stage.to_string(),
                    short(self.mesh.several(sharing.replicas)),
                    short(self.mesh.several(sharing.shards())),
                    if extra_reductions.is_empty() { "-".to_owned() } else { extra_reductions.join(", ") },
                    grouped(part.layout().params().len() as u64),
                    grouped(elements as u64),
                    grouped(part.buckets().len() as u64),
                    grouped((padded - elements) as u64),
                ];
                let rules = of_part(part);
                let matrices = if rules.see_matrices() { matrices_of(part) } else { "-" };
                let row = row.into_iter().chain(sees_matrices.then(|| matrices.to_owned()));
                row.chain(is_mixed.then(|| rules.rule().name().to_owned())).collect()
            };
            rows.extend(of.families().map(own));
        }
        rows
    }

    /// One row for each pipeline stage: bytes held by its fullest rank.
    fn held(&self, kinds: &[TotalKind]) -> Vec<Vec<String>> {
        let names = Memory::default().by_category().map(|(category, _)| category.to_string());
        let head = ["pp", "rank"].map(String::from).into_iter().chain(names).chain(["total".to_owned()]);
        let mut rows = vec![head.collect::<Vec<String>>()];
        for kind in self.most_of_each(kinds, |kind| kind.memory.total()) {
            let TotalKind { stage, first, memory, .. } = kind;
            let held = memory.by_category().map(|(_, bytes)| bytes).into_iter().chain([memory.total()]);
            rows.push([stage.to_string(), first.to_string()].into_iter().chain(held.map(grouped)).collect());
        }
        rows
    }

    /// One row for each pipeline stage: bytes sent by its busiest rank, one column for each purpose and set of axes.
    fn sent(&self, kinds: &[TotalKind]) -> Vec<Vec<String>> {
        let of_stages = self.most_of_each(kinds, |kind| kind.wire.total());
        let sends =
            |kind: &TotalKind| self.rank(kind.first).and_then(|rank| rank.sends()).unwrap_or_default();
        let all: Vec<_> = of_stages.iter().map(sends).collect();
        let column = |sends: &Sends| (sends.purpose, self.mesh.several(sends.axes));
        let mut columns: Vec<(Purpose, Axes)> = all.iter().flatten().map(column).collect();
        columns.sort();
        columns.dedup();
        let name = |(purpose, axes): &(Purpose, Axes)| format!("{purpose} {}", short(*axes));
        let head = ["pp", "rank"].map(String::from).into_iter();
        let mut rows =
            vec![head.chain(columns.iter().map(name)).chain(["total".to_owned()]).collect::<Vec<_>>()];
        for (TotalKind { stage, first, wire, .. }, sends) in of_stages.iter().zip(&all) {
            let of = |wanted: &(Purpose, Axes)| {
                let sends = sends.iter().filter(|sends| column(sends) == *wanted);
                grouped(sends.map(|sends| sends.bytes).sum())
            };
            let own = [stage.to_string(), first.to_string()].into_iter().chain(columns.iter().map(of));
            rows.push(own.chain([grouped(wire.total())]).collect());
        }
        rows
    }

    /// Returns for each pipeline stage the kind of ranks with the largest `of`; the first one on a tie.
    fn most_of_each(&self, kinds: &[TotalKind], of: impl Fn(&TotalKind) -> u64) -> Vec<TotalKind> {
        let own = |stage| kinds.iter().filter(move |kind| kind.stage == stage);
        let most = |stage| own(stage).max_by_key(|kind| (of(kind), usize::MAX - kind.first)).copied();
        (0..self.pipeline.len()).filter_map(most).collect()
    }
}

impl fmt::Display for RankPlan<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (held, sent) = (self.memory().total(), self.wire().total());
        let (rank, at) = (self.rank(), self.coordinate());
        writeln!(f, "Rank {rank} ({at}) holds {} bytes and sends {} a step", grouped(held), grouped(sent))?;
        let head = ["parameter", "stores", "updates", "in the norm", "bucket"].map(String::from).to_vec();
        let holds = self.holds().map(|holds| {
            let Holds { parameter, stored, owned, counts, bucket, .. } = holds;
            let counts = if counts { "counts" } else { "-" };
            [parameter.name.clone(), places(&stored), places(&owned), counts.to_owned(), bucket.to_string()]
                .to_vec()
        });
        writeln!(f, "{}", table(&[head].into_iter().chain(holds).collect::<Vec<_>>()))?;
        let head = ["for", "along", "with ranks", "bytes"].map(String::from).to_vec();
        let sends = self.sends().unwrap_or_default().into_iter().map(|sends| {
            let ranks: Vec<String> = sends.group.ranks().map(|rank| rank.to_string()).collect();
            let ranks = ranks.join(" ");
            [sends.purpose.to_string(), short(sends.axes), ranks, grouped(sends.bytes)].to_vec()
        });
        write!(f, "{}", table(&[head].into_iter().chain(sends).collect::<Vec<_>>()))
    }
}

/// Says where the matrices of a part are updated.
fn matrices_of(part: &Part) -> &'static str {
    match part.stage() {
        _ if part.cuts().is_some() => "exchanged: the mesh cuts them",
        _ if part.is_uncut() => "whole",
        Stage::Zero3 => "exchanged: chunks cut them",
        _ => "exchanged: whole ones would pad more than 1/4",
    }
}

/// Formats index ranges in the parameter, one for each dimension.
fn places(pieces: &[Piece]) -> String {
    let range = |range: &std::ops::Range<usize>| format!("{}..{}", range.start, range.end);
    let place =
        |piece: &Piece| format!("[{}]", piece.global.iter().map(range).collect::<Vec<_>>().join(", "));
    let places: Vec<String> = pieces.iter().map(place).collect();
    if places.is_empty() { "-".to_owned() } else { places.join(" ") }
}

/// Formats axes for a table cell.
fn short(axes: Axes) -> String {
    if axes.is_empty() { "-".to_owned() } else { axes.to_string() }
}

/// Formats bytes exactly and rounded.
fn bytes(bytes: u64) -> String {
    let units = [("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)];
    let rough = units.iter().find(|(_, unit)| bytes as f64 >= *unit);
    let rough = rough.map_or(String::new(), |(name, unit)| format!(" ({:.1} {name})", bytes as f64 / unit));
    grouped(bytes) + &rough
}

/// Formats 1234567 as 1,234,567.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut grouped = String::new();
    for (i, digit) in digits.char_indices() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

/// Merges rows of pipeline stages that differ only in the first cell (the stage) and the next `own` cells; a merged row keeps the cells
/// of its first.
fn together(rows: Vec<Vec<String>>, own: usize) -> Vec<Vec<String>> {
    let mut merged: Vec<(Vec<usize>, Vec<String>)> = Vec::new();
    let (head, rows) = rows.split_first().map_or((Vec::new(), &[][..]), |(head, rows)| (head.clone(), rows));
    for row in rows {
        let stage = row[0].parse().unwrap_or_default();
        match merged.iter_mut().find(|(_, other)| other[1 + own..] == row[1 + own..]) {
            Some((stages, _)) => stages.push(stage),
            None => merged.push((vec![stage], row.clone())),
        }
    }
    let named = merged.into_iter().map(|(stages, row)| [vec![ranges(&stages)], row[1..].to_vec()].concat());
    [head].into_iter().chain(named).collect()
}

/// Formats ascending numbers, with consecutive numbers as a range.
fn ranges(numbers: &[usize]) -> String {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for &number in numbers {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == number => *last = number,
            _ => runs.push((number, number)),
        }
    }
    let run = |&(first, last): &(usize, usize)| {
        if first == last { first.to_string() } else { format!("{first}-{last}") }
    };
    runs.iter().map(run).collect::<Vec<_>>().join(", ")
}

/// Formats rows as a table with the first row as head. Columns of numbers are aligned right, others left.
fn table(rows: &[Vec<String>]) -> String {
    let number = |cell: &String| cell.starts_with(|c: char| c.is_ascii_digit());
    let columns = rows.first().map_or(0, Vec::len);
    let width = |i: usize| rows.iter().map(|row| row[i].len()).max().unwrap_or(0);
    let right = |i: usize| rows.iter().skip(1).all(|row| number(&row[i]));
    let mut text = String::new();
    for row in rows {
        let cells = (0..columns).map(|i| match right(i) {
            true => format!("{:>width$}", row[i], width = width(i)),
            false => format!("{:<width$}", row[i], width = width(i)),
        });
        text += cells.collect::<Vec<_>>().join("  ").trim_end();
        text.push('\n');
    }
    text
}
