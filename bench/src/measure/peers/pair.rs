//! PyTorch twice, in turns: with the allocator as it is, and with freed memory kept. PyTorch's own choice of allocator settings is
//! none, so the faster of both is the one that ratios are computed with.

use std::path::Path;

use anyhow::Result;
use meshstep_bench_cases::peers::{Torch, TorchTurn};
use meshstep_bench_cases::samples::Samples;
use serde_json::Value;

use super::malloc;

/// Two programs that prepare the same cases.
#[derive(Debug)]
pub(crate) struct TorchPair {
    usual: Torch,
    kept: Torch,
    /// Settings of the second one, as text.
    pub(crate) settings: String,
    /// Turns since the case was prepared, of the usual program and of the other.
    turns: Vec<[TorchTurn; 2]>,
}

impl TorchPair {
    pub(crate) fn start(python: &Path, script: &Path) -> Result<Self> {
        let variables = malloc::kept(&malloc::tunables());
        let text = variables.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>();
        Ok(TorchPair {
            usual: Torch::start(python, script)?,
            kept: Torch::start_in(python, script, &variables)?,
            settings: text.join(" "),
            turns: Vec::new(),
        })
    }

    pub(crate) fn version(&self) -> &str {
        &self.usual.version
    }

    /// Prepares a case of the script in both programs.
    pub(crate) fn case(&mut self, case: Value) -> Result<()> {
        self.turns.clear();
        self.usual.case(case.clone())?;
        self.kept.case(case).map(drop)
    }

    /// Runs the case once in each program; every other call runs them in reverse order. Returns the seconds of the usual one.
    pub(crate) fn run(&mut self) -> Result<f64> {
        let turns = if self.turns.len().is_multiple_of(2) {
            let usual = self.usual.turn()?;
            [usual, self.kept.turn()?]
        } else {
            let kept = self.kept.turn()?;
            [self.usual.turn()?, kept]
        };
        self.turns.push(turns);
        Ok(turns[0].seconds)
    }

    /// Returns the times of all turns of this case but the first, which races do not count.
    pub(crate) fn times(&self) -> TorchTimes {
        TorchTimes::of(self.turns.get(1..).unwrap_or_default())
    }
}

/// Times of both programs in the same rounds.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TorchTimes {
    pub(crate) usual: Samples,
    pub(crate) kept: Samples,
    /// The faster program's until the end of its closing barrier; `None` in a case of one process.
    pub(crate) with_barrier: Option<Samples>,
}

impl TorchTimes {
    fn of(turns: &[[TorchTurn; 2]]) -> Self {
        let seconds = |idx: usize| turns.iter().map(|both| both[idx].seconds).collect::<Samples>();
        let mut times = TorchTimes { usual: seconds(0), kept: seconds(1), with_barrier: None };
        let faster = usize::from(times.is_kept());
        times.with_barrier = turns.iter().map(|both| both[faster].with_barrier).collect();
        times
    }

    /// Returns true if the program that keeps memory has the smaller median.
    fn is_kept(&self) -> bool {
        self.kept.median().median < self.usual.median().median
    }

    /// Returns the samples of the faster program, and the name of its allocation.
    pub(crate) fn better(&self) -> (&'static str, &Samples) {
        if self.is_kept() { ("kept", &self.kept) } else { ("usual", &self.usual) }
    }

    /// Divides all times by a number of operations.
    pub(crate) fn over(self, times: usize) -> Self {
        let each = |samples: Samples| samples.times(1.0 / times as f64);
        TorchTimes {
            usual: each(self.usual),
            kept: each(self.kept),
            with_barrier: self.with_barrier.map(each),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turns(usual: &[f64], kept: &[f64], barrier: Option<f64>) -> Vec<[TorchTurn; 2]> {
        let turn = |seconds: f64| TorchTurn { seconds, with_barrier: barrier.map(|extra| seconds + extra) };
        usual.iter().zip(kept).map(|(usual, kept)| [turn(*usual), turn(*kept)]).collect()
    }

    #[test]
    fn the_faster_allocation_is_the_peer_and_its_barrier_is_reported() {
        let times = TorchTimes::of(&turns(&[4.0, 6.0, 5.0], &[3.0, 4.0, 9.0], Some(0.5)));
        assert_eq!(times.better(), ("kept", &[3.0, 4.0, 9.0].into_iter().collect()));
        assert_eq!(times.with_barrier, Some([3.5, 4.5, 9.5].into_iter().collect()));
        let times = TorchTimes::of(&turns(&[4.0, 6.0], &[5.0, 7.0], Some(0.5)));
        assert_eq!(times.better(), ("usual", &[4.0, 6.0].into_iter().collect()));
        assert_eq!(times.over(2).with_barrier, Some([2.25, 3.25].into_iter().collect()));
    }

    #[test]
    fn a_case_of_one_process_has_no_barrier() {
        assert_eq!(TorchTimes::of(&turns(&[4.0], &[5.0], None)).with_barrier, None);
    }
}
