//! Evaluation on GPUs: loopback's values, and steps that go on with loopback's bits.

use crate::common::gpus::on_ranks;
use crate::common::{Gradients, PRECISIONS, Run, STAGES};
use crate::cuda::{alone, room_for, some};
use crate::evaluation::{on_rank, run_of};
use meshstep_comm::loopback;

#[test]
fn gpus_evaluate_at_the_point_of_loopback() {
    let _alone = alone();
    if !room_for(2) {
        return;
    }
    for (i, stage) in STAGES.into_iter().enumerate() {
        for recipe in some(&PRECISIONS, 3 * i, 3) {
            let run = Run { ranks: 2, ..run_of(recipe, Gradients::Equal).stage(stage) };
            let here = loopback::spawn(2, |comm| on_rank(comm, &run, &[0, 1, 3]).unwrap()).unwrap();
            let there = on_ranks(&run, |comm, run| on_rank(comm, run, &[0, 1, 3]).unwrap());
            assert_eq!(there, here, "{recipe:?} at {stage:?}");
        }
    }
}
