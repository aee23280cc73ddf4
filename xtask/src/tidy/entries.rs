//! Rules for what a reader has to know: entries of a folder, files of a type, names of types, test programs, checkpoint verbs.

use super::complaint::{Complaint, File};
use super::graph::tokens::{Token, closing, text, tokens, without_tests};
use super::measures::{Figure, Limit, Measure, TREE};
use std::collections::{BTreeMap, BTreeSet};

/// Files and folders directly in a crate's `src`.
const ENTRIES_GOAL: usize = 16;

/// Bounds of today, by the crate's folder. A crate without a row keeps to the goal.
const ENTRIES_NOW: &[(&str, usize)] = &[];

/// Files of shard with methods of `Optimizer`.
const IMPLS: Limit = Limit { now: 5, goal: 5 };
/// Names that three types or more of the libraries have, tests aside.
const NAMES: Limit = Limit { now: 15, goal: 15 };
const TEST_PROGRAMS: Limit = Limit { now: 16, goal: 16 };
/// Public functions that take the placement as an argument, by their names.
const PLACED: Limit = Limit { now: 0, goal: 0 };
/// Public functions of `shard/checkpoint`, and of the files that save other types with it, that begin with one of `VERBS`.
const CHECKPOINT: Limit = Limit { now: 12, goal: 12 };

/// Folders of the libraries, each with the crates inside.
const FOLDERS: &[&str] = &["tensor", "comm", "optim", "shard", "parallel3d"];

const VERBS: &[&str] =
    &["save", "load", "reshard", "export", "import", "serialize", "deserialize", "consolidate", "resume"];

/// All measures of this file but the test programs; `folders` are those of the crates.
pub(super) fn measure(files: &[File], folders: &[&str]) -> Vec<Measure> {
    let of_tree = |what, limit, offences: Vec<Complaint>| Measure {
        place: TREE.to_owned(),
        what,
        figure: Figure::Count(offences.len()),
        limit,
        offences,
    };
    let mut measures: Vec<Measure> = folders.iter().filter_map(|folder| entries(files, folder)).collect();
    let sources: Vec<Source<'_>> = files.iter().filter_map(Source::of).collect();
    measures.extend([
        Measure {
            place: "shard".to_owned(),
            ..of_tree("files with `impl Optimizer`", IMPLS, impls(&sources))
        },
        of_tree("type names that the libraries define three times or more", NAMES, names(&sources)),
        of_tree("public functions `*_placed`", PLACED, placed(&sources)),
        of_tree("public checkpoint verbs", CHECKPOINT, verbs(&sources)),
    ]);
    measures
}

/// The test programs of the workspace, by the paths of their main files.
pub(super) fn test_programs(paths: &[String]) -> Measure {
    let offence = |path: &String| Complaint::file(path, "a test program; make it a module of its crate's");
    Measure {
        place: TREE.to_owned(),
        what: "test programs",
        figure: Figure::Count(paths.len()),
        limit: TEST_PROGRAMS,
        offences: paths.iter().map(offence).collect(),
    }
}

/// Counts files and folders directly in the crate's `src`.
fn entries(files: &[File], folder: &str) -> Option<Measure> {
    let source = format!("{folder}/src/");
    let below = files.iter().filter_map(|file| file.path.strip_prefix(&source));
    let names: BTreeSet<&str> = below.filter_map(|path| path.split('/').next()).collect();
    let offence =
        |name| Complaint::file(&format!("{source}{name}"), "an entry of src; move it into a folder");
    (!names.is_empty()).then(|| Measure {
        place: folder.to_owned(),
        what: "entries in src",
        figure: Figure::Count(names.len()),
        limit: Limit::of(folder, ENTRIES_NOW, ENTRIES_GOAL),
        offences: names.into_iter().map(offence).collect(),
    })
}

/// A Rust file as tokens.
struct Source<'a> {
    path: &'a str,
    tokens: Vec<Token<'a>>,
}

impl<'a> Source<'a> {
    fn of(file: &'a File) -> Option<Self> {
        file.path.ends_with(".rs").then(|| Self { path: &file.path, tokens: tokens(&file.text) })
    }

    fn line(&self, at: usize, what: impl Into<String>) -> Complaint {
        Complaint::line(self.path, self.tokens[at].line, what)
    }

    fn text(&self, at: usize) -> &'a str {
        text(&self.tokens, at)
    }

    /// Index and name of every function that is public without restriction.
    fn public_functions(&self) -> impl Iterator<Item = (usize, &'a str)> {
        let publics = (0..self.tokens.len()).filter(|at| self.text(*at) == "pub" && self.text(at + 1) != "(");
        publics.filter_map(|at| {
            let modifier = |at: &usize| matches!(self.text(*at), "const" | "async" | "unsafe" | "extern");
            let at = (at + 1..).find(|at| !modifier(at))?;
            (self.text(at) == "fn").then(|| (at, self.text(at + 1)))
        })
    }

    /// Index of the type's name in an inherent `impl` at `at`; generics may come first.
    fn inherent(&self, at: usize) -> Option<usize> {
        if self.text(at) != "impl" {
            return None;
        }
        let mut depth = 0usize;
        for at in at + 1..self.tokens.len() {
            match self.text(at) {
                "<" => depth += 1,
                // The arrow of a function type closes nothing.
                ">" if self.text(at - 1) != "-" => depth = depth.saturating_sub(1),
                _ if depth == 0 => return Some(at),
                _ => {}
            }
        }
        None
    }
}

fn impls(sources: &[Source<'_>]) -> Vec<Complaint> {
    let of_shard = sources.iter().filter(|source| source.path.starts_with("shard/src/"));
    of_shard
        .filter_map(|source| {
            let is_block = |at: &usize| {
                source.inherent(*at).is_some_and(|name| {
                    source.text(name) == "Optimizer" && matches!(source.text(name + 1), "{" | "<" | "where")
                })
            };
            let at = (0..source.tokens.len()).find(is_block)?;
            Some(source.line(at, "methods of `Optimizer`; give them to the field's type that they work on"))
        })
        .collect()
}

/// A complaint per name, at its first definition.
fn names(sources: &[Source<'_>]) -> Vec<Complaint> {
    let mut places: BTreeMap<&str, Vec<(&str, usize)>> = BTreeMap::new();
    for source in sources.iter().filter(|source| of_library(source.path)) {
        let tokens = without_tests(&source.tokens);
        for at in type_names(&tokens) {
            places.entry(tokens[at].text).or_default().push((source.path, tokens[at].line));
        }
    }
    let often = places.into_iter().filter(|(_, places)| places.len() >= 3);
    often
        .map(|(name, places)| {
            let others: Vec<String> =
                places[1..].iter().map(|(path, line)| format!("{path}:{line}")).collect();
            let what =
                format!("a type `{name}`, as also in {}; say in the name which one it is", others.join(", "));
            Complaint::line(places[0].0, places[0].1, what)
        })
        .collect()
}

/// True for a source file of a crate in one of the libraries' folders.
fn of_library(path: &str) -> bool {
    let (folder, _) = path.split_once('/').unwrap_or((path, ""));
    let tests = path.contains("/tests/") || path.ends_with("/tests.rs");
    FOLDERS.contains(&folder) && path.contains("/src/") && !tests
}

/// Indices of the names of all types and traits; a type inside an `impl` or `trait` is associated and has no name of its own.
fn type_names(tokens: &[Token<'_>]) -> Vec<usize> {
    let mut found = Vec::new();
    let (mut at, mut in_header, mut block_end) = (0, false, 0);
    while at < tokens.len() {
        let begins =
            at == 0 || matches!(text(tokens, at - 1), ";" | "{" | "}" | "]" | "pub" | ")" | "unsafe");
        match text(tokens, at) {
            "struct" | "enum" | "trait" if begins => found.push(at + 1),
            "type" if begins && at >= block_end => found.push(at + 1),
            _ => {}
        }
        match text(tokens, at) {
            "impl" | "trait" if begins => in_header = true,
            "{" if std::mem::take(&mut in_header) => block_end = block_end.max(closing(tokens, at)),
            ";" => in_header = false,
            _ => {}
        }
        at += 1;
    }
    found.retain(|at| tokens.get(*at).is_some_and(Token::is_name));
    found
}

fn placed(sources: &[Source<'_>]) -> Vec<Complaint> {
    let found = sources.iter().filter(|source| source.path.contains("/src/")).flat_map(|source| {
        let named = source.public_functions().filter(|(_, name)| name.ends_with("_placed"));
        named.map(|(at, _)| {
            source.line(at, "placement is a property of the thing; do not pass it as an argument")
        })
    });
    found.collect()
}

fn verbs(sources: &[Source<'_>]) -> Vec<Complaint> {
    let saves = |path: &str| ["/checkpoint/", "/saving/"].iter().any(|part| path.contains(part));
    let of_checkpoint = sources
        .iter()
        .filter(|source| source.path.starts_with("shard/") && of_library(source.path) && saves(source.path));
    let found = of_checkpoint.flat_map(|source| {
        let named = source.public_functions();
        let verbs = named.filter(|(_, name)| VERBS.iter().any(|verb| name.starts_with(verb)));
        verbs.map(|(at, name)| {
            source.line(at, format!("`{name}` is one more way; let one verb serve every type"))
        })
    });
    found.collect()
}

#[cfg(test)]
mod tests {
    use super::super::complaint::tests::file;
    use super::*;

    fn at(measures: &[Measure], what: &str) -> Vec<String> {
        let measure = measures.iter().find(|measure| measure.what == what).unwrap();
        assert_eq!(measure.figure, Figure::Count(measure.offences.len()));
        measure.offences.iter().map(|offence| offence.at.clone()).collect()
    }

    #[test]
    fn entries_are_files_and_folders() {
        let paths = [
            "a/src/lib.rs",
            "a/src/x/mod.rs",
            "a/src/x/y.rs",
            "a/src/k.cu",
            "a/tests/t.rs",
            "a/b/src/lib.rs",
        ];
        let files: Vec<File> = paths.iter().map(|path| file(path, "")).collect();
        let measures = measure(&files, &["a", "a/b", "c"]);
        assert_eq!(at(&measures, "entries in src"), ["a/src/k.cu", "a/src/lib.rs", "a/src/x"]);
        assert_eq!(measures.iter().filter(|measure| measure.what == "entries in src").count(), 2);
    }

    #[test]
    fn methods_of_the_optimizer_are_counted_by_file() {
        let texts = [
            "impl Optimizer { }\nimpl Optimizer { }",
            "fn f(x: impl Fn() -> u8) {}\n\nimpl<'a, F: Fn() -> u8> Optimizer<'a> {}",
            "impl fmt::Debug for Optimizer {}",
            "impl Debug for Optimizer {} // impl Optimizer {}",
            "impl OptimizerState {}",
        ];
        let named = texts.iter().enumerate();
        let files: Vec<File> = named.map(|(idx, text)| file(&format!("shard/src/{idx}.rs"), text)).collect();
        let found = at(&measure(&files, &[]), "files with `impl Optimizer`");
        assert_eq!(found, ["shard/src/0.rs:1", "shard/src/1.rs:3"]);
    }

    #[test]
    fn a_type_name_counts_from_its_third_definition() {
        let files = [
            file("comm/src/x.rs", "pub struct Place;\nenum Seen {}\nfn f() { struct Run; }"),
            file(
                "shard/local/src/y.rs",
                "pub(crate) trait Place { type Run; fn f(); }\n#[derive(Debug)] struct Seen;",
            ),
            file(
                "optim/src/z.rs",
                "type Place = u8;\nimpl Iterator for X { type Run = u8; }\ntype Run = u8;",
            ),
        ];
        let often = |files: &[File]| {
            at(&measure(files, &[]), "type names that the libraries define three times or more")
        };
        assert_eq!(often(&files), ["comm/src/x.rs:1"]);
        for elsewhere in ["bench/src/z.rs", "optim/tests/z.rs", "optim/src/x/tests.rs"] {
            assert!(
                often(&[&files[..2], &[file(elsewhere, &files[2].text)]].concat()).is_empty(),
                "{elsewhere}"
            );
        }
        let source = Source::of(&files[2]).unwrap();
        let found: Vec<&str> = type_names(&source.tokens).into_iter().map(|at| source.text(at)).collect();
        assert_eq!(found, ["Place", "Run"]);
    }

    #[test]
    fn public_functions_are_those_without_restriction() {
        let text = "pub fn save() {}\npub(crate) fn load() {}\npub const unsafe fn reshard_placed() {}\nfn save() {}\n\
            pub struct Load;\npub fn placed() {}";
        let files = ["shard/local/src/saving/mod.rs", "shard/checkpoint/src/a.rs", "parallel3d/src/a.rs"]
            .map(|path| file(path, text));
        let measures = measure(&files, &[]);
        assert_eq!(at(&measures, "public checkpoint verbs").len(), 4);
        let placed = at(&measures, "public functions `*_placed`");
        assert_eq!(placed.len(), 3);
        assert_eq!(placed[2], "parallel3d/src/a.rs:3");
    }

    #[test]
    fn every_test_program_is_an_entry_too() {
        let paths: Vec<String> = (0..17).map(|idx| format!("a/tests/x{idx}.rs")).collect();
        let measure = test_programs(&paths);
        assert!(measure.figure.value() > measure.limit.now);
        assert_eq!(measure.offences.len(), 17);
    }
}
