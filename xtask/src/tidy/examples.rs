//! Rule for examples: every public type of the libraries stands in one, by its name. Examples are code blocks that rustdoc compiles, in the
//! sources and in documents, and the files of `examples` folders.

use super::complaint::{Complaint, File};
use super::graph::tokens::{Token, text, tokens};
use super::measures::{Figure, Limit, Measure};
use std::collections::BTreeSet;

/// Folders of the libraries, each with the crates inside.
const FOLDERS: &[&str] = &["tensor", "comm", "optim", "shard", "parallel3d"];

/// Public modules for the packages of this repository, and for glob imports.
const NOT_FOR_PROGRAMS: &[&str] = &["extend", "prelude"];

const GOAL: usize = 0;

/// Bounds of today, by the crate's folder: structures of CUDA kernels, and of the package cudarc. A crate without a row keeps to the goal.
const NOW: &[(&str, usize)] = &[("tensor", 1), ("optim", 15)];

/// Counts the types of each crate that no example names; `folders` are those of the crates.
pub(super) fn measure(files: &[File], folders: &[&str]) -> Vec<Measure> {
    let shown: BTreeSet<&str> = files.iter().flat_map(|file| example_lines(file)).flat_map(words).collect();
    let libraries =
        folders.iter().filter(|folder| FOLDERS.contains(&folder.split('/').next().unwrap_or(folder)));
    libraries.filter_map(|folder| of_crate(files, folder, &shown)).collect()
}

fn of_crate(files: &[File], folder: &str, shown: &BTreeSet<&str>) -> Option<Measure> {
    let root = files.iter().find(|file| file.path == format!("{folder}/src/lib.rs"))?;
    let offence = |(name, path, line): (&str, &str, usize)| {
        (!shown.contains(name)).then(|| Complaint::line(path, line, format!("`{name}` stands in no example")))
    };
    let (types, aliases) = (exports(files, root), aliases(files, folder));
    let types = types.into_iter().filter(|(name, ..)| !aliases.contains(name));
    let offences: Vec<Complaint> = types.filter_map(offence).collect();
    Some(Measure {
        place: folder.to_owned(),
        what: "public types in no example",
        figure: Figure::Count(offences.len()),
        limit: Limit::of(folder, NOW, GOAL),
        offences,
    })
}

/// Types that a module exports, by re-exports, definitions, and public modules, each with its file and line.
fn exports<'a>(files: &'a [File], module: &'a File) -> Vec<(&'a str, &'a str, usize)> {
    let tokens = tokens(&module.text);
    let mut found = Vec::new();
    // `#[doc(hidden)]` is the last attribute of an item that is not for programs.
    let shown = |at: &usize| *at < 3 || text(&tokens, at - 3) != "hidden";
    for at in (0..tokens.len()).filter(|at| text(&tokens, *at) == "pub").filter(shown) {
        match text(&tokens, at + 1) {
            "use" => found
                .extend(renamed(&tokens[at + 2..]).map(|Token { text, line }| (text, &*module.path, line))),
            "struct" | "enum" | "trait" | "union" => {
                found.push((text(&tokens, at + 2), &*module.path, tokens[at].line));
            }
            "mod" if !NOT_FOR_PROGRAMS.contains(&text(&tokens, at + 2)) => {
                let below = file_of(files, &module.path, text(&tokens, at + 2));
                found.extend(below.into_iter().flat_map(|file| exports(files, file)));
            }
            _ => {}
        }
    }
    found.retain(|(name, ..)| is_type(name));
    found
}

/// Other names of types, which need no example.
fn aliases<'a>(files: &'a [File], folder: &str) -> BTreeSet<&'a str> {
    let source = format!("{folder}/src/");
    let own = files.iter().filter(|file| file.path.starts_with(&source) && file.path.ends_with(".rs"));
    own.flat_map(|file| {
        let tokens = tokens(&file.text);
        let named = |at: &usize| text(&tokens, *at) == "pub" && text(&tokens, at + 1) == "type";
        (0..tokens.len()).filter(named).map(|at| text(&tokens, at + 2)).collect::<Vec<_>>()
    })
    .collect()
}

/// Names under which a `use` exports what it names: the last of each path.
fn renamed<'a>(tokens: &[Token<'a>]) -> impl Iterator<Item = Token<'a>> {
    let end = (0..tokens.len()).find(|at| text(tokens, *at) == ";").unwrap_or(tokens.len());
    let last = |at: &usize| matches!(text(tokens, at + 1), "," | "}" | ";");
    (0..end).filter(last).map(|at| tokens[at]).collect::<Vec<_>>().into_iter()
}

/// The file of a module that the file at `path` declares.
fn file_of<'a>(files: &'a [File], path: &str, name: &str) -> Option<&'a File> {
    let folder = path.strip_suffix("/lib.rs").or(path.strip_suffix("/mod.rs")).or(path.strip_suffix(".rs"))?;
    let paths = [format!("{folder}/{name}.rs"), format!("{folder}/{name}/mod.rs")];
    files.iter().find(|file| paths.contains(&file.path))
}

/// True for names of types and traits, not of functions and constants.
fn is_type(name: &str) -> bool {
    name.starts_with(|first: char| first.is_ascii_uppercase())
        && name.contains(|c: char| c.is_ascii_lowercase())
}

fn words(line: &str) -> impl Iterator<Item = &str> {
    line.split(|c: char| !c.is_alphanumeric() && c != '_')
}

/// Lines of a file that are examples.
fn example_lines(file: &File) -> Vec<&str> {
    let lines = file.text.lines();
    match file.path.rsplit_once('.').map(|(_, end)| end) {
        Some("rs") if file.path.contains("/examples/") => lines.collect(),
        Some("rs") => compiled(lines.map(doc_text)),
        Some("md") => compiled(lines.map(Some)),
        _ => Vec::new(),
    }
}

/// The text of a documentation comment's line.
fn doc_text(line: &str) -> Option<&str> {
    let line = line.trim_start();
    line.strip_prefix("///").or(line.strip_prefix("//!"))
}

/// Lines of code blocks that rustdoc compiles. `None` is a line of something else, which ends a block.
fn compiled<'a>(lines: impl Iterator<Item = Option<&'a str>>) -> Vec<&'a str> {
    let (mut found, mut block) = (Vec::new(), None);
    for line in lines {
        let fence = line.and_then(|line| line.trim_start().strip_prefix("```"));
        block = match (line, fence, block) {
            (None, ..) | (_, Some(_), Some(_)) => None,
            (_, Some(kind), None) => Some(kind.split(',').all(is_rust)),
            (Some(line), None, Some(true)) => {
                found.push(line);
                block
            }
            _ => block,
        };
    }
    found
}

fn is_rust(kind: &str) -> bool {
    matches!(kind.trim(), "" | "rust" | "no_run" | "should_panic" | "compile_fail")
}

#[cfg(test)]
mod tests {
    use super::super::complaint::tests::file;
    use super::*;

    fn offences(files: &[File]) -> Vec<String> {
        let measures = measure(files, &["comm", "xtask"]);
        measures.into_iter().flat_map(|measure| measure.offences).map(|offence| offence.to_string()).collect()
    }

    #[test]
    fn types_of_the_crate_and_of_public_modules_need_an_example() {
        let files = [
            file(
                "comm/src/lib.rs",
                "pub use a::{One, b::Two as Three, LIMIT, go};\nmod a;\npub mod tcp;\npub mod extend;\n",
            ),
            file("comm/src/tcp/mod.rs", "pub(crate) struct Hidden;\npub enum Four {}\n"),
            file("comm/src/extend.rs", "pub struct Inner;\n"),
            file("xtask/src/lib.rs", "pub struct Tool;\n"),
        ];
        let expected = [
            "comm/src/lib.rs:1: `One` stands in no example",
            "comm/src/lib.rs:1: `Three` stands in no example",
            "comm/src/tcp/mod.rs:2: `Four` stands in no example",
        ];
        assert_eq!(offences(&files), expected);
    }

    #[test]
    fn compiled_blocks_and_programs_are_examples() {
        let with = |path: &str, text: &str| {
            offences(&[file("comm/src/lib.rs", "pub struct One;\n"), file(path, text)]).is_empty()
        };
        for (path, text) in [
            ("comm/src/one.rs", "/// It.\n///\n/// ```\n/// # use comm::One;\n/// ```\n"),
            ("comm/src/one.rs", "//! ```no_run\n//! f(One)\n//! ```\n"),
            ("comm/README.md", "```rust\nOne::new()\n```\n"),
            ("comm/examples/one.rs", "use comm::One;\n"),
        ] {
            assert!(with(path, text), "{path}: {text}");
        }
        for (path, text) in [
            ("comm/src/one.rs", "/// One.\n/// ```text\n/// One\n/// ```\n"),
            ("comm/src/one.rs", "/// ```\n/// Oneself\n/// ```\nuse One;\n"),
            ("comm/README.md", "One\n```rust,ig\nOne\n```\n```sh\nOne\n```\n"),
            ("comm/tests/suite/main.rs", "use comm::One;\n"),
        ] {
            assert!(!with(path, text), "{path}: {text}");
        }
    }
}
