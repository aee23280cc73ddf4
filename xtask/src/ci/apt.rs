//! Installation of Debian packages for steps of `ci`.

use crate::cmd::Cmd;
use anyhow::{Context as _, ensure};

/// Installs packages, separated by spaces, which needs root. `missing` opens the error.
pub(crate) fn install(packages: &str, missing: &str) -> anyhow::Result<()> {
    let user = Cmd::built("id", "-u").output()?.unwrap_or_default();
    let missing = format!("{missing}: apt-get install {packages}");
    ensure!(user.trim() == "0", "{missing}");
    // A machine's lists of packages may be missing or old.
    let install =
        format!("apt-get install -y {packages} || (apt-get update && apt-get install -y {packages})");
    let install = Cmd::built("sh", "-c").arg(&install).env("DEBIAN_FRONTEND", "noninteractive");
    let status = install.run_unattended().context(missing.clone())?;
    ensure!(status.success(), "{missing}");
    Ok(())
}
