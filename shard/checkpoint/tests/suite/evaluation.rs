//! Checkpoints hold trained parameters: none is made or loaded during an evaluation, and a loaded optimizer evaluates at the same point.

use crate::common::{Gradients, Run, WhichRule, param};
use crate::layouts::{DIR, train};
use meshstep_checkpoint::{self as checkpoint, Error, Load, Save, Store};
use meshstep_checkpoint_cases::Sim;
use meshstep_comm::loopback;
use meshstep_shard::{Optimizer, Options, Stage};
use std::sync::Arc;

fn run() -> Run {
    let options = Options { bucket_len: Some(100), ..Options::default() };
    Run { rule: WhichRule::ScheduleFree, gradients: Gradients::Equal, options, ..Run::default() }
}

/// Bits of all parameters where they are trained, and where they are evaluated.
fn both(opt: &mut Optimizer) -> [Vec<Vec<u8>>; 2] {
    let read = |opt: &Optimizer| -> Vec<Vec<u8>> { opt.params().map(|p| param(opt, p.name())).collect() };
    let trained = read(opt);
    opt.begin_evaluation().unwrap();
    let evaluated = read(opt);
    opt.end_evaluation().unwrap();
    [trained, evaluated]
}

#[test]
fn other_ranks_and_stages_evaluate_at_the_same_point() {
    let store = Store::on(Arc::new(Sim::new(DIR)), DIR);
    let saved = loopback::spawn(4, |comm| {
        let run = run().stage(Stage::Zero2);
        let mut opt = run.build(comm).unwrap();
        train(&run, &mut opt, 1..4);
        checkpoint::save(&mut opt, &store, Save::default()).unwrap();
        let then = both(&mut opt);
        train(&run, &mut opt, 4..6);
        (then, both(&mut opt))
    });
    let saved = saved.unwrap();
    assert_ne!(saved[0].0[0], saved[0].0[1]);
    for (ranks, stage) in [(1, Stage::Replicated), (2, Stage::Zero3), (3, Stage::Zero1)] {
        let loaded = loopback::spawn(ranks, |comm| {
            let run = Run { ranks, ..run().stage(stage) };
            let mut opt = run.build(comm).unwrap();
            checkpoint::load(&mut opt, &store, Load::default()).unwrap();
            let then = both(&mut opt);
            train(&run, &mut opt, 4..6);
            (then, both(&mut opt))
        });
        assert!(loaded.unwrap().iter().all(|end| *end == saved[0]), "{ranks} ranks at {stage:?}");
    }
}

#[test]
fn nothing_is_saved_or_loaded_during_an_evaluation() {
    let store = Store::on(Arc::new(Sim::new(DIR)), DIR);
    loopback::spawn(2, |comm| {
        let run = run().stage(Stage::Zero1);
        let mut opt = run.build(comm).unwrap();
        train(&run, &mut opt, 1..3);
        checkpoint::save(&mut opt, &store, Save::default()).unwrap();
        opt.begin_evaluation().unwrap();
        let refused = [
            checkpoint::save(&mut opt, &store, Save::default()).map(drop),
            checkpoint::load(&mut opt, &store, Load::default()).map(drop),
            checkpoint::consolidate(&mut opt, 0, &mut |_| Ok(())),
        ];
        for refused in refused {
            let error = refused.unwrap_err();
            assert!(matches!(error, Error::Shard(meshstep_shard::Error::Evaluating)), "{error}");
        }
        opt.end_evaluation().unwrap();
        checkpoint::load(&mut opt, &store, Load::default()).unwrap();
        train(&run, &mut opt, 3..4);
    })
    .unwrap();
}
