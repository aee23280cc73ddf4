//! Reads nextest's report of a run in JUnit XML: the time of each test.

use anyhow::Context;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Returns the path of the report, as configured in `xtask/nextest.toml`.
pub(super) fn path(target: &Path) -> PathBuf {
    target.join("nextest/default/junit.xml")
}

/// Returns each test with its time.
pub(super) fn times(xml: &str) -> anyhow::Result<Vec<(String, Duration)>> {
    let document = roxmltree::Document::parse(xml).context("nextest's report is not valid XML")?;
    let cases = document.descendants().filter(|node| node.has_tag_name("testcase"));
    cases
        .map(|case| {
            let of =
                |name| case.attribute(name).with_context(|| format!("a test case has no attribute {name}"));
            let seconds: f64 = of("time")?.parse().context("the time of a test case is not a number")?;
            let took =
                Duration::try_from_secs_f64(seconds).context("the time of a test case is not a duration")?;
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
