//! Groups by predicate: the steps of the same groups by name, differences between ranks, and refusals.

use meshstep_comm::loopback;
use meshstep_optim::Sgd;
use meshstep_shard::{Error, Groups, Optimizer, Options, StepArgs};
use meshstep_tensor::{DType, Layout, Param};

const NAMES: [&str; 4] = ["emb", "w", "ln.weight", "ln.bias"];

fn layout() -> Layout {
    let layout = Layout::builder().param("emb", &[4, 2], DType::F32).param("w", &[2, 3], DType::F32);
    let layout = layout.param("ln.weight", &[3], DType::F32).param("ln.bias", &[3], DType::F32);
    layout.frozen("rope", &[2], DType::F32).build().unwrap()
}

fn decay(weight_decay: f64) -> Sgd {
    Sgd { weight_decay, ..Sgd::default() }
}

fn stepped(rules: impl Fn(usize) -> Groups + Sync) -> Vec<Result<Vec<Vec<f32>>, Error>> {
    loopback::spawn(2, |comm| {
        let rules = rules(comm.rank());
        let ones =
            |p: &Param, mut w: meshstep_tensor::SliceMut<'_>| w.copy_from((&vec![1f32; p.len()]).into());
        let mut opt = Optimizer::new(comm, layout(), rules, ones, Options::default())?;
        let mb = opt.micro_batch(1)?;
        for name in NAMES {
            mb.grad(name, &vec![0.5f32; mb.param(name)?.len()])?;
        }
        mb.finish()?;
        opt.step(StepArgs { lr: 0.1, ..StepArgs::default() })?.outcome()?;
        NAMES.iter().map(|name| Ok(opt.param(name)?.typed::<f32>()?.to_vec())).collect()
    })
    .unwrap()
}

#[test]
fn a_predicate_selects_what_its_names_do() {
    let by_name = stepped(|_| {
        let vectors = vec!["ln.weight".to_owned(), "ln.bias".to_owned()];
        Groups::new(decay(0.1)).with(decay(0.0), vectors).with_lr(decay(0.2), 0.5, ["emb"])
    });
    let by_shape = stepped(|_| {
        let rules = Groups::new(decay(0.1)).with(decay(0.0), |p: &Param| p.shape().len() == 1);
        rules.with_lr(decay(0.2), 0.5, |p: &Param| p.name().starts_with("emb"))
    });
    for (named, shaped) in by_name.into_iter().zip(by_shape) {
        let named = named.unwrap();
        assert_eq!(named, shaped.unwrap());
        assert_eq!(named[0][0], 1.0 - 0.05 * (0.5 + 0.2));
    }
}

#[test]
fn other_predicates_on_other_ranks_are_refused_and_so_are_overlaps() {
    let told =
        stepped(|rank| Groups::new(decay(0.1)).with(decay(0.0), move |p: &Param| rank == 1 && p.len() == 6));
    for told in told {
        let told = told.unwrap_err().to_string();
        assert_eq!(told, "ranks disagree on group of \"w\": rank 0 has 0, rank 1 has 1");
    }
    let two = |_| Groups::new(decay(0.1)).with(decay(0.0), ["w"]).with(decay(0.2), |p: &Param| p.len() == 6);
    assert!(
        stepped(two).into_iter().all(|told| matches!(told, Err(Error::InTwoGroups { name }) if name == "w"))
    );
    // A predicate may match nothing, and is not asked about frozen parameters.
    let frozen = |_| Groups::new(decay(0.1)).with(decay(0.0), |p: &Param| p.name() == "rope" || p.len() > 99);
    assert!(stepped(frozen).into_iter().all(|told| told.is_ok()));
}
