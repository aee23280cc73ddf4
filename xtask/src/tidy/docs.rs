//! Rules for what stands beside the code: the documents exist, and the commands they show can be typed.

use super::complaint::{Complaint, File};
use crate::cli::Cli;
use crate::programs;
use clap::CommandFactory;
use clap::error::ErrorKind;

/// Documents and licences of every repository.
const REQUIRED: &[&str] = &["README.md", "ARCHITECTURE.md", "CHANGELOG.md", "LICENSE-MIT", "LICENSE-APACHE"];

/// The documents and licences exist and say something.
pub(super) fn required(files: &[File]) -> Vec<Complaint> {
    let there = |path: &str| files.iter().any(|file| file.path == path && !file.text.trim().is_empty());
    let missing = REQUIRED.iter().filter(|path| !there(path));
    missing.map(|path| Complaint::file(path, "missing or empty; write it")).collect()
}

/// Commands that the first page must show.
const SHOWN: &[&str] = &["train", "ci"];

/// `cargo xtask` in a code block of a document is something xtask accepts, and README.md shows the main commands.
pub(super) fn commands(files: &[File]) -> Vec<Complaint> {
    let documents = files.iter().filter(|file| file.path.ends_with(".md"));
    let wrong = documents.flat_map(|file| {
        shown_commands(&file.text)
            .into_iter()
            .filter_map(|(line, words)| refusal(&words).map(|why| Complaint::line(&file.path, line, why)))
    });
    wrong.chain(files.iter().filter(|file| file.path == "README.md").flat_map(not_shown)).collect()
}

fn not_shown(readme: &File) -> Vec<Complaint> {
    let shown = shown_commands(&readme.text);
    let missing = SHOWN.iter().filter(|name| !shown.iter().any(|(_, words)| words.first() == Some(*name)));
    missing
        .map(|name| Complaint::file(&readme.path, format!("show `cargo xtask {name}` in a code block")))
        .collect()
}

/// Every flag that a document hands to `cargo xtask train` is a word of `help`, or an option of the training on a GPU.
pub(super) fn train_flags(files: &[File], help: &str) -> Vec<Complaint> {
    let known: Vec<&str> = help.split(|c: char| !c.is_ascii_alphanumeric() && c != '-').collect();
    let documents = files.iter().filter(|file| file.path.ends_with(".md"));
    let trainings = documents.flat_map(|file| {
        let shown = shown_commands(&file.text).into_iter();
        shown.filter(|(_, words)| words.first() == Some(&"train")).map(move |shown| (file, shown))
    });
    trainings
        .flat_map(|(file, (line, words))| {
            let complaint = move |what: String| Complaint::line(&file.path, line, what);
            unknown_flags(&words[1..], &known).into_iter().map(complaint)
        })
        .collect()
}

/// Returns what is wrong with these arguments of a training, whose options on CPUs are `known`.
fn unknown_flags(words: &[&str], known: &[&str]) -> Vec<String> {
    let args: Vec<String> = words.iter().map(|&word| word.to_owned()).collect();
    let rest = match programs::cpu_arguments(&args) {
        Ok(rest) => rest,
        Err(why) => return vec![why],
    };
    let flags = rest.iter().filter(|word| word.starts_with('-')).filter_map(|word| word.split('=').next());
    flags.filter(|flag| !known.contains(flag)).map(|flag| format!("`train` has no flag {flag}")).collect()
}

/// Why xtask would not accept these words; help is an answer, not a refusal.
fn refusal(words: &[&str]) -> Option<String> {
    let typed = std::iter::once(&"cargo xtask").chain(words);
    let error = Cli::command().try_get_matches_from(typed).err()?;
    if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
        return None;
    }
    let reason = error.to_string();
    let first = reason.lines().next().unwrap_or_default();
    Some(format!("`cargo xtask {}` does not parse: {first}", words.join(" ")))
}

/// The words after `cargo xtask` in every code block, each with its line from 1.
fn shown_commands(text: &str) -> Vec<(usize, Vec<&str>)> {
    let mut fence = None;
    let mut found = Vec::new();
    for (idx, line) in text.lines().enumerate() {
        let mark = fence_mark(line);
        match fence {
            None => fence = mark,
            Some(_) if mark == fence => fence = None,
            Some(_) => found.extend(command_words(line).map(|words| (idx + 1, words))),
        }
    }
    found
}

/// The character of a line that opens or closes a code block.
fn fence_mark(line: &str) -> Option<char> {
    let line = line.trim_start();
    ['`', '~'].into_iter().find(|mark| line.chars().take_while(|c| c == mark).count() >= 3)
}

/// Up to a comment, a pipe, a redirection or another command.
fn command_words(line: &str) -> Option<Vec<&str>> {
    let (before, rest) = line.split_once("cargo xtask")?;
    // `# cargo xtask ...` in a block is a remark about a command.
    if before.contains('#') || !rest.is_empty() && !rest.starts_with(char::is_whitespace) {
        return None;
    }
    let ends = |word: &&str| word.starts_with(['#', '|', '>', '&', ';', '\\']) || word.starts_with("2>");
    Some(rest.split_whitespace().take_while(|word| !ends(word)).collect())
}

#[cfg(test)]
mod tests {
    use super::super::complaint::tests::file;
    use super::*;

    #[test]
    fn an_absent_or_empty_document_is_missed() {
        let all: Vec<File> = REQUIRED.iter().map(|path| file(path, "text")).collect();
        assert_eq!(required(&all), []);
        for idx in 0..all.len() {
            let mut absent = all.clone();
            let path = absent.remove(idx).path;
            assert_eq!(required(&absent).len(), 1);
            let mut empty = all.clone();
            empty[idx].text = " \n".to_owned();
            assert_eq!(required(&empty)[0].at, path);
        }
    }

    fn page(block: &str) -> File {
        file("ARCHITECTURE.md", &format!("Words.\n\n```sh\n{block}\n```\n"))
    }

    #[test]
    fn a_command_that_does_not_parse_is_named_with_its_line() {
        for block in
            ["cargo xtask fly", "$ cargo xtask ci --short", "A=1 cargo xtask tidy now", "cargo xtask"]
        {
            let complaints = commands(&[page(block)]);
            assert_eq!(complaints.len(), 1, "{block}: {complaints:?}");
            assert_eq!(complaints[0].at, "ARCHITECTURE.md:4");
        }
    }

    #[test]
    fn what_xtask_accepts_may_be_shown() {
        let accepted = [
            "cargo xtask ci --long   # all counts",
            "RUST_LOG=info cargo xtask train --steps 3 | tee log",
            "cargo xtask tidy && cargo xtask ci",
            "cargo xtask --help",
            "# cargo xtask fly is not there yet",
            "cargo xtasks",
        ];
        for block in accepted {
            assert_eq!(commands(&[page(block)]), [], "{block}");
        }
        assert_eq!(commands(&[file("a.md", "Outside a block: cargo xtask fly\n")]), []);
        assert_eq!(commands(&[file("a.md", "```\nx\n```\ncargo xtask fly\n~~~\ny\n~~~\n")]), []);
    }

    #[test]
    fn flags_of_train_must_be_in_its_help() {
        let help = "Options:\n  -q, --quiet\n      --steps <N>  how many\n";
        let accepted =
            ["cargo xtask train --steps 3 -q", "cargo xtask train --steps=3", "cargo xtask ci --long"];
        for block in accepted {
            assert_eq!(train_flags(&[page(block)], help), [], "{block}");
        }
        for block in
            ["cargo xtask train --step 3", "cargo xtask train --steps 3 --loud", "cargo xtask train -x"]
        {
            let complaints = train_flags(&[page(block)], help);
            assert_eq!(complaints.len(), 1, "{block}: {complaints:?}");
            assert_eq!(complaints[0].at, "ARCHITECTURE.md:4");
        }
    }

    #[test]
    fn flags_of_a_training_on_a_gpu_are_those_of_its_own_program() {
        for block in
            ["cargo xtask train --device cuda --layers 2", "cargo xtask train --device cpu --steps 3"]
        {
            assert_eq!(train_flags(&[page(block)], "--steps <N>"), [], "{block}");
        }
        for block in [
            "cargo xtask train --device cuda --stage 1",
            "cargo xtask train --device cuda --layers many",
            "cargo xtask train --device cpu --layers 2",
            "cargo xtask train --device tpu",
        ] {
            assert_eq!(train_flags(&[page(block)], "--steps <N> --stage <N>").len(), 1, "{block}");
        }
    }

    #[test]
    fn a_block_ends_at_its_own_mark() {
        let text = "~~~\n```\ncargo xtask fly\n~~~\ncargo xtask fly\n";
        assert_eq!(commands(&[file("a.md", text)]).len(), 1);
    }

    #[test]
    fn the_readme_shows_the_main_commands() {
        let readme = |block: &str| file("README.md", &format!("```sh\n{block}\n```\n"));
        assert_eq!(commands(&[readme("cargo xtask train\ncargo xtask ci")]), []);
        let complaints = commands(&[readme("cargo xtask ci")]);
        assert_eq!(complaints.len(), 1);
        assert!(complaints[0].what.contains("cargo xtask train"));
    }
}
