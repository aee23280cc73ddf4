//! A parameter that was saved under another of its names must have the same rule.

use crate::failures::failed;
use meshstep_checkpoint::{
    self as checkpoint, CheckpointError, Contents, Error, Load, Mismatch, ModelPlacement, Save, Saveable,
    Store,
};
use meshstep_checkpoint_cases::Sim;
use meshstep_comm::{Communicator, loopback::spawn};
use meshstep_optim::AdamW;
use meshstep_shard::{Optimizer, Options, Stage};
use meshstep_tensor::{DType, Layout};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Model with two names for one parameter.
struct Tied(&'static [(&'static str, &'static str)]);

impl ModelPlacement for Tied {
    fn mesh(&self) -> String {
        "ranks=2".to_owned()
    }

    fn tied(&self) -> BTreeMap<String, String> {
        self.0.iter().map(|&(name, to)| (name.to_owned(), to.to_owned())).collect()
    }
}

/// Optimizer of such a model.
struct OfTied<'a>(&'a mut Optimizer, &'a Tied);

impl Saveable for OfTied<'_> {
    fn contents(&mut self) -> Contents<'_> {
        self.0.contents().placed(self.1)
    }
}

const HEAD: Tied = Tied(&[("head", "embedding")]);
const EMBEDDING: Tied = Tied(&[("embedding", "head")]);
const NONE: Tied = Tied(&[]);

fn make(comm: Arc<dyn Communicator>, name: &str, beta2: f64) -> Optimizer {
    let layout = Layout::builder().param(name, &[7, 3], DType::F32).param("w", &[5], DType::F32);
    let options = Options { stage: Stage::Zero1, ..Options::default() };
    let rule = AdamW { beta2, ..AdamW::default() };
    Optimizer::new(comm, layout.build().unwrap(), rule, |_, _| Ok(()), options).unwrap()
}

/// Returns the results of resuming with another rule under `name`: by a load, and by a reshard.
fn told((saved, by): (&str, &Tied), (name, here): (&str, &Tied), beta2: f64) -> [Result<(), Error>; 2] {
    let store = Store::on(Arc::new(Sim::new("/run")), "/run");
    let ranks = spawn(2, |comm| {
        let mut old = make(comm.clone(), saved, 0.999);
        let mut old = OfTied(&mut old, by);
        checkpoint::save(&mut old, &store, Save::default()).unwrap();
        let mut new = make(comm.clone(), name, beta2);
        let mut new = OfTied(&mut new, here);
        let loaded = checkpoint::load(&mut new, &store, Load::default()).map(drop);
        let moved = checkpoint::reshard(&comm, Some(&mut old), Some(&mut new));
        [loaded, moved.map(drop)]
    });
    ranks.unwrap().remove(0)
}

#[test]
fn a_rule_is_compared_by_whichever_name_a_parameter_has() {
    let table = [
        (("embedding", &HEAD), ("head", &NONE)),
        (("embedding", &NONE), ("head", &EMBEDDING)),
        (("embedding", &HEAD), ("head", &EMBEDDING)),
        (("head", &NONE), ("embedding", &HEAD)),
        (("head", &NONE), ("head", &NONE)),
    ];
    for (saved, here) in table {
        for same in told(saved, here, 0.999) {
            same.unwrap();
        }
        for other in told(saved, here, 0.95) {
            let CheckpointError::Mismatch(Mismatch::Setting { what, .. }) = failed(other.unwrap_err()).error
            else {
                panic!("another rule is another setting")
            };
            assert_eq!(what, format!("the rule of {:?}", here.0));
        }
    }
}
