//! Parser for the output of a Rust test program: its list of tests, and each test's result as it is printed.

use std::collections::BTreeSet;

/// Parses the output of `--list --format terse` into test names. Returns `None` if the output is not such a list.
pub(crate) fn listed(text: &str) -> Option<Vec<String>> {
    let mut tests = Vec::new();
    for line in text.lines().filter(|line| !line.trim().is_empty()) {
        match line.rsplit_once(": ")? {
            (name, "test") => tests.push(name.to_owned()),
            (_, "benchmark") => {}
            _ => return None,
        }
    }
    Some(tests)
}

/// Results of one process that runs tests in order, one at a time. The process prints a test's name before the test runs.
#[derive(Debug, Default)]
pub(crate) struct Results {
    /// Tests without a start or result line so far.
    waiting: BTreeSet<String>,
    /// Test that is running.
    pub(crate) current: Option<String>,
    /// True if the current test has printed "skipped: ".
    skips: bool,
    pub(crate) passed: Vec<String>,
    pub(crate) failed: Vec<String>,
    /// Number of tests that are ignored, or printed "skipped: " and ended without a failure. They are not among the passed ones.
    pub(crate) skipped: usize,
    /// Tests with a result line that other output garbled. The summary lists the failed ones among them.
    unclear: Vec<String>,
    /// True once the line that ends a run was read.
    pub(crate) finished: bool,
    /// Last line, while it is incomplete.
    partial: String,
    in_failures: bool,
    /// Number of starts and ends of tests.
    pub(crate) events: usize,
}

impl Results {
    pub(crate) fn of(tests: &[String]) -> Results {
        Results { waiting: tests.iter().cloned().collect(), ..Results::default() }
    }

    /// Reads a piece of the output.
    pub(crate) fn read(&mut self, piece: &[u8]) {
        let mut text = std::mem::take(&mut self.partial);
        text.push_str(&String::from_utf8_lossy(piece));
        for line in text.split_inclusive('\n') {
            match line.strip_suffix('\n') {
                Some(line) => self.line(line.trim_end()),
                None => self.partial = line.to_owned(),
            }
        }
        if let Some((name, _)) = self.begun_in(&self.partial) {
            self.begin(name);
        }
    }

    fn line(&mut self, line: &str) {
        let begun = self.begun_in(line);
        if begun.is_some() || self.current.is_some() {
            let (name, rest) = begun.map_or((None, line.to_owned()), |(name, rest)| (Some(name), rest));
            name.into_iter().for_each(|name| self.begin(name));
            self.result(&rest);
        }
        if line == "failures:" {
            self.in_failures = true;
        } else if line.starts_with("test result: ") {
            self.finish();
        } else if self.in_failures && self.unclear.iter().any(|name| name == line.trim()) {
            self.unclear.retain(|name| name != line.trim());
            self.failed.push(line.trim().to_owned());
        }
    }

    /// If the line is a known test's line, returns the test's name and the text after the name.
    fn begun_in(&self, line: &str) -> Option<(String, String)> {
        let (name, rest) = line.strip_prefix("test ")?.split_once(" ... ").or_else(|| {
            // An incomplete line may lack the final space.
            line.strip_prefix("test ")?.strip_suffix(" ...").map(|name| (name, ""))
        })?;
        let name = name.strip_suffix(" - should panic").unwrap_or(name);
        let known = self.waiting.contains(name) || self.current.as_deref() == Some(name);
        known.then(|| (name.to_owned(), rest.to_owned()))
    }

    fn begin(&mut self, name: String) {
        if self.current.as_ref() == Some(&name) {
            return;
        }
        match self.current.take() {
            // Its result is garbled. Unless it failed, which the list of failures says, it has checked nothing.
            Some(_) if self.skips => self.skipped += 1,
            unclear => self.unclear.extend(unclear),
        }
        self.waiting.remove(&name);
        self.current = Some(name);
        self.skips = false;
        self.events += 1;
    }

    fn result(&mut self, text: &str) {
        self.skips |= text.starts_with("skipped: ");
        let ended = match text {
            "ok" if !self.skips => &mut self.passed,
            "FAILED" => &mut self.failed,
            _ if text == "ok" || text.starts_with("ignored") => {
                self.skipped += 1;
                &mut Vec::new()
            }
            _ => return,
        };
        ended.extend(self.current.take());
        self.events += 1;
    }

    fn finish(&mut self) {
        self.finished = true;
        self.passed.append(&mut self.unclear);
    }

    /// Returns the tests that must run in another process after this process has ended: all tests without a result except
    /// the one that was running.
    pub(crate) fn rest(&self) -> Vec<String> {
        self.waiting.iter().chain(&self.unclear).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    fn read(tests: &[&str], text: &str) -> Results {
        let mut results = Results::of(&names(tests));
        results.read(text.as_bytes());
        results
    }

    #[test]
    fn a_list_is_names_and_nothing_else() {
        assert_eq!(listed("a::b: test\nc: benchmark\n\nd: test\n").unwrap(), names(&["a::b", "d"]));
        assert_eq!(listed("").unwrap(), names(&[]));
        assert_eq!((listed("\u{1}garbage"), listed("a: test\nwhat: now\n")), (None, None));
    }

    #[test]
    fn results_are_told_apart() {
        let said = "\nrunning 4 tests\ntest a ... ok\ntest b ... FAILED\ntest c ... ignored, why\n\
                    test d - should panic ... ok\n\nfailures:\n\nfailures:\n    b\n\n\
                    test result: FAILED. 2 passed; 1 failed; 1 ignored; 0 measured\n";
        let results = read(&["a", "b", "c", "d"], said);
        assert_eq!((&results.passed, &results.failed), (&names(&["a", "d"]), &names(&["b"])));
        assert_eq!((results.skipped, results.finished, results.rest()), (1, true, names(&[])));
        assert_eq!(results.current, None);
    }

    #[test]
    fn pieces_may_end_anywhere() {
        let said = "test a ... ok\ntest b ... FAILED\ntest c ... ";
        let mut results = Results::of(&names(&["a", "b", "c", "d"]));
        for byte in said.bytes() {
            results.read(&[byte]);
        }
        assert_eq!((&results.passed, &results.failed), (&names(&["a"]), &names(&["b"])));
        assert_eq!((results.current.as_deref(), results.rest()), (Some("c"), names(&["d"])));
    }

    #[test]
    fn output_of_a_test_hides_no_result() {
        let said = "test a ... skipped: no NVLink\nok\ntest b ... x = 1\nok?ok\ntest c ... wordok\ntest d ... ok\n\
                    failures:\n    c\n";
        let mut results = read(&["a", "b", "c", "d"], said);
        assert_eq!((&results.passed, results.skipped), (&names(&["d"]), 1), "a checked nothing");
        assert_eq!(results.rest(), names(&["b"]), "without a summary, b must run again");
        results.read(b"test result: FAILED. 3 passed; 1 failed\n");
        assert_eq!((&results.passed, &results.failed), (&names(&["d", "b"]), &names(&["c"])));
    }

    #[test]
    fn tests_that_were_not_asked_for_count_for_nothing() {
        let results = read(&["a"], "test other ... ok\ntest a ... test other ... ok\nok\n");
        assert_eq!((results.passed, results.current), (names(&["a"]), None));
    }
}
