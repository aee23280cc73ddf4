//! A crate outside the workspace that uses one library and nothing else, as a user's first crate would.

use anyhow::Context;
use std::fs;
use std::path::Path;

/// Writes the crate for `library` into `dir`, with the versions that the workspace in `root` is locked to.
pub(crate) fn write(dir: &Path, library: &str, root: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(dir.join("src"))?;
    fs::write(dir.join("Cargo.toml"), manifest(library, &root.join(folder(library))))?;
    fs::write(dir.join("src/main.rs"), program(library))?;
    // Cargo drops the entries that this crate does not need.
    fs::copy(root.join("Cargo.lock"), dir.join("Cargo.lock")).context("the workspace has no Cargo.lock")?;
    Ok(())
}

/// The folder of a library below the root: its name without the project's.
fn folder(library: &str) -> &str {
    library.strip_prefix("meshstep-").unwrap_or(library)
}

fn manifest(library: &str, path: &Path) -> String {
    // `[workspace]` makes it its own root; a literal string needs no escapes on any platform.
    format!(
        "[workspace]\n\n\
         [package]\n\
         name = \"outside-{library}\"\n\
         version = \"0.0.0\"\n\
         edition = \"2024\"\n\n\
         [dependencies]\n\
         {library} = {{ path = '{}' }}\n",
        path.display()
    )
}

fn program(library: &str) -> String {
    format!("//! Links `{library}` alone.\n\nuse {} as _;\n\nfn main() {{}}\n", library.replace('-', "_"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_crate_has_its_own_workspace_and_one_dependency() {
        let manifest = manifest("meshstep-tensor", Path::new("/w/tensor"));
        assert!(manifest.starts_with("[workspace]\n"));
        let (_, dependencies) = manifest.split_once("[dependencies]\n").unwrap();
        assert_eq!(dependencies, "meshstep-tensor = { path = '/w/tensor' }\n");
    }

    #[test]
    fn the_program_links_the_library() {
        assert!(program("meshstep-tensor").contains("use meshstep_tensor as _;"));
        assert_eq!(folder("meshstep-tensor"), "tensor");
    }
}
