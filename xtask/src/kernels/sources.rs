//! Finds the kernels' sources, and assembles the text that each module is compiled from.

use anyhow::{Context, ensure};
use std::fs;
use std::path::Path;

/// Parent folder of the kernels; they lie in its subfolders.
const FOLDER: &str = "optim/src";

/// Folder of code shared by kernels. Files with a name that begins with a digit are prepended to every kernel; other files
/// are kernels.
const SHARED: &str = "optim/src/cuda/";

/// A text file; the path is relative to the root, with `/` on every platform.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct File {
    pub(crate) path: String,
    pub(crate) text: String,
}

/// A file of kernels with all code that it needs; compiled to one PTX module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Module {
    /// For example `adam` for `optim/src/rules/adam/adam.cu`.
    pub(crate) name: String,
    pub(crate) path: String,
    pub(crate) text: String,
}

impl Module {
    /// Returns the path of the module's committed PTX.
    pub(crate) fn ptx_path(&self) -> String {
        ptx_path(&self.path)
    }
}

/// Returns the path of the committed PTX of a `.cu` file.
pub(crate) fn ptx_path(cu: &str) -> String {
    format!("{}.ptx", cu.trim_end_matches(".cu"))
}

/// Reads every `.cu` and `.ptx`.
pub(crate) fn read(root: &Path) -> anyhow::Result<Vec<File>> {
    let mut files = Vec::new();
    for inside in folders(root, FOLDER)? {
        for name in names(&root.join(&inside))? {
            if name.ends_with(".cu") || name.ends_with(".ptx") {
                let path = format!("{inside}/{name}");
                let text =
                    fs::read_to_string(root.join(&path)).with_context(|| format!("cannot read {path}"))?;
                files.push(File { path, text });
            }
        }
    }
    Ok(files)
}

/// Returns the paths of all folders below `parent`, a folder before those inside it.
fn folders(root: &Path, parent: &str) -> anyhow::Result<Vec<String>> {
    let mut below = Vec::new();
    for name in names(&root.join(parent))? {
        let path = format!("{parent}/{name}");
        if root.join(&path).is_dir() {
            let inside = folders(root, &path)?;
            below.push(path);
            below.extend(inside);
        }
    }
    Ok(below)
}

/// Returns the names of a folder's entries in alphabetical order.
fn names(folder: &Path) -> anyhow::Result<Vec<String>> {
    let entries = fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))?;
    let names = entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
    let mut names = names.collect::<std::io::Result<Vec<_>>>()?;
    names.sort();
    Ok(names)
}

/// Returns every module, with the shared files in front in alphabetical order.
pub(crate) fn modules(files: &[File]) -> anyhow::Result<Vec<Module>> {
    let sources = files.iter().filter(|file| file.path.ends_with(".cu"));
    let (mut shared, kernels): (Vec<&File>, Vec<&File>) = sources.partition(|file| is_shared(&file.path));
    shared.sort_by_key(|file| &file.path);
    let before: String = shared.into_iter().map(with_its_lines).collect();
    let mut modules: Vec<Module> = Vec::new();
    for file in kernels {
        let name = stem(&file.path).to_owned();
        if let Some(other) = modules.iter().find(|other| other.name == name) {
            anyhow::bail!("{} and {} have the same name; rename one", other.path, file.path);
        }
        let text = before.clone() + &with_its_lines(file);
        modules.push(Module { name, path: file.path.clone(), text });
    }
    ensure!(!modules.is_empty(), "no .cu file in the subfolders of {FOLDER}");
    Ok(modules)
}

/// Returns the PTX files without a source.
pub(crate) fn orphans<'a>(files: &'a [File], modules: &[Module]) -> Vec<&'a str> {
    let ptx = files.iter().map(|file| file.path.as_str()).filter(|path| path.ends_with(".ptx"));
    ptx.filter(|path| modules.iter().all(|module| module.ptx_path() != *path)).collect()
}

fn is_shared(path: &str) -> bool {
    path.strip_prefix(SHARED).is_some_and(|name| name.starts_with(|c: char| c.is_ascii_digit()))
}

fn stem(path: &str) -> &str {
    let name = path.rsplit('/').next().unwrap_or(path);
    name.split('.').next().unwrap_or(name)
}

/// Returns the text after a `#line` directive, so that compiler messages name the file and its line numbers.
fn with_its_lines(file: &File) -> String {
    let end = if file.text.ends_with('\n') { "" } else { "\n" };
    format!("#line 1 \"{}\"\n{}{end}", file.path, file.text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, text: &str) -> File {
        File { path: path.to_owned(), text: text.to_owned() }
    }

    #[test]
    fn shared_files_go_before_each_kernel_in_the_order_of_names() {
        let files = [
            file("optim/src/rules/adam/adam.cu", "adam"),
            file("optim/src/cuda/2_b.cu", "b"),
            file("optim/src/cuda/1_a.cu", "a\n"),
            file("optim/src/cuda/3_c.cu", "c\n"),
            file("optim/src/cuda/prologue.cu", "prologue\n"),
            file("optim/src/norm/1_norm.cu", "norm\n"),
            file("optim/src/rules/adam/adam.ptx", "old"),
        ];
        let modules = modules(&files).unwrap();
        let names: Vec<&str> = modules.iter().map(|module| module.name.as_str()).collect();
        assert_eq!(names, ["adam", "prologue", "1_norm"]);
        let before = "#line 1 \"optim/src/cuda/1_a.cu\"\na\n#line 1 \"optim/src/cuda/2_b.cu\"\nb\n\
                      #line 1 \"optim/src/cuda/3_c.cu\"\nc\n";
        assert_eq!(modules[0].text, format!("{before}#line 1 \"optim/src/rules/adam/adam.cu\"\nadam\n"));
        assert_eq!(modules[1].text, format!("{before}#line 1 \"optim/src/cuda/prologue.cu\"\nprologue\n"));
        assert_eq!(modules[0].ptx_path(), "optim/src/rules/adam/adam.ptx");
    }

    #[test]
    fn two_kernels_of_one_name_and_none_at_all_are_refused() {
        let twice = [file("optim/src/a/x.cu", ""), file("optim/src/b/x.cu", "")];
        let error = modules(&twice).unwrap_err().to_string();
        assert!(error.contains("optim/src/a/x.cu and optim/src/b/x.cu"), "{error}");
        assert!(modules(&[file("optim/src/cuda/1_a.cu", "")]).is_err());
    }

    #[test]
    fn ptx_without_its_source_is_found() {
        let files =
            [file("optim/src/a/a.cu", ""), file("optim/src/a/a.ptx", ""), file("optim/src/b/b.ptx", "")];
        let modules = modules(&files).unwrap();
        assert_eq!(orphans(&files, &modules), ["optim/src/b/b.ptx"]);
    }

    #[test]
    fn the_repository_has_adam() {
        let root = crate::workspace::Workspace::find().unwrap().root;
        let modules = modules(&read(&root).unwrap()).unwrap();
        let adam = modules.iter().find(|module| module.name == "adam").unwrap();
        assert_eq!(adam.path, "optim/src/rules/adam/adam.cu");
        let number = adam.text.find("optim/src/cuda/1_number.cu").unwrap();
        assert!(number < adam.text.find("optim/src/rules/adam/adam.cu").unwrap());
    }
}
