//! Replacement of the GPU suite in a program without the feature `cuda`: opening a GPU always fails.

use std::path::Path;

use anyhow::{Result, bail};

use crate::measure::effort::Effort;
use crate::measure::record::Section;

/// A type without values.
pub(crate) struct Gpu {
    pub(crate) name: String,
    never: std::convert::Infallible,
}

impl Gpu {
    pub(crate) fn open() -> Result<Self> {
        bail!(
            "--device cuda: this program was built without the feature cuda; run `cargo xtask bench --device cuda`, which enables it"
        )
    }

    pub(crate) fn run(&self, _: Effort, _: Option<&Path>, _: &mut Vec<String>) -> Result<Section> {
        match self.never {}
    }
}
