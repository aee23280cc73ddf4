//! Consolidation with a sender that cannot read its vectors.

use super::*;
use crate::collective::compatibility::Fitting;
use crate::contents::Contents;
use crate::format::settings::Settings;
use crate::store::reader::Saved;
use crate::tensors::Read;
use meshstep_cases::tried;
use meshstep_comm::loopback::spawn;
use meshstep_optim::AdamW;
use meshstep_shard::extend::VectorKind as Slot;
use meshstep_shard::{Optimizer, Options, Stage};
use meshstep_tensor::{Layout, Queue, SliceMut};
use std::sync::LazyLock;

/// Optimizer with vectors that cannot be read after a number of reads.
struct Failing {
    opt: Optimizer,
    left: usize,
}

impl Saveable for Failing {
    fn contents(&mut self) -> Contents<'_> {
        Contents::of(self)
    }
}

impl SavedParts for Failing {
    fn optimizer(&mut self) -> &mut Optimizer {
        &mut self.opt
    }

    fn inside(&mut self) -> &mut dyn SavedParts {
        self
    }

    fn tensors(&self, placing: &dyn ModelPlacement) -> Result<Vec<SavedTensor>, CheckpointError> {
        self.opt.tensors(placing)
    }

    fn queue(&self) -> Queue {
        self.opt.queue()
    }

    fn vector(&mut self, param: usize, slot: Slot) -> Result<(usize, Slice<'_>), meshstep_shard::Error> {
        self.left = self.left.checked_sub(1).ok_or(meshstep_shard::Error::NothingTrains)?;
        self.opt.vector(param, slot)
    }

    fn vector_mut(&mut self, param: usize, slot: Slot) -> Result<SliceMut<'_>, meshstep_shard::Error> {
        self.opt.vector_mut(param, slot)
    }

    fn read(&mut self, _: &Saved, _: &[SavedTensor], _: &Fitting<'_>) -> Result<Vec<Read>, CheckpointError> {
        Ok(Vec::new())
    }

    fn settings(&self) -> Settings {
        self.opt.settings()
    }

    fn check(&self, settings: &Settings) -> Result<(), CheckpointError> {
        self.opt.check(settings)
    }

    fn resume(&mut self, settings: &Settings) -> Result<(), Error> {
        self.opt.resume(settings)
    }
}

/// `w` has two windows, and `b` has one element for each rank.
const LENS: [(&str, usize); 2] = [("w", WINDOW as usize + 5), ("b", 3)];

/// Values of each parameter, made once.
static VALUES: LazyLock<Vec<f32>> = LazyLock::new(|| (0..LENS[0].1).map(|i| 1.0 + i as f32).collect());

/// Vector, index of the first value, and the values' bytes, which compare faster.
type Seen = (String, u64, Vec<u8>);

/// Returns the windows passed to rank 0 and the error of all ranks, if rank `at` can read `left` vectors.
fn consolidated(at: usize, left: usize) -> (Vec<Seen>, Option<String>) {
    let ranks = spawn(3, |comm| {
        let own = comm.rank() == at;
        let add = |layout: meshstep_tensor::LayoutBuilder, (name, len): (&str, usize)| {
            layout.param(name, &[len], DType::F32)
        };
        let layout = LENS.into_iter().fold(Layout::builder(), add).build().unwrap();
        let options = Options { stage: Stage::Zero3, ..Options::default() };
        let values = |param: &meshstep_tensor::Param, mut to: SliceMut<'_>| {
            to.copy_from(Slice::from(&VALUES[..param.len()]))
        };
        let opt = Optimizer::new(comm, layout, AdamW::default(), values, options).unwrap();
        let mut saveable = Failing { opt, left: if own { left } else { usize::MAX } };
        let mut seen = Vec::new();
        let told = consolidate(&mut saveable, 0, &mut |window| {
            let values = window.values.bytes().map_err(CheckpointError::memory)?;
            seen.push((format!("{}:{}", window.param, window.slot), window.at, values.to_vec()));
            Ok(())
        });
        let told = told.err().map(|error| error.to_string());
        // The ranks have not lost each other.
        saveable.left = usize::MAX;
        consolidate(&mut saveable, 1, &mut |_| Ok(())).unwrap();
        (seen, told)
    });
    let ranks = ranks.unwrap();
    assert!(ranks.iter().all(|(_, told)| *told == ranks[0].1), "an error is the same on all ranks");
    ranks.into_iter().next().unwrap()
}

#[test]
fn a_sink_sees_nothing_that_was_not_sent() {
    let (whole, none) = consolidated(0, usize::MAX);
    assert!(none.is_none() && whole.len() > 6);
    for at in (0..3).filter(|at| tried(*at, 1)) {
        for left in (0..).filter(|left| tried(*left, 1)) {
            let (seen, told) = consolidated(at, left);
            assert!(whole.starts_with(&seen), "rank {at} reads {left}: {} windows", seen.len());
            let Some(told) = told else { break };
            assert!(seen.len() < whole.len());
            assert!(
                told.starts_with(&format!("on rank {at}: ")) && told.contains("needs one that trains"),
                "{told}"
            );
        }
    }
}
