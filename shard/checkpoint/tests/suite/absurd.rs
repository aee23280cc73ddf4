//! Counts that no number of steps can reach, in bytes with a matching hash: all ranks refuse them.

use crate::common::Run;
use crate::layouts::train;
use crate::whole::part;
use meshstep_checkpoint as checkpoint;
use meshstep_comm::{Communicator, loopback::spawn};
use meshstep_optim::Lbfgs;
use meshstep_shard::{Options, ShardedLbfgs, Stage};
use meshstep_tensor::{DType, Layout};
use serde_json::{Value, json};
use std::sync::Arc;

/// Returns the same bytes with an edited header.
fn edited(bytes: &[u8], edit: impl FnOnce(&mut Value)) -> Vec<u8> {
    let (magic, rest) = bytes[..bytes.len() - 32].split_at(8);
    let (len, rest) = rest.split_at(8);
    let (text, data) = rest.split_at(u64::from_le_bytes(len.try_into().unwrap()) as usize);
    let mut header: Value = serde_json::from_slice(text).unwrap();
    edit(&mut header);
    let text = serde_json::to_vec(&header).unwrap();
    let mut all = [magic, &(text.len() as u64).to_le_bytes(), &text, data].concat();
    all.extend(blake3::hash(&all).as_bytes());
    all
}

#[test]
fn updates_beyond_any_are_refused() {
    let run = Run { ranks: 2, lens: vec![6, 5], ..Run::default() }.stage(Stage::Zero1);
    let ends = spawn(2, |comm| {
        let mut opt = run.build(comm).unwrap();
        train(&run, &mut opt, 1..3);
        let (bytes, before) = (checkpoint::serialize(&mut opt).unwrap(), part(&opt));
        for t in [u64::MAX, u64::MAX - 1, 1 << 53] {
            let wrong = edited(&bytes, |header| header["t"][1] = json!(t));
            let error = checkpoint::deserialize(&mut opt, &wrong).unwrap_err().to_string();
            assert_eq!(
                error,
                format!("on rank 0: the bytes are not what `serialize` made: {t} is no count of updates")
            );
            assert!(part(&opt) == before, "nothing has changed");
        }
        let late = edited(&bytes, |header| header["t"][1] = json!((1u64 << 53) - 1));
        checkpoint::deserialize(&mut opt, &late).unwrap();
        assert_eq!(opt.state("p1").unwrap().t, (1 << 53) - 1);
        train(&run, &mut opt, 3..4);
        opt.state("p1").unwrap().t
    });
    assert_eq!(ends.unwrap(), [1 << 53; 2]);
}

fn lbfgs(comm: Arc<dyn Communicator>) -> ShardedLbfgs {
    let rule = Lbfgs { max_iter: 3, history_len: 4, ..Lbfgs::default() };
    let layout = Layout::builder().param("a", &[9], DType::F64).build().unwrap();
    let first = |_: &meshstep_tensor::Param, mut to: meshstep_tensor::SliceMut<'_>| {
        to.copy_from(meshstep_tensor::Slice::from(&[0.5; 9][..]))
    };
    ShardedLbfgs::new(comm, layout, rule, first, Options { stage: Stage::Zero1, ..Options::default() })
        .unwrap()
}

fn step(opt: &mut ShardedLbfgs) {
    let stepped = opt.step(|mb| {
        let x = mb.param("a")?.typed::<f64>()?.to_vec();
        mb.grad("a", &x.iter().map(|x| 2.0 * x + 4.0 * x.powi(3)).collect::<Vec<_>>()[..])?;
        Ok::<_, meshstep_shard::Error>(x.iter().map(|x| x * x + x.powi(4)).sum::<f64>())
    });
    stepped.unwrap();
}

/// The words are the index of the previous gradient, step length, iterations, evaluations; then slots, the spare slot, the number in use,
/// and their indices.
#[test]
fn a_history_beyond_its_memory_is_refused() {
    let ends = spawn(2, |comm| {
        let mut opt = lbfgs(comm);
        step(&mut opt);
        let bytes = checkpoint::serialize(&mut opt).unwrap();
        let word =
            |at: usize, to: u64| edited(&bytes, |header| header["settings"]["lbfgs"][1][at] = json!(to));
        let counts = [u64::MAX, 1 << 53].into_iter().flat_map(|count| [(2, count), (3, count)]);
        let places = [(0, 4), (0, u64::MAX), (0, 1 << 32), (4, 6), (4, u64::MAX), (5, 5), (5, u64::MAX)];
        let pairs = [(6, 5), (6, u64::MAX), (6, 1 << 40), (7, 5), (7, u64::MAX)];
        for (at, to) in counts.chain(places).chain(pairs) {
            let error = checkpoint::deserialize(&mut opt, &word(at, to)).unwrap_err().to_string();
            assert!(
                error.starts_with("on rank 0: invalid entry for the progress of L-BFGS: "),
                "{at} {to}: {error}"
            );
            step(&mut opt);
        }
        checkpoint::deserialize(&mut opt, &word(3, (1 << 53) - 1)).unwrap();
        step(&mut opt);
        opt.state().evaluations()
    });
    assert!(ends.unwrap().iter().all(|&evaluations| evaluations > 1 << 53));
}
