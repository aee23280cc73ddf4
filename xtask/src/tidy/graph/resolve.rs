//! Name resolution: from a path in one module to the module that defines the item.

use super::Modules;

/// Result of following a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    Module(usize),
    /// An item, defined in this module.
    Item(usize),
    /// A name of another crate.
    Outside,
}

/// Longest chain of re-exports that is followed; a cycle ends there.
const CHAIN: usize = 8;

impl<'a> Modules<'a> {
    /// Importing module, line and defining module of every import.
    pub(super) fn imports(&self) -> Vec<(usize, usize, usize)> {
        let mut found = Vec::new();
        for (from, module) in self.all.iter().enumerate() {
            let mut add = |line: usize, target: Found| {
                if let Found::Item(to) = target {
                    found.push((from, line, to));
                }
            };
            let words = &module.scope.words;
            for leaf in &module.scope.uses {
                match leaf.name {
                    Some(name) if leaf.exported && !words.contains(name) => {}
                    Some(_) => add(leaf.line, self.resolve(from, &leaf.path, CHAIN)),
                    None => self.glob(from, &leaf.path).for_each(|target| add(leaf.line, target)),
                }
            }
            for mention in &module.scope.mentions {
                add(mention.line, self.resolve(from, &mention.path, CHAIN));
            }
        }
        found
    }

    /// The items that the module `from` mentions out of all that `path::*` brings in.
    fn glob(&self, from: usize, path: &[&'a str]) -> impl Iterator<Item = Found> {
        let target = match self.resolve(from, path, CHAIN) {
            Found::Module(target) => Some(target),
            _ => None,
        };
        let words = self.all[from].scope.words.iter();
        words.filter_map(move |word| self.name(target?, word, true, CHAIN))
    }

    fn root(&self, mut module: usize) -> usize {
        while let Some(parent) = self.all[module].parent {
            module = parent;
        }
        module
    }

    fn parent(&self, module: usize) -> Found {
        self.all[module].parent.map_or(Found::Outside, Found::Module)
    }

    /// Follows `path` as it stands in the module `from`.
    fn resolve(&self, from: usize, path: &[&'a str], chain: usize) -> Found {
        let mut found = Found::Module(from);
        for (idx, name) in path.iter().enumerate() {
            let Found::Module(module) = found else { return found };
            let last = idx + 1 == path.len();
            found = match *name {
                "crate" => Found::Module(self.root(module)),
                "self" => found,
                "super" => self.parent(module),
                // The first name is in scope or another crate's; a later one that is not found was made by a macro.
                name if idx == 0 => self.name(module, name, last, chain).unwrap_or(Found::Outside),
                name => self.name(module, name, last, chain).unwrap_or(Found::Item(module)),
            };
        }
        found
    }

    /// The name in the module's scope. Inside a path, a module goes before an item of the same name.
    fn name(&self, module: usize, name: &str, last: bool, chain: usize) -> Option<Found> {
        let chain = chain.checked_sub(1)?;
        let this = &self.all[module];
        let child = this.children.get(name).map(|child| Found::Module(*child));
        if child.is_some() && !last {
            return child;
        }
        if this.scope.definitions.contains(name) {
            return Some(Found::Item(module));
        }
        let named = this.scope.uses.iter().find(|leaf| leaf.name == Some(name));
        if let Some(leaf) = named {
            return Some(self.resolve(module, &leaf.path, chain));
        }
        let globs = this.scope.uses.iter().filter(|leaf| leaf.name.is_none());
        child.or_else(|| {
            globs.into_iter().find_map(|leaf| self.in_glob(module, &leaf.path, name, last, chain))
        })
    }

    fn in_glob(
        &self,
        module: usize,
        path: &[&'a str],
        name: &str,
        last: bool,
        chain: usize,
    ) -> Option<Found> {
        match self.resolve(module, path, chain) {
            Found::Module(target) => self.name(target, name, last, chain),
            _ => None,
        }
    }
}
