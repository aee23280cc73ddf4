//! Step `reports`: makes small reports, takes screenshots of them with headless Chromium, and looks for overflow and empty axes.
//!
//! The pictures and the pages stay in `target/reports`. A window of Chromium is at least 500 px wide, so a page stands in a frame of the
//! wanted width. `check.js`, which is added to a copy of the page, measures what the browser has laid out.

mod browser;

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};

use super::task::{ALL, Setting, Task};
use crate::cmd::Cmd;
use browser::{Browser, Looks};

/// Widths of a desk's screen and of a telephone's, in pixels.
const WIDTHS: [u32; 2] = [1280, 420];
const CHECK: &str = include_str!("check.js");

/// A page with every fault, and what the check must say about it: a check that finds nothing would pass everything.
const BROKEN: &str = include_str!("broken.html");
const FAULTS: [&str; 15] = [
    "px wide on a screen of 420 px",
    "\"wide\" reaches from",
    "\"faint\" has a contrast of 1.",
    "\"#nowhere\" leads nowhere",
    "no chart: there is no chart",
    "empty: axis x has 1 ticks",
    "empty: axis y is empty",
    "empty: no axis has a name",
    "empty: there is no mark",
    "\"name\" and \"1\" overlap",
    "\"200\" leaves the picture",
    "\"0\" is too small",
    "1 curves have no legend of as many lines",
    "the legend covers the chart",
    "there is no verdict",
];

/// What `bench network` says on a machine that cannot run it.
const NO_NAMESPACES: &str = "makes no network namespaces";

/// One task of the step.
#[derive(Clone, Debug)]
pub(crate) enum PageTask {
    /// Install Chromium unless a browser is there.
    Install,
    /// Write a report. It may miss limits, as it is too small for them.
    Write(Cmd),
    /// Write a report of `bench network`, where the machine makes network namespaces.
    WriteNetwork(Cmd),
    /// Check that the check finds every fault of a broken page.
    Prove { folder: PathBuf },
    /// Take screenshots of a page, and check it.
    Look { page: PathBuf, pictures: PathBuf },
}

/// Returns the tasks.
pub(super) fn tasks(setting: &Setting) -> Vec<Task> {
    let folder = setting.target.join("reports");
    let program =
        setting.target.join("debug").join(format!("meshstep-bench{}", std::env::consts::EXE_SUFFIX));
    let write = |line: &str, name: &str| {
        let out = folder.join(name);
        PageTask::Write(
            Cmd::built(&program, line).arg("--out").arg(&out.to_string_lossy()).dir(&setting.root),
        )
    };
    let look = |file: &str| PageTask::Look { page: folder.join(file), pictures: folder.join("pictures") };
    let small = "--steps 24 --kx 4 --ranks 2 --batch 1 --held-out 16";
    let network =
        Cmd::built(&program, "bench network --quick --out").arg(&folder.join("chaos").to_string_lossy());
    let pages = [
        PageTask::Install,
        PageTask::Prove { folder: folder.clone() },
        write("bench --quick", "bench"),
        write(&format!("train --local all {small}"), "local"),
        // The page of a training in the folder of its report has measured seconds.
        PageTask::WriteNetwork(network.dir(&setting.root)),
        write(&format!("train --local des-loc --chaos 1 {small}"), "chaos"),
        look("bench/report.html"),
        look("local/local.html"),
        look("chaos/local.html"),
    ];
    let build = Cmd::cargo(&format!("build {ALL} --bins --tests")).dir(&setting.root);
    let head = [Task::Run(build), Task::Empty(folder.clone())];
    head.into_iter().chain(pages.map(Task::Pages)).collect()
}

impl PageTask {
    pub(super) fn run(&self) -> anyhow::Result<()> {
        match self {
            Self::Install => browser::install(),
            Self::Write(cmd) => {
                let status = cmd.run_unattended()?;
                ensure!(matches!(status.code(), Some(0 | 1)), "{status}\ncommand:      {cmd}");
                Ok(())
            }
            Self::WriteNetwork(cmd) => {
                let (status, said) = cmd.status_and_stderr()?;
                if status.code() == Some(2) && said.contains(NO_NAMESPACES) {
                    println!(
                        "skipped: the page has no measured seconds, because this machine {NO_NAMESPACES}"
                    );
                    return Ok(());
                }
                ensure!(matches!(status.code(), Some(0 | 1)), "{status}\ncommand:      {cmd}");
                Ok(())
            }
            Self::Prove { folder } => prove(folder),
            Self::Look { page, pictures } => look(page, pictures),
        }
    }
}

/// Looks at the broken page.
fn prove(folder: &Path) -> anyhow::Result<()> {
    let page = folder.join("broken.html");
    fs::write(&page, BROKEN)?;
    let found = Browser::find()?.look(&page, CHECK, Looks { width: 420, dark: false })?;
    let missed: Vec<&str> =
        FAULTS.into_iter().filter(|fault| !found.faults.iter().any(|found| found.contains(fault))).collect();
    ensure!(
        missed.is_empty(),
        "check.js does not find these faults of broken.html: {missed:#?}\nit finds: {:#?}",
        found.faults
    );
    println!("check.js finds all {} kinds of faults of a broken page", FAULTS.len());
    Ok(())
}

/// Takes all screenshots of a page, and fails with every fault at the end.
fn look(page: &Path, pictures: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(pictures)?;
    let browser = Browser::find()?;
    let mut faults = Vec::new();
    for (width, dark) in WIDTHS.into_iter().flat_map(|width| [(width, false), (width, true)]) {
        let looks = Looks { width, dark };
        let found = browser.look(page, CHECK, looks)?;
        let name = picture_name(page, looks).context("the page has no folder")?;
        browser.picture(page, looks, found.height, &pictures.join(&name))?;
        println!("{name}: {}", found.counts);
        faults.extend(found.faults.iter().map(|fault| format!("{looks}: {fault}")));
    }
    ensure!(faults.is_empty(), "{} has {} faults:\n{}", page.display(), faults.len(), faults.join("\n"));
    Ok(())
}

fn picture_name(page: &Path, looks: Looks) -> Option<String> {
    let (folder, stem) = (page.parent()?.file_name()?.to_str()?, page.file_stem()?.to_str()?);
    Some(format!("{folder}-{stem}-{}-{}.png", looks.width, looks.scheme()))
}

impl fmt::Display for PageTask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Install => f.write_str("install chromium unless a browser is there"),
            Self::Write(cmd) | Self::WriteNetwork(cmd) => write!(f, "{cmd}"),
            Self::Prove { .. } => {
                f.write_str("check that the check of pages finds the faults of a broken one")
            }
            Self::Look { page, pictures } => {
                write!(f, "check {}, with screenshots in {}", page.display(), pictures.display())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_page_is_looked_at_wide_and_narrow_in_both_schemes() {
        let page = Path::new("/t/reports/local/local.html");
        let names: Vec<String> = WIDTHS
            .into_iter()
            .flat_map(|width| [false, true].map(|dark| picture_name(page, Looks { width, dark }).unwrap()))
            .collect();
        let expected = ["1280-light", "1280-dark", "420-light", "420-dark"];
        assert_eq!(names, expected.map(|end| format!("local-local-{end}.png")));
    }

    /// Without a browser nothing is checked here; the step of a long run installs one.
    #[test]
    fn the_check_finds_every_fault_of_a_broken_page() {
        if Browser::find().is_err() {
            return println!("skipped: there is no Chromium");
        }
        let folder = std::env::temp_dir().join(format!("meshstep-pages-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let proven = prove(&folder);
        fs::remove_dir_all(&folder).unwrap();
        proven.unwrap();
    }
}
