//! Report of trainings: tables, loss against bytes sent, and membership over time.

use super::schedule::Loss;
use super::trained::{Life, Trained};
use crate::measure::record::{Cell, Plot, Scale, Section, Shape, Table, Wanted};
use crate::measure::show::size;

/// Maximum number of points of a curve.
const POINTS: usize = 24;

/// Returns the comparison of all trainings: the figures are of the first seed, the bars of all seeds.
pub(super) fn methods(all: &[Trained], entropy: f64) -> Section {
    let runs: Vec<&Trained> = all.iter().filter(|run| run.seed == all[0].seed).collect();
    let about = "Workers step alone, each on its own part of the text, and exchange what their method says. Bytes are the sum over \
                 all workers, as their communicators count them for ring algorithms; planned bytes were computed before the run. Losses \
                 are in nats per byte; held-out losses are the mean over the workers' own models, each on its share. The column `of \
                 every step's` is the share of the bytes that the workers of each step would send to reduce its gradients. Curves and \
                 rows are of the first seed.";
    let mut section = Section::new("loss against bytes", about);
    let columns = ["train loss", "held-out loss", "bytes sent", "planned", "extra", "of every step's"];
    let mut table = Table::new("method", &columns);
    runs.iter().for_each(|run| table.row(run.method.to_string(), cells(run)));
    runs.iter().for_each(|run| table.note(format!("{}: {}", run.method, run.about)));
    table.note(format!(
        "byte entropy {entropy:.3}, ln 256 {:.3}; every step's bytes: gradients reduced in {}",
        libm::log(256.0),
        there(&runs)
    ));
    table.note("extra: state for joining workers, and failed exchanges");
    section.tables.push(table);
    section.verdict.extend(summary(&runs));
    section.verdict.extend(runs.iter().filter_map(|run| sentence(run, &runs)));
    let curves = |of: fn(&Trained) -> Vec<(f64, f64)>| {
        runs.iter().map(|run| (run.method.to_string(), of(run))).collect()
    };
    let sent = || Scale::amount("sent by all workers so far, MB");
    let caption = "Lower and further left is better. Losses are of one seed, counted bytes are exact.";
    let (x, y) = (sent(), Scale::near("held-out loss, nats per byte"));
    let shape = Shape::Curves { x, y, curves: curves(against_bytes) };
    section.plots.push(Plot::new("Held-out loss against bytes", caption, shape));
    let (x, y) = (Scale::amount("step"), Scale::near("training loss, nats per byte"));
    let shape = Shape::Curves { x, y, curves: curves(training) };
    let caption =
        "Lower is better. Means of intervals of steps, of one seed, each worker on its own part of the text.";
    section.plots.push(Plot::new("Training loss by step", caption, shape));
    for run in runs {
        let seeds = || all.iter().filter(|other| other.method == run.method);
        let sum = |of: fn(&Trained) -> usize| seeds().map(of).sum::<usize>() as f64;
        // Without a planned number there is no bar.
        if seeds().any(|run| run.planned.is_some()) {
            let what = format!("{}: number of exchanges with unplanned bytes", run.method);
            section.bar(what, sum(|run| run.unplanned), Wanted::AtMost(0.0));
        }
        if seeds().any(|run| run.compared || run.outer) {
            let whose = if run.compared { "exchanged" } else { "outer" };
            let what = format!("{}: workers with different {whose} parameters at the end", run.method);
            section.bar(what, sum(|run| run.differing), Wanted::AtMost(0.0));
        }
    }
    section
}

/// Returns a sentence on all methods with baselines, if there are several.
fn summary(runs: &[&Trained]) -> Option<String> {
    let excess = |run: &&&Trained| {
        let baseline = runs.iter().find(|other| Some(other.method) == run.method.baseline())?;
        Some((run.held_out() / baseline.held_out() - 1.0, run.sent() as f64 / run.every_step as f64))
    };
    let all: Vec<(f64, f64)> = runs.iter().filter_map(|run| excess(&run)).collect();
    let range = |of: fn(&(f64, f64)) -> f64| {
        let values = || all.iter().map(of);
        [values().fold(f64::INFINITY, f64::min), values().fold(f64::NEG_INFINITY, f64::max)]
            .map(|part| 100.0 * part)
    };
    let ([low, high], [least, most]) = (range(|one| one.0), range(|one| one.1));
    (all.len() > 1).then(|| {
        format!(
            "{} methods that exchange rarely were compared with the same rule in every step: they send {least:.0}% to {most:.0}% of its \
             bytes, and their held-out losses differ by {low:+.1}% to {high:+.1}% (lower is better; one seed).",
            all.len()
        )
    })
}

/// Returns a sentence that compares a method with its baseline, if both were trained; of a baseline there is none.
fn sentence(run: &Trained, runs: &[&Trained]) -> Option<String> {
    let (share, loss) = (100.0 * run.sent() as f64 / run.every_step as f64, run.held_out());
    let sent = size(run.sent() as f64);
    let own = format!("{} sends {sent} and reaches a held-out loss of {loss:.3} nats per byte", run.method);
    let Some(baseline) = run.method.baseline() else {
        return (runs.len() == 1)
            .then(|| format!("{own}. It is a baseline, and nothing was compared with it."));
    };
    let bytes = format!("It sends {share:.1}% of the bytes of gradients reduced in every step.");
    let compared = match runs.iter().find(|other| other.method == baseline) {
        Some(other) => {
            let (theirs, off) = (other.held_out(), 100.0 * (loss / other.held_out() - 1.0));
            let word = if off > 0.0 { "higher (worse)" } else { "lower (better)" };
            format!(", {:.1}% {word} than {theirs:.3} of {baseline}. {bytes}", off.abs())
        }
        None => format!(". {bytes} No baseline was trained, so the loss is not compared."),
    };
    Some(own + &compared)
}

/// Describes the number of steps, and of the workers that took each step.
fn there(runs: &[&Trained]) -> String {
    let steps = runs.iter().map(|run| run.steps).max().unwrap_or(0);
    let present = || runs.iter().flat_map(|run| &run.present);
    let (least, most) = (present().min().unwrap_or(&0), present().max().unwrap_or(&0));
    match least == most {
        true => format!("{steps} steps by {most} workers"),
        false => format!("{steps} steps by the {least} to {most} workers that took each"),
    }
}

/// Returns the table of workers.
pub(super) fn workers(run: &Trained, unlike: bool) -> Section {
    let about = match unlike {
        false => "The text that each worker read, and its steps.",
        true => {
            "The text that each worker read, and its steps. The training text is sorted by the share of letters in its blocks, so \
                 that every worker reads text of another kind; held-out text has all kinds."
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

/// Returns the tables of membership changes and failed exchanges.
pub(super) fn members(run: &Trained, seed: Option<u64>) -> Section {
    let happens = seed.map_or("Joining workers".to_owned(), |seed| format!("Events drawn from seed {seed}"));
    let about = format!(
        "{happens}, and the members: an epoch is one list of members. {} exchanges failed, at steps {:?}.",
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
    let names = (0..run.workers.len()).map(|worker| format!("worker {worker}"));
    let (x, y) = (Scale::amount("step"), Scale::named("worker", names));
    let line = |(i, life): (usize, &Life)| {
        let ends = [life.steps.start as f64, life.steps.end as f64].map(|step| (step, i as f64));
        (format!("worker {i}, {}", end(life.lost)), ends.to_vec())
    };
    let curves = run.workers.iter().enumerate().map(line).collect();
    let caption = "A line from the first step that a worker takes to its last.";
    section.plots.push(Plot::new("Membership over time", caption, Shape::Curves { x, y, curves }));
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

/// Returns the measured held-out losses against the bytes sent until then.
fn against_bytes(run: &Trained) -> Vec<(f64, f64)> {
    let sent = |steps: u64| run.sent.get(steps as usize - 1).copied().unwrap_or(0) as f64 / 1e6;
    run.held_out.iter().map(|&(steps, loss)| (sent(steps), loss)).filter(|(sent, _)| *sent > 0.0).collect()
}

/// Returns the mean training losses of intervals by their last steps.
fn training(run: &Trained) -> Vec<(f64, f64)> {
    let stretch = run.losses.len().div_ceil(POINTS).max(1);
    let point = |(i, losses): (usize, &[f64])| {
        ((i * stretch + losses.len()) as f64, losses.iter().sum::<f64>() / losses.len() as f64)
    };
    run.losses.chunks(stretch).enumerate().map(point).collect()
}
