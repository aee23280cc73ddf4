//! Compression of embedded files: every module's PTX, and machine code with the feature `cubins`.

use std::env;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

/// Variable with the folder of machine code, for the feature `cubins`.
const CUBINS: &str = "MESHSTEP_CUBINS";

/// Writes every compressed file, and a list of them.
pub(crate) fn pack() -> Result<(), String> {
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("cargo sets no OUT_DIR")?);
    let mut list = String::from("[\n");
    for File { module, chip, path } in ptx()?.into_iter().chain(cubins()?) {
        let bytes = fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        let packed = out.join(format!("{module}.{chip}"));
        fs::write(&packed, miniz_oxide::deflate::compress_to_vec(&bytes, 6))
            .map_err(|error| error.to_string())?;
        let _ = writeln!(
            list,
            "Packed {{ module: {module:?}, chip: {chip}, bytes: include_bytes!({packed:?}), len: {} }},",
            bytes.len()
        );
    }
    fs::write(out.join("texts.rs"), list + "]\n").map_err(|error| error.to_string())
}

/// File to embed: name without endings, and the chip of machine code, or 0 for PTX.
struct File {
    module: String,
    chip: u32,
    path: PathBuf,
}

/// Returns the committed PTX in all folders of `src`.
fn ptx() -> Result<Vec<File>, String> {
    println!("cargo::rerun-if-changed=src");
    let (mut folders, mut files) = (vec![PathBuf::from("src")], Vec::new());
    while let Some(folder) = folders.pop() {
        for path in names(&folder)? {
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|end| end == "ptx") {
                let module = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
                files.push(File { module, chip: 0, path });
            }
        }
    }
    files.sort_by(|a, b| a.module.cmp(&b.module));
    Ok(files)
}

/// Returns the machine code written by `cargo xtask kernels --cubins`: `adam.sm_90.cubin`, beside the PTX it was assembled from.
fn cubins() -> Result<Vec<File>, String> {
    println!("cargo::rerun-if-env-changed={CUBINS}");
    if !cfg!(feature = "cubins") {
        return Ok(Vec::new());
    }
    let wanted = format!(
        "the feature `cubins` needs {CUBINS}, the whole path of the folder that `cargo xtask kernels --cubins` fills"
    );
    let folder = PathBuf::from(env::var_os(CUBINS).ok_or_else(|| wanted.clone())?);
    println!("cargo::rerun-if-changed={}", folder.display());
    let mut files = Vec::new();
    for File { module, path, .. } in ptx()? {
        is_same(&folder.join(format!("{module}.ptx")), &path)
            .map_err(|problem| format!("{problem}; {wanted}"))?;
        files.extend(of_module(&folder, &module)?);
    }
    if files.is_empty() { Err(format!("{} has no cubins; {wanted}", folder.display())) } else { Ok(files) }
}

/// Checks that machine code belongs to the committed PTX; code of another version would take other arguments.
fn is_same(beside: &Path, committed: &Path) -> Result<(), String> {
    let read = |path: &Path| fs::read(path).map_err(|error| format!("{}: {error}", path.display()));
    if read(beside)? == read(committed)? {
        return Ok(());
    }
    Err(format!("{} is not {}: its cubins are of another version", beside.display(), committed.display()))
}

/// Returns the cubins of one PTX file.
fn of_module(folder: &Path, module: &str) -> Result<Vec<File>, String> {
    let mut files = Vec::new();
    for path in names(folder)? {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let chip = name.strip_prefix(&format!("{module}.sm_")).and_then(|rest| rest.strip_suffix(".cubin"));
        let Some(chip) = chip.and_then(|chip| chip.parse().ok()).filter(|&chip| chip > 0) else { continue };
        let bytes = fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        if !is_whole(&bytes) {
            return Err(format!("{} is no whole cubin; assemble it again", path.display()));
        }
        files.push(File { module: module.to_owned(), chip, path });
    }
    Ok(files)
}

/// Returns true if the file contains all sections of its ELF header: the driver reads them without knowing the file's length.
fn is_whole(bytes: &[u8]) -> bool {
    let word = |at: usize| bytes.get(at..at + 8)?.try_into().ok().map(u64::from_le_bytes);
    let half = |at: usize| bytes.get(at..at + 2)?.try_into().ok().map(u16::from_le_bytes).map(u64::from);
    // Offset of the section headers, size of one, and their number.
    let (Some(start), Some(size), Some(count)) = (word(40), half(58), half(60)) else { return false };
    let end = size.checked_mul(count).and_then(|len| len.checked_add(start));
    bytes.starts_with(b"\x7fELF") && end.is_some_and(|end| end <= bytes.len() as u64)
}

/// Returns the entries of a folder, ordered by name.
fn names(folder: &Path) -> Result<Vec<PathBuf>, String> {
    let problem = |error: std::io::Error| format!("{}: {error}", folder.display());
    let entries = fs::read_dir(folder).map_err(problem)?;
    let mut paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>, _>>().map_err(problem)?;
    paths.sort();
    Ok(paths)
}
