//! Checkpoints of a module's parameters, loaded onto other numbers of ranks.

use crate::common::{Mlp, applied, at, bits, on_ranks, options, sharded};
use meshstep_checkpoint::{self as checkpoint, Load, Save, Store};
use meshstep_shard::Stage;

#[test]
fn a_checkpoint_of_four_ranks_goes_on_on_three() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::new(dir.path());
    let run = |ranks: usize, stage, load: bool, steps: std::ops::Range<u64>, save: bool| {
        let finals = on_ranks(ranks, |comm| {
            let mut model = Mlp::new(if load { 8 } else { 1 });
            let mut opt = sharded(comm, &mut model, options(stage)).unwrap();
            let before = bits(&model);
            if load {
                checkpoint::load(&mut opt.with_model(&mut model), &store, Load::default()).unwrap();
                assert_ne!(bits(&model), before, "the module has the loaded values");
            }
            for step in steps.clone() {
                let loss = model.loss(step);
                applied(opt.backward_step(&mut model, loss, at()));
            }
            if save {
                checkpoint::save(&mut opt.with_model(&mut model), &store, Save::default()).unwrap();
            }
            bits(&model)
        });
        assert!(finals.iter().all(|rank| rank == &finals[0]));
        finals.into_iter().next().unwrap()
    };
    // Equal batches: every number of ranks has the same mean.
    let whole = run(4, Stage::Zero2, false, 0..6, false);
    let saved = run(4, Stage::Zero2, false, 0..3, true);
    assert_eq!(run(3, Stage::Zero1, true, 3..3, false), saved);
    assert_eq!(run(4, Stage::Zero2, true, 3..6, false), whole);
    assert_eq!(run(2, Stage::Zero1, true, 3..6, false), whole);
    assert_eq!(run(1, Stage::Replicated, true, 3..6, false), whole);
    // A mean over three ranks rounds, so three go on with bits of their own, at every stage the same.
    let three = run(3, Stage::Zero2, true, 3..6, false);
    assert_eq!(three, run(3, Stage::Replicated, true, 3..6, false));
    // Saved on three ranks after that step, the run goes on on four.
    let again = run(3, Stage::Zero1, true, 3..4, true);
    assert_eq!(run(4, Stage::Zero2, true, 4..4, false), again);
}
