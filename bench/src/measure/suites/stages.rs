//! Bytes that each stage holds and sends, by the papers' formulas, by the plan, and counted; and the balance of state
//! between ranks.

use anyhow::{Result, anyhow, ensure};
use meshstep_bench_cases::shapes::{STAGES, even, hand_over, layout};
use meshstep_comm::loopback;
use meshstep_optim::AdamW;
use meshstep_parallel3d::models::{Gpt2, Llama3};
use meshstep_shard::{Optimizer, Options, Outcome, Owners, Plan, Stage, StepArgs};
use meshstep_tensor::{DType, Layout};

use crate::measure::effort::Effort;
use crate::measure::record::{Cell, Plot, Scale, Section, Shape, Table, Wanted};
use crate::measure::suites::comm::point;

const ABOUT: &str = "AdamW in f32: 4 bytes of parameters, 4 of gradients and 8 of state for each of P parameters, on n ranks. The \
                     formulas are those of Rajbhandari et al., ZeRO (2020): state / n at stage 1, gradients too at stage 2, \
                     parameters too at stage 3. The saving of 37.5% on 2 ranks, which some texts attribute to stage 1, is that of stage 2.";

/// Maximum relative difference of a plan from its formula, caused by padding.
const NEAR: f64 = 1e-3;

/// Returns the bytes of parameters, gradients and state that a rank of `n` holds for each parameter.
fn held(stage: Stage, n: f64) -> f64 {
    let divided = |divides: bool| if divides { n } else { 1.0 };
    let params = 4.0 / divided(stage == Stage::Zero3);
    let grads = 4.0 / divided(matches!(stage, Stage::Zero2 | Stage::Zero3));
    let state = 8.0 / divided(stage != Stage::Replicated);
    params + grads + state
}

/// Returns the bytes that a rank of `n` sends in a step for each parameter, by ring algorithms: one reduction and one
/// gathering; for whole parameters an all-reduce and one broadcast from the owner; at stage 3 one gathering for each of
/// both passes.
fn sent(stage: Stage, n: f64) -> f64 {
    let part = (n - 1.0) / n;
    match stage {
        Stage::Replicated | Stage::Zero1 | Stage::Zero2 => 2.0 * 4.0 * part,
        Stage::WholeParams(_) | Stage::Zero3 => 3.0 * 4.0 * part,
    }
}

pub(crate) fn run(effort: Effort) -> Result<Section> {
    let mut section = Section::new("stages: bytes held and sent", ABOUT);
    classic(&mut section)?;
    traffic(&mut section, effort)?;
    balance(&mut section, effort)?;
    Ok(section)
}

/// The standard example of texts on sharded optimizers: 1.7 billion parameters on 2 ranks.
fn classic(section: &mut Section) -> Result<()> {
    let (count, len, ranks) = (1700, 1_000_000, 2);
    let layout = even(count, len)?;
    let mut table = Table::new(
        "1.7 billion parameters on 2 ranks",
        &["formula", "planned", "saved", "gradients on their way", "formula on 64"],
    );
    let params = (count * len) as f64;
    let mut off = 0f64;
    for (name, stage) in STAGES {
        let planned = Plan::new(&layout, ranks, &Options { stage, ..Options::default() })?;
        // The fullest rank counts, because whole parameters do not divide evenly.
        let memory = (0..ranks).map(|rank| planned.memory(rank, &AdamW::default()));
        let memory = memory.max_by_key(meshstep_shard::Memory::total).ok_or_else(|| anyhow!("no ranks"))?;
        let own = memory.params + memory.grads + memory.state;
        let formula = params * held(stage, ranks as f64);
        off = off.max((own as f64 / formula - 1.0).abs());
        table.row(
            name,
            [
                Cell::Bytes(formula as u64),
                Cell::Bytes(own),
                Cell::Share(1.0 - held(stage, ranks as f64) / held(Stage::Replicated, 1.0)),
                Cell::Bytes(memory.buckets + memory.gathered),
                Cell::Bytes((params * held(stage, 64.0)) as u64),
            ],
        );
    }
    table.note("gradients on their way: pooled buckets at stages 2 and 3, and gathered units at stage 3; the formulas do not count them");
    section.tables.push(table);
    section.bar("largest relative difference of a plan from its formula", off, Wanted::AtMost(NEAR));
    Ok(())
}

/// Compares the bytes sent by formula, by the plan, and counted in a step.
fn traffic(section: &mut Section, effort: Effort) -> Result<()> {
    let (ranks, count, len) = (4, 8, effort.pick(1 << 12, 1 << 17));
    let layout = even(count, len)?;
    let mut table = Table::new(
        format!("sent by a rank of {ranks} in a step, {} parameters", count * len),
        &["formula", "planned", "counted", "of it the exchange"],
    );
    let (mut wrong, mut off) = (0, 0f64);
    for (name, stage) in STAGES {
        let options = Options { stage, ..Options::default() };
        let plan = Plan::new(&layout, ranks, &options)?;
        let planned: Vec<_> = (0..ranks).map(|rank| plan.wire(rank, &AdamW::default())).collect();
        let counted = counted(&layout, ranks, stage)?;
        wrong +=
            planned.iter().zip(&counted).filter(|(planned, counted)| planned.total() != **counted).count();
        let mean = |bytes: &mut dyn Iterator<Item = u64>| bytes.sum::<u64>() / ranks as u64;
        let exchange = mean(&mut planned.iter().map(|wire| wire.exchange));
        let total = mean(&mut planned.iter().map(meshstep_shard::Wire::total));
        let formula = (count * len) as f64 * sent(stage, ranks as f64);
        off = off.max(((total - exchange) as f64 / formula - 1.0).abs());
        table.row(
            name,
            [
                Cell::Bytes(formula as u64),
                Cell::Bytes(total),
                Cell::Bytes(mean(&mut counted.iter().copied())),
                Cell::Bytes(exchange),
            ],
        );
    }
    table
        .note("means over all ranks; stage 3's units are gathered for the forward and for the backward pass");
    section.tables.push(table);
    section.verdict.push(match wrong {
        0 => format!(
            "On {ranks} ranks every stage sends exactly the planned bytes. By the formulas stages 1 and 2 send as many as the \
             unsharded step, and stage 3 half as many again."
        ),
        wrong => format!("{wrong} ranks and stages send other bytes than planned."),
    });
    section.bar("ranks and stages with other bytes sent than planned", wrong as f64, Wanted::AtMost(0.0));
    section.bar("largest relative difference of sent bytes from their formula", off, Wanted::AtMost(NEAR));
    Ok(())
}

/// Returns the bytes that each rank sends in its second step.
fn counted(layout: &Layout, ranks: usize, stage: Stage) -> Result<Vec<u64>> {
    let of_rank = |comm| -> Result<u64> {
        let options = Options { stage, ..Options::default() };
        let mut opt = Optimizer::new(comm, layout.clone(), AdamW::default(), |_, _| Ok(()), options)?;
        let names: Vec<(String, String)> = opt
            .params()
            .map(|param| (param.name().to_owned(), param.unit().unwrap_or_default().to_owned()))
            .collect();
        let mut sent = 0;
        for _ in 0..2 {
            for (_, unit) in &names {
                drop(opt.gather(unit)?);
            }
            let batch = opt.micro_batch(1)?;
            for (name, unit) in names.iter().rev() {
                drop(batch.gather(unit)?);
                hand_over(&batch, name, |values| values.fill(0.5))?;
            }
            batch.finish()?;
            let outcome = opt.step(StepArgs::default())?.outcome()?;
            let Outcome::Applied { traffic, .. } = outcome else {
                return Err(anyhow!("a step was skipped: {outcome:?}"));
            };
            sent = traffic.sent;
        }
        Ok(sent)
    };
    loopback::spawn(ranks, of_rank)?.into_iter().collect()
}

/// Compares the fullest rank's state with an even part: whole parameters against flat chunks.
fn balance(section: &mut Section, effort: Effort) -> Result<()> {
    let ways = [
        ("round robin", Stage::WholeParams(Owners::RoundRobin)),
        ("largest first", Stage::WholeParams(Owners::SortedGreedy)),
        ("flat", Stage::Zero1),
    ];
    let models = [
        ("GPT-2 small", layout(&Gpt2::SMALL.model(DType::F32).build()?)?),
        ("GPT-2 XL", layout(&Gpt2::XL.model(DType::F32).build()?)?),
        ("Llama 3 8B", layout(&Llama3::B8.model(DType::F32, 1).build()?)?),
    ];
    let worlds: &[usize] = effort.pick(&[2, 8, 64], &[2, 8, 64, 256, 1024]);
    let columns: Vec<String> = worlds.iter().map(|n| format!("{n} ranks")).collect();
    let columns: Vec<&str> = columns.iter().map(String::as_str).collect();
    let mut table = Table::new("most state of a rank / an even part", &columns);
    let (mut curves, mut worst) = (Vec::new(), 0f64);
    for (model, layout) in &models {
        for (way, stage) in ways {
            let mut cells = Vec::new();
            for (place, &ranks) in worlds.iter().enumerate() {
                let most = fullest(layout, ranks, stage)?;
                if stage == Stage::Zero1 {
                    worst = worst.max(most);
                }
                // Flat chunks share one curve, because the models do not differ visibly.
                if stage != Stage::Zero1 {
                    point(&mut curves, &format!("{model}, {way}"), (place as f64, most));
                } else if *model == "GPT-2 small" {
                    point(&mut curves, way, (place as f64, most));
                }
                cells.push(Cell::Number(most));
            }
            table.row(format!("{model}, {way}"), cells);
        }
    }
    section.tables.push(table);
    let whole =
        curves.iter().flat_map(|(_, points): &(String, Vec<(f64, f64)>)| points).map(|(_, most)| *most);
    section.verdict.push(format!(
        "The fullest rank holds at most {worst:.2} times an even part with flat chunks, as this library divides, and up to {:.1} times \
         if whole parameters are dealt out (planned, up to {} ranks).",
        whole.fold(0.0, f64::max),
        worlds.last().unwrap_or(&0)
    ));
    let x = Scale::named("ranks", worlds.iter().map(usize::to_string));
    let y = Scale::amount("fullest rank / even part");
    let caption = "Less is better, and 1 is an even division. Computed from plans, without a run.";
    section.plots.push(Plot::new("Balance of the optimizer state", caption, Shape::Curves { x, y, curves }));
    // A limit that whole parameters cannot meet.
    section.bar("flat chunks: most / even, at worst", worst, Wanted::AtMost(1.05));
    Ok(())
}

/// Returns the elements that the fullest rank updates, relative to an even part.
fn fullest(layout: &Layout, ranks: usize, stage: Stage) -> Result<f64> {
    let plan = Plan::new(layout, ranks, &Options { stage, ..Options::default() })?;
    let all: usize = layout.params().iter().map(|param| param.len()).sum();
    let most = (0..ranks)
        .map(|rank| {
            let part = &plan.parts()[0];
            let owned = (0..part.buckets().len()).flat_map(|b| part.owned(b, rank));
            owned.map(|range| range.len()).sum::<usize>()
        })
        .max();
    let most = most.ok_or_else(|| anyhow!("there are no ranks"))?;
    ensure!(all > 0, "a model without parameters");
    Ok(most as f64 * ranks as f64 / all as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_classic_example_has_its_classic_figures() {
        let gigabytes = |stage| (1.7e9 * held(stage, 2.0) / 1e8).round() / 10.0;
        assert_eq!(STAGES.map(|(_, stage)| gigabytes(stage)), [27.2, 20.4, 20.4, 17.0, 13.6]);
        let mut section = Section::new("", "");
        classic(&mut section).unwrap();
        assert!(section.bars[0].holds(), "{:?}", section.bars);
    }

    #[test]
    fn all_of_it_runs_and_holds() {
        let section = run(Effort { quick: true }).unwrap();
        assert!(section.bars.iter().all(crate::measure::record::Bar::holds), "{:?}", section.bars);
        assert_eq!(section.tables.len(), 3);
    }
}
