//! Rule for folders: the rooms of a crate stand in an order, and a lower room imports nothing from an upper one.
//!
//! A room is a folder in the crate's `src`, with the file `ROOM.rs` beside it if there is one. Files outside of the rooms, such
//! as `lib.rs` and `error.rs`, may import and be imported everywhere. The imports are those of the `graph` module.

use super::complaint::{Complaint, File};
use super::graph::{Graph, Import};
use super::measures::{Figure, Limit, Measure};

/// A crate's rooms, lowest first. Rooms that do not exist yet, or no longer, are skipped.
struct House {
    folder: &'static str,
    /// Bound of today on imports that point up; the goal is none.
    now: usize,
    rooms: &'static [&'static str],
}

const HOUSES: &[House] = &[
    House {
        folder: "comm",
        now: 0,
        rooms: &["sync", "group", "loopback", "p2p", "rendezvous", "shared_memory", "tcp", "nccl"],
    },
    House {
        folder: "optim",
        now: 0,
        rooms: &["precision", "engine", "norm", "cuda", "flat", "schedule", "merge", "lbfgs", "rules"],
    },
    House {
        folder: "shard",
        now: 0,
        rooms: &[
            "config",
            "ranks",
            "plan",
            "reduce",
            "update",
            "gather",
            "verify",
            "step",
            "optimizer",
            "closure",
            "cross_shard",
            "extend",
        ],
    },
    House {
        folder: "shard/checkpoint",
        now: 0,
        rooms: &["format", "store", "collective", "saveable", "pytorch"],
    },
    House { folder: "shard/local", now: 0, rooms: &["plan", "exchange", "worker", "saving"] },
    House {
        folder: "bench",
        now: 0,
        rooms: &["args", "ranks", "gpt", "report", "corpus", "train", "measure", "local", "mesh"],
    },
    House { folder: "cli", now: 0, rooms: &["launch", "ckpt", "parity", "plan"] },
];

/// The imports that point up in each crate of the table.
pub(super) fn measure(files: &[File]) -> Vec<Measure> {
    let here = HOUSES.iter().filter(|house| files.iter().any(|file| below_src(house, &file.path).is_some()));
    here.map(|house| measure_house(house, files)).collect()
}

fn measure_house(house: &House, files: &[File]) -> Measure {
    let exists = |name: &str| {
        let folder = format!("{name}/");
        files.iter().any(|file| below_src(house, &file.path).is_some_and(|path| path.starts_with(&folder)))
    };
    let rooms: Vec<&str> = house.rooms.iter().copied().filter(|name| exists(name)).collect();
    let graph = Graph::of(files, house.folder);
    let offences: Vec<Complaint> =
        graph.imports.iter().filter_map(|import| offence(house, &rooms, import)).collect();
    Measure {
        place: house.folder.to_owned(),
        what: "imports from upper rooms",
        figure: Figure::Count(offences.len()),
        limit: Limit { now: house.now, goal: 0 },
        offences,
    }
}

fn offence(house: &House, rooms: &[&str], import: &Import) -> Option<Complaint> {
    let floor = |path: &str| {
        let name = room(below_src(house, path)?);
        rooms.iter().position(|room| *room == name)
    };
    let (from, to) = (floor(&import.from)?, floor(&import.to)?);
    (from < to).then(|| {
        let (lower, upper) = (rooms[from], rooms[to]);
        let what = format!("{lower} imports from {}, but {upper} is above it; move the item down", import.to);
        Complaint::line(&import.from, import.line, what)
    })
}

/// The path below the crate's `src`.
fn below_src<'a>(house: &House, path: &'a str) -> Option<&'a str> {
    path.strip_prefix(house.folder)?.strip_prefix("/src/")
}

/// The folder directly below `src`, or the file's name without `.rs`.
fn room(path: &str) -> &str {
    path.split_once('/').map_or_else(|| path.trim_end_matches(".rs"), |(folder, _)| folder)
}

#[cfg(test)]
mod tests {
    use super::super::graph::tests::made_up;
    use super::*;

    const HOUSE: House = House { folder: "a", now: 0, rooms: &["plan", "ranks", "step"] };

    fn measured(files: &[(&str, &str)]) -> Measure {
        measure_house(&HOUSE, &made_up(files))
    }

    const LIB: (&str, &str) = ("lib.rs", "mod plan; mod step; mod error; use step::Step; fn f(_: Step) {}");

    #[test]
    fn an_upper_room_may_import_from_a_lower_one() {
        let files = [
            LIB,
            ("plan/mod.rs", "pub mod bucket;"),
            ("plan/bucket.rs", "use crate::error::E; pub struct Bucket;"),
            ("step/mod.rs", "use crate::plan::bucket::Bucket; pub struct Step;"),
            ("error.rs", "use crate::step::Step; pub struct E;"),
        ];
        assert_eq!(measured(&files).offences, []);
    }

    #[test]
    fn a_lower_room_may_not_import_from_an_upper_one() {
        let files = [
            LIB,
            ("plan.rs", "mod bucket;\npub(crate) use bucket::Bucket;\nuse crate::step::Step;"),
            ("plan/bucket.rs", "\nfn f() { crate::step::go::go() }\npub struct Bucket;"),
            ("step/mod.rs", "pub mod go;\npub struct Step;"),
            ("step/go.rs", "pub fn go() {}"),
        ];
        let measure = measured(&files);
        let at: Vec<&str> = measure.offences.iter().map(|offence| offence.at.as_str()).collect();
        assert_eq!(at, ["a/src/plan.rs:3", "a/src/plan/bucket.rs:2"]);
        assert_eq!(
            measure.offences[1].what,
            "plan imports from a/src/step/go.rs, but step is above it; move the item down"
        );
    }

    #[test]
    fn a_room_without_a_folder_is_skipped() {
        let files = [
            LIB,
            ("plan.rs", "use crate::step::Step; pub struct Plan;"),
            ("step/mod.rs", "pub struct Step;"),
        ];
        assert_eq!(measured(&files).offences, []);
    }

    #[test]
    fn each_crate_of_the_table_is_measured_where_it_exists() {
        let here = measure(&[super::super::complaint::tests::file("shard/src/lib.rs", "")]);
        assert_eq!(here.iter().map(|measure| measure.place.as_str()).collect::<Vec<_>>(), ["shard"]);
        for house in HOUSES {
            assert!((1..house.rooms.len()).all(|idx| !house.rooms[..idx].contains(&house.rooms[idx])));
        }
    }
}
