//! Step `candle`: type-checks the recipe of tensor's README for candle variables in a flat buffer, in a crate outside the
//! workspace.

use super::task::{Setting, Task};
use crate::cmd::Cmd;
use crate::workspace::Workspace;
use anyhow::Context;
use std::fs;
use std::path::Path;

/// Returns the commands that write and check the crate. Candle's build needs nvcc; a script that writes empty kernels
/// replaces it.
pub(super) fn tasks(setting: &Setting) -> Vec<Task> {
    let folder = setting.target.join("outside");
    let dir = folder.join("candle");
    // A separate target folder, because the other outside crates use different features.
    let check = Cmd::cargo("check --target-dir").arg(&folder.join("candle-target").to_string_lossy());
    let nvcc = setting.root.join("xtask/standin/nvcc/nvcc");
    let check = check.env("NVCC", &nvcc.to_string_lossy()).env("CUDA_COMPUTE_CAP", "80");
    vec![Task::WriteRecipe { dir: dir.clone() }, Task::Run(check.dir(&dir))]
}

/// Writes the crate into `dir`, with the dependency versions of the workspace's lock file.
pub(super) fn write(dir: &Path, workspace: &Workspace) -> anyhow::Result<()> {
    let tensor = workspace.root.join("tensor");
    let readme = fs::read_to_string(tensor.join("README.md"))?;
    let recipe = Recipe::find(&readme).context("tensor/README.md has no section on variables of candle")?;
    fs::create_dir_all(dir.join("src"))?;
    fs::write(dir.join("Cargo.toml"), recipe.manifest(&tensor))?;
    fs::write(dir.join("src/lib.rs"), recipe.program())?;
    // Cargo adds the dependencies of candle that the workspace does not have.
    fs::copy(workspace.root.join("Cargo.lock"), dir.join("Cargo.lock"))?;
    Ok(())
}

/// Recipe of the README: its code and its version of candle.
struct Recipe<'a> {
    version: &'a str,
    code: &'a str,
}

impl<'a> Recipe<'a> {
    fn find(readme: &'a str) -> Option<Self> {
        let (_, section) = readme.split_once("\nVariables of candle ")?;
        let (version, rest) = section.split_once(' ')?;
        let (_, code) = rest.split_once("```rust,ignore\n")?;
        let (code, _) = code.split_once("```")?;
        Some(Recipe { version, code })
    }

    fn manifest(&self, tensor: &Path) -> String {
        format!(
            "[workspace]\n\n\
             [package]\n\
             name = \"outside-candle\"\n\
             version = \"0.0.0\"\n\
             edition = \"2024\"\n\n\
             [dependencies]\n\
             candle-core = {{ version = \"={}\", default-features = false, features = [\"cuda\"] }}\n\
             meshstep-tensor = {{ path = '{}', features = [\"cuda\"] }}\n",
            self.version,
            tensor.display()
        )
    }

    fn program(&self) -> String {
        let Recipe { code, .. } = self;
        format!(
            "//! For type checking only; never run.\n\n\
             pub fn recipe(layout: &meshstep_tensor::Layout) -> Result<(), Box<dyn std::error::Error>> {{\n\
             {code}\
             drop(vars);\n\
             Ok(())\n\
             }}\n"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_recipe_is_what_the_readme_shows() {
        let readme = "# t\n\nVariables of candle 1.2.3 can lie.\n\n```rust,ignore\nlet vars = 1;\n```\n\n```sh\nno\n```\n";
        let recipe = Recipe::find(readme).unwrap();
        assert_eq!((recipe.version, recipe.code), ("1.2.3", "let vars = 1;\n"));
        assert!(recipe.program().contains("{\nlet vars = 1;\ndrop(vars);\n"));
        let manifest = recipe.manifest(Path::new("/t"));
        assert!(manifest.contains("candle-core = { version = \"=1.2.3\","), "{manifest}");
        assert!(manifest.contains("meshstep-tensor = { path = '/t',"), "{manifest}");
        assert!(Recipe::find("# t\n\nVariables of candle 1.2.3 can lie.\n").is_none());
    }
}
