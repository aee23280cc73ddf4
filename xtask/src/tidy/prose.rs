//! Rule for comments: plain sentences with a noun as subject. Counts sentences that read like riddles, per top-level folder.
//!
//! A sentence is a stretch of at least three words of a `//`, `///` or `//!` block, outside of code fences; table cells are
//! sentences of their own, and code spans count as one word.

use super::complaint::{Complaint, File};
use super::measures::{Figure, Limit, Measure};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;

/// Goals in tenths of a percent of a folder's sentences.
const GOALS: [usize; 3] = [30, 5, 5];

const WHAT: [&str; 3] = [
    "sentences that open with a pronoun",
    "sentences mostly of pronouns",
    "sentences with who, told or hear",
];

const ADVICE: [&str; 3] = [
    "open the sentence with its subject, a noun",
    "name the things that the pronouns stand for",
    "say which rank or type acts, and use a technical verb",
];

static OPENINGS: LazyLock<BTreeSet<&str>> = LazyLock::new(|| OPENING.split_whitespace().collect());
static PRONOUNS: LazyLock<BTreeSet<&str>> = LazyLock::new(|| PRONOUN.split_whitespace().collect());
static WORDS: LazyLock<BTreeSet<&str>> = LazyLock::new(|| WORD.split_whitespace().collect());

const OPENING: &str =
    "what whatever whether who whoever whom whose which whichever of those that such neither nobody";

const PRONOUN: &str = "it its itself they them their theirs themselves who whom whose whoever what whatever which \
    whichever that those these this one ones nobody somebody anybody everybody nothing something anything everything \
    none neither either both all each every other others another some any few many most same such else there here he \
    him his she her you your we our us so";

const WORD: &str = "who whom whose whoever told heard hears hear";

/// The three shares of each top-level folder; a crate inside another's folder counts with it.
pub(super) fn measure(files: &[File]) -> Vec<Measure> {
    let mut folders: BTreeMap<&str, Vec<&File>> = BTreeMap::new();
    for file in files.iter().filter(|file| file.path.ends_with(".rs")) {
        let (folder, _) = file.path.split_once('/').unwrap_or((".", ""));
        folders.entry(folder).or_default().push(file);
    }
    folders.into_iter().flat_map(|(folder, files)| measure_folder(folder, &files)).collect()
}

fn measure_folder(folder: &str, files: &[&File]) -> Vec<Measure> {
    let mut whole = 0;
    let mut offences: [Vec<Complaint>; 3] = Default::default();
    for file in files {
        for (line, sentence) in sentences(&file.text) {
            whole += 1;
            for (kind, _) in judge(&sentence).into_iter().enumerate().filter(|(_, offends)| *offends) {
                let start: String = sentence.chars().take(70).collect();
                let what = format!("{}: \"{start}\"", ADVICE[kind]);
                offences[kind].push(Complaint::line(&file.path, line, what));
            }
        }
    }
    let numbered = offences.into_iter().enumerate();
    numbered
        .map(|(kind, offences)| Measure {
            place: folder.to_owned(),
            what: WHAT[kind],
            figure: Figure::Share { part: offences.len(), whole },
            limit: Limit { now: GOALS[kind], goal: GOALS[kind] },
            offences,
        })
        .collect()
}

/// True for each of the three offences that the sentence commits.
fn judge(sentence: &str) -> [bool; 3] {
    let words: Vec<String> = letters(sentence).iter().map(|word| word.to_ascii_lowercase()).collect();
    let pronouns = words.iter().filter(|word| PRONOUNS.contains(word.as_str())).count();
    let mut parts = sentence.split(|c: char| !c.is_alphanumeric() && c != '_');
    [
        words.first().is_some_and(|word| OPENINGS.contains(word.as_str())),
        words.len() >= 4 && 100 * pronouns >= 34 * words.len(),
        parts.any(|part| WORDS.contains(part.to_lowercase().as_str())),
    ]
}

/// Runs of ASCII letters, with an apostrophe and the small letters behind it.
fn letters(sentence: &str) -> Vec<&str> {
    let mut words = Vec::new();
    let mut rest = sentence;
    while let Some(start) = rest.find(|c: char| c.is_ascii_alphabetic()) {
        rest = &rest[start..];
        let letters = run(rest, |c| c.is_ascii_alphabetic());
        let tail = rest[letters..].strip_prefix('\'').map_or(0, |tail| run(tail, |c| c.is_ascii_lowercase()));
        let end = if tail == 0 { letters } else { letters + 1 + tail };
        words.push(&rest[..end]);
        rest = &rest[end..];
    }
    words
}

/// Bytes of the characters at the start of `text` that `belongs` accepts.
fn run(text: &str, belongs: impl Fn(char) -> bool) -> usize {
    text.find(|c| !belongs(c)).unwrap_or(text.len())
}

/// The sentences of all comments of a source file, each with the line on which its paragraph starts.
fn sentences(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut paragraph = Paragraph::default();
    let (mut mark, mut in_code) = (None, false);
    for (idx, line) in text.lines().enumerate() {
        let Some((this_mark, words)) = comment(line) else {
            paragraph.end(&mut found);
            (mark, in_code) = (None, false);
            continue;
        };
        if mark.replace(this_mark) != Some(this_mark) {
            paragraph.end(&mut found);
        }
        if words.starts_with("```") {
            in_code = !in_code;
            paragraph.end(&mut found);
        } else if !in_code {
            if words.is_empty() || begins_paragraph(words) {
                paragraph.end(&mut found);
            }
            // A heading is no sentence.
            if !words.is_empty() && !words.starts_with('#') {
                paragraph.push(idx + 1, words);
            }
        }
    }
    paragraph.end(&mut found);
    found
}

/// The comment's mark and its text, if the line is nothing but a comment. Four slashes are a ruler, not a comment.
fn comment(line: &str) -> Option<(&'static str, &str)> {
    let line = line.trim_start();
    let mark = ["///", "//!", "//"].into_iter().find(|mark| line.starts_with(mark))?;
    let text = &line[mark.len()..];
    (!text.starts_with('/')).then(|| (mark, text.trim()))
}

/// A heading, a row of a table, or an item of a list.
fn begins_paragraph(words: &str) -> bool {
    let digits = run(words, |c| c.is_ascii_digit());
    let numbered = digits > 0 && words[digits..].starts_with(". ");
    numbered || ["#", "|", "- ", "* "].iter().any(|start| words.starts_with(start))
}

/// Lines of a comment that belong together.
#[derive(Default)]
struct Paragraph<'a> {
    start: usize,
    lines: Vec<&'a str>,
}

impl<'a> Paragraph<'a> {
    fn push(&mut self, line: usize, words: &'a str) {
        if self.lines.is_empty() {
            self.start = line;
        }
        self.lines.push(words);
    }

    /// Moves its sentences of at least three words to `found`.
    fn end(&mut self, found: &mut Vec<(usize, String)>) {
        let text = without_links(&without_code(&self.lines.join(" ")));
        self.lines.clear();
        let parts = split(&text).into_iter().map(|part| part.trim_matches([' ', '*', '#', '-']));
        let long = parts.filter(|part| part.split_whitespace().count() >= 3);
        found.extend(long.map(|part| (self.start, part.to_owned())));
    }
}

/// Each code span becomes one word.
fn without_code(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('`') {
        let Some((_, behind)) = after.split_once('`') else { break };
        out += before;
        out += "CODE";
        rest = behind;
    }
    out + rest
}

/// `[text](target)` and `[text]` become `text`.
fn without_links(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('[') {
        let Some((shown, behind)) = after.split_once(']') else { break };
        out += before;
        out += shown;
        let target = behind.strip_prefix('(').and_then(|target| target.split_once(')'));
        rest = target.map_or(behind, |(_, behind)| behind);
    }
    out + rest
}

/// Splits at a bar, and at spaces between a stop, colon or semicolon and the begin of a sentence.
fn split(text: &str) -> Vec<&str> {
    let mut parts = Vec::new();
    let (mut start, mut at) = (0, 0);
    while at < text.len() {
        let rest = &text[at..];
        let spaces = run(rest, char::is_whitespace);
        let behind = &rest[spaces..];
        let stop = spaces > 0 && text[start..at].ends_with(['.', '!', '?', ':', ';']);
        let begins = behind.starts_with(|c: char| c.is_ascii_uppercase() || "`(*".contains(c));
        if let Some(after) = behind.strip_prefix('|') {
            parts.push(&text[start..at]);
            at = text.len() - after.trim_start().len();
            start = at;
        } else if stop && begins {
            parts.push(&text[start..at]);
            at += spaces;
            start = at;
        } else {
            at += if spaces > 0 { spaces } else { behind.chars().next().map_or(1, char::len_utf8) };
        }
    }
    parts.push(&text[start..]);
    parts
}

#[cfg(test)]
mod tests {
    use super::super::complaint::tests::file;
    use super::*;

    fn judged(sentence: &str) -> String {
        "OPW".chars().zip(judge(sentence)).filter(|(_, offends)| *offends).map(|(letter, _)| letter).collect()
    }

    #[test]
    fn riddles_are_told_from_sentences() {
        let cases = [
            ("The arbiter decides membership and commits exchanges.", ""),
            ("What a rank keeps of each fragment.", "O"),
            ("Whether the bucket is full.", "O"),
            ("Who hears nothing of its first has left.", "OPW"),
            ("It is here, and they are all there with us.", "P"),
            ("The rank told the arbiter.", "W"),
            ("The rank that's WHO first.", "W"),
            ("A who_is query, and whoever's.", "W"),
            ("A who_is query of the directory.", ""),
            ("12 34 56", ""),
        ];
        for (sentence, offences) in cases {
            assert_eq!(judged(sentence), offences, "{sentence}");
        }
    }

    #[test]
    fn density_counts_from_a_third_and_from_four_words() {
        assert_eq!(judged("This is it"), "");
        assert_eq!(judged("Both ranks share it"), "P");
        assert_eq!(judged("All ranks and buckets share their memory"), "");
    }

    fn said(text: &str) -> Vec<(usize, String)> {
        sentences(text)
    }

    #[test]
    fn sentences_are_cut_out_of_comment_blocks() {
        let text = "//! One module head here. Second\n//! sentence: A third one.\n\nfn f() {} // no sentence here\n\
            \x20   // A comment of `two words` and [a link](to::it).\n/// Doc follows the comment.\n";
        let expected = [
            (1, "One module head here."),
            (1, "Second sentence:"),
            (1, "A third one."),
            (5, "A comment of CODE and a link."),
            (6, "Doc follows the comment."),
        ];
        let short: Vec<_> = said(text).into_iter().collect();
        let kept: Vec<(usize, &str)> = short.iter().map(|(line, text)| (*line, text.as_str())).collect();
        let long = expected.into_iter().filter(|(_, text)| text.split(' ').count() >= 3);
        assert_eq!(kept, long.collect::<Vec<_>>());
    }

    #[test]
    fn code_headings_and_rulers_are_left_out() {
        let text = "/// # Heading of four words\n/// ```\n/// let who = told_what();\n/// ```\n//// a long ruler here\n";
        assert_eq!(said(text), []);
        let list = "// - first item of it\n// - second item of it\n//\n// | a cell with words | another cell with words |";
        assert_eq!(said(list).len(), 4);
    }

    #[test]
    fn a_share_is_measured_per_folder_and_its_lines_are_named() {
        let good = "// The rank owns a shard.\n".repeat(3).replace('\n', "\nfn f() {}\n");
        let files = [
            file("a/src/lib.rs", &good),
            file("a/b/src/lib.rs", "// What a rank owns."),
            file("c.md", "// What?"),
        ];
        let measures = measure(&files);
        assert_eq!(measures.len(), 3);
        assert_eq!(measures[0].figure, Figure::Share { part: 1, whole: 4 });
        assert_eq!(measures[0].offences[0].at, "a/b/src/lib.rs:1");
        assert!(measures[1..].iter().all(|measure| measure.offences.is_empty()));
    }
}
