//! Of which bytes a load reads: each window of 1 MiB that a rank needs, and each once.

use crate::hooked::{Call, Hooked};
use crate::layouts::DIR;
use crate::sim::Sim;
use meshstep_comm::{Communicator, loopback::spawn};
use meshstep_optim::AdamW;
use meshstep_shard::checkpoint::{Load, Save, Store};
use meshstep_shard::{Optimizer, Options, Stage};
use meshstep_tensor::{DType, Layout, Param, SliceMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

const WINDOW: u64 = 1 << 20;

/// Elements of the one parameter: 21 windows and a part of another.
const LEN: usize = 21 * (1 << 18) + 777;

fn optimizer(comm: Arc<dyn Communicator>) -> Optimizer {
    let layout = Layout::builder().param("w", &[LEN], DType::F32).build().unwrap();
    let values = |_: &Param, mut to: SliceMut<'_>| {
        let bytes = to.bytes_mut()?.chunks_exact_mut(4);
        bytes.zip(1u32..).for_each(|(to, i)| to.copy_from_slice(&(i as f32).to_le_bytes()));
        Ok(())
    };
    let options = Options { stage: Stage::Zero3, ..Options::default() };
    Optimizer::new(comm, layout, AdamW::default(), values, options).unwrap()
}

/// Bytes of files other than the manifest that `ranks` ranks read of what `savers` saved, and of all that was saved.
fn read(savers: usize, ranks: usize) -> (u64, u64) {
    let sim = Sim::new(DIR);
    let store = Store::on(Arc::new(sim.clone()), DIR);
    spawn(savers, |comm| _ = optimizer(comm).save(&store, Save::default()).unwrap()).unwrap();
    let manifest = store.latest().unwrap().manifest().clone();
    let saved = manifest.tensors["w"].slots.values().flat_map(|slot| &slot.pieces);
    let saved = saved.map(|piece| piece.stored.bytes).sum();
    let counted = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&counted);
    let counting = Hooked::new(sim, move |call| {
        if let Call::Read(path, bytes) = call
            && path.extension().is_some_and(|name| name == "safetensors")
        {
            count.fetch_add(bytes as u64, Relaxed);
        }
        Ok(())
    });
    let store = Store::on(Arc::new(counting), DIR);
    spawn(ranks, |comm| _ = optimizer(comm).load(&store, Load::default()).unwrap()).unwrap();
    (counted.load(Relaxed), saved)
}

#[test]
fn one_rank_reads_each_byte_once() {
    for savers in [1, 3] {
        let (read, saved) = read(savers, 1);
        assert_eq!(saved, 3 * 4 * LEN as u64, "parameters, m and v");
        assert_eq!(read, saved, "saved by {savers}");
    }
}

#[test]
fn ranks_read_a_window_twice_only_where_they_meet() {
    for (savers, ranks) in [(1, 2), (1, 3), (3, 2)] {
        let (read, saved) = read(savers, ranks);
        let most = 3 * (ranks as u64 - 1) * WINDOW;
        assert!(saved < read && read <= saved + most, "{savers} to {ranks}: {read} of {saved}");
    }
}
