//! Rule for the types to know to follow a step: those that the step's file names, and the parts of the optimizer.

use super::complaint::{Complaint, File};
use super::graph::tokens::{Token, closing, text, tokens, without_tests};
use super::measures::{Figure, Limit, Measure};
use std::collections::{BTreeMap, BTreeSet};

const STEP: &str = "shard/src/optimizer/step.rs";
const OPTIMIZER: &str = "shard/src/optimizer/mod.rs";
const TYPES: Limit = Limit { now: 20, goal: 20 };

/// Names of the standard library, which libraries define anew.
const STANDARD: &[&str] = &["Result", "Err", "Ok"];
const DEFINE: &[&str] = &["struct", "enum", "union", "trait", "type"];

/// The number of types of the libraries; nothing if a file is missing.
pub(super) fn measure(files: &[File]) -> Option<Measure> {
    let source = |path: &str| files.iter().find(|file| file.path == path);
    let (step, optimizer) = (source(STEP)?, source(OPTIMIZER)?);
    let of_libraries = files.iter().filter(|file| file.path.ends_with(".rs") && file.path.contains("/src/"));
    let parsed: Vec<Vec<Token<'_>>> = of_libraries.map(|file| without_tests(&tokens(&file.text))).collect();
    let defined: BTreeSet<&str> = parsed.iter().flat_map(|tokens| definitions(tokens)).collect();
    let (step_tokens, optimizer_tokens) =
        (without_tests(&tokens(&step.text)), without_tests(&tokens(&optimizer.text)));
    let mut found = BTreeMap::new();
    for (path, tokens) in [(STEP, &step_tokens[..]), (OPTIMIZER, fields(&optimizer_tokens))] {
        for (name, line) in names(tokens).filter(|(name, _)| defined.contains(name)) {
            found.entry(name).or_insert((path, line));
        }
    }
    let offence = |(name, (path, line)): (&&str, &(&str, usize))| {
        Complaint::line(path, *line, format!("the type `{name}`"))
    };
    Some(Measure {
        place: "shard".to_owned(),
        what: "types to know to follow a step",
        figure: Figure::Count(found.len()),
        limit: TYPES,
        offences: found.iter().map(offence).collect(),
    })
}

/// Names of the types that a file defines.
fn definitions<'a>(tokens: &[Token<'a>]) -> Vec<&'a str> {
    let pairs = tokens.windows(2).filter(|pair| DEFINE.contains(&pair[0].text) && pair[1].is_name());
    pairs.map(|pair| pair[1].text).collect()
}

/// The body of `struct Optimizer`.
fn fields<'t, 'a>(tokens: &'t [Token<'a>]) -> &'t [Token<'a>] {
    let start = (0..tokens.len()).find(|at| {
        text(tokens, *at) == "struct" && text(tokens, at + 1) == "Optimizer" && text(tokens, at + 2) == "{"
    });
    start.map_or(&[], |start| &tokens[start + 1..closing(tokens, start + 2)])
}

/// Names that begin with a capital, with their lines; no variants and associated items, which follow a type.
fn names<'a>(tokens: &[Token<'a>]) -> impl Iterator<Item = (&'a str, usize)> {
    let is_type = |name: &str| {
        name.starts_with(|first: char| first.is_ascii_uppercase())
            && name.contains(|c: char| c.is_ascii_lowercase())
    };
    let of_type = move |at: usize| at >= 3 && text(tokens, at - 1) == ":" && is_type(text(tokens, at - 3));
    let counts = move |name: &str| is_type(name) && !STANDARD.contains(&name);
    let found = (0..tokens.len()).filter(move |at| counts(tokens[*at].text) && !of_type(*at));
    found.map(|at| (tokens[at].text, tokens[at].line))
}

#[cfg(test)]
mod tests {
    use super::super::complaint::tests::file;
    use super::*;

    #[test]
    fn types_of_the_step_and_parts_of_the_optimizer_count_once() {
        let files = [
            file(
                STEP,
                "use crate::a::Norm; fn f(x: Norm) -> Option<Skip> { Decision::Skip; g(Decider) }\n#[cfg(test)] mod tests { use Late; }",
            ),
            file(
                OPTIMIZER,
                "/// An Unnamed.\npub struct Optimizer { pub(crate) decider: Decider, other: Outside }\nstruct Late;",
            ),
            file(
                "comm/src/lib.rs",
                "pub struct Norm; enum Decision { Skip } trait Decider {} type Unnamed = u8;",
            ),
        ];
        let measure = measure(&files).unwrap();
        assert_eq!(
            measure.figure,
            Figure::Count(4),
            "Norm, Decision, Decider, Optimizer: {:?}",
            measure.offences
        );
    }

    #[test]
    fn a_tree_without_the_step_has_no_figure() {
        assert_eq!(measure(&[file(OPTIMIZER, "")]), None);
    }
}
