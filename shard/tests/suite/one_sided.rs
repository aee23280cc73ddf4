//! Different calls on two ranks: the error of each rank names both calls.

use crate::common::{STAGES, adamw};
use meshstep_comm::loopback;
use meshstep_shard::{Error, Optimizer, Options, StepArgs};
use meshstep_tensor::{DType, Layout, Param, SliceMut};

fn zeros(_: &Param, _: SliceMut<'_>) -> Result<(), meshstep_tensor::Error> {
    Ok(())
}

fn layout(name: &str) -> Layout {
    Layout::builder().param(name, &[6], DType::F32).build().unwrap()
}

fn steps(opt: &mut Optimizer, grads: bool) -> Result<(), Error> {
    let mb = opt.micro_batch(1)?;
    if grads {
        mb.grad("w", &[1f32; 6])?;
    }
    mb.finish()?;
    opt.step(StepArgs::default())?.outcome().map(drop)
}

/// Runs `first` on rank 0 and `second` on rank 1, after a common step; the messages of both contain `names`.
fn told(
    first: impl Fn(&mut Optimizer) -> Result<(), Error> + Sync,
    second: impl Fn(&mut Optimizer) -> Result<(), Error> + Sync,
    names: [&str; 2],
) {
    for stage in STAGES {
        let told = loopback::spawn(2, |comm| {
            let options = Options { stage, ..Options::default() };
            let is_first = comm.rank() == 0;
            let mut opt = Optimizer::new(comm, layout("w"), adamw(), zeros, options).unwrap();
            steps(&mut opt, true).unwrap();
            if is_first { first(&mut opt) } else { second(&mut opt) }.unwrap_err().to_string()
        });
        for told in told.unwrap() {
            let of = |name: &str| told.matches(&format!(" in {name} (its operation")).count();
            assert!(names.iter().all(|name| of(name) == 1), "{stage:?}: {told}");
        }
    }
}

#[test]
fn a_rank_that_adds_parameters_while_the_other_steps() {
    let adds = |opt: &mut Optimizer| opt.add_param_group(layout("late"), adamw(), zeros);
    told(adds, |opt| steps(opt, true), ["Optimizer::add_param_group", "MicroBatch::grad"]);
    // Without a gradient the bucket travels at the micro-batch's end.
    told(adds, |opt| steps(opt, false), ["Optimizer::add_param_group", "MicroBatch::finish"]);
    // Without a micro-batch the step sends it.
    let step = |opt: &mut Optimizer| opt.step(StepArgs::default())?.outcome().map(drop);
    told(adds, step, ["Optimizer::add_param_group", "Optimizer::step"]);
}

#[test]
fn a_rank_that_verifies_while_the_other_steps() {
    let verifies = |opt: &mut Optimizer| opt.verify().map(drop);
    told(verifies, |opt| steps(opt, true), ["Optimizer::verify", "MicroBatch::grad"]);
}
