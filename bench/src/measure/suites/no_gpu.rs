//! What stands for a GPU in a program that was built without the feature `cuda`: nothing that could be opened.

use std::path::Path;

use anyhow::{Result, bail};

use crate::measure::Effort;
use crate::measure::record::Section;

/// There is none.
pub(crate) struct Gpu {
    pub(crate) name: String,
    never: std::convert::Infallible,
}

impl Gpu {
    pub(crate) fn open() -> Result<Self> {
        bail!(
            "--device cuda: this program was built without the feature cuda; `cargo xtask bench --device cuda` builds it with it"
        )
    }

    pub(crate) fn run(&self, _: Effort, _: Option<&Path>, _: &mut Vec<String>) -> Result<Section> {
        match self.never {}
    }
}
