//! Preludes of all crates are imported together: no name is ambiguous, and another crate's `Error` keeps its name.

#![allow(
    unused_imports,
    reason = "the shard prelude contains the others, which must be importable beside it"
)]

use meshstep_comm::prelude::*;
use meshstep_optim::prelude::*;
use meshstep_shard::prelude::*;
use meshstep_tensor::prelude::*;
use std::error::*;
use std::sync::Arc;

/// Ambiguous if a prelude exports an `Error`.
fn trained(comm: Arc<dyn Communicator>) -> Result<Vec<f32>, Box<dyn Error + Send + Sync>> {
    let layout = Layout::builder().param("w", &[2], DType::F32).build()?;
    let rules: Groups = Sgd { form: Momentum::default(), ..Sgd::default() }.into();
    let precision =
        Precision { master: Master::None, moments: Moments::Full, rounding: Rounding::Nearest, seed: 0 };
    let options = Options {
        stage: Stage::Zero1,
        combine: Combine::Mean,
        missing: Missing::Error,
        non_finite: NonFinite::Skip,
        initial: Initial::Broadcast,
        clip: Clip::AfterReduce,
        norm: Norm::L2,
        queue: Queue::cpu(),
        meter: Meter::new(),
        precision,
        ..Options::default()
    };
    let ones = |p: &Param, mut out: SliceMut<'_>| out.copy_from(Slice::from(&vec![1f32; p.len()]));
    let mut opt = Optimizer::new(comm, layout, rules, ones, options)?;
    let mb: MicroBatch<'_> = opt.micro_batch(1)?;
    let mut slot: Slot<'_> = mb.slot("w")?;
    slot.as_mut()?.copy_from(Slice::from(&[0.5f32, 1.0]))?;
    slot.fill()?;
    mb.finish()?;
    let pending: Pending = opt.step(StepArgs { lr: 1.0, ..StepArgs::default() })?;
    assert!(matches!(pending.outcome()?, Outcome::Applied { .. }));
    Ok(opt.param("w")?.typed::<f32>()?.to_vec())
}

#[test]
fn a_loop_needs_the_preludes_alone() {
    let ranks = loopback::spawn(2, trained).unwrap();
    ranks.into_iter().for_each(|w| assert_eq!(w.unwrap(), [0.5, 0.0]));
}
