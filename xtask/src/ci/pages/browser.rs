//! Chromium without a window: lays a page out in a frame, runs a script in it, and takes pictures.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};

use crate::ci::apt;
use crate::cmd::Cmd;

/// Programs that are Chromium, the usual one first.
const PROGRAMS: [&str; 3] = ["chromium", "chromium-browser", "google-chrome"];
/// Least width of Chromium's window.
const LEAST: u32 = 500;

/// Width of a screen, and its colours.
#[derive(Clone, Copy, Debug)]
pub(super) struct Looks {
    pub(super) width: u32,
    pub(super) dark: bool,
}

/// Result of the script that looks at a page.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) height: u32,
    /// Numbers of charts and tables that were looked at.
    pub(super) counts: String,
    pub(super) faults: Vec<String>,
}

/// A browser of this machine.
#[derive(Clone, Copy, Debug)]
pub(super) struct Browser(&'static str);

/// Installs Chromium if there is no browser, which needs root.
pub(super) fn install() -> anyhow::Result<()> {
    if Browser::find().is_ok() {
        return Ok(());
    }
    apt::install("chromium", "Chromium is missing")
}

impl Browser {
    pub(super) fn find() -> anyhow::Result<Self> {
        let runs =
            |program: &&str| Cmd::built(*program, "--version").silent().is_ok_and(|status| status.success());
        PROGRAMS.into_iter().find(runs).map(Browser).context("Chromium is missing: apt-get install chromium")
    }

    /// Runs `script` in a copy of the page.
    pub(super) fn look(self, page: &Path, script: &str, looks: Looks) -> anyhow::Result<Found> {
        let text = fs::read_to_string(page).with_context(|| format!("reading {}", page.display()))?;
        let copy = page.with_extension("checked.html");
        fs::write(&copy, format!("{text}<script>\n{script}</script>\n"))?;
        let frame = frame(&copy, looks, 2000)?;
        // The page's message arrives within this time of the browser's own clock.
        let dump = self.command(looks, 2000).arg("--virtual-time-budget=10000").arg("--dump-dom");
        let printed = dump.arg(&url(&frame)?).output()?.with_context(|| format!("{} failed", self.0))?;
        let found = Found::of(&printed, looks).with_context(|| format!("checking {}", page.display()));
        fs::remove_file(&copy)?;
        fs::remove_file(&frame)?;
        found
    }

    /// Takes a picture of the whole page.
    pub(super) fn picture(self, page: &Path, looks: Looks, height: u32, into: &Path) -> anyhow::Result<()> {
        let frame = frame(page, looks, height)?;
        let shoot = self.command(looks, height).arg(&format!("--screenshot={}", into.display()));
        let printed = shoot.arg(&url(&frame)?).output()?;
        fs::remove_file(&frame)?;
        ensure!(printed.is_some() && into.exists(), "{} took no picture of {}", self.0, page.display());
        Ok(())
    }

    fn command(self, looks: Looks, height: u32) -> Cmd {
        let flags = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars --force-device-scale-factor=1";
        let scheme = format!("--blink-settings=preferredColorScheme={}", if looks.dark { 0 } else { 1 });
        let size = format!("--window-size={},{height}", looks.width.max(LEAST));
        // A browser that hangs is ended after two minutes.
        Cmd::built("timeout", &format!("120 {} {flags}", self.0)).arg(&scheme).arg(&size)
    }
}

/// Writes a page that shows `page` in a frame of the wanted size, and the frame's message as text.
fn frame(page: &Path, looks: Looks, height: u32) -> anyhow::Result<PathBuf> {
    let path = page.with_extension(format!("frame-{looks}.html").replace(", ", "-").replace(' ', ""));
    let text = format!(
        "<!doctype html><meta charset=\"utf-8\"><meta name=\"color-scheme\" content=\"light dark\">\n\
         <style>body{{margin:0}}iframe{{border:0;display:block}}</style>\n<pre hidden></pre>\n\
         <script>onmessage = event => {{ document.querySelector('pre').textContent = event.data }}</script>\n\
         <iframe width=\"{}\" height=\"{height}\" src=\"{}\"></iframe>\n",
        looks.width,
        url(page)?
    );
    fs::write(&path, text)?;
    Ok(path)
}

fn url(path: &Path) -> anyhow::Result<String> {
    Ok(format!("file://{}", path.canonicalize()?.display()))
}

impl Found {
    /// Reads what the script has sent from the printed frame.
    fn of(printed: &str, looks: Looks) -> anyhow::Result<Self> {
        let sent = printed.split_once("<pre hidden=\"\">").and_then(|(_, rest)| rest.split_once("</pre>"));
        let (sent, _) = sent.context("the browser printed no page")?;
        let sent = sent.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&");
        let mut lines = sent.lines();
        let mut next =
            || lines.next().context("the script sent no result: it failed, or the page did not load");
        let height = next()?.parse().context("no height")?;
        let shown = next()?;
        ensure!(shown == looks.to_string(), "the page was shown with {shown} instead of {looks}");
        Ok(Found { height, counts: next()?.to_owned(), faults: lines.map(str::to_owned).collect() })
    }
}

impl Looks {
    pub(super) fn scheme(self) -> &'static str {
        if self.dark { "dark" } else { "light" }
    }
}

impl fmt::Display for Looks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} px, {}", self.width, self.scheme())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_script_sends_is_read_and_another_screen_is_an_error() {
        let looks = Looks { width: 420, dark: true };
        let of = |sent: &str| Found::of(&format!("<html><pre hidden=\"\">{sent}</pre></html>"), looks);
        let found = of("900\n420 px, dark\n2 charts\na &lt;b&gt;").unwrap();
        assert_eq!(found, Found { height: 900, counts: "2 charts".into(), faults: vec!["a <b>".into()] });
        let error = of("900\n500 px, dark\n2 charts").unwrap_err().to_string();
        assert!(error.contains("500 px, dark instead of 420 px, dark"), "{error}");
        assert!(of("").unwrap_err().to_string().contains("the script sent no result"));
        assert!(Found::of("", looks).is_err());
    }
}
