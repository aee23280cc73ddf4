//! Calls that a type does not support are refused on every rank, before anything is exchanged.

use crate::checkpoint::failures::failed;
use crate::checkpoint::sim::Sim;
use meshstep_comm::{Communicator, loopback::spawn};
use meshstep_optim::{AdamW, Lbfgs};
use meshstep_shard::checkpoint::pytorch::{Import, PyTorchFile};
use meshstep_shard::checkpoint::{self, CheckpointError, Error, Saveable};
use meshstep_shard::{CrossShard, Optimizer, Options, ShardedLbfgs};
use meshstep_tensor::{DType, Layout};
use std::path::Path;
use std::sync::Arc;

/// Returns the names of the calls that are refused.
fn refused<T: Saveable>(thing: &mut T, via: &Arc<dyn Communicator>) -> Vec<String> {
    let file = PyTorchFile::on(Arc::new(Sim::new("/run")), Path::new("/run/file"));
    let results: [Result<(), Error>; 5] = [
        checkpoint::serialize(thing).map(drop),
        checkpoint::deserialize(thing, &[]),
        checkpoint::export_pytorch(thing, &file, 0),
        checkpoint::import_pytorch(thing, &file, Import::default()).map(drop),
        checkpoint::reshard(via, Some(thing), None).map(drop),
    ];
    let refused = results.into_iter().filter_map(Result::err).map(failed);
    let named = refused.filter_map(|failed| match failed.error {
        CheckpointError::Unsupported { call, .. } => Some(call),
        _ => None,
    });
    named.collect()
}

fn layout() -> Layout {
    Layout::builder().param("w", &[7], DType::F32).build().unwrap()
}

fn make(comm: Arc<dyn Communicator>) -> Optimizer {
    Optimizer::new(comm, layout(), AdamW::default(), |_, _| Ok(()), Options::default()).unwrap()
}

#[test]
fn each_type_names_the_calls_it_refuses() {
    let ranks = spawn(4, |world| {
        let own = refused(&mut make(Arc::clone(&world)), &world);
        let lbfgs = ShardedLbfgs::new(
            Arc::clone(&world),
            layout(),
            Lbfgs::default(),
            |_, _| Ok(()),
            Options::default(),
        );
        let lbfgs = refused(&mut lbfgs.unwrap(), &world);
        let groups = [vec![0, 1], vec![2, 3]];
        let (rule, options) = (AdamW::default(), Options::default());
        let cross =
            CrossShard::new(Arc::clone(&world), Some(&groups), layout(), rule, |_, _| Ok(()), options);
        [own, lbfgs, refused(&mut cross.unwrap(), &world)]
    });
    let all = ["serialize", "deserialize", "export_pytorch", "import_pytorch", "reshard"];
    for [own, lbfgs, cross] in ranks.unwrap() {
        assert_eq!((own, lbfgs), (Vec::<String>::new(), all[2..4].iter().map(ToString::to_string).collect()));
        assert_eq!(cross, all[2..]);
    }
}
