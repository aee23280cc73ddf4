//! Names that one module declares, imports and mentions.

use super::tokens::{Token, closing, text};
use std::collections::BTreeSet;

/// Contents of a module, without those of its inline modules.
#[derive(Debug, Default)]
pub(super) struct Scope<'a> {
    /// `mod x;`
    pub(super) declared: Vec<&'a str>,
    /// `mod x { .. }`
    pub(super) inline: Vec<(&'a str, Scope<'a>)>,
    pub(super) uses: Vec<Use<'a>>,
    /// Names of items at the module's top level.
    pub(super) definitions: BTreeSet<&'a str>,
    /// Paths outside of `use`, of at least two names.
    pub(super) mentions: Vec<Mention<'a>>,
    /// First names of all paths outside of `use`, also of single names.
    pub(super) words: BTreeSet<&'a str>,
}

/// One leaf of a `use` tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Use<'a> {
    /// The name that it brings into scope; none for `*`.
    pub(super) name: Option<&'a str>,
    pub(super) path: Vec<&'a str>,
    pub(super) line: usize,
    /// True with `pub`, also if restricted.
    pub(super) exported: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mention<'a> {
    pub(super) path: Vec<&'a str>,
    pub(super) line: usize,
}

const DEFINE: &[&str] = &["struct", "enum", "union", "trait", "type", "fn", "const", "static"];

impl<'a> Scope<'a> {
    pub(super) fn of(tokens: &[Token<'a>]) -> Self {
        let mut scope = Self::default();
        let (mut at, mut depth) = (0, 0usize);
        while at < tokens.len() {
            match tokens[at].text {
                "{" => depth += 1,
                "}" => depth = depth.saturating_sub(1),
                word if depth == 0 && DEFINE.contains(&word) => {
                    let name = at + 1 + usize::from(text(tokens, at + 1) == "mut");
                    scope.definitions.insert(text(tokens, name));
                }
                "macro_rules" => {
                    scope.definitions.insert(text(tokens, at + 2));
                }
                _ => {}
            }
            at = scope.take(tokens, at);
        }
        scope
    }

    /// Takes the import, module or path at `at`, if there is one, and returns the index behind it.
    fn take(&mut self, tokens: &[Token<'a>], at: usize) -> usize {
        let token = tokens[at];
        let previous = at.checked_sub(1).map_or("", |before| text(tokens, before));
        match (token.text, text(tokens, at + 2)) {
            // `use<..>` captures lifetimes.
            ("use", _) if text(tokens, at + 1) != "<" => {
                let exported = previous == "pub" || previous == ")";
                let mut tree = Tree { tokens, line: token.line, exported, leaves: &mut self.uses };
                tree.read(at + 1, &[])
            }
            ("mod", ";") => {
                self.declared.push(text(tokens, at + 1));
                at + 3
            }
            ("mod", "{") => {
                let end = closing(tokens, at + 2);
                self.inline.push((text(tokens, at + 1), Scope::of(&tokens[at + 3..end])));
                end + 1
            }
            _ if token.is_name() && previous != "." && previous != "::" => self.take_path(tokens, at),
            _ => at + 1,
        }
    }

    fn take_path(&mut self, tokens: &[Token<'a>], mut at: usize) -> usize {
        let line = tokens[at].line;
        let mut path = vec![tokens[at].text];
        while text(tokens, at + 1) == "::" && tokens.get(at + 2).is_some_and(Token::is_name) {
            at += 2;
            path.push(tokens[at].text);
        }
        self.words.insert(path[0]);
        if path.len() > 1 {
            self.mentions.push(Mention { path, line });
        }
        at + 1
    }
}

/// Reader of a `use` tree.
struct Tree<'t, 'a> {
    tokens: &'t [Token<'a>],
    line: usize,
    exported: bool,
    leaves: &'t mut Vec<Use<'a>>,
}

impl<'a> Tree<'_, 'a> {
    /// Reads the tree at `at` below `prefix`; returns the index behind it.
    fn read(&mut self, mut at: usize, prefix: &[&'a str]) -> usize {
        let mut path = prefix.to_vec();
        loop {
            match text(self.tokens, at) {
                "::" => at += 1,
                "{" => return self.read_group(at + 1, &path),
                "*" => {
                    self.leaf(None, path);
                    return at + 1;
                }
                "as" => {
                    self.leaf(Some(text(self.tokens, at + 1)), path);
                    return at + 2;
                }
                "," | "}" | ";" | "" => {
                    let name = path.iter().rev().find(|name| **name != "self").copied();
                    self.leaf(Some(name.unwrap_or("self")), path);
                    return at;
                }
                name => {
                    self.line = self.tokens[at].line;
                    path.push(name);
                    at += 1;
                }
            }
        }
    }

    fn read_group(&mut self, mut at: usize, path: &[&'a str]) -> usize {
        while !matches!(text(self.tokens, at), "}" | "") {
            at = self.read(at, path);
            at += usize::from(text(self.tokens, at) == ",");
        }
        at + 1
    }

    fn leaf(&mut self, name: Option<&'a str>, mut path: Vec<&'a str>) {
        if path.len() > 1 && path.last() == Some(&"self") {
            path.pop();
        }
        self.leaves.push(Use { name, path, line: self.line, exported: self.exported });
    }
}

#[cfg(test)]
mod tests {
    use super::super::tokens::tokens;
    use super::*;

    fn uses(source: &str) -> Vec<String> {
        let scope = Scope::of(&tokens(source));
        let text = |leaf: &Use<'_>| format!("{} as {}", leaf.path.join("::"), leaf.name.unwrap_or("*"));
        scope.uses.iter().map(text).collect()
    }

    #[test]
    fn nested_groups_are_leaves() {
        let source = "use crate::a::{self, b::{C, D as E}, f::*,};\npub(crate) use super::x;\nfn f() -> impl T + use<'a> {}";
        let expected = [
            "crate::a as a",
            "crate::a::b::C as C",
            "crate::a::b::D as E",
            "crate::a::f as *",
            "super::x as x",
        ];
        assert_eq!(uses(source), expected);
        let exported: Vec<bool> = Scope::of(&tokens(source)).uses.iter().map(|leaf| leaf.exported).collect();
        assert_eq!(exported, [false, false, false, false, true]);
    }

    #[test]
    fn leaves_and_paths_know_their_lines() {
        let scope = Scope::of(&tokens("use crate::{\n  a::B,\n  c::D,\n};\n\ncrate::e::f();"));
        assert_eq!(scope.uses.iter().map(|leaf| leaf.line).collect::<Vec<_>>(), [2, 3]);
        assert_eq!(scope.mentions, [Mention { path: vec!["crate", "e", "f"], line: 6 }]);
    }

    #[test]
    fn definitions_are_those_at_the_top_level() {
        let source = "pub struct A { b: C }\nimpl A { fn inner() {} }\nstatic mut S: u8 = 0; const fn f() {}\n\
            macro_rules! m { () => {} }\nmod deep { fn g() {} }\nmod file;";
        let scope = Scope::of(&tokens(source));
        for (name, defined) in
            [("A", true), ("inner", false), ("S", true), ("f", true), ("m", true), ("g", false), ("b", false)]
        {
            assert_eq!(scope.definitions.contains(name), defined, "{name}");
        }
        assert_eq!(scope.declared, ["file"]);
        assert!(scope.inline[0].1.definitions.contains("g"));
    }

    #[test]
    fn words_are_first_names_outside_of_imports() {
        let scope = Scope::of(&tokens("use a::Seen; fn f(x: B) { x.field.call(); plan::go::<C>() }"));
        for (word, seen) in
            [("B", true), ("C", true), ("plan", true), ("Seen", false), ("call", false), ("go", false)]
        {
            assert_eq!(scope.words.contains(word), seen, "{word}");
        }
    }
}
