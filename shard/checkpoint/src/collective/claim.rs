//! Claim of a folder before the first save.

use super::ranks::Work;
use crate::contents::Saveable;
use crate::failure::Error;
use crate::store::Store;
use meshstep_shard::extend::OptimizerShard;

/// Takes the folder of `store` for this job, before it loads from there or trains, until rank 0 drops the last clone of its store.
/// Collective over all ranks of `thing`. The first save does the same; a job that claims its folder at its start learns then, and not at its
/// first save, that another job has it: [`Held`](crate::CheckpointError::Held), on every rank. It does not look at the run of the checkpoints
/// there: [`OtherRun`](crate::CheckpointError::OtherRun) comes with the first save.
///
/// ```
/// use meshstep_checkpoint::{self as checkpoint, Load, Save, Store};
/// use meshstep_shard::prelude::*;
///
/// # let dir = std::env::temp_dir().join(format!("meshstep-claim-doc-{}", std::process::id()));
/// # std::fs::create_dir_all(&dir)?;
/// let store = Store::new(&dir);
/// let job = |comm| -> Result<(), checkpoint::Error> {
///     let layout = Layout::builder().param("w", &[3, 5], DType::F32).build()?;
///     let mut opt = Optimizer::new(comm, layout, AdamW::default(), |_, _| Ok(()), Options::default())?;
///     checkpoint::claim(&mut opt, &store)?; // then load, and train
///     checkpoint::save(&mut opt, &store, Save::default())?;
///     Ok(())
/// };
/// loopback::spawn(2, job)?.into_iter().collect::<Result<(), _>>()?;
/// // A second job is refused as long as the store of the first one lives.
/// let refused = Store::new(&dir).claim();
/// assert!(matches!(refused, Err(checkpoint::CheckpointError::Held { .. })));
/// # std::fs::remove_dir_all(&dir)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn claim<T: Saveable + ?Sized>(thing: &mut T, store: &Store) -> Result<(), Error> {
    let mut contents = thing.contents();
    let (parts, _) = contents.all();
    parts.optimizer().healthy()?;
    parts.call_all("claim a folder", Ok(()))?;
    let ranks = parts.group();
    let first = ranks.rank() == 0;
    parts.apart(|_| ranks.agree_on_first(first.then(|| Box::new(|| store.claim()) as Work<'_, _>)).map(drop))
}
