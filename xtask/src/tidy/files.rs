//! Reads the text files that belong to the repository.

use super::complaint::File;
use anyhow::Context;
use std::path::Path;
use std::process::{Command, Stdio};
use std::{fs, io};

/// Every text file below `root` that git tracks or would track.
pub(super) fn read(root: &Path) -> anyhow::Result<Vec<File>> {
    let mut paths = match listed_by_git(root) {
        Some(paths) => paths,
        None => walk(root, "").with_context(|| format!("cannot list the files in {}", root.display()))?,
    };
    paths.sort();
    paths.dedup();
    paths.into_iter().filter_map(|path| read_text(root, path).transpose()).collect()
}

/// A file, or nothing if it is gone (git still lists it until that is recorded) or not text.
fn read_text(root: &Path, path: String) -> anyhow::Result<Option<File>> {
    match fs::read(root.join(&path)) {
        Ok(bytes) => Ok(String::from_utf8(bytes).ok().map(|text| File { path, text })),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("cannot read {path}")),
    }
}

/// Nothing where git is not installed or `root` is no checkout.
fn listed_by_git(root: &Path) -> Option<Vec<String>> {
    let mut git = Command::new("git");
    git.args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"]).current_dir(root);
    let output = git.stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
    let names = output.stdout.split(|&byte| byte == 0).filter(|name| !name.is_empty());
    let names = names.map(|name| String::from_utf8_lossy(name).into_owned());
    output.status.success().then(|| names.collect())
}

/// All files below `root/below`, except build results and git's own.
fn walk(root: &Path, below: &str) -> io::Result<Vec<String>> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(root.join(below))? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let kind = entry.file_type()?;
        if kind.is_dir() && name != "target" && name != ".git" {
            paths.extend(walk(root, &format!("{below}{name}/"))?);
        } else if kind.is_file() {
            paths.push(format!("{below}{name}"));
        }
    }
    Ok(paths)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace::Workspace;

    #[test]
    fn finds_this_file_with_its_text_and_nothing_built() {
        let files = read(&Workspace::find().unwrap().root).unwrap();
        let this = files.iter().find(|file| file.path == "xtask/src/tidy/files.rs").unwrap();
        assert_eq!(this.text, include_str!("files.rs"));
        assert!(files.iter().all(|file| !file.path.starts_with("target/")));
    }

    #[test]
    fn a_walk_sees_what_git_lists() {
        let root = Workspace::find().unwrap().root;
        let walked = walk(&root, "").unwrap();
        for path in ["Cargo.toml", ".ci/run", "xtask/src/main.rs"] {
            assert!(walked.iter().any(|walked| walked == path), "{path} is missing");
        }
        assert!(walked.iter().all(|path| !path.starts_with("target/") && !path.starts_with(".git/")));
    }

    #[test]
    fn what_is_gone_or_not_text_is_passed_over() {
        let root = Workspace::find().unwrap().root;
        assert_eq!(read_text(&root, "no/such/file".to_owned()).unwrap(), None);
        assert!(read_text(&root, "xtask".to_owned()).is_err());
    }
}
