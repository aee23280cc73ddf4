//! Input and output of every rule: the files of the repository, and complaints about them.

use std::fmt;

/// A text file of the repository; `path` is relative to the root, with `/` on every platform.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct File {
    pub(super) path: String,
    pub(super) text: String,
}

/// A breach of a rule: its place, and the change that would mend it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Complaint {
    /// A file, with a line where one is to blame.
    pub(super) at: String,
    pub(super) what: String,
}

impl Complaint {
    pub(super) fn file(path: &str, what: impl Into<String>) -> Self {
        Self { at: path.to_owned(), what: what.into() }
    }

    /// `line` counts from 1.
    pub(super) fn line(path: &str, line: usize, what: impl Into<String>) -> Self {
        Self { at: format!("{path}:{line}"), what: what.into() }
    }
}

impl fmt::Display for Complaint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.at, self.what)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A file for the tests of the rules.
    pub(in super::super) fn file(path: &str, text: &str) -> File {
        File { path: path.to_owned(), text: text.to_owned() }
    }

    #[test]
    fn a_complaint_begins_with_its_place() {
        assert_eq!(Complaint::line("a.rs", 3, "split it").to_string(), "a.rs:3: split it");
        assert_eq!(Complaint::file("a.rs", "split it").to_string(), "a.rs: split it");
    }
}
