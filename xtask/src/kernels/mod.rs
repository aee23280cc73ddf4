//! `kernels`: compiles the CUDA kernels to the committed PTX files, and checks their resource usage against a budget.

mod budget;
mod nvrtc;
pub(crate) mod ptx;
mod ptxas;
mod sass;
pub(crate) mod sources;
mod tools;

use crate::cli::KernelsArgs;
use crate::parallel::in_parallel;
use crate::workspace::Workspace;
use anyhow::{Context, bail};
use budget::{Budget, Measured};
use nvrtc::Nvrtc;
pub(crate) use ptxas::CHIPS;
use sources::{File, Module};
use std::fs;
use std::path::Path;
use tools::Tools;

/// Compiler options. They forbid transformations that change bits: no contraction of products and sums, IEEE rounding of
/// divisions and roots, and subnormals are kept. The kernels already request this by intrinsics; the options cover the
/// remaining code. The architecture is the oldest supported chip, so that the driver of any newer chip can compile the PTX.
const OPTIONS: &str =
    "--gpu-architecture=compute_80 --std=c++17 --fmad=false --prec-div=true --prec-sqrt=true --ftz=false";

/// Chip on which instructions are counted.
const COUNTED: &str = "sm_90";

/// Advice for stale committed files.
const REMEDY: &str = "run `cargo xtask kernels` and commit the files that it writes";

/// Writes or checks the PTX, then the budget.
pub(crate) fn run(args: &KernelsArgs, workspace: &Workspace) -> anyhow::Result<()> {
    let root = &workspace.root;
    let files = sources::read(root)?;
    let modules = sources::modules(&files)?;
    let tools = Tools::get(&workspace.target)?;
    if let Some(folder) = &args.cubins {
        return cubins(&root.join(folder), &files, &tools);
    }
    let texts = compile(&modules, &tools)?;
    let stale = stale(&files, &modules, &texts);
    if !args.check {
        write(root, &files, &modules, &texts)?;
    } else if !stale.is_empty() {
        bail!("{}\n{REMEDY}", stale.join("\n"));
    }
    let wanted = |chip: &str| args.chip.as_ref().is_none_or(|only| only == chip);
    let measured = measure(&modules, &texts, &tools, &workspace.target.join("kernels"), wanted)?;
    settle_budget(args, root, &measured)?;
    let bytes: usize = texts.iter().map(String::len).sum();
    println!("{}", measured.summary());
    println!("kernels: {} in {} files, {} kB of PTX", measured.len(), modules.len(), bytes.div_ceil(1000));
    Ok(())
}

/// Writes machine code of the committed PTX for each chip, in the layout that optim's build script reads.
fn cubins(folder: &Path, files: &[File], tools: &Tools) -> anyhow::Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let mut jobs = Vec::new();
    for File { path, text } in files.iter().filter(|file| file.path.ends_with(".ptx")) {
        let file = folder.join(path.rsplit('/').next().unwrap_or(path));
        fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))?;
        jobs.extend(CHIPS.map(|chip| (file.clone(), chip)));
    }
    in_parallel(&jobs, |(file, chip)| ptxas::measure(&tools.ptxas, file, chip))?;
    println!("{}: {} cubins; build with MESHSTEP_CUBINS={0}", folder.display(), jobs.len());
    Ok(())
}

/// Returns the text to commit for each module.
fn compile(modules: &[Module], tools: &Tools) -> anyhow::Result<Vec<String>> {
    let nvrtc = Nvrtc::open(&tools.builtins, &tools.nvrtc)?;
    in_parallel(modules, |module| {
        let options: Vec<&str> = OPTIONS.split(' ').collect();
        let written = nvrtc.compile(&format!("{}.cu", module.name), &module.text, &options)?;
        let print = ptx::fingerprint(&[tools::PINNED, OPTIONS, &module.text]);
        ptx::committed(&module.name, &print, &written)
    })
}

/// Lists committed PTX that differs from its sources or has no source.
fn stale(files: &[File], modules: &[Module], texts: &[String]) -> Vec<String> {
    let committed = |path: &str| files.iter().find(|file| file.path == path).map(|file| file.text.as_str());
    let differ = modules.iter().zip(texts).filter_map(|(module, fresh)| {
        let path = module.ptx_path();
        ptx::difference(committed(&path), fresh).map(|why| format!("{path} {why}"))
    });
    let orphans = sources::orphans(files, modules).into_iter();
    differ.chain(orphans.map(|path| format!("{path} belongs to no kernel"))).collect()
}

fn write(root: &Path, files: &[File], modules: &[Module], texts: &[String]) -> anyhow::Result<()> {
    for (module, text) in modules.iter().zip(texts) {
        let path = root.join(module.ptx_path());
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        println!("{}: {} kB", module.ptx_path(), text.len().div_ceil(1000));
    }
    for path in sources::orphans(files, modules) {
        fs::remove_file(root.join(path)).with_context(|| format!("cannot remove {path}"))?;
        println!("{path}: removed");
    }
    Ok(())
}

/// Measures the resource usage of every kernel on the wanted chips, compiled from the text to commit.
fn measure(
    modules: &[Module],
    texts: &[String],
    tools: &Tools,
    folder: &Path,
    wanted: impl Fn(&str) -> bool,
) -> anyhow::Result<Measured> {
    let mut jobs = Vec::new();
    for (module, text) in modules.iter().zip(texts) {
        let file = folder.join(format!("{}.ptx", module.name));
        fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))?;
        let chips = CHIPS.iter().enumerate().filter(|(_, chip)| wanted(chip));
        jobs.extend(chips.map(|(idx, chip)| (file.clone(), idx, *chip)));
    }
    let usages = in_parallel(&jobs, |(file, _, chip)| ptxas::measure(&tools.ptxas, file, chip))?;
    let mut measured = Measured::default();
    for ((_, chip, _), usages) in jobs.iter().zip(usages) {
        measured.add(*chip, &usages)?;
    }
    let counted: Vec<_> = jobs.iter().filter(|(_, _, chip)| *chip == COUNTED).collect();
    let turns = in_parallel(&counted, |(file, _, chip)| {
        sass::turns(&tools.nvdisasm, &ptxas::cubin(file, chip), |kernel| {
            kernel.ends_with("_bf16") && !kernel.starts_with("norm_")
        })
    })?;
    turns.iter().for_each(|turns| measured.add_turns(turns));
    Ok(measured)
}

/// Compares the measurements with the committed budget, which `--budget` rewrites first.
fn settle_budget(args: &KernelsArgs, root: &Path, measured: &Measured) -> anyhow::Result<()> {
    let path = root.join(budget::PATH);
    let mut budget = match fs::read_to_string(&path) {
        Ok(text) => Budget::parse(&text)?,
        Err(error) if args.budget && error.kind() == std::io::ErrorKind::NotFound => Budget::default(),
        Err(error) => return Err(error).with_context(|| format!("cannot read {}", budget::PATH)),
    };
    if args.budget {
        budget = budget.renewed(measured);
        fs::write(&path, budget.to_string()).with_context(|| format!("cannot write {}", budget::PATH))?;
    }
    match budget.complaints(measured) {
        complaints if complaints.is_empty() => Ok(()),
        complaints => bail!(
            "{}\nmake the kernels smaller, or change {} (`cargo xtask kernels --budget` writes the measured values)",
            complaints.join("\n"),
            budget::PATH
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, text: &str) -> File {
        File { path: path.to_owned(), text: text.to_owned() }
    }

    #[test]
    fn stale_missing_and_orphaned_ptx_is_named() {
        let files = [
            file("optim/src/a/a.cu", "a"),
            file("optim/src/b/b.cu", "b"),
            file("optim/src/c/c.cu", "c"),
            file("optim/src/a/a.ptx", "// a\n// of 1\nx\n"),
            file("optim/src/c/c.ptx", "// c\n// of 0\nx\n"),
            file("optim/src/d/d.ptx", "// d\n// of 1\nx\n"),
        ];
        let modules = sources::modules(&files).unwrap();
        let texts: Vec<String> =
            modules.iter().map(|module| format!("// {}\n// of 1\nx\n", module.name)).collect();
        let stale = stale(&files, &modules, &texts);
        let begins =
            ["optim/src/b/b.ptx is missing", "optim/src/c/c.ptx was compiled", "optim/src/d/d.ptx belongs"];
        assert_eq!(stale.len(), begins.len(), "{stale:?}");
        for (stale, begin) in stale.iter().zip(begins) {
            assert!(stale.starts_with(begin), "{stale}");
        }
    }
}
