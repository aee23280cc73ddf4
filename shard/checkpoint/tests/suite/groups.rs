//! Groups of replicas resume from their own group's checkpoint, bit for bit; equal groups resume on any layout.

use crate::failures::failed;
use crate::whole::{Whole, join, part};
use meshstep_checkpoint::{self as checkpoint, CheckpointError, Load, Save, Saver, Store};
use meshstep_checkpoint_cases::Sim;
use meshstep_comm::{Communicator, loopback::spawn};
use meshstep_optim::{AdamW, DynamicLossScale, LossScale};
use meshstep_shard::{CrossShard, Error, Fault, MicroBatch, Optimizer, Options, Stage, Step, StepArgs};
use meshstep_tensor::{DType, Layout, Param, Slice, SliceMut};
use std::collections::BTreeMap;
use std::sync::Arc;

const NAMES: [(&str, usize); 3] = [("w", 37), ("b", 1), ("none", 0)];

fn layout() -> Layout {
    let add = |layout: meshstep_tensor::LayoutBuilder, (name, len): (&str, usize)| {
        layout.param(name, &[len], DType::F32)
    };
    NAMES.into_iter().fold(Layout::builder(), add).frozen("still", &[3], DType::F32).build().unwrap()
}

fn first(param: &Param, mut values: SliceMut<'_>) -> Result<(), meshstep_tensor::Error> {
    let own: Vec<f32> = (0..param.len()).map(|i| (i as f32 * 0.7).sin()).collect();
    values.copy_from(Slice::from(&own[..]))
}

fn options(stage: Stage) -> Options {
    let scale = DynamicLossScale { init_scale: 8.0, growth_interval: 2, ..DynamicLossScale::default() };
    Options { stage, loss_scale: Some(LossScale::Dynamic(scale)), ..Options::default() }
}

fn build(world: Arc<dyn Communicator>, groups: &[Vec<usize>]) -> CrossShard {
    CrossShard::new(world, Some(groups), layout(), AdamW::default(), first, options(Stage::Replicated))
        .unwrap()
}

/// Sets the gradients of one step of a group, the same on all of its ranks.
fn grads(mb: &MicroBatch<'_>, t: u64, group: usize, overflow: bool) {
    for (name, len) in NAMES {
        let scale = mb.loss_scale() as f32;
        let value = |i: usize| ((i + 1) as f32 * (t as f32 + 0.3) + group as f32).sin() * scale;
        let mut grad: Vec<f32> = (0..len).map(value).collect();
        if let Some(value) = grad.first_mut().filter(|_| overflow) {
            *value = f32::INFINITY;
        }
        mb.grad(name, &grad[..]).unwrap();
    }
}

const AT: StepArgs = StepArgs { lr: 0.01, max_norm: Some(1.0), grad_scale: 1.0 };

fn step(opt: &mut CrossShard, t: u64, group: usize, overflow: bool) {
    let mb = opt.micro_batch(1).unwrap();
    grads(&mb, t, group, overflow);
    mb.finish().unwrap();
    let _ = opt.step(AT).unwrap().outcome().unwrap();
}

/// Takes three further steps.
fn on_from(opt: &mut CrossShard, group: usize) -> Whole {
    (11..14).for_each(|t| step(opt, t, group, false));
    part(opt.optimizer())
}

/// Returns the group of a rank.
fn of(groups: &[Vec<usize>], rank: usize) -> usize {
    groups.iter().position(|ranks| ranks.contains(&rank)).unwrap()
}

/// Returns the value of each group; it must be the same on all ranks of a group.
fn by_group<T: PartialEq + std::fmt::Debug>(ends: Vec<(usize, T)>) -> BTreeMap<usize, T> {
    let mut groups = BTreeMap::new();
    for (group, end) in ends {
        let known = groups.entry(group).or_insert(None);
        assert!(known.as_ref().is_none_or(|known| *known == end), "ranks of group {group} are apart");
        *known = Some(end);
    }
    groups.into_iter().map(|(group, end)| (group, end.unwrap())).collect()
}

fn store() -> Store {
    Store::on(Arc::new(Sim::new("/run")), "/run")
}

/// Takes steps that let the groups diverge: in values and steps, and the second also in a skip, a loss scale and `t`.
fn part_ways(opt: &mut CrossShard, group: usize) {
    (1..4).for_each(|t| step(opt, t, group, group == 1 && t == 2));
    if group == 1 {
        step(opt, 4, group, true);
    }
}

#[test]
fn groups_that_have_parted_go_on_each_from_its_own() {
    let saved_on = [vec![0, 2], vec![3, 1]];
    for background in [false, true] {
        let store = store();
        let ends = spawn(4, |world| {
            let (rank, group) = (world.rank(), of(&saved_on, world.rank()));
            let mut opt = build(world, &saved_on);
            part_ways(&mut opt, group);
            assert!(
                matches!(
                    checkpoint::save(&mut opt, &store, Save::default()),
                    Err(checkpoint::Error::Shard(Error::Disagree { .. }))
                ),
                "other steps"
            );
            let own = [rank as u8];
            let save = Save { step: Some(3), own_blobs: vec![("rank", &own)], ..Save::default() };
            let then = part(opt.optimizer());
            let mut saver = Saver::default();
            let saving = match background {
                true => Some(checkpoint::save_async(&mut opt, &mut saver, &store, save).unwrap()),
                false => checkpoint::save(&mut opt, &store, save).map(|_| None).unwrap(),
            };
            let end = on_from(&mut opt, group);
            saving.map(|saving| saving.join().unwrap());
            (group, (then, end))
        });
        let expected = by_group(ends.unwrap());
        assert_ne!(expected[&0], expected[&1]);
        let saved = store.latest().unwrap();
        saved.verify().unwrap();
        assert_eq!(saved.manifest().mesh, "groups=2,ranks=2");
        assert!(saved.manifest().tensors.contains_key("group.1/none"));
        for groups in [&[vec![0], vec![1]][..], &saved_on, &[vec![5, 0, 3], vec![1, 4, 2]]] {
            let ends = spawn(groups.len() * groups[0].len(), |world| {
                let (rank, group) = (world.rank(), of(groups, world.rank()));
                let mut opt = build(world, groups);
                step(&mut opt, 1, group, false);
                let loaded = checkpoint::load(&mut opt, &store, Load::default()).unwrap();
                assert!(loaded.missing.is_empty() && loaded.unexpected.is_empty());
                let own = loaded.own_blobs.get("rank").map(|bytes| bytes[0]);
                assert_eq!(own, (rank < 4).then_some(rank as u8));
                let then = part(opt.optimizer());
                (group, (then, on_from(&mut opt, group)))
            });
            assert!(by_group(ends.unwrap()) == expected, "{groups:?}");
        }
    }
}

/// Returns the state of a single optimizer that takes the steps all groups took.
fn alone(ranks: usize, stage: Stage, then: impl Fn(&mut Optimizer) + Sync) -> Whole {
    let ends = spawn(ranks, |comm| {
        let mut opt = Optimizer::new(comm, layout(), AdamW::default(), first, options(stage)).unwrap();
        then(&mut opt);
        part(&opt)
    });
    join(ends.unwrap())
}

fn alone_step(opt: &mut Optimizer, t: u64) {
    let mb = opt.micro_batch(1).unwrap();
    grads(&mb, t, 0, false);
    mb.finish().unwrap();
    opt.step(AT).unwrap().outcome().unwrap();
}

#[test]
fn groups_that_are_alike_are_saved_once_and_go_onto_anything() {
    let (store, groups) = (store(), [vec![0, 1], vec![2, 3]]);
    let ends = spawn(4, |world| {
        let mut opt = build(world, &groups);
        (1..4).for_each(|t| step(&mut opt, t, 0, false));
        assert_eq!(checkpoint::save(&mut opt, &store, Save::default()).unwrap(), 3);
        on_from(&mut opt, 0)
    });
    let end = join(ends.unwrap());
    let saved = store.latest().unwrap();
    let names: Vec<_> = saved.manifest().tensors.keys().map(String::as_str).collect();
    assert_eq!(names, ["b", "none", "still", "w"]);
    for groups in [&[vec![0], vec![1], vec![2]][..], &[vec![1, 0, 2]]] {
        let ends = spawn(3, |world| {
            let mut opt = build(world, groups);
            checkpoint::load(&mut opt, &store, Load::default()).unwrap();
            on_from(&mut opt, 0)
        });
        assert!(join(ends.unwrap()) == end, "{groups:?}");
    }
    for stage in [Stage::Zero2, Stage::Replicated] {
        let on_from = alone(3, stage, |opt| {
            checkpoint::load(opt, &store, Load::default()).unwrap();
            (11..14).for_each(|t| alone_step(opt, t));
        });
        assert!(on_from == end, "{stage:?}");
    }
}

#[test]
fn what_one_optimizer_saved_goes_into_every_group() {
    let (store, groups) = (store(), [vec![0], vec![1], vec![2]]);
    let end = alone(2, Stage::Zero1, |opt| {
        (1..3).for_each(|t| alone_step(opt, t));
        checkpoint::save(opt, &store, Save::default()).unwrap();
        (11..14).for_each(|t| alone_step(opt, t));
    });
    let ends = spawn(3, |world| {
        let mut opt = build(world, &groups);
        checkpoint::load(&mut opt, &store, Load::default()).unwrap();
        on_from(&mut opt, 0)
    });
    assert!(join(ends.unwrap()) == end);
}

#[test]
fn groups_that_have_parted_go_into_no_other_number_until_they_are_one() {
    // Rank 0, which writes state shared by all ranks, is in the first group or in the last.
    for two in [[vec![0, 1], vec![2, 3]], [vec![2, 3], vec![0, 1]]] {
        let (store, three) = (store(), [vec![0], vec![1], vec![2]]);
        let ends = spawn(4, |world| {
            let (number, mut opt) = (of(&two, world.rank()), build(world, &two));
            part_ways(&mut opt, number);
            checkpoint::save(&mut opt, &store, Save { step: Some(1), ..Save::default() }).unwrap();
            opt.synchronize_state().unwrap();
            checkpoint::save(&mut opt, &store, Save { step: Some(2), ..Save::default() }).unwrap();
            (number, part(opt.optimizer()))
        });
        let saved = by_group(ends.unwrap());
        let told = spawn(3, |world| {
            let (group, mut opt) = (world.rank(), build(world, &three));
            step(&mut opt, 1, group, false);
            let before = part(opt.optimizer());
            let load = |step| Load { step: Some(step), ..Load::default() };
            let told = failed(checkpoint::load(&mut opt, &store, load(1)).map(drop).unwrap_err());
            assert!(part(opt.optimizer()) == before, "a refusal has changed something");
            step(&mut opt, 2, group, false);
            checkpoint::load(&mut opt, &store, load(2)).unwrap();
            // The first group's steps and loss scale.
            assert!(part(opt.optimizer()) == saved[&0]);
            told.error
        });
        assert_eq!(told.unwrap(), vec![CheckpointError::Groups { saved: 2, here: 3 }; 3]);
        // Values were saved once, with each group's loss scale.
        assert_ne!(saved[&0].loss_scale, saved[&1].loss_scale);
        let ends = spawn(2, |world| {
            let (group, mut opt) = (world.rank(), build(world, &[vec![0], vec![1]]));
            checkpoint::load(&mut opt, &store, Load::default()).unwrap();
            (group, part(opt.optimizer()))
        });
        assert!(by_group(ends.unwrap()) == saved);
    }
}

/// One rank is in the middle of a step: this is an error on all ranks, and steps can go on.
#[test]
fn a_rank_that_is_not_ready_is_told_of_in_all_groups() {
    let (store, groups) = (store(), [vec![0, 1], vec![2, 3]]);
    let told = spawn(4, |world| {
        let (rank, group) = (world.rank(), of(&groups, world.rank()));
        let mut opt = build(world, &groups);
        if rank == 2 {
            grads(&opt.accumulate(1).unwrap(), 1, group, false);
        }
        let checkpoint::Error::Shard(told) = checkpoint::save(&mut opt, &store, Save::default()).unwrap_err()
        else {
            panic!("no rank has begun to write")
        };
        assert!(store.latest().is_err());
        matches!(told, Error::Disagree { .. } | Error::Fault { fault: Fault::Unfinished, .. }) || rank == 2
    });
    assert_eq!(told.unwrap(), [true; 4]);
}
