//! Rules for source files: how they begin, how long they are, and what they do not contain.

use super::complaint::{Complaint, File};

/// Every Rust file begins with a sentence about itself.
pub(super) fn headers(files: &[File]) -> Vec<Complaint> {
    let bare = rust(files).filter(|file| {
        let first = file.text.lines().next().unwrap_or_default();
        first.strip_prefix("//! ").is_none_or(|sentence| sentence.trim().is_empty())
    });
    bare.map(|file| Complaint::line(&file.path, 1, "begin with a `//! ` sentence that says what the file is"))
        .collect()
}

/// A file holds one idea: sources, tests included, have at most this many lines.
const MAX_LINES: usize = 400;

/// Extensions of sources: Rust, C++ and CUDA.
const SOURCES: &[&str] = &[".rs", ".cpp", ".h", ".cu"];

pub(super) fn lengths(files: &[File]) -> Vec<Complaint> {
    let sources = files.iter().filter(|file| SOURCES.iter().any(|ext| file.path.ends_with(ext)));
    let counted = sources.map(|file| (file, file.text.lines().count()));
    counted
        .filter(|(_, lines)| *lines > MAX_LINES)
        .map(|(file, lines)| {
            Complaint::file(&file.path, format!("{lines} lines, above {MAX_LINES}; give each idea a file"))
        })
        .collect()
}

fn rust(files: &[File]) -> impl Iterator<Item = &File> {
    files.iter().filter(|file| file.path.ends_with(".rs"))
}

/// Text that stands for work not done, or that holds on one machine only.
///
/// Each text is written in two parts, so that the rule does not find itself.
const FORBIDDEN: &[(&str, Where, &str)] = &[
    (concat!("to", "do!"), Where::Rust, "write it, or say under Limits that it is missing"),
    (concat!("un", "implemented!"), Where::Rust, "write it, or return an error that says what works"),
    (concat!("#[ig", "nore"), Where::Rust, "a test that never runs checks nothing: let it run or remove it"),
    (concat!("```ig", "nore"), Where::Rust, "an example that never compiles goes stale: let it compile"),
    (
        concat!("#[pa", "th"),
        Where::NotExample,
        "a file belongs to one module: what several programs share is a crate; tests alone include examples, and a model.rs the file \
         beside it",
    ),
    (concat!("T", "BD"), Where::Anywhere, "say it now or leave it out"),
    (concat!("/wo", "rk/"), Where::Path, "this folder is on one machine only"),
    (concat!("/t", "mp/"), Where::Path, "use the target folder, or a folder the system hands out"),
    (concat!("/ro", "ot/"), Where::Path, "this folder is on one machine only"),
];

/// Where a forbidden text counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Where {
    Rust,
    /// In Rust files, except where a crate's tests name one of its examples, or a model the file beside it that it runs on other
    /// primitives.
    NotExample,
    Anywhere,
    /// In every file, at the beginning of an absolute path.
    Path,
}

pub(super) fn forbidden(files: &[File]) -> Vec<Complaint> {
    files.iter().flat_map(forbidden_in).collect()
}

fn forbidden_in(file: &File) -> impl Iterator<Item = Complaint> {
    file.text.lines().enumerate().flat_map(move |(idx, line)| {
        let found = FORBIDDEN.iter().filter(move |(text, place, _)| occurs(text, *place, line, &file.path));
        found.map(move |(text, _, instead)| {
            Complaint::line(&file.path, idx + 1, format!("contains `{text}`: {instead}"))
        })
    })
}

fn occurs(text: &str, place: Where, line: &str, path: &str) -> bool {
    match place {
        Where::Rust => path.ends_with(".rs") && line.contains(text),
        Where::NotExample => {
            let example = path.contains("/tests/") && line.contains("\"../../examples/");
            let model = path.ends_with("/model.rs") && !line.contains('/');
            path.ends_with(".rs") && line.contains(text) && !example && !model
        }
        Where::Anywhere => line.match_indices(text).any(|(at, _)| is_word(line, at, text.len())),
        Where::Path => line.match_indices(text).any(|(at, _)| begins_a_path(line, at)),
    }
}

fn is_word(line: &str, at: usize, len: usize) -> bool {
    let inside = |c: char| c.is_alphanumeric() || c == '_';
    !line[..at].ends_with(inside) && !line[at + len..].starts_with(inside)
}

/// A slash after a name or another slash is in the middle of a path or an address.
fn begins_a_path(line: &str, at: usize) -> bool {
    !line[..at].ends_with(|c: char| c.is_alphanumeric() || "_-./~$}".contains(c))
}

#[cfg(test)]
mod tests {
    use super::super::complaint::tests::file;
    use super::*;

    #[test]
    fn a_rust_file_begins_with_a_sentence() {
        let bare = ["", "use std::fmt;", "//!", "//!   ", "/// Not of the file.", "\n//! Too late."];
        for text in bare {
            assert_eq!(headers(&[file("a/src/lib.rs", text)]).len(), 1, "{text:?}");
        }
        assert_eq!(headers(&[file("a/src/lib.rs", "//! A crate.\n"), file("a.md", "")]), []);
    }

    #[test]
    fn sources_end_at_400_lines_and_texts_need_not() {
        let long = "\n".repeat(MAX_LINES + 1);
        for path in ["a/src/lib.rs", "a/tests/it.rs", "a/benches/b.rs", "a/src/kernel.cu", "a/b.cpp", "a/b.h"]
        {
            assert_eq!(lengths(&[file(path, &long)]).len(), 1, "{path}");
            assert_eq!(lengths(&[file(path, &long[1..])]), []);
        }
        for path in ["a/README.md", "Cargo.lock", "a/src/kernel.ptx"] {
            assert_eq!(lengths(&[file(path, &long)]), [], "{path}");
        }
    }

    #[test]
    fn each_forbidden_text_is_found_with_its_line() {
        for (text, _, _) in FORBIDDEN {
            let complaints = forbidden(&[file("a/src/lib.rs", &format!("//! A.\nlet x = {text} y;\n"))]);
            assert_eq!(complaints.len(), 1, "{text}: {complaints:?}");
            assert_eq!(complaints[0].at, "a/src/lib.rs:2");
        }
    }

    #[test]
    fn macros_count_in_rust_only_and_words_as_words() {
        let rust = [Where::Rust, Where::NotExample];
        for (text, _, _) in FORBIDDEN.iter().filter(|(_, place, _)| rust.contains(place)) {
            assert_eq!(forbidden(&[file("a.md", text)]), [], "{text}");
        }
        let inside = concat!("ST", "BD", "X");
        assert_eq!(forbidden(&[file("a.md", inside)]), []);
    }

    #[test]
    fn tests_alone_include_examples() {
        let line = |of: &str| format!("{} = \"{of}\"]", concat!("#[pa", "th"));
        let (example, other) = (line("../../examples/mlp.rs"), line("../other.rs"));
        assert_eq!(forbidden(&[file("a/tests/suite/examples.rs", &example)]), []);
        assert_eq!(forbidden(&[file("a/tests/suite/examples.rs", &other)]).len(), 1);
        let beside = line("crew.rs");
        assert_eq!(forbidden(&[file("a/src/model.rs", &beside)]), []);
        assert_eq!(forbidden(&[file("a/src/model.rs", &other)]).len(), 1);
        assert_eq!(forbidden(&[file("a/src/other.rs", &beside)]).len(), 1);
        assert_eq!(forbidden(&[file("a/src/lib.rs", &example)]).len(), 1);
    }

    #[test]
    fn only_the_beginning_of_a_path_counts() {
        let folder = concat!("/t", "mp/");
        for line in ["target", "https://example.org", "~", "$HOME", "${DIR}", "."] {
            assert_eq!(forbidden(&[file("a.sh", &format!("ls {line}{folder}x"))]), [], "{line}");
        }
        for line in ["ls ", "cp a:", "(", "\"", "'", "`", ""] {
            assert_eq!(forbidden(&[file("a.sh", &format!("{line}{folder}x"))]).len(), 1, "{line}");
        }
    }
}
