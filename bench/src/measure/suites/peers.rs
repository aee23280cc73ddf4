//! Other systems beside this one: the same sizes, as many threads, in turns.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use anyhow::{Context as _, Result, anyhow, ensure};
use meshstep_comm::Communicator;
use meshstep_optim::{Alone, Lbfgs, LbfgsState, Loss};
use meshstep_shard::Stage;
use meshstep_tensor::{Buffer, Category, DType, Meter, Slice, SliceMut};
use rayon::prelude::*;
use serde_json::json;

use super::comm::{self, operations};
use super::kernels::{Case, case};
use super::ranks::{Player, together};
use super::speed::{Grads, Steps};
use crate::measure::Effort;
use crate::measure::peers::{Candle, Mpi, Torch};
use crate::measure::race::{Contestant, race, timed};
use crate::measure::record::{Cell, Section, Table, Wanted};
use crate::measure::samples::Samples;
use crate::measure::shapes::even;

const ABOUT: &str = "How many times as long the other system takes: medians of ratios, round by round, in turns. Updates have as many \
                     threads on both sides. Ranks of PyTorch and of OpenMPI are processes of one thread each; ours are threads \
                     of one process, and that is part of what is compared.";

/// Elements of GPT-2 small.
const GPT2: usize = 124_439_808;

const HISTORY: usize = 10;

/// What there is to compare with, and why the rest is not here.
pub(crate) fn run(effort: Effort, folder: &Path, left_out: &mut Vec<String>) -> Result<Section> {
    let mut section = Section::new("peers", ABOUT);
    candle(&mut section, effort)?;
    match Torch::start(&folder.join("venv")) {
        Ok(mut torch) => {
            section.about += &format!(" PyTorch {}.", torch.version);
            updates(&mut section, effort, &mut torch)?;
            lbfgs(&mut section, effort, &mut torch)?;
            steps(&mut section, effort, &mut torch)?;
            gloo(&mut section, effort, &mut torch)?;
        }
        Err(why) => left_out.push(format!("PyTorch: {why:#}")),
    }
    match Mpi::start(folder, RANKS) {
        Ok(mut mpi) => openmpi(&mut section, effort, &mut mpi)?,
        Err(why) => left_out.push(format!("OpenMPI: {why:#}")),
    }
    if effort.quick {
        section.bars.clear();
    }
    Ok(section)
}

const RANKS: usize = 4;
const COLUMNS: [&str; 4] = ["ours", "theirs", "theirs / ours", "wanted"];

fn tell(section: &mut Section, table: &mut Table, what: &str, [ours, theirs]: [&Samples; 2], wanted: f64) {
    let ratio = theirs.over(ours).median();
    let cells =
        [Cell::Time(ours.median()), Cell::Time(theirs.median()), Cell::Ratio(ratio), Cell::Number(wanted)];
    table.row(what, cells);
    section.bar(format!("{what}: theirs / ours"), ratio.median, Wanted::AtLeast(wanted));
}

fn updates(section: &mut Section, effort: Effort, torch: &mut Torch) -> Result<()> {
    let mut table = Table::new("updates", &COLUMNS);
    let threads = rayon::current_num_threads();
    let (len, rounds) = (effort.pick(1 << 18, 1 << 26), effort.pick(3, 11));
    let gpt2 = effort.pick(None, Some("gpt2"));
    for (rule, theirs, len, model, wanted) in [
        ("adamw", "adamw fused", len, None, 1.15),
        ("sgd, momentum", "sgd fused", len, None, 1.05),
        ("adamw", "adamw foreach", len, None, 4.0),
        ("adamw", "adamw foreach", gpt2.map_or(len, |_| GPT2), gpt2, 8.0),
    ] {
        torch.case(json!({ "case": theirs, "length": len, "model": model, "threads": threads }))?;
        let mut own = case(rule, len)?;
        let theirs_in_turn: Contestant<'_, Case> = Box::new(|_| torch.run());
        let samples = race(&mut own, rounds, vec![timed(Case::update), theirs_in_turn])?;
        let on = model.map_or_else(|| format!("one tensor of {len}"), |_| "GPT-2's 148 tensors".to_owned());
        tell(section, &mut table, &format!("torch {theirs}, {on}"), [&samples[0], &samples[1]], wanted);
    }
    section.tables.push(table);
    Ok(())
}

/// candle's AdamW, which has no other form.
fn candle(section: &mut Section, effort: Effort) -> Result<()> {
    let (len, rounds) = (effort.pick(1 << 18, 1 << 24), effort.pick(3, 11));
    let mut theirs = Candle::new(len)?;
    let mut own = case("adamw", len)?;
    let theirs_in_turn: Contestant<'_, Case> = Box::new(|_| theirs.run());
    let samples = race(&mut own, rounds, vec![timed(Case::update), theirs_in_turn])?;
    let mut table = Table::new("candle's updates", &COLUMNS);
    tell(
        section,
        &mut table,
        &format!("candle AdamW, one tensor of {len}"),
        [&samples[0], &samples[1]],
        20.0,
    );
    section.tables.push(table);
    Ok(())
}

/// One iteration with a full history on `length` parameters, on both sides with a loss that costs little.
fn lbfgs(section: &mut Section, effort: Effort, torch: &mut Torch) -> Result<()> {
    let (len, rounds) = (effort.pick(100_000, 10_000_000), effort.pick(3, 11));
    torch.case(json!({ "case": "lbfgs", "length": len, "history": HISTORY, "threads": rayon::current_num_threads() }))?;
    let rule = Lbfgs {
        lr: 0.1,
        max_iter: 1,
        max_eval: Some(2),
        history_len: HISTORY,
        tolerance_grad: 0.0,
        tolerance_change: 0.0,
        ..Lbfgs::default()
    };
    let mut own = Own::new(&rule, len)?;
    (0..=HISTORY).try_for_each(|_| iterate(&rule, &mut own))?;
    let ours: Contestant<'_, Own> = Box::new(|own| {
        let start = Instant::now();
        iterate(&rule, own)?;
        Ok(start.elapsed().as_secs_f64())
    });
    let theirs: Contestant<'_, Own> = Box::new(|_| torch.run());
    let samples = race(&mut own, rounds, vec![ours, theirs])?;
    let mut table = Table::new("L-BFGS, one iteration", &COLUMNS);
    tell(
        section,
        &mut table,
        &format!("torch.optim.LBFGS, history {HISTORY}, {len}"),
        [&samples[0], &samples[1]],
        3.0,
    );
    section.tables.push(table);
    Ok(())
}

/// The point, what is known of the way to it, where it leads, and what its elements weigh.
struct Own {
    x: Buffer,
    state: LbfgsState,
    target: Vec<f32>,
    weight: Vec<f32>,
}

impl Own {
    fn new(rule: &Lbfgs, len: usize) -> Result<Self> {
        let meter = Meter::new();
        Ok(Own {
            x: Buffer::zeroed(len, DType::F32, &meter, Category::Params)?,
            state: rule.state(len, DType::F32, &meter)?,
            target: (0..len).map(|i| (i % 7 + 1) as f32).collect(),
            weight: (0..len).map(|i| 1.0 + i as f32 / len as f32).collect(),
        })
    }
}

/// One iteration. The gradient is the other side's: of vectors of the same length by the same formula.
fn iterate(rule: &Lbfgs, Own { x, state, target, weight }: &mut Own) -> Result<()> {
    let closure = |x: Slice<'_>, mut grad: SliceMut<'_>| -> Result<Loss, meshstep_tensor::Error> {
        let to = target.par_chunks(CHUNK).zip(weight.par_chunks(CHUNK));
        let from = x.typed::<f32>()?.par_chunks(CHUNK).zip(to);
        grad.typed_mut::<f32>()?.par_chunks_mut(CHUNK).zip(from).for_each(|(grad, (x, (target, weight)))| {
            let terms = x.iter().zip(target).zip(weight);
            grad.iter_mut()
                .zip(terms)
                .for_each(|(grad, ((x, target), weight))| *grad = (x - target) * weight);
        });
        Ok(Loss::Whole(1.0))
    };
    let report = rule.step(x.as_mut(), closure, &Alone, state).map_err(|error| anyhow!("L-BFGS: {error}"))?;
    ensure!(report.iterations == 1, "L-BFGS took {} iterations where one was asked for", report.iterations);
    Ok(())
}

const CHUNK: usize = 64 << 10;

/// A rank that plays its own turns, and waits on rank 0 while another system plays the last.
struct Beside<'p, P> {
    own: P,
    turns: usize,
    rank: usize,
    theirs: &'p Mutex<&'p mut (dyn FnMut(usize) -> Result<()> + Send)>,
}

impl<P: Player> Player for Beside<'_, P> {
    fn play(&mut self, turn: usize) -> Result<()> {
        if turn < self.turns {
            return self.own.play(turn);
        }
        if self.rank > 0 {
            return Ok(());
        }
        let mut theirs = self.theirs.lock().unwrap_or_else(PoisonError::into_inner);
        (*theirs)(turn - self.turns)
    }
}

/// Samples of `turns` own turns on 4 ranks, and of one of theirs, by their own clock.
fn in_turns<P: Player>(
    (turns, rounds): (usize, usize),
    own: impl Fn(Arc<dyn Communicator>) -> Result<P> + Sync,
    mut run: impl FnMut() -> Result<f64> + Send,
) -> Result<(Vec<Samples>, Samples)> {
    let mut seconds = Vec::new();
    let mut theirs = |_| -> Result<()> {
        seconds.push(run()?);
        Ok(())
    };
    let shared: Mutex<&mut (dyn FnMut(usize) -> Result<()> + Send)> = Mutex::new(&mut theirs);
    let samples = together(RANKS, (turns + 1, rounds), |comm| {
        let rank = comm.rank();
        Ok(Beside { own: own(comm)?, turns, rank, theirs: &shared })
    })?;
    // The first round does not count on either side.
    Ok((samples, seconds.into_iter().skip(1).collect()))
}

/// A whole step of data-parallel ranks, 16 tensors of 1 Mi.
fn steps(section: &mut Section, effort: Effort, torch: &mut Torch) -> Result<()> {
    let (count, len, rounds) = (16, effort.pick(1 << 14, 1 << 20), effort.pick(3, 11));
    let layout = even(count, len)?;
    let mut table = Table::new(format!("a step of {RANKS} ranks, {} parameters", count * len), &COLUMNS);
    for (name, theirs, wanted) in [
        ("ZeroRedundancyOptimizer(fused AdamW) over gloo", "zero", 8.0),
        ("all_reduce, clip, fused AdamW over gloo", "ddp", 6.0),
    ] {
        torch.case(json!({ "case": theirs, "count": count, "length": len, "ranks": RANKS }))?;
        let own = |comm: Arc<dyn Communicator>| Steps::new(&comm, &[Stage::Zero1], &layout, Grads::There);
        let (samples, theirs) = in_turns((1, rounds), own, || torch.run())?;
        tell(section, &mut table, &format!("{name}; ours stage 1"), [&samples[0], &theirs], wanted);
    }
    section.tables.push(table);
    Ok(())
}

fn gloo(section: &mut Section, effort: Effort, torch: &mut Torch) -> Result<()> {
    let wanted = [8.0, 8.0, 5.0];
    let mut table = Table::new(format!("gloo's collectives, {RANKS} ranks"), &COLUMNS);
    for (i, ((name, ..), wanted)) in operations(RANKS).into_iter().zip(wanted).enumerate() {
        let bytes = largest(effort);
        torch
            .case(json!({ "case": "collective", "operation": name, "bytes": bytes, "ranks": RANKS }))
            .with_context(|| format!("gloo's {name}"))?;
        let (own, theirs) = collective(i, effort, || torch.run())?;
        tell(section, &mut table, &format!("gloo {name}"), [&own, &theirs], wanted);
    }
    section.tables.push(table);
    Ok(())
}

fn openmpi(section: &mut Section, effort: Effort, mpi: &mut Mpi) -> Result<()> {
    let wanted = [4.0, 4.0, 0.95];
    let mut table = Table::new(format!("OpenMPI's collectives, {RANKS} ranks"), &COLUMNS);
    for (i, ((name, ..), wanted)) in operations(RANKS).into_iter().zip(wanted).enumerate() {
        mpi.case(name, largest(effort))?;
        let (own, theirs) = collective(i, effort, || mpi.run())?;
        tell(section, &mut table, &format!("OpenMPI {name}"), [&own, &theirs], wanted);
    }
    section.tables.push(table);
    Ok(())
}

fn largest(effort: Effort) -> usize {
    effort.pick(1 << 20, 64 << 20)
}

/// Operation `i` of ours, in turns with one of theirs.
fn collective(
    i: usize,
    effort: Effort,
    run: impl FnMut() -> Result<f64> + Send,
) -> Result<(Samples, Samples)> {
    let len = largest(effort) / DType::F32.size();
    let own = |comm: Arc<dyn Communicator>| Ok(Only(comm::Rank::new(comm, len)?, i));
    let (mut own, theirs) = in_turns((1, effort.pick(3, 11)), own, run)?;
    Ok((own.swap_remove(0), theirs))
}

/// A rank that has one turn.
struct Only(comm::Rank, usize);

impl Player for Only {
    fn play(&mut self, _turn: usize) -> Result<()> {
        self.0.play(self.1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ours_and_theirs_take_turns_and_their_clock_counts() {
        let mut calls = 0.0;
        let own = |comm: Arc<dyn Communicator>| Ok(Only(comm::Rank::new(comm, 64)?, 0));
        let (ours, theirs) = in_turns((1, 3), own, || {
            calls += 1.0;
            Ok(calls)
        })
        .unwrap();
        assert_eq!((ours[0].median().rounds, theirs), (3, [2.0, 3.0, 4.0].into_iter().collect()));
        let fails = in_turns((1, 3), own, || Err(anyhow!("gone")));
        assert_eq!(fails.unwrap_err().to_string(), "gone");
    }

    #[test]
    fn iterations_are_one_at_a_time_and_converge() {
        let rule = Lbfgs {
            lr: 0.5,
            max_iter: 1,
            max_eval: Some(2),
            tolerance_grad: 0.0,
            tolerance_change: 0.0,
            ..Lbfgs::default()
        };
        let mut own = Own::new(&rule, 100).unwrap();
        (0..20).for_each(|_| iterate(&rule, &mut own).unwrap());
        let x = own.x.typed::<f32>().unwrap();
        assert!(x.iter().enumerate().all(|(i, x)| (x - (i % 7 + 1) as f32).abs() < 0.1), "{x:?}");
    }
}
