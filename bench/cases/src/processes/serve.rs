//! A rank's side: reads commands, prepares cases and runs them.

use std::io::{BufRead, Write};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

/// A prepared case.
pub trait Work {
    /// Runs the case once with the other ranks, and returns the seconds between two barriers.
    fn run(&mut self) -> Result<f64>;
}

/// Executes the commands of `input` until its end; `prepare` makes the work of a case. Failures of cases are answered.
pub fn serve(
    input: impl BufRead,
    mut output: impl Write,
    mut prepare: impl FnMut(&Value) -> Result<Box<dyn Work>>,
) -> Result<()> {
    let mut work: Option<Box<dyn Work>> = None;
    for line in input.lines() {
        let answer = match execute(&line?, &mut work, &mut prepare) {
            Ok(answer) => answer,
            Err(error) => json!({ "error": format!("{error:#}") }),
        };
        writeln!(output, "{answer}")?;
        output.flush()?;
    }
    Ok(())
}

fn execute(
    line: &str,
    work: &mut Option<Box<dyn Work>>,
    prepare: &mut impl FnMut(&Value) -> Result<Box<dyn Work>>,
) -> Result<Value> {
    let command: Value = serde_json::from_str(line).with_context(|| format!("{line} is not JSON"))?;
    if let Some(case) = command.get("case") {
        // The former case gives its memory back first.
        *work = None;
        *work = Some(prepare(case)?);
        return Ok(json!({ "ready": true }));
    }
    let work = work.as_mut().context("no case is prepared")?;
    Ok(json!({ "seconds": work.run()? }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::anyhow;

    struct Counts(f64);

    impl Work for Counts {
        fn run(&mut self) -> Result<f64> {
            self.0 += 1.0;
            if self.0 > 2.0 { Err(anyhow!("three")) } else { Ok(self.0) }
        }
    }

    #[test]
    fn every_command_has_an_answer() {
        let input =
            "{\"run\":true}\n{\"case\":7}\n{\"run\":true}\n{\"run\":true}\n{\"run\":true}\n{\"case\":8}\nx\n";
        let mut output = Vec::new();
        let prepare = |case: &Value| -> Result<Box<dyn Work>> {
            if *case == 7 { Ok(Box::new(Counts(0.0))) } else { Err(anyhow!("no case {case}")) }
        };
        serve(input.as_bytes(), &mut output, prepare).unwrap();
        let answers = String::from_utf8(output).unwrap();
        let answers: Vec<&str> = answers.lines().collect();
        let expected = [
            r#"{"error":"no case is prepared"}"#,
            r#"{"ready":true}"#,
            r#"{"seconds":1.0}"#,
            r#"{"seconds":2.0}"#,
            r#"{"error":"three"}"#,
            r#"{"error":"no case 8"}"#,
        ];
        assert_eq!(answers[..6], expected);
        assert!(answers[6].contains("x is not JSON"));
    }
}
