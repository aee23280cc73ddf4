//! The chapters of the book as documentation, so that `cargo test --doc` compiles and runs their code, and
//! the tests of its programs and tables.

#[cfg(test)]
mod plan_table;
#[cfg(test)]
mod quick_start;

/// Includes each chapter as a module's documentation while doctests are built.
macro_rules! chapters {
    ($($name:ident: $file:literal,)*) => {
        $(#[cfg(doctest)] #[doc = include_str!(concat!("src/", $file))] mod $name {})*
    };
}

chapters! {
    introduction: "introduction.md",
    quick_start: "quick-start.md",
    stages: "stages.md",
    clusters: "clusters.md",
    gpus: "gpus.md",
    checkpoints: "checkpoints.md",
    local_updates: "local-updates.md",
    precision: "precision.md",
    meshes: "meshes.md",
    determinism: "determinism.md",
    errors: "errors.md",
    migrating: "migrating.md",
    testing: "testing.md",
    stability: "stability.md",
    readme: "../../../README.md",
}
