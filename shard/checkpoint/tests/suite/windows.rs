//! Bytes read by a load: each window of 1 MiB that a rank needs, once.

use crate::common::{cases, draws, long};
use crate::hooked::{Call, Hooked};
use crate::layouts::DIR;
use meshstep_checkpoint::{
    self as checkpoint, Contents, Load, LocalPieces, ModelPlacement, Region, Save, Saveable, Store,
};
use meshstep_checkpoint_cases::Sim;
use meshstep_comm::{Communicator, loopback::spawn};
use meshstep_optim::{AdamW, Rule, Sgd};
use meshstep_shard::{Optimizer, Options, Stage};
use meshstep_tensor::{DType, Layout, Param, SliceMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

const WINDOW: u64 = 1 << 20;

/// Elements of the only parameter: 17 windows, more than one part of 16 MiB, or in a tenth 21; and a partial window.
fn len() -> usize {
    cases(17, 21).max(3) as usize * (1 << 18) + 777
}

/// Placement of a matrix with its columns divided evenly among the ranks.
struct Columns {
    rows: usize,
    columns: usize,
    rank: usize,
    ranks: usize,
}

impl Columns {
    /// Makes a matrix of `rows` rows with 1024 elements each, for all ranks together.
    fn of(rows: usize, comm: &dyn Communicator) -> Self {
        let (rank, ranks) = (comm.rank(), comm.world_size());
        Columns { rows, columns: 1024 / ranks, rank, ranks }
    }
}

impl ModelPlacement for Columns {
    fn mesh(&self) -> String {
        format!("tp={}", self.ranks)
    }

    fn holding(&self, _: &Param) -> LocalPieces {
        let [rows, columns] = [self.rows, self.columns].map(|n| n as u64);
        let (shape, local) = (vec![rows, columns * self.ranks as u64], vec![rows, columns]);
        let place = |rank: usize| vec![0, rank as u64 * columns];
        let [global, own] =
            [self.rank, 0].map(|rank| Region { offsets: place(rank), extents: local.clone() });
        LocalPieces { shape, local, boxes: vec![(global, own)] }
    }
}

fn optimizer(comm: Arc<dyn Communicator>) -> Optimizer {
    build(comm, &[len()], AdamW::default(), Stage::Zero3)
}

fn build(comm: Arc<dyn Communicator>, shape: &[usize], rule: impl Rule + 'static, stage: Stage) -> Optimizer {
    let layout = Layout::builder().param("w", shape, DType::F32).build().unwrap();
    let values = |_: &Param, mut to: SliceMut<'_>| {
        // The values do not influence which bytes are read.
        if !long() {
            to.bytes_mut()?.fill(63);
            return Ok(());
        }
        let bytes = to.bytes_mut()?.chunks_exact_mut(4);
        bytes.zip(1u32..).for_each(|(to, i)| to.copy_from_slice(&(i as f32).to_le_bytes()));
        Ok(())
    };
    let options = Options { stage, ..Options::default() };
    Optimizer::new(comm, layout, rule, values, options).unwrap()
}

/// Saves on some ranks and loads on others; returns the number of bytes read and the number saved.
fn read(
    (savers, save): (usize, impl Fn(Arc<dyn Communicator>, &Store) + Send + Sync),
    (ranks, load): (usize, impl Fn(Arc<dyn Communicator>, &Store) + Send + Sync),
) -> (u64, u64) {
    let sim = Sim::new(DIR);
    let store = Store::on(Arc::new(sim.clone()), DIR);
    spawn(savers, |comm| save(comm, &store)).unwrap();
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
    spawn(ranks, |comm| load(comm, &store)).unwrap();
    (counted.load(Relaxed), saved)
}

/// Same as [`read`] for the vector.
fn read_vector(savers: usize, ranks: usize) -> (u64, u64) {
    let save =
        |comm, store: &Store| _ = checkpoint::save(&mut optimizer(comm), store, Save::default()).unwrap();
    let load =
        |comm, store: &Store| _ = checkpoint::load(&mut optimizer(comm), store, Load::default()).unwrap();
    read((savers, save), (ranks, load))
}

/// Optimizer of columns of a matrix.
struct OfColumns(Optimizer, Columns);

impl Saveable for OfColumns {
    fn contents(&mut self) -> Contents<'_> {
        self.0.contents().placed(&self.1)
    }
}

#[test]
fn columns_that_lie_side_by_side_are_read_about_once() {
    // 12288 rows are 48 MiB, which are read in more than one share; so are the 20 MiB of a tenth.
    let rows = (cases(12, 12).max(5) as usize) << 10;
    let make = |comm: Arc<dyn Communicator>| {
        let placing = Columns::of(rows, &*comm);
        let shape = [rows, placing.columns];
        OfColumns(build(comm, &shape, Sgd::default(), Stage::Replicated), placing)
    };
    let save = |comm, store: &Store| _ = checkpoint::save(&mut make(comm), store, Save::default()).unwrap();
    let load = |comm, store: &Store| _ = checkpoint::load(&mut make(comm), store, Load::default()).unwrap();
    let mut drawn = draws(1);
    for savers in [2, 8].into_iter().filter(|_| drawn()) {
        let (read, saved) = read((savers, save), (1, load));
        assert_eq!(saved, 4 * 1024 * rows as u64);
        assert!(saved <= read && read <= saved + saved / 4, "{savers}: {read} of {saved}");
    }
}

#[test]
fn one_rank_reads_each_byte_once() {
    for savers in [1, 3] {
        let (read, saved) = read_vector(savers, 1);
        assert_eq!(saved, 3 * 4 * len() as u64, "parameters, m and v");
        assert_eq!(read, saved, "saved by {savers}");
    }
}

#[test]
fn ranks_read_a_window_twice_only_where_they_meet() {
    let mut drawn = draws(1);
    for (savers, ranks) in [(1, 2), (1, 3), (3, 2)].into_iter().filter(|_| drawn()) {
        let (read, saved) = read_vector(savers, ranks);
        let most = 3 * (ranks as u64 - 1) * WINDOW;
        assert!(saved < read && read <= saved + most, "{savers} to {ranks}: {read} of {saved}");
    }
}
