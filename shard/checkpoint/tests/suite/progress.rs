//! Progress that belongs to no parameter survives every way to continue: loss scale, schedule, skips in a row, random bits, blobs.

use crate::layouts::DIR;
use crate::whole::{Whole, join, part};
use meshstep_checkpoint::{self as checkpoint, Load, Save, Saver, Store, reshard};
use meshstep_checkpoint_cases::Sim;
use meshstep_comm::{Communicator, loopback::spawn};
use meshstep_optim::schedule::{Cosine, Schedule};
use meshstep_optim::{AdamW, DynamicLossScale, LossScale, Rounding};
use meshstep_shard::{Optimizer, Options, Outcome, Precision, Stage, StepArgs};
use meshstep_tensor::{DType, Layout, Meter, Param, Slice, SliceMut};
use std::ops::Range;
use std::sync::Arc;

/// Way by which a run on ranks 0 and 1 continues on other ranks of four.
#[derive(Clone, Copy, Debug)]
enum Way {
    Saved,
    Background,
    Bytes,
    Moved,
}

/// Overflows cause two skips in a row up to step 5, the last before the save, and in all steps from 7 on.
fn overflows(t: u64) -> bool {
    [2, 4, 5].contains(&t) || t >= 7
}

fn build(comm: Arc<dyn Communicator>, loss_scale: LossScale, stage: Stage) -> Optimizer {
    let layout = Layout::builder().param("w", &[61], DType::BF16).param("b", &[3], DType::BF16);
    let first = |param: &Param, mut values: SliceMut<'_>| {
        let own: Vec<f32> = (0..param.len()).map(|i| (i as f32 * 0.7).sin()).collect();
        values.cast_from(Slice::from(&own[..]))
    };
    let options = Options {
        stage,
        loss_scale: Some(loss_scale),
        schedule: Some(Schedule::new(0.01, Cosine::new(2, 12)).unwrap()),
        precision: Precision { rounding: Rounding::Stochastic, seed: 7, ..Precision::default() },
        grads: Some(DType::F32),
        max_skips: 3,
        meter: Meter::new(),
        ..Options::default()
    };
    Optimizer::new(comm, layout.build().unwrap(), AdamW::default(), first, options).unwrap()
}

/// Takes steps up to the first error; returns the outcome of each step, and the next loss scale.
fn trace(opt: &mut Optimizer, steps: Range<u64>) -> Vec<String> {
    let mut told = Vec::new();
    for t in steps {
        let mb = opt.micro_batch(1).unwrap();
        let scale = mb.loss_scale() as f32;
        for (name, len) in [("w", 61), ("b", 3)] {
            let value = |i: usize| ((i + 1) as f32 * (t as f32 + 0.3)).sin() * scale;
            let mut grad: Vec<f32> = (0..len).map(value).collect();
            grad[0] = if overflows(t) { f32::INFINITY } else { grad[0] };
            mb.grad(name, &grad[..]).unwrap();
        }
        mb.finish().unwrap();
        let at = StepArgs { max_norm: Some(1.0), ..opt.scheduled().unwrap() };
        let outcome = opt.step(at).and_then(|step| step.outcome());
        let came = match &outcome {
            Ok(Outcome::Applied { norm, .. }) => format!("applied with {norm}"),
            Ok(_) => "skipped".to_owned(),
            Err(error) => error.to_string(),
        };
        told.push(format!("{t}: {came} at {}, next {:?}", at.lr, opt.loss_scale_state()));
        if outcome.is_err() {
            break;
        }
    }
    told
}

/// Runs on ranks 0 and 1, uninterrupted and continued; returns the outcomes of both.
fn both(way: Way, loss_scale: LossScale, to: Range<usize>) -> [(Vec<String>, Whole); 2] {
    let store = Store::on(Arc::new(Sim::new(DIR)), DIR);
    let ends = spawn(4, |via| {
        let among = |ranks: Range<usize>| via.split(ranks.contains(&via.rank()).then_some(0), 0).unwrap();
        let mut old = among(0..2).map(|comm| build(comm, loss_scale, Stage::Zero2));
        let stage = if let Way::Bytes = way { Stage::Zero2 } else { Stage::Zero1 };
        let mut new = among(to.clone()).map(|comm| build(comm, loss_scale, stage));
        old.iter_mut().for_each(|opt| assert_eq!(trace(opt, 1..6).len(), 5));
        new.iter_mut().for_each(|opt| assert_eq!(trace(opt, 1..2).len(), 1));
        let mut bytes = [via.rank() as u8; 3];
        let save =
            Save { blobs: vec![("job", b"of all")], own_blobs: vec![("rng", &bytes)], ..Save::default() };
        let (mut saver, mut saving) = (Saver::default(), None);
        match (way, &mut old) {
            (Way::Saved, Some(opt)) => _ = checkpoint::save(opt, &store, save).unwrap(),
            (Way::Background, Some(opt)) => {
                saving = Some(checkpoint::save_async(opt, &mut saver, &store, save).unwrap())
            }
            (Way::Bytes, Some(opt)) => {
                let bytes = checkpoint::serialize(opt).unwrap();
                checkpoint::deserialize(new.as_mut().unwrap(), &bytes).unwrap();
            }
            (Way::Moved, _) => _ = reshard(&via, old.as_mut(), new.as_mut()).unwrap(),
            _ => {}
        }
        // The caller's bytes may change at once.
        bytes.fill(255);
        let end = |opt: &mut Option<Optimizer>| opt.as_mut().map(|opt| (trace(opt, 6..20), part(opt)));
        let went_on = end(&mut old);
        saving.map(|saving| saving.join().unwrap());
        via.barrier().unwrap();
        if let (Way::Saved | Way::Background, Some(opt)) = (way, &mut new) {
            let loaded = checkpoint::load(opt, &store, Load::default()).unwrap();
            assert_eq!(loaded.blobs["job"], b"of all");
            assert_eq!(loaded.saved.blob_of("rng", 1), Ok(Some(vec![1; 3])));
        }
        [went_on, end(&mut new)]
    });
    let mut sides = [Vec::new(), Vec::new()];
    for rank in ends.unwrap() {
        sides.iter_mut().zip(rank).for_each(|(side, end)| side.extend(end));
    }
    sides.map(|side| {
        let (mut told, parts): (Vec<_>, Vec<_>) = side.into_iter().unzip();
        assert!(told.iter().all(|all| *all == told[0]));
        (told.remove(0), join(parts))
    })
}

#[test]
fn a_run_goes_on_where_it_was_whatever_way_it_went() {
    let falls = DynamicLossScale {
        init_scale: 1024.0,
        growth_interval: 2,
        hysteresis: 3,
        min_scale: 256.0,
        ..DynamicLossScale::default()
    };
    for loss_scale in [LossScale::Dynamic(falls), LossScale::Static(8.0)] {
        for (way, to) in [(Way::Saved, 1..4), (Way::Background, 3..4), (Way::Bytes, 0..2), (Way::Moved, 1..4)]
        {
            let [went_on, again] = both(way, loss_scale, to);
            assert_eq!(went_on.0, again.0, "{way:?}");
            assert!(went_on.1 == again.1, "{way:?}: values are apart");
            let (last, skips) = (went_on.0.last().unwrap(), went_on.0.len());
            assert!(last.contains("in a row") && (4..12).contains(&skips), "{:?}", went_on.0);
        }
    }
}

/// The third skip in a row is one too many; two of them come before the save.
#[test]
fn skips_before_and_after_are_in_a_row() {
    let store = Store::on(Arc::new(Sim::new(DIR)), DIR);
    let told = spawn(2, |comm| {
        let make = || build(Arc::clone(&comm), LossScale::Static(8.0), Stage::Zero1);
        let mut opt = make();
        // Steps 4 and 5, twice.
        assert_eq!(trace(&mut opt, 4..6).len(), 2);
        checkpoint::save(&mut opt, &store, Save::default()).unwrap();
        let mut again = make();
        checkpoint::load(&mut again, &store, Load::default()).unwrap();
        [trace(&mut opt, 7..12), trace(&mut again, 7..12), trace(&mut make(), 7..12)].map(|told| told.len())
    });
    let [went_on, again, anew] = told.unwrap()[0];
    assert!(went_on == again && again + 2 == anew, "{went_on}, {again}, {anew}");
}
