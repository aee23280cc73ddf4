//! Import graph of a crate's files: which file mentions names that another file defines. A parser of tokens, not a compiler.
//!
//! - The modules are those that `lib.rs` and `main.rs` reach by `mod x;`, without what `#[cfg(test)]` guards.
//! - An import is a `use` or a path that leads to an item of another file. Names that a module re-exports lead to the file that
//!   defines them. A re-export, `pub use`, is an import only if the file itself mentions the name; `mod x;` is none.
//!
//! Limits: `use` inside a function counts for its module. Method calls, derives and names made by macros are not seen; an item
//! that cannot be found counts as defined in the module that its path names. Both sides of a `cfg` count.

mod resolve;
mod scope;
pub(super) mod tokens;

use super::complaint::File;
use scope::Scope;
use std::collections::{BTreeMap, BTreeSet};
use tokens::{tokens, without_tests};

/// One file's import from another, at its first line.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Import {
    pub(super) from: String,
    pub(super) to: String,
    pub(super) line: usize,
}

/// Files of a crate and the imports between them.
#[derive(Debug)]
pub(super) struct Graph {
    pub(super) files: BTreeSet<String>,
    /// Sorted, with at most one import per pair of files.
    pub(super) imports: Vec<Import>,
}

impl Graph {
    /// The graph of the crate in `folder`.
    pub(super) fn of(files: &[File], folder: &str) -> Self {
        let source = format!("{folder}/src/");
        let of_crate = files.iter().filter_map(|file| Some((file.path.strip_prefix(&source)?, &*file.text)));
        let mut modules = Modules { files: of_crate.collect(), all: Vec::new() };
        for root in ["lib.rs", "main.rs"] {
            modules.add_file(root, "", None);
        }
        let path = |module: usize| format!("{source}{}", modules.all[module].file);
        let found = modules.imports().into_iter();
        let mut imports: Vec<Import> = found
            .map(|(from, line, to)| Import { from: path(from), to: path(to), line })
            .filter(|import| import.from != import.to)
            .collect();
        imports.sort();
        imports.dedup_by(|later, first| (&later.from, &later.to) == (&first.from, &first.to));
        Self { files: (0..modules.all.len()).map(path).collect(), imports }
    }
}

/// All modules of a crate, each with its place in the tree.
struct Modules<'a> {
    /// Text by path below `src`.
    files: BTreeMap<&'a str, &'a str>,
    all: Vec<Module<'a>>,
}

struct Module<'a> {
    /// Path below `src`; that of the parent for an inline module.
    file: &'a str,
    parent: Option<usize>,
    children: BTreeMap<&'a str, usize>,
    scope: Scope<'a>,
}

impl<'a> Modules<'a> {
    /// Adds a file and the modules below it, with files in `folder`; returns none if the file does not exist.
    fn add_file(&mut self, path: &str, folder: &str, parent: Option<usize>) -> Option<usize> {
        let (path, text) = self.files.get_key_value(path).map(|(path, text)| (*path, *text))?;
        let scope = Scope::of(&without_tests(&tokens(text)));
        Some(self.add_scope(scope, path, folder, parent))
    }

    fn add_scope(
        &mut self,
        mut scope: Scope<'a>,
        file: &'a str,
        folder: &str,
        parent: Option<usize>,
    ) -> usize {
        let inline = std::mem::take(&mut scope.inline);
        let declared = scope.declared.clone();
        let this = self.all.len();
        self.all.push(Module { file, parent, children: BTreeMap::new(), scope });
        for (name, scope) in inline {
            let child = self.add_scope(scope, file, &format!("{folder}{name}/"), Some(this));
            self.all[this].children.insert(name, child);
        }
        for name in declared {
            let below = format!("{folder}{name}/");
            let places = [format!("{folder}{name}.rs"), format!("{below}mod.rs")];
            let child = places.iter().find_map(|path| self.add_file(path, &below, Some(this)));
            self.all[this].children.extend(child.map(|child| (name, child)));
        }
        this
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::complaint::tests::file;
    use super::*;

    /// Files of a made-up crate `a`, by path below its `src`.
    pub(in super::super) fn made_up(files: &[(&str, &str)]) -> Vec<File> {
        files.iter().map(|(path, text)| file(&format!("a/src/{path}"), text)).collect()
    }

    /// Imports as `from:line to`.
    fn imports(files: &[(&str, &str)]) -> Vec<String> {
        let short = |path: &str| path.trim_start_matches("a/src/").to_owned();
        let graph = Graph::of(&made_up(files), "a");
        graph
            .imports
            .iter()
            .map(|import| format!("{}:{} {}", short(&import.from), import.line, short(&import.to)))
            .collect()
    }

    #[test]
    fn imports_lead_to_the_file_that_defines_the_name() {
        let files = [
            ("lib.rs", "mod x;\nmod y;\npub use y::Deep;\npub use x::X;"),
            ("x.rs", "use crate::y::{Deep,\n  Own as Other};\nstruct X;\nfn f() { super::y::deep::g() }"),
            ("y/mod.rs", "mod deep;\npub(crate) use deep::Deep;\npub struct Own;"),
            ("y/deep.rs", "use std::fmt;\npub struct Deep;\npub fn g() {}"),
        ];
        assert_eq!(imports(&files), ["x.rs:1 y/deep.rs", "x.rs:2 y/mod.rs"]);
        assert_eq!(Graph::of(&made_up(&files), "a").files.len(), 4);
    }

    #[test]
    fn a_re_export_is_an_import_only_where_its_name_is_used() {
        let parts = [("x.rs", "pub struct X;\npub struct Y;")];
        let with = |lib: &str| imports(&[[("lib.rs", lib)].as_slice(), &parts].concat());
        assert!(with("mod x;\npub use x::{X, Y};").is_empty());
        assert_eq!(with("mod x;\npub use x::{X, Y};\nfn f(_: X) {}"), ["lib.rs:2 x.rs"]);
        assert_eq!(with("mod x;\nuse x::X;"), ["lib.rs:2 x.rs"]);
        assert_eq!(with("mod x;\nfn f() { x::X }"), ["lib.rs:2 x.rs"]);
        assert!(with("mod x;\npub use x::*;").is_empty());
        assert_eq!(with("mod x;\n\nuse x::*;\nfn f(_: Y) {}"), ["lib.rs:3 x.rs"]);
    }

    #[test]
    fn names_that_the_parent_imports_lead_on() {
        let files = [
            ("main.rs", "mod x;\nmod y;\nuse y::Y;\nuse std::fmt;\nconst C: u8 = 0;"),
            ("x.rs", "use super::Y;\nuse super::fmt;\nuse crate::C;\nuse crate::made_by_a_macro;"),
            ("y.rs", "use crate::x;\npub struct Y;\nfn f() { x::g() }"),
        ];
        assert_eq!(imports(&files), ["main.rs:3 y.rs", "x.rs:3 main.rs", "x.rs:1 y.rs", "y.rs:3 x.rs"]);
    }

    #[test]
    fn a_module_and_an_item_may_share_a_name() {
        let files = [
            ("lib.rs", "mod minimize;\nmod x;\npub use minimize::minimize;"),
            ("minimize.rs", "pub fn minimize() {}\npub struct Other;"),
            ("x.rs", "use crate::minimize;"),
        ];
        assert_eq!(imports(&files), ["x.rs:1 minimize.rs"]);
    }

    #[test]
    fn tests_and_inline_modules_belong_to_no_other_file() {
        let files = [
            ("lib.rs", "#[cfg(test)]\nmod tests;\nmod x;\nmod sealed { pub trait Sealed {} }\npub struct S;"),
            ("tests.rs", "use crate::x::X;"),
            (
                "x.rs",
                "mod at {\n  pub use super::super::S;\n}\npub struct X;\n#[cfg(test)]\nmod tests { use crate::S; }",
            ),
        ];
        assert!(imports(&files).is_empty());
        assert_eq!(Graph::of(&made_up(&files), "a").files.len(), 2);
        let sealed = [files[0], ("x.rs", "mod at {\n  use super::super::sealed::Sealed;\n}")];
        assert_eq!(imports(&sealed), ["x.rs:2 lib.rs"]);
    }
}
