//! Rule for the length of functions: the median and the ninth decile of all crates, in lines from `fn` to the closing bracket.

use super::complaint::{Complaint, File};
use super::graph::tokens::{Token, closing, text, tokens, without_tests};
use super::measures::{Figure, Limit, Measure, TREE};

const MEDIAN: Limit = Limit { now: 8, goal: 8 };
const NINTH_DECILE: Limit = Limit { now: 25, goal: 25 };

/// A function with a body.
struct Function<'a> {
    path: &'a str,
    line: usize,
    lines: usize,
}

/// Both figures of the sources of all crates, whose folders are `folders`. Tests do not count.
pub(super) fn measure(files: &[File], folders: &[&str]) -> Vec<Measure> {
    let is_source = |path: &str| {
        let inside = |folder: &&str| path.strip_prefix(*folder).is_some_and(|rest| rest.starts_with("/src/"));
        path.ends_with(".rs") && folders.iter().any(inside)
    };
    let mut functions: Vec<Function<'_>> =
        files.iter().filter(|file| is_source(&file.path)).flat_map(of_file).collect();
    functions.sort_by_key(|function| function.lines);
    let median = figure(&functions, "lines of a median function", 5, MEDIAN);
    let decile = figure(&functions, "lines that nine of ten functions keep to", 9, NINTH_DECILE);
    median.into_iter().chain(decile).collect()
}

fn figure(functions: &[Function<'_>], what: &'static str, tenths: usize, limit: Limit) -> Option<Measure> {
    let lines = functions.get((functions.len() * tenths).div_ceil(10).checked_sub(1)?)?.lines;
    let long = functions.iter().filter(|function| function.lines > limit.goal);
    let offence = |function: &Function<'_>| {
        Complaint::line(function.path, function.line, format!("a function of {} lines", function.lines))
    };
    let offences = long.map(offence).collect();
    Some(Measure { place: TREE.to_owned(), what, figure: Figure::Count(lines), limit, offences })
}

fn of_file(file: &File) -> Vec<Function<'_>> {
    let tokens = without_tests(&tokens(&file.text));
    let starts = (0..tokens.len()).filter(|at| text(&tokens, *at) == "fn");
    starts
        .filter_map(|at| {
            let line = tokens[at].line;
            let lines = last_line(&tokens, at)? + 1 - line;
            Some(Function { path: &file.path, line, lines })
        })
        .collect()
}

/// Line of the bracket that closes the body of the function at `at`; `None` if it is a function type or has no body.
fn last_line(tokens: &[Token<'_>], at: usize) -> Option<usize> {
    tokens.get(at + 1).filter(|name| name.is_name())?;
    let mut at = at + 2;
    loop {
        match text(tokens, at) {
            "" | ";" => return None,
            "(" | "[" => at = closing(tokens, at) + 1,
            "{" => return tokens.get(closing(tokens, at)).map(|end| end.line),
            _ => at += 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::complaint::tests::file;
    use super::*;

    fn lines(source: &str) -> Vec<usize> {
        of_file(&file("c/src/lib.rs", source)).iter().map(|function| function.lines).collect()
    }

    #[test]
    fn a_function_counts_from_its_name_to_its_end() {
        assert_eq!(lines("fn a() {}\n"), [1]);
        assert_eq!(lines("pub fn a(\n    x: [u8; 2],\n) -> u8 {\n    if x { 1 } else { 2 }\n}\n"), [5]);
        assert_eq!(lines("fn a() {\n    fn b() {\n    }\n}\n"), [4, 2]);
    }

    #[test]
    fn declarations_types_and_tests_do_not_count() {
        assert!(lines("trait T { fn a(&self); }\ntype F = fn(u8) -> u8;\n").is_empty());
        assert!(lines("fn a(").is_empty());
        assert!(lines("#[cfg(test)]\nmod tests {\n    fn a() {}\n}\n").is_empty());
    }

    #[test]
    fn figures_are_those_of_the_sorted_lengths() {
        let function = |lines: usize| format!("fn f() {{{}}}\n", "\n".repeat(lines - 1));
        let text: String = [30, 1, 2, 9, 3, 4, 5, 6, 7, 26].map(function).concat();
        let measures =
            measure(&[file("c/src/lib.rs", &text), file("c/tests/x.rs", "fn f() {}")], &["c", "d"]);
        let values: Vec<usize> = measures.iter().map(|measure| measure.figure.value()).collect();
        assert_eq!(values, [5, 26]);
        assert_eq!(measures[1].offences.len(), 2);
        assert_eq!(measures[0].offences.len(), 3);
    }
}
