//! A checkpoint saved by two processes, and loaded by two others at another stage.

use crate::common::gpu_pair::{Rank, Role, finish, minute, play};
use crate::common::gpus::alone;
use crate::common::{F32_MASTER, Gradients, Run};
use crate::cuda::files::{load_and_train, train_and_save};
use crate::whole::{Whole, join};
use meshstep_checkpoint::Store;
use meshstep_comm::loopback;
use meshstep_optim::{DynamicLossScale, LossScale};
use meshstep_shard::{Options, Stage};
use meshstep_tensor::DType;
use std::path::PathBuf;

const ZERO: [Stage; 4] = [Stage::Replicated, Stage::Zero1, Stage::Zero2, Stage::Zero3];

const ROLES: &[Role] = &[("saves", minute, saves), ("loads", minute, loads)];

#[test]
fn one_of_two_ranks() {
    play(ROLES);
}

/// Returns the runs that are saved, each with the run that loads it and the folder.
fn runs() -> impl Iterator<Item = (Run, Run, PathBuf)> {
    let scale = DynamicLossScale { init_scale: 64.0, growth_interval: 2, ..DynamicLossScale::default() };
    let loss_scale = Some(LossScale::Dynamic(scale));
    let folder = PathBuf::from(std::env::var_os("PAIR_FOLDER").unwrap());
    (0..ZERO.len()).map(move |i| {
        let options = Options { loss_scale, bucket_len: Some(150), ..Options::default() };
        let (dtype, options) = match i % 2 {
            0 => (DType::F32, options),
            _ => (DType::BF16, Options { precision: F32_MASTER, ..options }),
        };
        let run = Run { ranks: 2, dtype, options, gradients: Gradients::Equal, ..Run::default() };
        let folder = folder.join(i.to_string());
        std::fs::create_dir_all(&folder).unwrap();
        (run.stage(ZERO[i]), run.stage(ZERO[(i + 2) % 4]), folder)
    })
}

fn saves(rank: &Rank) {
    for (i, (from, _, folder)) in runs().enumerate() {
        let own = train_and_save(rank.comm(), &rank.on_gpu(&from), &Store::new(folder), i % 2 == 1);
        assert!(own == on_loopback(&from).swap_remove(rank.number()), "{:?}", from.options.stage);
    }
}

fn loads(rank: &Rank) {
    for (from, to, folder) in runs() {
        let store = Store::new(folder);
        let own = load_and_train(rank.comm(), &rank.on_gpu(&to), &store);
        let mut loaded = loopback::spawn(2, |comm| load_and_train(comm, &to, &store)).unwrap();
        assert!(own == loaded[rank.number()], "{:?} is not loopback's", to.options.stage);
        // Joined with the other rank's part from loopback, it equals the saved state, at the save and three steps later.
        loaded[rank.number()] = own;
        let (thens, ends): (Vec<_>, Vec<_>) = loaded.into_iter().unzip();
        let (saved, went_on): (Vec<_>, Vec<_>) = on_loopback(&from).into_iter().unzip();
        assert!(join(thens) == join(saved), "{:?} is not what was saved", to.options.stage);
        assert!(join(ends) == join(went_on), "{:?}: three steps later they are apart", to.options.stage);
    }
}

/// Saves a run on loopback. Returns each rank's part, at the save and three steps later.
fn on_loopback(run: &Run) -> Vec<(Whole, Whole)> {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::new(folder.path());
    loopback::spawn(2, |comm| train_and_save(comm, run, &store, false)).unwrap()
}

#[test]
fn two_processes_load_what_two_others_saved() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let folder = [("PAIR_FOLDER", folder.path().to_str().unwrap())];
    finish("saves", &folder);
    finish("loads", &folder);
}
