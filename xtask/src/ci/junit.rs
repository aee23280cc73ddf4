//! The report that nextest writes of a run, in JUnit's XML: how long each test took.

use anyhow::Context;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Where nextest writes it, as `xtask/nextest.toml` says.
pub(super) fn path(target: &Path) -> PathBuf {
    target.join("nextest/default/junit.xml")
}

/// Each test with the time it took.
pub(super) fn times(xml: &str) -> anyhow::Result<Vec<(String, Duration)>> {
    let document = roxmltree::Document::parse(xml).context("nextest's report is no XML")?;
    let cases = document.descendants().filter(|node| node.has_tag_name("testcase"));
    cases
        .map(|case| {
            let of = |name| case.attribute(name).with_context(|| format!("a test case has no {name}"));
            let seconds: f64 = of("time")?.parse().context("a time is no number")?;
            let took = Duration::try_from_secs_f64(seconds).context("a time is no duration")?;
            Ok((format!("{} {}", of("classname")?, of("name")?), took))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_from_what_nextest_writes() {
        let xml = r#"<?xml version="1.0" encoding="UTF-8"?>
            <testsuites name="nextest-run" tests="2" failures="1">
              <testsuite name="meshstep-comm::suite" tests="2">
                <testcase name="split::a" classname="meshstep-comm::suite" time="1.250"/>
                <testcase name="b" classname="meshstep-comm::suite" time="0.004"><failure>at &lt;x&gt;</failure></testcase>
              </testsuite>
            </testsuites>"#;
        let expected = [("meshstep-comm::suite split::a", 1250), ("meshstep-comm::suite b", 4)];
        let expected = expected.map(|(name, ms)| (name.to_owned(), Duration::from_millis(ms)));
        assert_eq!(times(xml).unwrap(), expected);
        assert!(times("<testsuites><testcase name='a'/></testsuites>").is_err());
        assert!(times("no xml").is_err());
    }
}
