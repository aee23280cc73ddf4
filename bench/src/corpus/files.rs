//! Reads text from a file, a folder, or the sources of this workspace's dependencies.

use std::fmt;
use std::fs::{self, File};
use std::io::Read as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use cargo_metadata::{MetadataCommand, Package};

/// Files with these endings are read from folders.
const ENDINGS: [&str; 3] = ["md", "rs", "txt"];

/// Size limit of source files in the default corpus; longer ones are mostly generated tables.
const MAX_SOURCE_FILE: u64 = 128 << 10;

/// Text with its origin.
#[derive(Clone, Debug)]
pub(crate) struct Text {
    /// Contents of the files, concatenated.
    pub(crate) bytes: Vec<u8>,
    origin: String,
    files: usize,
    capped: bool,
}

impl fmt::Display for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = self.bytes.len() as f64 / f64::from(1 << 20);
        let capped = if self.capped { ", cut there" } else { "" };
        write!(f, "{mib:.2} MiB from {} of {}{capped}", plural(self.files), self.origin)
    }
}

fn plural(files: usize) -> String {
    if files == 1 { "1 file".to_owned() } else { format!("{files} files") }
}

impl Text {
    /// Reads at most `cap` bytes of a file, or of the .md, .rs and .txt files below a folder in the order of their paths.
    pub(crate) fn from_path(path: &Path, cap: usize) -> Result<Self> {
        let shown = path.display();
        let kind =
            fs::metadata(path).with_context(|| format!("--corpus {shown}: give a text file or a folder"))?;
        let files = match () {
            () if kind.is_file() => vec![path.to_owned()],
            () if kind.is_dir() => below(path)?,
            () => bail!("--corpus {shown} is neither a file nor a folder"),
        };
        ensure!(!files.is_empty(), "--corpus {shown}: no file below it ends in .{}", ENDINGS.join(", ."));
        let text = Self::concat(shown.to_string(), &files, cap)?;
        ensure!(!text.bytes.is_empty(), "--corpus {shown} is empty: give a file or folder with text");
        Ok(text)
    }

    /// Reads at most `cap` bytes of the Rust sources of the dependencies of the workspace around `manifest`, in the order
    /// of packages, versions and paths.
    pub(crate) fn from_dependencies(manifest: &Path, cap: usize) -> Result<Self> {
        let mut packages = dependencies(manifest)?;
        packages.sort_by(|a, b| (&a.name, &a.version).cmp(&(&b.name, &b.version)));
        let mut files = Vec::new();
        for package in &packages {
            files.extend(sources(package)?);
        }
        let text = Self::concat("the workspace's dependencies".to_owned(), &files, cap)?;
        ensure!(
            !text.bytes.is_empty(),
            "the workspace's dependencies have no sources: give --corpus a file or folder"
        );
        Ok(text)
    }

    fn concat(origin: String, files: &[PathBuf], cap: usize) -> Result<Self> {
        let mut text = Self { bytes: Vec::new(), origin, files: 0, capped: false };
        for path in files {
            let room = (cap - text.bytes.len()) as u64;
            let file = File::open(path).with_context(|| format!("opening {}", path.display()))?;
            // Read one byte more than there is room for, to detect that the text is cut.
            let read = file.take(room + 1).read_to_end(&mut text.bytes);
            read.with_context(|| format!("reading {}", path.display()))?;
            text.files += 1;
            text.capped = text.bytes.len() > cap;
            text.bytes.truncate(cap);
            if text.capped {
                break;
            }
        }
        Ok(text)
    }
}

/// Returns the external packages that the workspace depends on, for this machine's platform.
fn dependencies(manifest: &Path) -> Result<Vec<Package>> {
    // Without the filter, cargo needs the sources for all other operating systems too.
    let options = ["--filter-platform", "host-tuple"].map(str::to_owned);
    let metadata = MetadataCommand::new().manifest_path(manifest).other_options(options).exec().context(
        "cargo metadata did not list the workspace's dependencies: give --corpus a file or folder",
    )?;
    Ok(metadata.packages.into_iter().filter(|package| package.source.is_some()).collect())
}

/// Returns a package's Rust files, without very long ones.
fn sources(package: &Package) -> Result<Vec<PathBuf>> {
    let folder = package.manifest_path.parent().context("the path of a package's manifest has no folder")?;
    let files = below(&folder.join("src").into_std_path_buf()).or_else(|_| below(folder.as_std_path()))?;
    let short = |path: &PathBuf| fs::metadata(path).is_ok_and(|kind| kind.len() <= MAX_SOURCE_FILE);
    let rust = |path: &PathBuf| path.extension().is_some_and(|ending| ending == "rs");
    Ok(files.into_iter().filter(|path| rust(path) && short(path)).collect())
}

/// Returns the text files below a folder, sorted by path. Links are not followed, because they may form cycles.
fn below(folder: &Path) -> Result<Vec<PathBuf>> {
    let (mut files, mut folders) = (Vec::new(), vec![folder.to_owned()]);
    while let Some(folder) = folders.pop() {
        let entries = fs::read_dir(&folder).with_context(|| format!("listing {}", folder.display()))?;
        for entry in entries {
            let entry = entry.with_context(|| format!("listing {}", folder.display()))?;
            let (kind, path) = (entry.file_type()?, entry.path());
            let text = path.extension().is_some_and(|ending| ENDINGS.iter().any(|&known| ending == known));
            match () {
                () if kind.is_dir() => folders.push(path),
                () if kind.is_file() && text => files.push(path),
                () => {}
            }
        }
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        folder
    }

    #[test]
    fn a_folder_is_read_in_the_order_of_paths_and_other_endings_are_left_out() {
        let folder = folder(&[("b.txt", "2"), ("a/z.rs", "1"), ("c.md", "3"), ("a.bin", "no"), ("rs", "no")]);
        let text = Text::from_path(folder.path(), 100).unwrap();
        assert_eq!((text.bytes.as_slice(), text.files, text.capped), (b"123".as_slice(), 3, false));
    }

    #[test]
    fn the_cap_cuts_and_says_so() {
        let folder = folder(&[("a.txt", "12345"), ("b.txt", "67890"), ("c.txt", "x")]);
        let cut = Text::from_path(folder.path(), 7).unwrap();
        assert_eq!((cut.bytes.as_slice(), cut.files, cut.capped), (b"1234567".as_slice(), 2, true));
        assert!(cut.to_string().ends_with("cut there"), "{cut}");
        let whole = Text::from_path(folder.path(), 11).unwrap();
        assert_eq!((whole.bytes.len(), whole.files, whole.capped), (11, 3, false));
        assert!(Text::from_path(folder.path(), 10).unwrap().capped);
    }

    #[test]
    fn what_cannot_be_read_is_an_error_that_names_it() {
        let folder = folder(&[("empty.txt", ""), ("sub/a.bin", "x")]);
        let error = |path: &str| format!("{:#}", Text::from_path(&folder.path().join(path), 10).unwrap_err());
        assert!(error("missing").contains("missing: give a text file or a folder"), "{}", error("missing"));
        assert!(error("empty.txt").contains("is empty"), "{}", error("empty.txt"));
        assert!(error("sub").contains("no file below it ends in .md, .rs, .txt"), "{}", error("sub"));
    }

    #[test]
    fn the_workspace_has_dependencies_and_they_read_the_same_every_time() {
        let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
        let text = Text::from_dependencies(&manifest, 1 << 20).unwrap();
        assert_eq!((text.bytes.len(), text.capped), (1 << 20, true));
        // One read is enough in short runs.
        if meshstep_cases::effort() == meshstep_cases::Effort::Tenth {
            return;
        }
        assert_eq!(text.bytes, Text::from_dependencies(&manifest, 1 << 20).unwrap().bytes);
    }
}
