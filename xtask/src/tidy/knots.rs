//! Rule for modules: no large knots. A knot is a set of files that import one another, directly or in a circle.
//!
//! The imports are those of the `graph` module, which says its limits.

use super::complaint::{Complaint, File};
use super::graph::{Graph, Import};
use super::measures::{Figure, Limit, Measure};
use std::collections::{BTreeMap, BTreeSet};

/// Files of a crate's largest knot.
const GOAL: usize = 8;

/// Bounds of today, by the crate's folder. A crate without a row keeps to the goal.
const NOW: &[(&str, usize)] = &[("shard", 8)];

/// The largest knot of each crate.
pub(super) fn measure(files: &[File], folders: &[&str]) -> Vec<Measure> {
    let crates = folders.iter().map(|folder| (*folder, Graph::of(files, folder)));
    crates
        .filter(|(_, graph)| !graph.files.is_empty())
        .map(|(folder, graph)| {
            let largest = knots(&graph).into_iter().max_by_key(BTreeSet::len).unwrap_or_default();
            Measure {
                place: folder.to_owned(),
                what: "files in the largest knot",
                figure: Figure::Count(largest.len()),
                limit: Limit::of(folder, NOW, GOAL),
                offences: offences(&graph, &largest),
            }
        })
        .collect()
}

/// The sets of files that reach one another, each with at least two files.
fn knots(graph: &Graph) -> Vec<BTreeSet<&str>> {
    let mut imported: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for import in &graph.imports {
        imported.entry(&import.from).or_default().push(&import.to);
    }
    let reached: BTreeMap<&str, BTreeSet<&str>> =
        graph.files.iter().map(|file| (file.as_str(), reach(&imported, file))).collect();
    let together = |a: &str, b: &str| reached[a].contains(b) && reached[b].contains(a);
    let mut knots: Vec<BTreeSet<&str>> = Vec::new();
    for file in reached.keys().filter(|file| together(file, file)) {
        if knots.iter().all(|knot| !knot.contains(file)) {
            knots.push(reached.keys().copied().filter(|other| together(file, other)).collect());
        }
    }
    knots
}

/// Files that `from` imports, directly or through further files.
fn reach<'g>(imported: &BTreeMap<&str, Vec<&'g str>>, from: &str) -> BTreeSet<&'g str> {
    let mut reached = BTreeSet::new();
    let mut next = imported.get(from).cloned().unwrap_or_default();
    while let Some(file) = next.pop() {
        if reached.insert(file) {
            next.extend(imported.get(file).into_iter().flatten());
        }
    }
    reached
}

/// Imports to remove until the knot is undone: the ones that point up in a greedy order of its files.
fn offences(graph: &Graph, knot: &BTreeSet<&str>) -> Vec<Complaint> {
    let inside = |import: &&Import| knot.contains(&*import.from) && knot.contains(&*import.to);
    let imports: Vec<&Import> = graph.imports.iter().filter(inside).collect();
    let order = order(knot.clone(), &imports);
    let place = |file: &str| order.iter().position(|placed| *placed == file);
    let up = imports.into_iter().filter(|import| place(&import.from) > place(&import.to));
    up.map(|import| {
        let what =
            format!("imports from {}, which leads back here; move the item or invert the import", import.to);
        Complaint::line(&import.from, import.line, what)
    })
    .collect()
}

/// The files with most imports point down: importers first (heuristic of Eades, Lin and Smyth).
fn order<'g>(mut left: BTreeSet<&'g str>, imports: &[&'g Import]) -> Vec<&'g str> {
    let (mut top, mut bottom) = (Vec::new(), Vec::new());
    while !left.is_empty() {
        let between =
            imports.iter().filter(|import| left.contains(&*import.from) && left.contains(&*import.to));
        let mut degrees: BTreeMap<&str, (usize, usize)> = left.iter().map(|file| (*file, (0, 0))).collect();
        for import in between {
            degrees.entry(&import.from).or_default().0 += 1;
            degrees.entry(&import.to).or_default().1 += 1;
        }
        let sink = degrees.iter().find(|(_, (imports, _))| *imports == 0);
        let most = || degrees.iter().max_by_key(|(_, (imports, importers))| imports + left.len() - importers);
        let (chosen, list) = match sink {
            Some((file, _)) => (*file, &mut bottom),
            None => (most().map_or("", |(file, _)| *file), &mut top),
        };
        list.push(chosen);
        left.remove(chosen);
    }
    bottom.reverse();
    top.append(&mut bottom);
    top
}

#[cfg(test)]
mod tests {
    use super::super::graph::tests::made_up;
    use super::*;

    fn measured(files: &[(&str, &str)]) -> Measure {
        measure(&made_up(files), &["a", "b"]).remove(0)
    }

    #[test]
    fn a_chain_has_no_knot() {
        let chain = [
            ("lib.rs", "mod x; mod y; mod z;"),
            ("x.rs", "use crate::y::Y;"),
            ("y.rs", "use crate::z::Z; struct Y;"),
            ("z.rs", "struct Z;"),
        ];
        let measure = measured(&chain);
        assert_eq!((measure.figure, measure.offences.len()), (Figure::Count(0), 0));
    }

    #[test]
    fn files_in_a_circle_are_a_knot_and_one_import_undoes_it() {
        let circle = [
            ("lib.rs", "mod x; mod y; mod z; use x::X; fn f(_: X) {}"),
            ("x.rs", "use crate::y::Y;\nuse crate::z::Z;\nstruct X;"),
            ("y.rs", "use crate::z::Z;\nstruct Y;"),
            ("z.rs", "\nuse crate::x::X;\nstruct Z;"),
        ];
        let measure = measured(&circle);
        assert_eq!(measure.figure, Figure::Count(3));
        let at: Vec<&str> = measure.offences.iter().map(|offence| offence.at.as_str()).collect();
        assert_eq!(at, ["a/src/z.rs:2"]);
    }

    #[test]
    fn the_largest_of_several_knots_counts() {
        let mut files = vec![("lib.rs", "mod p; mod q; mod x; mod y; mod z;")];
        files.extend([("p.rs", "use crate::q::Q; struct P;"), ("q.rs", "use crate::p::P; struct Q;")]);
        files.extend([("x.rs", "use crate::y::Y; struct X;"), ("y.rs", "use crate::z::Z; struct Y;")]);
        files.push(("z.rs", "use crate::x::X; struct Z;"));
        let all = made_up(&files);
        let graph = Graph::of(&all, "a");
        let sizes: Vec<usize> = knots(&graph).iter().map(BTreeSet::len).collect();
        assert_eq!(sizes, [2, 3]);
        assert_eq!(measured(&files).figure, Figure::Count(3));
    }
}
