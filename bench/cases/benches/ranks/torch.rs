//! Comparison with PyTorch and gloo, in turns: an update, all collectives, a step.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use meshstep_bench_cases::collectives::{Only, operations, share_of_copy};
use meshstep_bench_cases::copies::PASSES;
use meshstep_bench_cases::peers::Torch;
use meshstep_bench_cases::race::Contestant;
use meshstep_bench_cases::ranks::{Race, in_turns};
use meshstep_bench_cases::shapes::even;
use meshstep_bench_cases::step::{StepAndCopy, bytes_a_param};
use meshstep_bench_cases::update::{Case, case};
use meshstep_comm::Communicator;
use meshstep_shard::Stage;
use meshstep_tensor::{DType, Threads};
use serde_json::{Value, json};

use crate::rows::{PARAMS, shown};
use crate::settings::Settings;

/// Time limit of PyTorch for one round: a case that hangs is a row with an error, and the remaining cases still run.
const PATIENCE: Duration = Duration::from_secs(40);

/// A row of the record: the script's case, and the work of this library.
pub(crate) struct Row {
    pub(crate) name: String,
    ranks: usize,
    case: Value,
    work: Work,
}

enum Work {
    Update { len: usize },
    Collective { idx: usize, bytes: usize },
    Step { len: usize },
}

/// Returns all rows, in the order of the numbers of ranks.
pub(crate) fn rows(settings: &Settings) -> Vec<Row> {
    settings.ranks.iter().flat_map(|&ranks| of(ranks, settings)).collect()
}

fn of(ranks: usize, settings: &Settings) -> Vec<Row> {
    let row =
        |name: String, case: Value, work| Row { name: format!("{name}, {ranks} ranks"), ranks, case, work };
    let (len, bytes, of_step) = (settings.len, settings.bytes_beside_torch(), settings.len_of_step());
    let case = json!({ "case": "adamw fused", "length": len, "threads": ranks });
    let mut rows = vec![row("update, adamw fused".to_owned(), case, Work::Update { len })];
    rows.extend(operations(ranks).into_iter().enumerate().map(|(idx, (operation, ..))| {
        let case = json!({ "case": "collective", "operation": operation, "bytes": bytes, "ranks": ranks });
        row(format!("gloo {operation}, {}", shown(bytes)), case, Work::Collective { idx, bytes })
    }));
    for (name, case) in [("all_reduce, clip, adamw fused", "ddp"), ("ZeroRedundancyOptimizer", "zero")] {
        let case = json!({ "case": case, "count": PARAMS, "length": of_step, "ranks": ranks });
        rows.push(row(format!("step, {name}"), case, Work::Step { len: of_step }));
    }
    rows
}

/// Returns true if an interpreter has PyTorch.
pub(crate) fn is_there(python: &Path) -> bool {
    let mut import = Command::new(python);
    import.args(["-c", "import torch"]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    import.status().is_ok_and(|status| status.success())
}

impl Row {
    /// Returns the identification of the row in the record.
    pub(crate) fn head(&self) -> Value {
        json!({ "name": self.name, "ranks": self.ranks })
    }

    /// Measures the row next to this library. Starts `torch` unless it is running, for example after an error.
    pub(crate) fn measure(
        &self,
        torch: &mut Option<Torch>,
        [python, script]: [&Path; 2],
        rounds: usize,
    ) -> Result<Value> {
        let mut started = match torch.take() {
            Some(torch) => torch,
            None => Torch::start(python, script)?,
        };
        started.set_patience(PATIENCE);
        started.case(self.case.clone()).context("preparing PyTorch's case")?;
        let race = self.race(&mut started, rounds)?;
        let version = started.version.clone();
        *torch = Some(started);
        Ok(figures(&race, &version))
    }

    fn race(&self, torch: &mut Torch, rounds: usize) -> Result<Race> {
        let turns = (self.ranks, rounds);
        match self.work {
            Work::Update { len } => {
                let mut case = case("adamw", len)?.on(&Threads::new(self.ranks)?);
                let theirs: Contestant<'_, Case> = Box::new(|_| torch.run());
                case.beside(rounds, 1, theirs)
            }
            Work::Collective { idx, bytes } => {
                let own = |comm: Arc<dyn Communicator>| Only::new(comm, bytes / DType::F32.size(), idx);
                let mut race = in_turns(turns, self.ranks * bytes, own, || torch.run())?;
                race.copy = race.copy.times(share_of_copy(self.ranks, idx));
                Ok(race)
            }
            Work::Step { len } => {
                let (layout, bytes) = (even(PARAMS, len)?, bytes_a_param(self.ranks) * PARAMS * len);
                let own = |comm: Arc<dyn Communicator>| StepAndCopy::new(&comm, Stage::Zero1, &layout, bytes);
                in_turns(turns, bytes / 2, own, || torch.run())
            }
        }
    }
}

fn figures(Race { ours, theirs, copy, passes }: &Race, version: &str) -> Value {
    let ratio = theirs.over(ours).median();
    let [read, write, in_place] = PASSES.map(|pass| passes.speed(pass) / 1e9);
    json!({
        "torch": version,
        "torch_ms": theirs.median().median * 1e3,
        "ms": ours.median().median * 1e3,
        "reference_ms": copy.median().median * 1e3,
        "read_gb_per_s": read,
        "write_gb_per_s": write,
        "in_place_gb_per_s": in_place,
        "torch_over_ours": ratio.median,
        "torch_over_ours_low": ratio.low,
        "torch_over_ours_high": ratio.high,
        "rounds": ratio.rounds,
    })
}
