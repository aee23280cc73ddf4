//! A history of 16 bits over sharded layouts: the same bits on any ranks, and refusals on all ranks together.

use super::run::{Run, Share};
use super::{LARGE, SEARCHES, SMALL, at, problems::Problem};
use crate::common::{STAGES, turns};
use meshstep_comm::loopback;
use meshstep_optim::{History, Lbfgs};
use meshstep_shard::{Error, Options, ShardedLbfgs, Stage};
use meshstep_tensor::{Category, DType, Layout, Meter};

#[test]
fn world_sizes_and_stages_change_no_bit() {
    let of = |stage| (1..=4).map(move |ranks| (stage, ranks));
    let worlds: Vec<(Stage, usize)> = STAGES.into_iter().flat_map(of).collect();
    let mut row = 0;
    for (problem, lens) in [(Problem::Rosenbrock, SMALL), (Problem::Rosenbrock, LARGE)] {
        for search in SEARCHES {
            for history in [History::Bf16, History::F16] {
                let run = Run { share: Share::One, dtype: DType::F32, ..Run::new(problem, lens, search) };
                // More iterations than the history is long.
                let rule = Lbfgs { max_iter: 15, history, ..run.rule.clone() };
                let run = Run { rule, ..run };
                let one = at(&run, Stage::Replicated).run(1);
                let exact =
                    Run { rule: Lbfgs { history: History::Exact, ..run.rule.clone() }, ..run.clone() };
                assert!(at(&exact, Stage::Replicated).run(1).seen != one.seen, "rounding changes the points");
                row += 1;
                for (stage, ranks) in turns(&worlds, 7 * row + 13, 4) {
                    let end = at(&run, stage).run(ranks);
                    assert!(end.seen == one.seen && end.losses == one.losses, "{run:?} {stage:?} on {ranks}");
                    assert_eq!((end.params, end.step.report), (one.params.clone(), one.step.report));
                }
            }
        }
    }
}

fn build(ranks: usize, dtype: DType, history: fn(usize) -> History) -> Vec<Result<u64, Error>> {
    let build = |comm: std::sync::Arc<dyn meshstep_comm::Communicator>| {
        let layout = Layout::builder().param("w", &[ranks * 64], dtype).build()?;
        let rule = Lbfgs { history: history(comm.rank()), history_len: 4, ..Lbfgs::default() };
        let meter = Meter::new();
        let options = Options { stage: Stage::Zero1, meter: meter.clone(), ..Options::default() };
        ShardedLbfgs::new(comm, layout, rule, |_, _| Ok(()), options)?;
        Ok(meter.peak(Category::State))
    };
    loopback::spawn(ranks, build).unwrap()
}

#[test]
fn the_meter_counts_half_the_bytes() {
    for told in build(2, DType::F32, |_| History::Exact) {
        assert_eq!(told.unwrap(), 64 * 4 * (10 + 3));
    }
    for told in build(2, DType::F32, |_| History::Bf16) {
        assert_eq!(told.unwrap(), 64 * (2 * 10 + 4 * 4));
    }
}

#[test]
fn refusals_reach_all_ranks() {
    for told in build(2, DType::F64, |_| History::F16) {
        let Err(Error::Optim(meshstep_optim::Error::DType { given, works, .. })) = told else {
            panic!("{told:?}")
        };
        assert_eq!((given, works), (DType::F64, "f32, or History::Exact"));
    }
    let differ = |rank| if rank == 0 { History::Exact } else { History::Bf16 };
    for told in build(2, DType::F32, differ) {
        let text = told.unwrap_err().to_string();
        assert!(text.contains("history_bf16") || text.contains("differ"), "{text}");
    }
}
