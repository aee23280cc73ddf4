//! Replicas in groups: bytes of one rank, and whole values of one group.

use meshstep_checkpoint as checkpoint;
use meshstep_comm::{Communicator, loopback};
use meshstep_optim::AdamW;
use meshstep_shard::{CrossShard, Options, Outcome, Stage, Step, StepArgs};
use meshstep_tensor::{DType::F32, Layout};
use std::sync::Arc;

const GROUPS: [[usize; 2]; 2] = [[0, 2], [1, 3]];

fn replicas(world: Arc<dyn Communicator>) -> CrossShard {
    let options = Options { stage: Stage::Replicated, ..Options::default() };
    let layout = Layout::builder().param("w", &[3], F32).build().unwrap();
    let groups = GROUPS.map(|group| group.to_vec());
    CrossShard::new(world, Some(&groups), layout, AdamW::default(), |_, _| Ok(()), options).unwrap()
}

fn step(opt: &mut CrossShard, grad: f32) {
    let mb = opt.micro_batch(1).unwrap();
    mb.grad("w", &[grad; 3]).unwrap();
    mb.finish().unwrap();
    let outcome = opt.step(StepArgs::default()).unwrap().outcome().unwrap();
    assert!(matches!(outcome, Outcome::Applied { .. }), "{outcome:?}");
}

fn values(opt: &CrossShard) -> Vec<f32> {
    opt.param("w").unwrap().typed::<f32>().unwrap().to_vec()
}

/// Bytes of a rank, whole values of a group, and a bit flipped in one of its replicas.
#[test]
fn a_group_is_compared_brought_together_and_serialized() {
    loopback::spawn(4, |world| {
        let rank = world.rank();
        let mut opt = replicas(world);
        step(&mut opt, if rank % 2 == 0 { 1.0 } else { -1.0 });
        let (bytes, then) = (checkpoint::serialize(&mut opt).unwrap(), values(&opt));
        let mut brought = Vec::new();
        checkpoint::consolidate(&mut opt, 1, &mut |part| {
            brought.push(format!("{} {}", part.param, part.slot));
            Ok(())
        })
        .unwrap();
        let all = ["w param", "w m", "w v"];
        assert_eq!(brought, if rank < 2 { &[][..] } else { &all[..] });
        step(&mut opt, 0.5);
        assert_ne!(values(&opt), then);
        checkpoint::deserialize(&mut opt, &bytes).unwrap();
        assert_eq!((values(&opt), opt.optimizer().steps()), (then, 1));
        opt.verify().unwrap();
        opt.verify_every(1).unwrap();
        step(&mut opt, 0.5);
        assert_eq!(opt.optimizer().verified().map(|verified| verified.compared), Some(3));
    })
    .unwrap();
}
