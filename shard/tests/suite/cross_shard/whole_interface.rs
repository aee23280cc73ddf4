//! Replicas in groups support an optimizer's whole interface: more parameters, tied names, minimization, verification.

use meshstep_comm::{Communicator, loopback};
use meshstep_optim::{AdamW, Sgd};
use meshstep_shard::{CrossShard, Error, Options, Outcome, Stage, Step, StepArgs, Until};
use meshstep_tensor::{DType::F32, Layout, Param, Slice, SliceMut};
use std::sync::Arc;

const GROUPS: [[usize; 2]; 2] = [[0, 2], [1, 3]];

fn layout(name: &str) -> Layout {
    Layout::builder().param(name, &[3], F32).build().unwrap()
}

fn replicas(world: Arc<dyn Communicator>) -> CrossShard {
    let options = Options { stage: Stage::Replicated, ..Options::default() };
    let groups = GROUPS.map(|group| group.to_vec());
    CrossShard::new(world, Some(&groups), layout("w"), AdamW::default(), |_, _| Ok(()), options).unwrap()
}

fn step(opt: &mut CrossShard, grads: &[(&str, f32)]) {
    let mb = opt.micro_batch(1).unwrap();
    grads.iter().for_each(|(name, value)| mb.grad(name, &[*value; 3][..]).unwrap());
    mb.finish().unwrap();
    let outcome = opt.step(StepArgs::default()).unwrap().outcome().unwrap();
    assert!(matches!(outcome, Outcome::Applied { .. }), "{outcome:?}");
}

fn values(opt: &CrossShard, name: &str) -> Vec<f32> {
    opt.param(name).unwrap().typed::<f32>().unwrap().to_vec()
}

/// Groups that have diverged keep their values; added parameters start equal in all groups.
#[test]
fn parameters_are_added_to_groups_that_are_apart() {
    let ends = loopback::spawn(4, |world| {
        let rank = world.rank();
        let mut opt = replicas(world);
        step(&mut opt, &[("w", if rank % 2 == 0 { 1.0 } else { -1.0 })]);
        let before = values(&opt, "w");
        let first = |_: &Param, mut to: SliceMut<'_>| to.copy_from(Slice::from(&[rank as f32 + 7.0; 3][..]));
        opt.add_param_group(layout("b"), Sgd::default(), first).unwrap();
        assert_eq!((values(&opt, "w"), values(&opt, "b")), (before.clone(), vec![7.0; 3]));
        opt.also_called("head", "b").unwrap();
        step(&mut opt, &[("w", 0.5), ("head", 1.0)]);
        assert_eq!(values(&opt, "head"), [7.0 - 1e-3; 3]);
        // Another layout on one rank is an error on every rank, and nothing is added.
        let odd = layout(if rank == 1 { "c" } else { "d" });
        let told = opt.add_param_group(odd, Sgd::default(), |_, _| Ok(())).unwrap_err();
        assert!(matches!(told, Error::Disagree { rank: 1, .. }), "{told}");
        // A step that is due in one group refuses the call in all groups, and ends no rank.
        if rank % 2 == 1 {
            opt.micro_batch(1).unwrap().finish().unwrap();
        }
        let due = opt.add_param_group(layout("e"), Sgd::default(), |_, _| Ok(())).unwrap_err();
        assert!(matches!(due, Error::StepDue | Error::Disagree { .. }), "{due}");
        if rank % 2 == 1 {
            opt.discard_gradients().unwrap();
        }
        let taken = opt.add_param_group(layout("w"), Sgd::default(), |_, _| Ok(())).unwrap_err();
        assert!(matches!(taken, Error::NameTaken { .. }), "{taken}");
        step(&mut opt, &[("w", 0.5), ("b", 1.0)]);
        before
    });
    let ends = ends.unwrap();
    assert_eq!((&ends[0], &ends[1]), (&ends[2], &ends[3]));
    assert_ne!(ends[0], ends[1]);
}

/// Each group reaches its own minimum.
#[test]
fn a_group_minimizes_its_own_loss() {
    let ends = loopback::spawn(4, |world| {
        let target = if world.rank() % 2 == 0 { 3.0 } else { -5.0 };
        let mut opt = replicas(world);
        let until = Until { max_iter: 4000, ..Until::default() };
        let run = opt.minimize(
            until,
            |_| StepArgs { lr: 0.02, ..StepArgs::default() },
            1,
            |mb| {
                let w = mb.param("w")?.typed::<f32>()?;
                let grad: Vec<f32> = w.iter().map(|w| w - target).collect();
                mb.grad("w", &grad[..])?;
                Ok::<_, Error>(w.iter().map(|w| f64::from(w - target).powi(2) / 2.0).sum())
            },
        );
        assert!(run.unwrap().loss < 1e-2);
        (values(&opt, "w")[0] - target).abs()
    });
    assert!(ends.unwrap().iter().all(|apart| *apart < 0.1));
}
