//! Refused saves and loads: other folders, other jobs, other models, steps in progress, damage.

use crate::common::{F32_MASTER, Run, WhichRule, name};
use crate::failures::failed;
use crate::layouts::train;
use crate::whole::part;
use meshstep_checkpoint::{self as checkpoint, CheckpointError, Error, Failed, Load, Mismatch, Save, Store};
use meshstep_checkpoint_cases::Sim;
use meshstep_comm::loopback;
use meshstep_optim::Rounding;
use meshstep_shard::{Master, Optimizer, Options, Precision};
use meshstep_tensor::DType;
use std::sync::Arc;

const DIR: &str = "/run";

/// Returns the error of `call` on every rank of `run`; the call changes nothing, and the ranks stay usable.
fn told(run: &Run, call: impl Fn(&mut Optimizer) -> Error + Sync) -> Error {
    let ranks = loopback::spawn(run.ranks, |comm| {
        let mut opt = run.build(comm).unwrap();
        train(run, &mut opt, 1..2);
        let before = part(&opt);
        let error = call(&mut opt);
        assert!(part(&opt) == before, "nothing has changed: {error}");
        train(run, &mut opt, 2..3);
        error
    });
    let ranks = ranks.unwrap();
    let texts: Vec<String> = ranks.iter().map(Error::to_string).collect();
    assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
    ranks.into_iter().next().unwrap()
}

/// Same as [`told`], for an error of checkpoints.
fn refused(run: &Run, call: impl Fn(&mut Optimizer) -> Error + Sync) -> Failed {
    failed(told(run, call))
}

fn two() -> Run {
    Run { ranks: 2, ..Run::default() }
}

fn saved(run: &Run, store: &Store) {
    let saved = loopback::spawn(run.ranks, |comm| {
        let mut opt = run.build(comm).unwrap();
        train(run, &mut opt, 1..4);
        let own_blobs = vec![("rng", &[7; 20][..])];
        checkpoint::save(&mut opt, store, Save { own_blobs, ..Save::default() }).unwrap();
    });
    saved.unwrap();
}

fn in_memory() -> (Sim, Store) {
    let sim = Sim::new(DIR);
    let store = Store::on(Arc::new(sim.clone()), DIR);
    (sim, store)
}

#[test]
fn ranks_that_look_at_other_folders_are_told() {
    let [one, other] = [in_memory().1, in_memory().1];
    let Failed { rank, error } = refused(&two(), |opt| {
        let store = if opt.comm().rank() == 0 { &one } else { &other };
        checkpoint::save(opt, store, Save::default()).unwrap_err()
    });
    assert!(rank == 1 && matches!(error, CheckpointError::Elsewhere { .. }), "{error}");
    // A folder with the proof of another job is refused too.
    other.begin(1).unwrap().folder().show(7).unwrap();
    let Failed { error, .. } = refused(&two(), |opt| {
        let store = if opt.comm().rank() == 0 { &one } else { &other };
        checkpoint::save(opt, store, Save::default()).unwrap_err()
    });
    assert!(matches!(error, CheckpointError::Elsewhere { .. }), "{error}");
}

#[test]
fn a_second_job_and_a_second_save_of_a_step_are_refused() {
    let (_, store) = in_memory();
    let held = store.begin(9).unwrap();
    let Failed { rank, error } =
        refused(&two(), |opt| checkpoint::save(opt, &store, Save::default()).unwrap_err());
    assert!(rank == 0 && matches!(error, CheckpointError::Locked { .. }), "{error}");
    drop(held);
    saved(&two(), &store);
    let again = |opt: &mut Optimizer| {
        checkpoint::save(opt, &store, Save { step: Some(3), ..Save::default() }).unwrap_err()
    };
    assert!(matches!(refused(&two(), again).error, CheckpointError::Exists { .. }));
}

#[test]
fn nothing_is_saved_or_loaded_within_a_step() {
    let (_, store) = in_memory();
    saved(&two(), &store);
    for loads in [false, true] {
        let run = two();
        let error = told(&run, |opt| {
            run.hand_over(opt, 2, 0).unwrap();
            let error = match loads {
                true => checkpoint::load(opt, &store, Load::default()).map(drop).unwrap_err(),
                false => checkpoint::save(opt, &store, Save::default()).map(drop).unwrap_err(),
            };
            opt.discard_gradients().unwrap();
            error
        });
        assert!(matches!(error, Error::Shard(meshstep_shard::Error::StepDue)), "{error}");
    }
}

#[test]
fn ranks_that_ask_for_different_things_are_told() {
    let (_, store) = in_memory();
    saved(&two(), &store);
    let error = told(&two(), |opt| {
        let step = Some(20 + opt.comm().rank() as u64);
        checkpoint::save(opt, &store, Save { step, ..Save::default() }).unwrap_err()
    });
    assert_eq!(error.to_string(), "ranks disagree on step to save: rank 0 has 20, rank 1 has 21");
    let error = told(&two(), |opt| {
        checkpoint::load(opt, &store, Load { partial: opt.comm().rank() == 1, ..Load::default() })
            .map(drop)
            .unwrap_err()
    });
    assert!(error.to_string().starts_with("ranks disagree on what to load: "), "{error}");
    // Two stores with different newest checkpoints, as if another job had saved meanwhile.
    let other = in_memory().1;
    saved(&Run { seed: 2, ..two() }, &other);
    let error = told(&two(), |opt| {
        let store = if opt.comm().rank() == 0 { &store } else { &other };
        checkpoint::load(opt, store, Load::default()).map(drop).unwrap_err()
    });
    assert!(error.to_string().starts_with("ranks disagree on checkpoint to load: "), "{error}");
}

#[test]
fn a_folder_that_vanishes_is_an_error_and_the_next_save_goes() {
    let dir = tempfile::tempdir().unwrap();
    let gone = dir.path().join("gone");
    let store = Store::new(&gone);
    for call in [
        |opt: &mut Optimizer, store: &Store| {
            checkpoint::save(opt, store, Save::default()).map(drop).unwrap_err()
        },
        |opt: &mut Optimizer, store: &Store| {
            checkpoint::load(opt, store, Load::default()).map(drop).unwrap_err()
        },
    ] {
        let Failed { rank, error } = refused(&two(), |opt| call(opt, &store));
        assert!(rank == 0 && error.to_string().contains("gone"), "{error}");
    }
    std::fs::create_dir(&gone).unwrap();
    saved(&two(), &store);
    assert_eq!(store.steps().unwrap(), [3]);
}

/// Loads with every difference refused, then loads the parts that fit.
fn both(
    run: &Run,
    store: &Store,
    other_settings: bool,
) -> (CheckpointError, Vec<String>, Vec<String>, usize) {
    let Failed { error, .. } = refused(run, |opt| {
        checkpoint::load(opt, store, Load { other_settings, ..Load::default() }).map(drop).unwrap_err()
    });
    let ranks = loopback::spawn(run.ranks, |comm| {
        let mut opt = run.build(comm).unwrap();
        let load = Load { partial: true, other_settings: true, ..Load::default() };
        let loaded = checkpoint::load(&mut opt, store, load).unwrap();
        assert_eq!(opt.steps(), 3);
        train(run, &mut opt, 4..6);
        (loaded.missing, loaded.unexpected, loaded.cast.len())
    });
    let (missing, unexpected, cast) = ranks.unwrap().remove(0);
    (error, missing, unexpected, cast)
}

#[test]
fn another_model_is_refused_or_loaded_in_part() {
    let (_, store) = in_memory();
    saved(&Run { ranks: 3, ..Run::default() }, &store);
    let run = |lens: &[usize]| Run { lens: lens.to_vec(), ..two() };
    let (error, missing, unexpected, cast) = both(&run(&[70, 1, 0, 130, 64, 3, 5]), &store, false);
    assert!(error.to_string().contains("p6"), "{error}");
    assert_eq!((missing, unexpected, cast), (vec![name(6)], vec![], 0));
    let (error, missing, unexpected, _) = both(&run(&[70, 1, 0, 130]), &store, false);
    assert_eq!(error, Mismatch::Unexpected { vectors: vec![name(4), name(5)] }.into());
    assert_eq!((missing, unexpected), (vec![], vec![name(4), name(5)]));
    for partial in [false, true] {
        let Failed { error, .. } = refused(&run(&[70, 1, 0, 13, 64, 3]), |opt| {
            checkpoint::load(opt, &store, Load { partial, ..Load::default() }).map(drop).unwrap_err()
        });
        assert_eq!(error, Mismatch::Shape { tensor: name(3), saved: vec![130], here: vec![13] }.into());
    }
}

#[test]
fn other_rules_and_recipes_are_refused_unless_they_are_asked_for() {
    let (_, store) = in_memory();
    saved(&two(), &store);
    // Other vectors of state.
    let (error, missing, unexpected, _) = both(&Run { rule: WhichRule::SgdMomentum, ..two() }, &store, true);
    assert!(
        matches!(&error, CheckpointError::Mismatch(Mismatch::Missing { vectors }) if vectors.len() == 6),
        "{error}"
    );
    assert_eq!((missing.len(), unexpected.len()), (6, 12));
    // Equal vectors, other hyperparameters.
    let Failed { error, .. } = refused(&Run { rule: WhichRule::QhAdamW, ..two() }, |opt| {
        checkpoint::load(opt, &store, Load::default()).map(drop).unwrap_err()
    });
    let CheckpointError::Mismatch(Mismatch::Setting { what, saved: theirs, here }) = &error else {
        panic!("{error}")
    };
    assert_eq!(what, "the rule of \"p0\"");
    assert!(theirs.starts_with("adamw") && theirs != here, "{theirs}");
    // The same rule, other random bits.
    let (_, random) = in_memory();
    let stochastic = |seed| {
        let precision = Precision { rounding: Rounding::Stochastic, seed, ..Precision::default() };
        Run { dtype: DType::BF16, options: Options { precision, ..two().options }, ..two() }
    };
    saved(&stochastic(3), &random);
    let (error, missing, ..) = both(&stochastic(4), &random, false);
    assert!(matches!(error, CheckpointError::Mismatch(Mismatch::Setting { .. })), "{error}");
    assert!(missing.is_empty());
    // f32 into bf16 with masters: both come from the saved f32 values.
    let low =
        Run { dtype: DType::BF16, options: Options { precision: F32_MASTER, ..two().options }, ..two() };
    let (error, missing, unexpected, cast) = both(&low, &store, true);
    assert!(matches!(error, CheckpointError::Mismatch(Mismatch::Missing { .. })), "{error}");
    assert_eq!((missing.len(), unexpected.len(), cast), (6, 0, 12));
    // And back: from the masters, which are more precise than the rounded values.
    let (_, store) = in_memory();
    saved(&low, &store);
    let (error, missing, unexpected, cast) = both(&two(), &store, true);
    assert!(matches!(error, CheckpointError::Mismatch(Mismatch::Unexpected { .. })), "{error}");
    assert_eq!((missing.len(), unexpected.len(), cast), (0, 6, 6));
    let masters = |run: &Run, load: Load| {
        let ranks = loopback::spawn(run.ranks, |comm| {
            let mut opt = run.build(comm).unwrap();
            checkpoint::load(&mut opt, &store, load).unwrap();
            let all = |p: &meshstep_tensor::Param| {
                let state = opt.state(p.name()).unwrap();
                state.master.unwrap_or(state.values).bytes().unwrap().to_vec()
            };
            opt.params().map(all).collect::<Vec<_>>()
        });
        ranks.unwrap()
    };
    let partial = Load { partial: true, other_settings: true, ..Load::default() };
    assert_eq!(masters(&two(), partial), masters(&low, Load::default()));
}

#[test]
fn remainders_of_other_values_do_not_stay() {
    let (_, store) = in_memory();
    saved(&two(), &store);
    let precision = Precision { master: Master::Remainder, ..Precision::default() };
    let run = Run { dtype: DType::BF16, options: Options { precision, ..two().options }, ..two() };
    let partial = Load { partial: true, other_settings: true, ..Load::default() };
    loopback::spawn(run.ranks, |comm| {
        let remainders = |opt: &Optimizer| -> Vec<u16> {
            let of = |p: &meshstep_tensor::Param| {
                opt.state(p.name()).unwrap().master.map(|m| m.typed::<u16>().unwrap().to_vec())
            };
            opt.params().filter_map(of).flatten().collect()
        };
        let mut opt = run.build(comm).unwrap();
        train(&run, &mut opt, 1..4);
        assert!(remainders(&opt).iter().any(|&bits| bits != 0));
        let loaded = checkpoint::load(&mut opt, &store, partial).unwrap();
        assert!(loaded.missing.iter().any(|vector| vector.ends_with(":remainder")), "{:?}", loaded.missing);
        assert!(remainders(&opt).iter().all(|&bits| bits == 0));
    })
    .unwrap();
}
