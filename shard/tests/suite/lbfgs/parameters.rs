//! L-BFGS and its optimizer: added parameters, tied names, verification, and the optimizers it accepts.

use meshstep_comm::{Communicator, loopback};
use meshstep_optim::{AdamW, Lbfgs, LineSearch, Sgd};
use meshstep_shard::{Error, LbfgsStep, MicroBatch, NotForLbfgs, Optimizer, Options, ShardedLbfgs, Stage};
use meshstep_tensor::{
    DType::{F32, F64},
    Layout, Param, Slice, SliceMut,
};
use std::sync::Arc;

const STAGES: [Stage; 3] = [Stage::Replicated, Stage::Zero1, Stage::Zero2];

fn rule() -> Lbfgs {
    Lbfgs { line_search: LineSearch::StrongWolfe, max_iter: 8, ..Lbfgs::default() }
}

fn layout(name: &str, len: usize) -> Layout {
    Layout::builder().param(name, &[len], F64).build().unwrap()
}

fn first(_: &Param, mut to: SliceMut<'_>) -> Result<(), meshstep_tensor::Error> {
    to.copy_from(Slice::from(&[4.0, -3.0, 2.0, 5.0, -1.0][..to.len()]))
}

/// Least squares over some parameters, with different curvatures on each rank.
fn evaluate(mb: &MicroBatch<'_>, names: &[&str], rank: usize) -> Result<f64, Error> {
    let mut loss = 0.0;
    for name in names {
        let w = mb.param(name)?.typed::<f64>()?.to_vec();
        let scale = |i: usize| (1 + i * (rank + 1)) as f64;
        let grad: Vec<f64> = w.iter().enumerate().map(|(i, w)| scale(i) * (w - 1.0)).collect();
        loss += w.iter().enumerate().map(|(i, w)| scale(i) * (w - 1.0).powi(2) / 2.0).sum::<f64>();
        mb.grad(name, &grad[..])?;
    }
    Ok(loss)
}

fn step(opt: &mut ShardedLbfgs, names: &[&str]) -> LbfgsStep {
    let rank = opt.optimizer().comm().rank();
    opt.step(|mb| evaluate(mb, names, rank)).unwrap()
}

fn made(comm: Arc<dyn Communicator>, layout: Layout, stage: Stage) -> ShardedLbfgs {
    ShardedLbfgs::new(comm, layout, rule(), first, Options { stage, ..Options::default() }).unwrap()
}

/// The run restarts along the gradient, like one built with all parameters and the current values.
#[test]
fn parameters_are_added_and_the_history_is_forgotten() {
    for stage in STAGES {
        loopback::spawn(3, |comm| {
            let mut grown = made(Arc::clone(&comm), layout("a", 5), stage);
            step(&mut grown, &["a"]);
            let reached = grown.optimizer().param("a").unwrap().typed::<f64>().unwrap().to_vec();
            let before = grown.state().iterations();
            grown.add_param_group(layout("b", 4), first).unwrap();
            grown.also_called("c", "b").unwrap();
            assert_eq!((grown.state().pairs(), grown.optimizer().params().count()), (0, 2));
            let whole = Layout::builder().param("a", &[5], F64).param("b", &[4], F64).build().unwrap();
            let again = |param: &Param, to: SliceMut<'_>| match param.name() {
                "a" => to.into_typed::<f64>().map(|to| to.copy_from_slice(&reached)),
                _ => first(param, to),
            };
            let options = Options { stage, ..Options::default() };
            let mut fresh = ShardedLbfgs::new(comm, whole, rule(), again, options).unwrap();
            for _ in 0..3 {
                let (one, other) = (step(&mut grown, &["a", "c"]), step(&mut fresh, &["a", "b"]));
                assert_eq!(one.report, other.report, "{stage:?}");
            }
            for name in ["a", "b"] {
                let bits =
                    |opt: &ShardedLbfgs| opt.optimizer().param(name).unwrap().bytes().unwrap().to_vec();
                assert_eq!(bits(&grown), bits(&fresh), "{stage:?}");
            }
            grown.verify().unwrap();
            let taken = grown.add_param_group(layout("a", 1), first).unwrap_err();
            assert!(matches!(taken, Error::NameTaken { .. }), "{taken}");
            // A layout of another type, on all ranks or on one, changes nothing.
            let narrow = |name| Layout::builder().param(name, &[2], F32).build().unwrap();
            let mixed = grown.add_param_group(narrow("d"), first).unwrap_err();
            assert!(matches!(mixed, Error::NotForLbfgs(NotForLbfgs::Types { .. })), "{mixed}");
            let odd = if grown.optimizer().comm().rank() == 1 { narrow("d") } else { layout("d", 2) };
            assert!(grown.add_param_group(odd, first).is_err());
            assert_eq!(grown.optimizer().params().count(), 2);
            // The iteration count continues although the history is forgotten.
            assert_eq!(grown.optimizer().steps(), before + grown.state().iterations());
            step(&mut grown, &["a", "b"]);
        })
        .unwrap();
    }
}

/// The optimizer's own state would never be used.
#[test]
fn an_optimizer_whose_rule_has_state_is_refused() {
    loopback::spawn(2, |comm| {
        let of = |rule| {
            let opt = Optimizer::new(Arc::clone(&comm), layout("a", 5), rule, first, Options::default());
            ShardedLbfgs::over(opt.unwrap(), self::rule())
        };
        let told = of(meshstep_shard::Groups::new(AdamW::default())).unwrap_err();
        assert!(matches!(told, Error::NotForLbfgs(NotForLbfgs::State { rule: "adamw", .. })), "{told}");
        step(&mut of(meshstep_shard::Groups::new(Sgd::default())).unwrap(), &["a"]);
    })
    .unwrap();
}
