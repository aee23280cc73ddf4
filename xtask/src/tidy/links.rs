//! Rule for documents: a relative link leads to a file of the repository, and its anchor to a heading. Chapters of the book link to
//! chapters, as nothing else is built into it.

use super::complaint::{Complaint, File};
use std::collections::{BTreeMap, BTreeSet};

/// Folder of the book's chapters, and the chapter that lists them.
const CHAPTERS: &str = "docs/book/src/";
const SUMMARY: &str = "docs/book/src/SUMMARY.md";

/// Every link of every document.
pub(super) fn links(files: &[File]) -> Vec<Complaint> {
    let paths: BTreeSet<&str> = files.iter().map(|file| file.path.as_str()).collect();
    let documents: BTreeMap<&str, &File> = files
        .iter()
        .filter(|file| file.path.ends_with(".md"))
        .map(|file| (file.path.as_str(), file))
        .collect();
    let dead = documents.values().flat_map(|file| {
        let links = targets(&file.text).into_iter();
        let dead =
            links.filter_map(|(line, target)| Some((line, refusal(file, target, &paths, &documents)?)));
        dead.map(|(line, why)| Complaint::line(&file.path, line, why))
    });
    dead.chain(unlisted(&documents)).collect()
}

/// Says why a link leads nowhere.
fn refusal(
    from: &File,
    target: &str,
    paths: &BTreeSet<&str>,
    documents: &BTreeMap<&str, &File>,
) -> Option<String> {
    if target.contains("::") || target.contains("://") || target.starts_with("mailto:") {
        return None; // an item of rustdoc, or an address
    }
    let (path, anchor) = target.split_once('#').map_or((target, None), |(path, anchor)| (path, Some(anchor)));
    let Some(path) = resolve(&from.path, path) else {
        return Some(format!("the link {target} leaves the repository"));
    };
    let is_folder = || {
        paths.range(&*format!("{path}/")..).next().is_some_and(|next| next.starts_with(&format!("{path}/")))
    };
    if !paths.contains(&*path) && (path.is_empty() || !is_folder()) {
        return Some(format!("the link {target} leads to no file"));
    }
    if from.path.starts_with(CHAPTERS) && !path.starts_with(CHAPTERS) {
        return Some(format!("the link {target} leaves the book; write the path as code"));
    }
    let anchor = anchor?;
    let has = documents.get(&*path).is_some_and(|file| anchors(&file.text).contains(anchor));
    (!has).then(|| format!("the link {target} names no heading of {path}"))
}

/// Chapters that the summary does not list, which mdBook leaves out.
fn unlisted(documents: &BTreeMap<&str, &File>) -> Vec<Complaint> {
    let Some(summary) = documents.get(SUMMARY) else { return Vec::new() };
    let listed: BTreeSet<String> =
        targets(&summary.text).into_iter().filter_map(|(_, target)| resolve(SUMMARY, target)).collect();
    let chapters = documents.keys().filter(|path| path.starts_with(CHAPTERS) && **path != SUMMARY);
    let missing = chapters.filter(|path| !listed.contains(**path));
    missing.map(|path| Complaint::file(path, "is not in SUMMARY.md, so it is not in the book")).collect()
}

/// Returns the path that `target` means in the file `from`; nothing if it leaves the root. An empty target is the file.
fn resolve(from: &str, target: &str) -> Option<String> {
    if target.is_empty() {
        return Some(from.to_owned());
    }
    let mut parts: Vec<&str> = from.split('/').collect();
    parts.pop();
    for part in target.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()?),
            part => parts.push(part),
        }
    }
    Some(parts.join("/"))
}

/// Returns the targets of a document's links, each with its line from 1, outside of code.
fn targets(text: &str) -> Vec<(usize, &str)> {
    let lines = outside_of_fences(text).flat_map(|(line, words)| {
        let starts = words.match_indices("](").filter(|(at, _)| !in_code(words, *at));
        starts.filter_map(move |(at, _)| {
            let (target, _) = words[at + 2..].split_once(')')?;
            Some((line, target.split(' ').next().unwrap_or_default()))
        })
    });
    lines.collect()
}

/// Returns the anchors of a document: its headings in small letters, without punctuation, with a number from the second of a kind.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut counts = BTreeMap::<String, usize>::new();
    let headings = outside_of_fences(text).filter_map(|(_, line)| {
        let title = line.trim_start_matches('#');
        let level = line.len() - title.len();
        (1..=6).contains(&level).then(|| title.strip_prefix(' ')).flatten()
    });
    headings
        .map(|title| {
            let kept = title.trim().chars().filter(|c| c.is_alphanumeric() || "-_ ".contains(*c));
            let slug: String =
                kept.flat_map(char::to_lowercase).map(|c| if c == ' ' { '-' } else { c }).collect();
            let count = counts.entry(slug.clone()).or_default();
            *count += 1;
            if *count == 1 { slug } else { format!("{slug}-{}", *count - 1) }
        })
        .collect()
}

/// Returns the lines that are in no fenced block, numbered from 1.
fn outside_of_fences(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut fence: Option<&str> = None;
    text.lines().enumerate().filter_map(move |(idx, line)| {
        let mark = ["```", "~~~"].into_iter().find(|mark| line.trim_start().starts_with(mark));
        match (fence, mark) {
            (None, Some(mark)) => fence = Some(mark),
            (Some(open), Some(mark)) if open == mark => fence = None,
            (None, None) => return Some((idx + 1, line)),
            _ => {}
        }
        None
    })
}

/// True if the byte is inside a code span of the line.
fn in_code(line: &str, at: usize) -> bool {
    line[..at].matches('`').count() % 2 == 1
}

#[cfg(test)]
mod tests {
    use super::super::complaint::tests::file;
    use super::*;

    fn complaints(files: &[(&str, &str)]) -> Vec<String> {
        let files: Vec<File> = files.iter().map(|(path, text)| file(path, text)).collect();
        links(&files).iter().map(Complaint::to_string).collect()
    }

    #[test]
    fn a_link_to_a_file_or_a_heading_that_exists_is_kept() {
        let text = "# Top `of` it\n[a](b/c.rs) and [b](b) and [c](#top-of-it)\n\n```md\n[no](gone.md)\n```\n\
                    [web](https://x.y/z#q) [item](crate::Item) `[code](gone.md)` ![picture](b/c.rs \"title\")\n";
        assert_eq!(complaints(&[("README.md", text), ("b/c.rs", "")]), [""; 0]);
        let back = "[up](../README.md#limits-1)\n";
        let twice = "## Limits\n## Limits\n";
        assert_eq!(complaints(&[("README.md", twice), ("docs/x.md", back)]), [""; 0]);
    }

    #[test]
    fn a_link_that_leads_nowhere_is_named() {
        for (text, said) in [
            ("\n[x](gone.md)", "README.md:2: the link gone.md leads to no file"),
            ("[x](docs/gone)", "leads to no file"),
            ("[x](../up.md)", "leaves the repository"),
            ("# One\n[x](#two)", "README.md:2: the link #two names no heading of README.md"),
            ("[x](docs/y.md#gone)", "names no heading of docs/y.md"),
            ("[x](code.rs#l1)", "names no heading of code.rs"),
        ] {
            let found =
                complaints(&[("README.md", text), ("docs/y.md", "```\n# gone\n```\n"), ("code.rs", "")]);
            assert!(found.len() == 1 && found[0].contains(said), "{text}: {found:?}");
        }
    }

    #[test]
    fn a_chapter_is_listed_and_links_to_chapters() {
        let summary = ("docs/book/src/SUMMARY.md", "- [One](one.md)\n");
        let one = |text| ("docs/book/src/one.md", text);
        let two = ("docs/book/src/two.md", "");
        let readme = ("README.md", "");
        assert_eq!(complaints(&[summary, one("[x](one.md)"), readme]), [""; 0]);
        let found = complaints(&[summary, one("[x](../../../README.md)"), readme]);
        assert!(found.len() == 1 && found[0].contains("leaves the book"), "{found:?}");
        let found = complaints(&[summary, one(""), two, readme]);
        assert!(found.len() == 1 && found[0].starts_with("docs/book/src/two.md: is not in"), "{found:?}");
    }
}
