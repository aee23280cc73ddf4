//! Checkpoints saved on GPUs are loaded on the CPU, and vice versa, and training continues unchanged.

use crate::checkpoint::whole::{Whole, join, part};
use crate::common::gpus::on;
use crate::common::{F32_MASTER, Gradients, Run, STAGES};
use crate::cuda::{alone, room_for, seed, some, stand_in};
use meshstep_comm::Communicator;
use meshstep_optim::{DynamicLossScale, LossScale};
use meshstep_shard::checkpoint::{self, Load, Save, Saver, Store, reshard};
use meshstep_shard::{Optimizer, Options};
use meshstep_tensor::DType;
use std::ops::Range;
use std::sync::Arc;

/// Outcomes are not read, so that a GPU decides steps that the host does not follow.
fn train(run: &Run, opt: &mut Optimizer, steps: Range<u64>) {
    for t in steps {
        run.read_and_hand_over(opt, t, 0).unwrap();
        drop(opt.step(run.at(t)).unwrap());
    }
}

/// Saves, in the `background` while the next steps are taken or before them. Returns this rank's part at the save, and after
/// those steps.
pub(super) fn train_and_save(
    comm: Arc<dyn Communicator>,
    run: &Run,
    store: &Store,
    background: bool,
) -> (Whole, Whole) {
    let mut opt = run.build(comm).unwrap();
    train(run, &mut opt, 1..4);
    let mut saver = Saver::default();
    let saving =
        background.then(|| checkpoint::save_async(&mut opt, &mut saver, store, Save::default()).unwrap());
    if !background {
        checkpoint::save(&mut opt, store, Save::default()).unwrap();
    }
    let then = part(&opt);
    train(run, &mut opt, 4..7);
    saving.map(|saving| saving.join().unwrap());
    (then, part(&opt))
}

fn saved(gpus: bool, run: &Run, store: &Store, background: bool) -> (Whole, Whole) {
    let ends = on(gpus, run, |comm, run| train_and_save(comm, run, store, background));
    let (thens, ends): (Vec<_>, Vec<_>) = ends.into_iter().unzip();
    (join(thens), join(ends))
}

/// Loads, and takes the steps that follow. Returns this rank's part after the load and at the end.
pub(super) fn load_and_train(comm: Arc<dyn Communicator>, run: &Run, store: &Store) -> (Whole, Whole) {
    let mut opt = run.build(comm).unwrap();
    // The device counts steps already.
    train(run, &mut opt, 1..2);
    checkpoint::load(&mut opt, store, Load::default()).unwrap();
    let then = part(&opt);
    train(run, &mut opt, 4..7);
    (then, part(&opt))
}

fn loaded(gpus: bool, run: &Run, store: &Store) -> (Whole, Whole) {
    let ends = on(gpus, run, |comm, run| load_and_train(comm, run, store));
    let (thens, ends): (Vec<_>, Vec<_>) = ends.into_iter().unzip();
    (join(thens), join(ends))
}

#[test]
fn checkpoints_go_between_gpus_and_the_cpu() {
    let _alone = alone();
    if !room_for(4) {
        return;
    }
    let scale = DynamicLossScale { init_scale: 64.0, growth_interval: 2, ..DynamicLossScale::default() };
    let scaled =
        Options { loss_scale: Some(LossScale::Dynamic(scale)), bucket_len: Some(150), ..Options::default() };
    let low = Options { precision: F32_MASTER, ..scaled.clone() };
    for (i, (dtype, options)) in [(DType::F32, scaled), (DType::BF16, low)].into_iter().enumerate() {
        for (s, &stage) in STAGES.iter().enumerate() {
            if stand_in() {
                seed((i * STAGES.len() + s) as u64);
            }
            let run = Run { dtype, options: options.clone(), gradients: Gradients::Equal, ..Run::default() };
            let from = Run { ranks: 4, ..run.clone() }.stage(stage);
            let to = Run { ranks: 2, ..run }.stage(STAGES[(s + 2) % STAGES.len()]);
            let background =
                [(true, false, false), (false, true, false), (true, true, false), (true, false, true)];
            for (gpus, then_gpus, background) in some(&background, i + s, 1) {
                let dir = tempfile::tempdir().unwrap();
                let store = Store::new(dir.path());
                let (then, end) = saved(gpus, &from, &store, background);
                let (here, went_on) = loaded(then_gpus, &to, &store);
                assert!(here == then, "{stage:?} {dtype}: what was loaded is not what was saved");
                assert!(went_on == end, "{stage:?} {dtype}: three steps later they are apart");
            }
        }
    }
}

/// Moves state from the first two of three ranks to the last two, without a file. A mean of two is exact.
fn moved(gpus: bool, from: &Run, to: &Run) -> (Whole, Whole) {
    let ends = on(gpus, &Run { ranks: 3, ..from.clone() }, |via, run| {
        let among = |ranks: Range<usize>| via.split(ranks.contains(&via.rank()).then_some(0), 0).unwrap();
        let (old, new) = (among(0..2), among(1..3));
        let own = |run: &Run, there: &Run| Run {
            options: Options { queue: run.options.queue.clone(), ..there.options.clone() },
            ..there.clone()
        };
        let mut old = old.map(|comm| own(run, from).build(comm).unwrap());
        old.iter_mut().for_each(|opt| train(&own(run, from), opt, 1..4));
        let to = own(run, to);
        let mut new = new.map(|comm| to.build(comm).unwrap());
        new.iter_mut().for_each(|opt| train(&to, opt, 1..2));
        reshard(&via, old.as_mut(), new.as_mut()).unwrap();
        new.map(|mut opt| {
            let then = part(&opt);
            train(&to, &mut opt, 4..7);
            (then, part(&opt))
        })
    });
    let (thens, ends): (Vec<_>, Vec<_>) = ends.into_iter().flatten().unzip();
    (join(thens), join(ends))
}

#[test]
fn optimizers_move_between_gpus() {
    let _alone = alone();
    if !room_for(3) {
        return;
    }
    for (i, (dtype, precision)) in crate::cuda::PRECISIONS.into_iter().enumerate() {
        if stand_in() {
            seed(i as u64);
        }
        let grads = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let options = Options { precision, bucket_len: Some(150), ..Options::default() };
        let run = Run { dtype, grads, options, gradients: Gradients::Equal, ..Run::default() };
        let from = Run { ranks: 2, ..run.clone() }.stage(STAGES[i % STAGES.len()]);
        let to = Run { ranks: 2, ..run }.stage(STAGES[(i + 2) % STAGES.len()]);
        let dir = tempfile::tempdir().unwrap();
        let (then, end) = saved(false, &from, &Store::new(dir.path()), false);
        let (here, went_on) = moved(true, &from, &to);
        assert!(here == then, "{dtype} {i}: what has come is not what was there");
        assert!(went_on == end, "{dtype} {i}: three steps later they are apart");
    }
}
