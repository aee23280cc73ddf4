//! What trainings came to, for people: tables, loss against bytes, and who was there when.

use super::schedule::Loss;
use super::trained::{Life, Trained};
use crate::measure::record::{Cell, Plot, Scale, Section, Table, Wanted};

/// How many of `n` points a curve shows.
const POINTS: usize = 60;

/// All trainings beside each other: of the first seed the figures, of all seeds the bars.
pub(super) fn methods(all: &[Trained], entropy: f64) -> Section {
    let runs: Vec<&Trained> = all.iter().filter(|run| run.seed == all[0].seed).collect();
    let about = "Workers that step alone, each on its own part of the text, and exchange what their method says. Bytes \
                 are those of all workers together, counted by their communicators as ring algorithms send them; planned \
                 ones were known before. Losses are in nats a byte; held-out ones are the mean of the workers' own \
                 models, each on its share. Of every step's: the share of the bytes that the workers which took each step \
                 would send to reduce its gradients. Curves and rows are those of the first seed.";
    let mut section = Section::new("loss against bytes", about);
    let columns = ["train loss", "held-out loss", "bytes sent", "planned", "besides", "of every step's"];
    let mut table = Table::new("method", &columns);
    runs.iter().for_each(|run| table.row(run.method.to_string(), cells(run)));
    runs.iter().for_each(|run| table.note(format!("{}: {}", run.method, run.about)));
    table.note(format!(
        "byte entropy {entropy:.3}, ln 256 {:.3}; every step's bytes: gradients reduced in {}",
        libm::log(256.0),
        there(&runs)
    ));
    table.note("besides: state for workers that come, and exchanges that did not come about");
    section.tables.push(table);
    let (x, y) = (Scale::log("bytes that all workers have sent"), Scale::near("held-out loss, nats a byte"));
    let curves = runs.iter().map(|run| (run.method.to_string(), against_bytes(run))).collect();
    section.plots.push(Plot::Curves { title: "Held-out loss against bytes".into(), x, y, curves });
    let (x, y) = (Scale::log("bytes that all workers have sent"), Scale::near("training loss, nats a byte"));
    let curves = runs.iter().map(|run| (run.method.to_string(), training(run))).collect();
    section.plots.push(Plot::Curves { title: "Training loss against bytes".into(), x, y, curves });
    for run in runs {
        let seeds = || all.iter().filter(|other| other.method == run.method);
        let sum = |of: fn(&Trained) -> usize| seeds().map(of).sum::<usize>() as f64;
        // What is not compared has no bar.
        if seeds().any(|run| run.planned.is_some()) {
            let what = format!("{}: bytes that are not as planned, times", run.method);
            section.bar(what, sum(|run| run.unplanned), Wanted::AtMost(0.0));
        }
        if seeds().any(|run| run.compared || run.outer) {
            let whose = if run.compared { "exchanged" } else { "outer" };
            let what = format!("{}: workers whose {whose} parameters differ at the end", run.method);
            section.bar(what, sum(|run| run.differing), Wanted::AtMost(0.0));
        }
    }
    section
}

/// How many steps, and how many workers took each.
fn there(runs: &[&Trained]) -> String {
    let steps = runs.iter().map(|run| run.steps).max().unwrap_or(0);
    let present = || runs.iter().flat_map(|run| &run.present);
    let (least, most) = (present().min().unwrap_or(&0), present().max().unwrap_or(&0));
    match least == most {
        true => format!("{steps} steps by {most} workers"),
        false => format!("{steps} steps by the {least} to {most} workers that took each"),
    }
}

/// What each worker did.
pub(super) fn workers(run: &Trained, unlike: bool) -> Section {
    let about = match unlike {
        false => "Worker by worker: what it read, and how long it was there.",
        true => {
            "Worker by worker: what it read, and how long it was there. The text to train on is in the order of its blocks' \
                 shares of letters, so that every worker reads text of another kind; held-out text is of all kinds."
        }
    };
    let mut section = Section::new(&format!("workers, {}, seed {}", run.method, run.seed), about);
    let columns = ["bytes of the text", "letters in it", "steps", "end", "bytes sent", "planned"];
    let mut table = Table::new("worker", &columns);
    for (worker, life) in run.workers.iter().enumerate() {
        let Life { part, letters, steps, lost, sent, planned } = life;
        let row = [
            Cell::Text(format!("{} to {}", part.start, part.end)),
            Cell::Share(*letters),
            Cell::Text(format!("{} to {}", steps.start, steps.end)),
            Cell::Text(end(*lost).to_owned()),
            Cell::Count(*sent),
            planned.map_or(Cell::None, Cell::Count),
        ];
        table.row(worker.to_string(), row);
    }
    section.tables.push(table);
    section
}

/// Who was there when, and what became of exchanges.
pub(super) fn members(run: &Trained, seed: Option<u64>) -> Section {
    let happens = seed.map_or("Who comes".to_owned(), |seed| format!("What seed {seed} drew"));
    let about = format!(
        "{happens}, and who was there: an epoch is one list of members. Exchanges of {} steps did not come about: {:?}.",
        run.failed.len(),
        run.failed
    );
    let mut section = Section::new("members", &about);
    let mut table = Table::new("before step", &["worker", "what"]);
    for event in &run.schedule.events {
        let what = event.loss.map_or("comes", |loss| end(Some(loss)));
        table
            .row(event.step.to_string(), [Cell::Text(event.worker.to_string()), Cell::Text(what.to_owned())]);
    }
    section.tables.push(table);
    let mut table = Table::new("epoch", &["from step", "members", "new", "gone"]);
    for epoch in &run.epochs {
        let gone: Vec<String> = epoch.gone.iter().map(|(id, why)| format!("{id}: {why}")).collect();
        let row = [
            Cell::Text(epoch.step.to_string()),
            Cell::Text(format!("{:?}", epoch.members)),
            Cell::Text(format!("{:?}", epoch.new)),
            Cell::Text(gone.join("; ")),
        ];
        table.row(epoch.number.to_string(), row);
    }
    section.tables.push(table);
    let (x, y) = (Scale::linear("step"), Scale::linear("worker, from 1"));
    let line = |(i, life): (usize, &Life)| {
        let ends = [life.steps.start as f64, life.steps.end as f64].map(|step| (step, i as f64 + 1.0));
        (format!("worker {i}, {}", end(life.lost)), ends.to_vec())
    };
    let curves = run.workers.iter().enumerate().map(line).collect();
    section.plots.push(Plot::Curves { title: "Who was there".into(), x, y, curves });
    section
}

fn cells(run: &Trained) -> [Cell; 6] {
    let last = run.losses.len().div_ceil(20).max(1);
    let train = run.losses.iter().rev().take(last).sum::<f64>() / last as f64;
    [
        Cell::Text(format!("{train:.4}")),
        Cell::Text(format!("{:.4}", run.held_out())),
        Cell::Count(run.sent()),
        run.planned.map_or(Cell::Text("not compared".into()), Cell::Count),
        Cell::Count(run.besides),
        Cell::Text(format!("1/{:.2}", run.every_step as f64 / run.sent() as f64)),
    ]
}

fn end(lost: Option<Loss>) -> &'static str {
    match lost {
        None => "trains to the end",
        Some(Loss::Leaves) => "leaves",
        Some(Loss::Dies) => "is lost between exchanges",
        Some(Loss::DiesWithin) => "is lost in an exchange",
    }
}

/// Each measured held-out loss, by what had been sent then.
fn against_bytes(run: &Trained) -> Vec<(f64, f64)> {
    let sent = |steps: u64| run.sent.get(steps as usize - 1).copied().unwrap_or(0) as f64;
    run.held_out.iter().map(|&(steps, loss)| (sent(steps), loss)).filter(|(sent, _)| *sent > 0.0).collect()
}

/// The mean training losses of stretches, by what had been sent at their ends.
fn training(run: &Trained) -> Vec<(f64, f64)> {
    let stretch = run.losses.len().div_ceil(POINTS).max(1);
    let stretches = run.losses.chunks(stretch).zip(run.sent.chunks(stretch));
    let point = |(losses, sent): (&[f64], &[u64])| {
        (sent.last().copied().unwrap_or(0) as f64, losses.iter().sum::<f64>() / losses.len() as f64)
    };
    stretches.map(point).filter(|(sent, _)| *sent > 0.0).collect()
}
