//! Workers that begin from the mean of saved workers.

use super::{
    SAVED, STEPS, by_tokens, first_stage, in_turn, load_and_train, named, of_step, run, spawn, step,
    steps_until, store, train_and_save,
};
use crate::common::{self, Run, STAGES, WhichRule, cases, long, turns};
use crate::equal::{assert_equal, end, plans};
use crate::naive::Naive;
use meshstep_checkpoint as checkpoint;
use meshstep_comm::loopback;
use meshstep_local::{Fragment, LocalOptimizer, LocalPlan, Select, Timing, Weights, What};
use meshstep_shard::{Optimizer, Options, Stage, Step};
use meshstep_tensor::{Category, DType, bf16};

#[test]
fn other_workers_go_on_from_the_mean() {
    for (p, (name, rule, plan)) in plans().into_iter().chain(by_tokens()).enumerate() {
        if !in_turn(p, 0) {
            continue;
        }
        let store = store();
        let run = |i: usize| Run { rule, ..run(STAGES[(first_stage(p) + i) % 4]) };
        let loaded: Vec<usize> = turns(&[0, 1, 2], p + p / 3, 1).collect();
        let saved: Vec<u64> = loaded.iter().map(|&k| SAVED[k]).collect();
        let saved = if long() { SAVED.to_vec() } else { saved };
        train_and_save(&run(0), &plan, 1 + p % 2, &store, &saved);
        for k in loaded {
            let at = SAVED[k];
            // Six workers take much longer than two.
            for workers in turns(&[2, 6], usize::from(p % 6 == 1), 1) {
                let saved_run = Run { ranks: 4, ..run(0) };
                let mut saved = Naive::new(&saved_run, &plan, 4);
                (0..at).for_each(|step| saved.step(step));
                let naive_run = Run { ranks: workers, ..run(0) };
                let mut naive = saved.merged(&naive_run, workers);
                (at..STEPS).for_each(|step| naive.step(step));
                let ends = load_and_train(&run(k + 1), &plan, [workers, 2], &store, of_step(at));
                for (rank, end) in ends.iter().enumerate() {
                    let what = format!("{name} from {at} to {workers}, rank {rank}");
                    assert_equal(end, &naive.workers[rank / 2], &what);
                }
            }
        }
    }
}

#[test]
fn workers_begin_from_what_one_optimizer_has_saved() {
    let (store, run) = (store(), run(Stage::Zero1));
    let plan = LocalPlan::diloco(3);
    let alone = loopback::spawn(2, |comm| {
        let mut opt: Optimizer = run.build(comm).unwrap();
        for t in 1..=4 {
            let mb = opt.micro_batch(1).unwrap();
            for i in 0..run.lens.len() {
                let grad: Vec<f32> = run.gradient(t, 0, 0, i).iter().map(|&g| g as f32).collect();
                mb.grad(&common::name(i), &grad[..]).unwrap();
            }
            mb.finish().unwrap();
            let _ = opt.step(run.at(t)).unwrap().outcome().unwrap();
        }
        checkpoint::save(&mut opt, &store, named(4)).unwrap();
    });
    alone.unwrap();
    let one = Run { ranks: 1, ..run.clone() };
    let mut naive = Naive::new(&one, &LocalPlan::local_sgd(100), 1);
    (0..4).for_each(|step| naive.step(step));
    let three = Run { ranks: 3, ..run.clone() };
    let mut naive = naive.anew(&three, &plan, 3);
    (4..STEPS).for_each(|step| naive.step(step));
    for (rank, end) in load_and_train(&run, &plan, [3, 2], &store, of_step(4)).iter().enumerate() {
        assert_equal(end, &naive.workers[rank / 2], &format!("rank {rank}"));
    }
}

#[test]
fn who_has_only_just_come_does_not_count_in_the_mean() {
    let (store, run) = (store(), Run { rule: WhichRule::AdamW, ..run(Stage::Zero1) });
    let plan = LocalPlan::des_loc(4, 4, 4);
    let saved = spawn(&run, &plan, [3, 2], |mut local, worker| {
        steps_until(&run, &mut local, worker, 2);
        if worker == 0 {
            local.enter();
        }
        checkpoint::save(&mut local, &store, named(2)).unwrap();
        step(&run, &mut local, worker);
        step(&run, &mut local, worker);
        end(&run, &local)
    });
    // The same number of workers: the new one still does not count.
    let again = spawn(&run, &plan, [3, 2], |mut local, worker| {
        checkpoint::load(&mut local, &store, of_step(2)).unwrap();
        steps_until(&run, &mut local, worker, 4);
        end(&run, &local)
    });
    for (end, saved) in again.iter().zip(&saved) {
        assert_eq!(end.params, saved.params);
    }
    let two = Run { ranks: 3, ..run.clone() };
    let mut naive = Naive::new(&two, &plan, 3);
    (0..2).for_each(|step| naive.step(step));
    naive.workers.remove(0);
    let four = Run { ranks: 4, ..run.clone() };
    let merged = naive.merged(&four, 4);
    let ends = spawn(&run, &plan, [4, 1], |mut local, _| {
        checkpoint::load(&mut local, &store, of_step(2)).unwrap();
        end(&run, &local)
    });
    for (rank, end) in ends.iter().enumerate() {
        assert_equal(end, &merged.workers[rank], &format!("rank {rank}"));
    }
}

#[test]
fn parameters_that_follow_masters_follow_their_mean() {
    let (store, plan) = (store(), LocalPlan::local_adam(4));
    let run = |stage| {
        let options = Options { precision: common::F32_MASTER, ..run(stage).options };
        Run { dtype: DType::BF16, options, ..run(stage) }
    };
    let master = |run: &Run, local: &LocalOptimizer, i: usize| -> Vec<f32> {
        let state = local.state(&common::name(i)).unwrap();
        let own: Vec<f32> = state.master.map_or(vec![], |master| master.typed().unwrap().to_vec());
        assert_eq!(own.len(), run.lens[i]);
        own
    };
    let saved = spawn(&run(Stage::Replicated), &plan, [4, 1], |mut local, worker| {
        let run = run(Stage::Replicated);
        steps_until(&run, &mut local, worker, 3);
        checkpoint::save(&mut local, &store, named(3)).unwrap();
        (0..run.lens.len()).map(|i| master(&run, &local, i)).collect::<Vec<_>>()
    });
    spawn(&run(Stage::Zero2), &plan, [3, 2], |mut local, _| {
        checkpoint::load(&mut local, &store, of_step(3)).unwrap();
        for (i, &len) in run(Stage::Zero2).lens.iter().enumerate() {
            let mean = |j: usize| saved.iter().map(|own| f64::from(own[i][j])).sum::<f64>() / 4.0;
            let masters: Vec<f32> = (0..len).map(|j| mean(j) as f32).collect();
            let rounded: Vec<bf16> = masters.iter().map(|&x| bf16::from_f32(x)).collect();
            assert_eq!(local.param(&common::name(i)).unwrap().typed::<bf16>().unwrap(), rounded);
            let state = local.state(&common::name(i)).unwrap();
            let own = state.master.map_or(vec![], |master| master.typed::<f32>().unwrap().to_vec());
            assert_eq!(own, masters[state.range.clone()]);
        }
    });
}

/// Vectors are longer than the part read at once, except in a tenth.
#[test]
fn a_mean_takes_memory_for_parts_of_what_workers_have() {
    // The workers' values together are more than a load may hold.
    let len = cases(1_500_000, 2_000_000) as usize;
    let whole = Run { rule: WhichRule::Sgd, lens: vec![len], ..run(Stage::Zero2) };
    // Weighted by tokens, except for the ends.
    let params = Select::Elements { name: common::name(0), range: 5..len - 7 };
    let own = Fragment::mean(What::Params, Timing::every(100));
    let plan = LocalPlan::new(vec![Fragment { params, weights: Weights::Tokens, ..own }]);
    let (store, workers) = (store(), 6);
    spawn(&whole, &plan, [workers, 1], |mut local, worker| {
        step(&whole, &mut local, worker);
        checkpoint::save(&mut local, &store, named(1)).unwrap();
    });
    let (saved_by, one) = (Run { ranks: workers, ..whole.clone() }, Run { ranks: 1, ..whole.clone() });
    let mut naive = Naive::new(&saved_by, &plan, workers);
    naive.step(0);
    let naive = naive.merged(&one, 1);
    let ends = spawn(&whole, &plan, [1, 1], |mut local, _| {
        let meter = local.optimizer().options().meter.clone();
        meter.reset_peaks();
        checkpoint::load(&mut local, &store, of_step(1)).unwrap();
        (end(&whole, &local), meter.peak(Category::Staging))
    });
    assert_equal(&ends[0].0, &naive.workers[0], "the only worker");
    // Parts of 16 MiB, as much memory for the readers, and a few words.
    let (all, most) = (4 * len as u64, (32 << 20) + (64 << 10));
    assert!(ends[0].1 > all && ends[0].1 <= all + most, "{} bytes, {all} of them read", ends[0].1);
}
