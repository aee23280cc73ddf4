//! Tokens of Rust source text: names and punctuation, without comments, literals and items for tests.

/// A name, a number, `::`, or one other character.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Token<'a> {
    pub(crate) text: &'a str,
    /// From 1.
    pub(crate) line: usize,
}

impl Token<'_> {
    /// True for names and keywords, also raw ones.
    pub(crate) fn is_name(&self) -> bool {
        self.text.starts_with(|c: char| c.is_alphabetic() || c == '_')
    }
}

/// Text of the token at `at`; empty beyond the end.
pub(crate) fn text<'a>(tokens: &[Token<'a>], at: usize) -> &'a str {
    tokens.get(at).map_or("", |token| token.text)
}

/// All tokens of a source file, in order.
pub(crate) fn tokens(source: &str) -> Vec<Token<'_>> {
    let mut tokens = Vec::new();
    let (mut at, mut line) = (0, 1);
    while at < source.len() {
        let rest = &source[at..];
        let (len, kept) = next(rest);
        if kept {
            tokens.push(Token { text: &rest[..len], line });
        }
        line += rest[..len].matches('\n').count();
        at += len;
    }
    tokens
}

/// Bytes of what `rest` begins with, and true if it is a token to keep. `rest` is not empty.
fn next(rest: &str) -> (usize, bool) {
    let opaque = match rest.as_bytes()[0] {
        b'/' => comment(rest),
        b'"' | b'\'' | b'b' | b'c' | b'r' => string(rest).or_else(|| quote(rest)),
        _ => None,
    };
    if let Some(len) = opaque {
        return (len, false);
    }
    let spaces = run(rest, char::is_whitespace);
    if spaces > 0 {
        return (spaces, false);
    }
    let raw = if rest.starts_with("r#") { 2 } else { 0 };
    let name = run(&rest[raw..], |c| c.is_alphanumeric() || c == '_');
    if name > 0 {
        return (raw + name, true);
    }
    (if rest.starts_with("::") { 2 } else { rest.chars().next().map_or(1, char::len_utf8) }, true)
}

/// Bytes of the characters at the start of `text` that `belongs` accepts.
fn run(text: &str, belongs: impl Fn(char) -> bool) -> usize {
    text.find(|c| !belongs(c)).unwrap_or(text.len())
}

/// A comment to the end of its line, or between marks that nest.
fn comment(rest: &str) -> Option<usize> {
    if rest.starts_with("//") {
        return Some(run(rest, |c| c != '\n'));
    }
    let mut depth = usize::from(rest.starts_with("/*"));
    let mut at = 2;
    while depth > 0 && at < rest.len() {
        let (step, change) = match rest.get(at..at + 2) {
            Some("/*") => (2, 1),
            Some("*/") => (2, -1),
            _ => (rest[at..].chars().next().map_or(1, char::len_utf8), 0),
        };
        depth = depth.saturating_add_signed(change);
        at += step;
    }
    rest.starts_with("/*").then_some(at)
}

/// A string literal of any kind.
fn string(rest: &str) -> Option<usize> {
    let prefix = ["br", "cr", "r", "b", "c", ""].into_iter().find(|prefix| rest.starts_with(prefix))?;
    let hashes = if prefix.ends_with('r') { run(&rest[prefix.len()..], |c| c == '#') } else { 0 };
    let open = prefix.len() + hashes;
    let body = rest[open..].strip_prefix('"')?;
    if prefix.ends_with('r') {
        let end = format!("\"{}", "#".repeat(hashes));
        return Some(body.find(&end).map_or(rest.len(), |at| open + 1 + at + end.len()));
    }
    Some(open + 1 + to_quote(body, '"'))
}

/// A character, or a lifetime.
fn quote(rest: &str) -> Option<usize> {
    let open = if rest.starts_with("b'") { 2 } else { 1 };
    let body = rest.strip_prefix("b'").or_else(|| rest.strip_prefix('\''))?;
    let first = body.chars().next()?;
    if first == '\\' || body[first.len_utf8()..].starts_with('\'') {
        return Some(open + to_quote(body, '\''));
    }
    Some(open + run(body, |c| c.is_alphanumeric() || c == '_'))
}

/// Bytes up to and with the closing quote of a literal with escapes.
fn to_quote(body: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, c) in body.char_indices() {
        if !escaped && c == quote {
            return at + 1;
        }
        escaped = !escaped && c == '\\';
    }
    body.len()
}

/// Index of the bracket that closes the one at `open`; the end if none does.
pub(crate) fn closing(tokens: &[Token<'_>], open: usize) -> usize {
    let mut depth = 0usize;
    for (at, token) in tokens.iter().enumerate().skip(open) {
        match token.text {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" if depth <= 1 => return at,
            ")" | "]" | "}" => depth -= 1,
            _ => {}
        }
    }
    tokens.len()
}

/// The tokens outside of items, fields and statements under `#[cfg(test)]` or `#[cfg(all(test, ..))]`.
pub(crate) fn without_tests<'a>(tokens: &[Token<'a>]) -> Vec<Token<'a>> {
    let mut kept = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        if !is_test_attribute(tokens, at) {
            kept.push(tokens[at]);
            at += 1;
        } else if text(tokens, at + 1) == "!" {
            return kept;
        } else {
            at = after_item(tokens, at);
        }
    }
    kept
}

fn is_test_attribute(tokens: &[Token<'_>], at: usize) -> bool {
    if text(tokens, at) != "#" {
        return false;
    }
    let open = at + 1 + usize::from(text(tokens, at + 1) == "!");
    if text(tokens, open) != "[" || text(tokens, open + 1) != "cfg" {
        return false;
    }
    let words = &tokens[open..closing(tokens, open)];
    let has = |word: &str| words.iter().any(|token| token.text == word);
    has("test") && !has("not") && !has("any")
}

const ITEMS: &[&str] = &[
    "fn",
    "mod",
    "use",
    "impl",
    "struct",
    "enum",
    "union",
    "trait",
    "type",
    "const",
    "static",
    "unsafe",
    "async",
    "extern",
    "macro_rules",
    "let",
];

/// Index behind an item, field or statement with its attributes, which begin at `at`.
fn after_item(tokens: &[Token<'_>], mut at: usize) -> usize {
    while text(tokens, at) == "#" {
        at = closing(tokens, at + 1) + 1;
    }
    let mut word = at;
    if text(tokens, word) == "pub" {
        word += 1;
        if text(tokens, word) == "(" {
            word = closing(tokens, word) + 1;
        }
    }
    let is_item = ITEMS.contains(&text(tokens, word));
    while at < tokens.len() {
        match text(tokens, at) {
            ";" => return at + 1,
            "," if !is_item => return at + 1,
            "{" => return closing(tokens, at) + 1,
            "(" | "[" => at = closing(tokens, at) + 1,
            ")" | "]" | "}" => return at,
            _ => at += 1,
        }
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(tokens: &[Token<'_>]) -> String {
        tokens.iter().map(|token| token.text).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn comments_and_literals_are_no_tokens() {
        let source = r####"use a::b; // use c::d
            /* x /* y */ z */ let s = "mod q { \" }"; r#type; r#"raw " text"#; b"\\" 'a' '\'' '{' &'a str b'x' 1.5"####;
        assert_eq!(texts(&tokens(source)), "use a :: b ; let s = ; r#type ; ; & str 1 . 5");
    }

    #[test]
    fn tokens_know_their_lines() {
        let source = "a\n/* \n */ b \"\n\" c";
        let lines: Vec<usize> = tokens(source).iter().map(|token| token.line).collect();
        assert_eq!(lines, [1, 3, 4]);
    }

    #[test]
    fn an_unfinished_file_has_an_end() {
        for source in ["/* a", "\"a", "r#\"a\"", "'", "'\\", "#[cfg(test", "#[cfg(test)] mod x {", "é'é"] {
            let _ = without_tests(&tokens(source));
        }
    }

    #[test]
    fn items_for_tests_are_left_out() {
        let cases = [
            ("a; #[cfg(test)] mod tests { x { y } } b;", "a ; b ;"),
            ("#[cfg(test)] mod tests; b", "b"),
            ("#[cfg(all(test, unix))] #[allow(x)] pub(crate) fn f<A, B>(a: A) -> [u8; 2] { } b", "b"),
            ("struct S { #[cfg(test)] pub(crate) x: T<[u8; 2]>, y: U }", "struct S { y : U }"),
            ("f(#[cfg(test)] x) b", "f ( ) b"),
            ("a; #![cfg(test)] b", "a ;"),
        ];
        for (source, kept) in cases {
            assert_eq!(texts(&without_tests(&tokens(source))), kept, "{source}");
        }
        for source in ["#[cfg(not(test))] a", "#[cfg(any(test, x))] a", "#[test] a"] {
            assert!(texts(&without_tests(&tokens(source))).ends_with(" a"), "{source}");
        }
    }
}
