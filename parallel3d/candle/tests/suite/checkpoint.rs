//! Checkpoints of sharded variables, loaded onto other numbers of ranks.

use crate::common::{Mlp, applied, at, bits, on_ranks, options, sharded};
use meshstep_checkpoint::{self as checkpoint, Load, Save, Store};
use meshstep_shard::Stage;

#[test]
fn a_checkpoint_of_two_ranks_goes_on_on_four() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::new(dir.path());
    let run = |ranks: usize, stage, load: bool, steps: std::ops::Range<u64>, save: bool| {
        let finals = on_ranks(ranks, |comm| {
            let mlp = Mlp::new(if load { 8 } else { 1 });
            let mut opt = sharded(comm, mlp.vars(), options(stage)).unwrap();
            let before = bits(&opt);
            if load {
                checkpoint::load(&mut opt, &store, Load::default()).unwrap();
                assert_ne!(bits(&opt), before, "the variables have the loaded values");
            }
            for step in steps.clone() {
                applied(opt.backward_step(&mlp.loss(step).unwrap(), at()));
            }
            if save {
                checkpoint::save(&mut opt, &store, Save::default()).unwrap();
            }
            bits(&opt)
        });
        assert!(finals.iter().all(|rank| rank == &finals[0]));
        finals.into_iter().next().unwrap()
    };
    let whole = run(2, Stage::Zero2, false, 0..6, false);
    let saved = run(2, Stage::Zero2, false, 0..3, true);
    assert_eq!(run(4, Stage::Zero1, true, 3..3, false), saved);
    assert_eq!(run(4, Stage::Zero1, true, 3..6, false), whole);
    assert_eq!(run(1, Stage::Replicated, true, 3..6, false), whole);
}
