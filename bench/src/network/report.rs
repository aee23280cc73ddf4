//! Tables, plots and limits of the trainings.

use anyhow::{Context as _, Result};

use super::contestants::{Kind, Sizes};
use super::crossover::{Crossover, Line, between_measured};
use super::measured::Rate;
use super::{Trained, target};
use crate::measure::effort::Effort;
use crate::measure::record::{Cell, Plot, Scale, Section, Shape, Table, Wanted};

/// Rate at which rare exchanges must win, and by how much over plain AdamW.
const AT: Rate = Rate(100);
const FASTER: f64 = 4.0;
/// Number of workers that the limits on times and losses apply to.
const WORKERS: usize = 4;
/// Largest relative excess of DES-LOC's last held-out loss over Local Adam's.
const EXCESS: f64 = 0.01;
/// Largest ratio of the bytes over the links to the planned ones: headers, acknowledgements and what was sent again.
const OVER_PLAN: f64 = 1.1;

/// Adds everything about the trainings of one number of workers.
pub(super) fn add(section: &mut Section, sizes: &Sizes, all: &[Trained], effort: Effort) -> Result<()> {
    let target = target(all);
    section.tables.push(times(sizes, all, target));
    section.tables.push(bytes(sizes, all));
    section.tables.push(crossovers(sizes, all, target)?);
    section.plots.push(times_by_rate(sizes, all, target));
    section.plots.extend(sizes.rates.iter().map(|rate| losses_in_time(sizes, all, *rate)));
    section.verdict.extend(fastest(sizes, all, target));
    let most =
        all.iter().map(|trained| trained.crossed as f64 / trained.planned() as f64).fold(0.0, f64::max);
    let what = format!("{} workers: most bytes over the links / planned", sizes.workers);
    section.bar(what, most, Wanted::AtMost(OVER_PLAN));
    limits(section, sizes, all, target, effort)
}

fn times(sizes: &Sizes, all: &[Trained], target: f64) -> Table {
    let title = format!("{} workers, seconds to a held-out loss of {target:.4}", sizes.workers);
    let mut columns =
        vec!["last held-out loss".to_owned(), "steps".to_owned(), "of them to the target".to_owned()];
    columns.extend(sizes.rates.iter().map(Rate::to_string));
    let mut table = Table::new(title, &columns.iter().map(String::as_str).collect::<Vec<_>>());
    for trained in all {
        let (step, case) = (trained.step_of(target), &trained.contestant.case);
        let mut cells = vec![
            Cell::Text(format!("{:.4}", trained.curve.last())),
            Cell::Count(case.steps as u64),
            Cell::Text(format!("{step:.1}")),
        ];
        cells.extend(trained.at.iter().map(|(_, measured)| {
            let computed = if step > measured.steps() as f64 { "*" } else { "" };
            Cell::Text(format!("{:.2} s{computed}", measured.seconds_at(step)))
        }));
        table.row(trained.contestant.name.clone(), cells);
    }
    let tokens = sizes.workers * sizes.steps * sizes.batch * sizes.network.context;
    table.note(format!("{} parameters, {tokens} tokens; {:?}", sizes.params(), sizes.network));
    for (i, rate) in sizes.rates.iter().enumerate() {
        let seconds = |trained: &&Trained| {
            trained.at.get(i).map_or(f64::NAN, |(_, m)| m.seconds_at(trained.step_of(target)))
        };
        let fastest = all.iter().min_by(|a, b| seconds(a).total_cmp(&seconds(b)));
        let fastest = fastest.map_or(String::new(), |trained| trained.contestant.name.clone());
        table.note(format!("fastest at {rate}: {fastest}"));
    }
    table
}

fn bytes(sizes: &Sizes, all: &[Trained]) -> Table {
    let title = format!("{} workers, bytes over all links in the whole training", sizes.workers);
    let mut table = Table::new(title, &["planned", "crossed", "crossed / planned", "of plain AdamW's"]);
    let plain = all.first().map_or(f64::NAN, |plain| plain.crossed as f64);
    for trained in all {
        let (planned, crossed) = (trained.planned(), trained.crossed);
        table.row(
            trained.contestant.name.clone(),
            [
                Cell::Bytes(planned),
                Cell::Bytes(crossed),
                Cell::Number(crossed as f64 / planned as f64),
                Cell::Share(crossed as f64 / plain),
            ],
        );
    }
    table.note("planned: before the training, as ring algorithms send them; crossed: counted by the kernel at the links, with headers");
    table
}

/// Returns the seconds of the best AdamW in every step at each rate.
fn best(all: &[Trained], target: f64) -> Result<Vec<(Rate, f64)>> {
    let every = all.iter().filter(|trained| trained.contestant.kind.is_every_step());
    let least = |a: Vec<(Rate, f64)>, b: Vec<(Rate, f64)>| {
        a.iter().zip(b).map(|((rate, a), (_, b))| (*rate, a.min(b))).collect()
    };
    every.map(|trained| trained.times(target)).reduce(least).context("AdamW in every step was not trained")
}

fn crossovers(sizes: &Sizes, all: &[Trained], target: f64) -> Result<Table> {
    let title =
        format!("{} workers, rate below which a method is faster than AdamW in every step", sizes.workers);
    let mut table = Table::new(
        title,
        &[
            "than plain",
            "by the model",
            "than the best tuned",
            "by the model",
            "seconds",
            "bytes",
            "off at most",
        ],
    );
    let (best, plain) = (best(all, target)?, of(all, Kind::Plain)?.times(target));
    for trained in all.iter().filter(|trained| !trained.contestant.kind.is_every_step()) {
        let times = trained.times(target);
        let line = Line::fit(&times);
        let mut cells = Vec::new();
        for other in [&plain, &best] {
            let found = [between_measured(&times, other), Some(line.against(Line::fit(other)))];
            cells.extend(found.map(|found| Cell::Text(describe(found, &sizes.rates))));
        }
        cells.extend([
            Cell::Seconds(line.seconds),
            Cell::Bytes(line.bytes.max(0.0) as u64),
            Cell::Share(line.off),
        ]);
        table.row(trained.contestant.name.clone(), cells);
    }
    table.note("the model: seconds + bytes / rate, fitted to the measured times; bytes are those that a worker waits for");
    Ok(table)
}

fn times_by_rate(sizes: &Sizes, all: &[Trained], target: f64) -> Plot {
    let curve = |trained: &Trained| {
        let points =
            trained.times(target).into_iter().enumerate().map(|(i, (_, seconds))| (i as f64, seconds));
        (trained.contestant.name.clone(), points.collect())
    };
    let x = Scale::named("rate of each link", sizes.rates.iter().map(Rate::to_string));
    let shape =
        Shape::Curves { x, y: Scale::amount("time to the loss, s"), curves: all.iter().map(curve).collect() };
    let title = format!("{} workers: measured time to a held-out loss of {target:.3}", sizes.workers);
    Plot::new(title, "Less is better. The fastest links are on the left.", shape)
}

/// Returns the measured losses by the seconds after which they were reached at a rate.
fn losses_in_time(sizes: &Sizes, all: &[Trained], rate: Rate) -> Plot {
    let curve = |trained: &Trained| {
        let measured = trained.at.iter().find(|(at, _)| *at == rate).map(|(_, measured)| measured);
        let point = |&(step, loss): &(u64, f64)| {
            let measured = measured.filter(|measured| step as usize <= measured.steps())?;
            Some((measured.seconds_at(step as f64), loss))
        };
        (trained.contestant.name.clone(), trained.curve.0.iter().filter_map(point).collect())
    };
    let (x, y) = (Scale::amount("measured time, s"), Scale::near("held-out loss, nats per byte"));
    let shape = Shape::Curves { x, y, curves: all.iter().map(curve).collect() };
    let title = format!("{} workers: held-out loss against measured seconds at {rate}", sizes.workers);
    Plot::new(
        title,
        "Lower and further left is better. At slow rates only the first steps are measured.",
        shape,
    )
}

/// Returns a sentence on the fastest method and plain AdamW at the slowest rate.
fn fastest(sizes: &Sizes, all: &[Trained], target: f64) -> Option<String> {
    let rate = *sizes.rates.last()?;
    let fastest = all.iter().min_by(|a, b| a.time(target, rate).total_cmp(&b.time(target, rate)))?;
    let plain = of(all, Kind::Plain).ok()?;
    let [time, plain_time] = [fastest, plain].map(|trained| trained.time(target, rate));
    Some(format!(
        "{} workers behind links of {rate}: {} reaches a held-out loss of {target:.3} in {time:.1} s, and {} in {plain_time:.1} s, {:.1} \
         times as long.",
        sizes.workers,
        fastest.contestant.name,
        plain.contestant.name,
        plain_time / time
    ))
}

/// Adds the limits on times, bytes and losses.
fn limits(section: &mut Section, sizes: &Sizes, all: &[Trained], target: f64, effort: Effort) -> Result<()> {
    let [plain, adam, des_loc] = [Kind::Plain, Kind::LocalAdam, Kind::DesLoc].map(|kind| of(all, kind));
    let (plain, adam, des_loc) = (plain?, adam?, des_loc?);
    let workers = sizes.workers;
    let what = format!("{workers} workers: DES-LOC's bytes over the links / Local Adam's");
    section.bar(what, des_loc.crossed as f64 / adam.crossed as f64, Wanted::AtMost(1.0));
    if effort.quick || workers != WORKERS {
        return Ok(());
    }
    let what =
        format!("{workers} workers: relative excess of DES-LOC's last held-out loss over Local Adam's");
    section.bar(what, des_loc.curve.last() / adam.curve.last() - 1.0, Wanted::AtMost(EXCESS));
    let ratio = plain.time(target, AT) / des_loc.time(target, AT);
    let what = format!("{workers} workers, {AT}: plain AdamW's time to the target / DES-LOC's");
    section.bar(what, ratio, Wanted::AtLeast(FASTER));
    Ok(())
}

fn of(all: &[Trained], kind: Kind) -> Result<&Trained> {
    let found = all.iter().find(|trained| trained.contestant.kind == kind);
    found.with_context(|| format!("{kind:?} was not trained"))
}

/// Describes a crossover; the model is not trusted beyond the measured rates, of which the fastest is the first.
fn describe(crossover: Option<Crossover>, rates: &[Rate]) -> String {
    let [fastest, slowest] =
        [rates.first(), rates.last()].map(|rate| rate.map_or(0.0, |rate| rate.bits() as f64));
    match crossover {
        Some(Crossover::At(bits)) if bits > fastest => format!("above {:.0} Mbit/s", fastest / 1e6),
        Some(Crossover::At(bits)) if bits < slowest => format!("below {:.0} Mbit/s", slowest / 1e6),
        Some(Crossover::At(bits)) => format!("{:.0} Mbit/s", bits / 1e6),
        Some(Crossover::Faster) => "always".to_owned(),
        Some(Crossover::Slower) => "never".to_owned(),
        None => "unknown".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::local::timed::Timed;
    use crate::network::contestants::{Contestant, contestants};
    use crate::network::measured::{Curve, Measured};

    /// Results in which every method reaches `losses` at the end, and takes `seconds` for each step at 100 Mbit/s.
    fn all(sizes: &Sizes, of: impl Fn(Kind) -> (f64, f64, u64)) -> Vec<Trained> {
        let trained = |contestant: Contestant| {
            let ((loss, seconds, crossed), steps) = (of(contestant.kind), contestant.case.steps);
            let timed = |share: f64| Timed {
                seconds: (1..=steps).map(|step| step as f64 * seconds * share).collect(),
                losses: vec![loss; steps],
                held_out: Vec::new(),
                sent: 0,
                planned: crossed / 4,
                digest: String::new(),
            };
            let at = |rate, share| (rate, Measured { workers: vec![timed(share); 4], crossed });
            let curve = Curve(vec![(1, 4.0), (steps as u64, loss)]);
            let at = vec![at(Rate(1000), 0.1), at(AT, 1.0), at(Rate(10), 10.0)];
            Trained { contestant, curve, crossed, at }
        };
        contestants(sizes).into_iter().map(trained).collect()
    }

    fn missed(of: impl Fn(Kind) -> (f64, f64, u64)) -> Vec<String> {
        let effort = Effort { quick: false };
        let sizes = Sizes::of(effort, WORKERS);
        let mut section = Section::new("", "");
        add(&mut section, &sizes, &all(&sizes, of), effort).unwrap();
        assert_eq!(
            (section.tables.len(), section.plots.len(), section.bars.len()),
            (3, 1 + sizes.rates.len(), 4)
        );
        section.bars.iter().filter(|bar| !bar.holds()).map(|bar| bar.what.clone()).collect()
    }

    #[test]
    fn a_crossover_beyond_the_measured_rates_is_only_said_to_be_there() {
        let rates = [Rate(1000), Rate(10)];
        let describe = |crossover| describe(crossover, &rates);
        assert_eq!(describe(Some(Crossover::At(9e8))), "900 Mbit/s");
        assert_eq!(describe(Some(Crossover::At(2e9))), "above 1000 Mbit/s");
        assert_eq!(describe(Some(Crossover::At(2e6))), "below 10 Mbit/s");
        let rest = [Some(Crossover::Faster), Some(Crossover::Slower), None].map(describe);
        assert_eq!(rest, ["always", "never", "unknown"]);
    }

    #[test]
    fn time_bytes_and_loss_have_limits_of_their_own() {
        let good = |kind| match kind {
            Kind::Plain => (3.0, 0.41, 4000),
            Kind::LocalAdam => (3.0, 0.1, 800),
            Kind::DesLoc => (3.0, 0.1, 400),
            _ => (3.0, 0.2, 1000),
        };
        assert!(missed(good).is_empty(), "{:?}", missed(good));
        let missed = |kind: Kind, bad: (f64, f64, u64)| {
            let all = missed(|of| if of == kind { bad } else { good(of) });
            assert_eq!(all.len(), 1, "{all:?}");
            all[0].clone()
        };
        assert!(missed(Kind::Plain, (3.0, 0.39, 4000)).contains("time to the target"));
        assert!(missed(Kind::DesLoc, (3.0, 0.1, 804)).contains("bytes over the links / Local Adam's"));
        assert!(missed(Kind::LocalAdam, (2.96, 0.1, 800)).contains("excess"));
        assert!(missed(Kind::Rare, (3.0, 0.2, 3)).contains("planned"));
    }
}
