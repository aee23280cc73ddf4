//! Files that are compressed and embedded: every module's PTX, and machine code where it is asked for.

use std::env;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

/// Where machine code is, with the feature `cubins`.
const CUBINS: &str = "MESHSTEP_CUBINS";

/// Writes every file, and a list of them.
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

/// A file to embed: its name without endings, and the chip of machine code, 0 of PTX.
struct File {
    module: String,
    chip: u32,
    path: PathBuf,
}

/// The committed PTX in the folders of `src`.
fn ptx() -> Result<Vec<File>, String> {
    println!("cargo::rerun-if-changed=src");
    let folders = names(Path::new("src"))?;
    let mut files = Vec::new();
    for folder in folders.into_iter().filter(|path| path.is_dir()) {
        for path in
            names(&folder)?.into_iter().filter(|path| path.extension().is_some_and(|end| end == "ptx"))
        {
            let module = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            files.push(File { module, chip: 0, path });
        }
    }
    Ok(files)
}

/// Machine code, as `cargo xtask kernels --cubins` writes it: `adam.sm_90.cubin`.
fn cubins() -> Result<Vec<File>, String> {
    println!("cargo::rerun-if-env-changed={CUBINS}");
    if !cfg!(feature = "cubins") {
        return Ok(Vec::new());
    }
    let wanted =
        format!("the feature `cubins` needs {CUBINS}, the folder that `cargo xtask kernels --cubins` fills");
    let folder = env::var_os(CUBINS).ok_or_else(|| wanted.clone())?;
    println!("cargo::rerun-if-changed={}", Path::new(&folder).display());
    let file = |path: PathBuf| {
        let name = path.file_name()?.to_str()?.strip_suffix(".cubin")?.to_owned();
        let (module, chip) = name.split_once(".sm_")?;
        Some(File { module: module.to_owned(), chip: chip.parse().ok()?, path })
    };
    let files: Vec<File> = names(Path::new(&folder))?.into_iter().filter_map(file).collect();
    if files.is_empty() {
        Err(format!("{} has no cubins; {wanted}", Path::new(&folder).display()))
    } else {
        Ok(files)
    }
}

/// What is in a folder, in the order of names.
fn names(folder: &Path) -> Result<Vec<PathBuf>, String> {
    let problem = |error: std::io::Error| format!("{}: {error}", folder.display());
    let entries = fs::read_dir(folder).map_err(problem)?;
    let mut paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>, _>>().map_err(problem)?;
    paths.sort();
    Ok(paths)
}
