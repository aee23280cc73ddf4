//! Replicas in groups: every rank holds and updates all parameters, and gradients are combined within its group.

pub(crate) mod assignment;
mod room;
pub(crate) mod shard;
mod step;
mod synchronize;

pub use assignment::AssignmentError;
pub use synchronize::{Drift, SlotDrift};

use crate::optimizer::layout_state;
use crate::ranks::{agree, host_words};
use crate::reduce::together::objection;
use crate::update::owned_bucket::Owned;
use crate::update::params::Params;
use crate::{Error, Groups, Initial, Master, MicroBatch, Missing, Optimizer, Options, Stage};
use meshstep_comm::{Communicator, Op, name_calls};
use meshstep_tensor::{Layout, Param, Slice, SliceMut};
use std::fmt::Write;
use std::sync::Arc;

/// Any rule over replicated parameters, with gradients combined across the ranks of a group (TensorFlow's `CrossShardOptimizer`).
///
/// [`Options::combine`] selects mean, sum, or mean weighted by each rank's batch size, the `weight` of its micro-batches.
/// [`Options::clip`] selects what [`StepArgs::max_norm`](crate::StepArgs::max_norm) limits: each rank's gradient before it is
/// combined, or the combined one.
///
/// If no rank of a group has a gradient for a parameter, the group leaves the parameter, its state and its `t` unchanged. If some
/// ranks have one, [`Options::missing`] decides: an error under [`Missing::Error`] and [`Missing::AllOrNone`], otherwise zeros on
/// the ranks without it.
///
/// Groups are independent after construction: each has its own norm, skips and loss scale, and parameters diverge where gradients
/// differ, until [`synchronize_state`](Self::synchronize_state). A step and the other calls of [`Step`](crate::Step) are
/// collective over the group.
///
/// On a GPU everything works the same way, and a step waits no more than an [`Optimizer`]'s: only construction, comparing and
/// averaging make the host wait.
///
/// ```
/// use meshstep_optim::Sgd;
/// use meshstep_shard::{CrossShard, Options, Step, StepArgs};
/// use meshstep_tensor::{DType, Layout};
///
/// let w = meshstep_comm::loopback::spawn(4, |comm| -> Result<f32, meshstep_shard::Error> {
///     let grad = 1.0 + comm.rank() as f32;
///     let layout = Layout::builder().param("w", &[1], DType::F32).build()?;
///     let groups = [vec![0, 2], vec![1, 3]];
///     let mut opt = CrossShard::new(comm, Some(&groups), layout, Sgd::default(), |_, _| Ok(()), Options::default())?;
///     let mb = opt.micro_batch(1)?;
///     mb.grad("w", &[grad])?;
///     mb.finish()?;
///     opt.step(StepArgs { lr: 1.0, ..StepArgs::default() })?.outcome()?;
///     Ok(opt.param("w")?.typed::<f32>()?[0])
/// })?;
/// let w: Result<Vec<f32>, _> = w.into_iter().collect();
/// assert_eq!(w?, [-2.0, -3.0, -2.0, -3.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct CrossShard {
    optimizer: Optimizer,
    world: Arc<dyn Communicator>,
    group: Vec<usize>,
    /// Index of the group.
    number: usize,
}

impl CrossShard {
    /// Builds replicas of the parameters of `layout`, updated by `rules`. Collective over `world`; every rank passes the same
    /// arguments, which is checked.
    ///
    /// `groups` are lists of ranks that contain every rank exactly once and are of equal size; `None`: one group of all ranks.
    /// Sums run in order of rank, whatever the order in the list. First values are the same in all groups: rank 0's, or compared
    /// ([`Options::initial`]).
    ///
    /// The stage is [`Stage::Replicated`]: the default of [`Options::stage`] is replaced, and [`Stage::Zero2`], [`Stage::Zero3`]
    /// and [`Stage::WholeParams`] are [`Error::NotReplicated`].
    pub fn new(
        world: Arc<dyn Communicator>,
        groups: Option<&[Vec<usize>]>,
        layout: Layout,
        rules: impl Into<Groups>,
        initial: impl FnMut(&Param, SliceMut<'_>) -> Result<(), meshstep_tensor::Error>,
        options: Options,
    ) -> Result<Self, Error> {
        let _name = name_calls("CrossShard::new");
        let everyone = [(0..world.world_size()).collect()];
        let groups = groups.unwrap_or(&everyone);
        let rules = rules.into();
        let stage = if options.stage == Stage::default() { Stage::Replicated } else { options.stage };
        let options = Options { missing: within_a_group(options.missing), stage, ..options };
        let mine = my_group(groups, &*world, &options);
        let text = match &mine {
            Ok(_) => describe(groups, &layout, &rules, &options),
            Err(error) => objection(Some(error)),
        };
        let group = agreed(&*world, &options, mine, &text)?;
        // Every rank passes a colour, so every rank gets a group.
        let comm = world.split(Some(group as u32), 0).inspect_err(|_| world.abort())?;
        let Some(comm) = comm else { return Err(Error::NoRanks) };
        let built = Optimizer::new(comm, layout, rules, initial, options.clone());
        let text = objection(built.as_ref().err());
        let optimizer = agreed(&*world, &options, built, &text)?;
        let mut both = CrossShard { optimizer, world, group: groups[group].clone(), number: group };
        both.first_values([0; 3])?;
        Ok(both)
    }

    /// Adds parameters with rules of their own to all groups, between two steps. Collective over the world; every rank passes the
    /// same arguments, which is checked, and first values are the same in all groups, as in [`new`](Self::new). If one rank fails
    /// after others have added the parameters, all groups end.
    pub fn add_param_group(
        &mut self,
        layout: Layout,
        rules: impl Into<Groups>,
        initial: impl FnMut(&Param, SliceMut<'_>) -> Result<(), meshstep_tensor::Error>,
    ) -> Result<(), Error> {
        let _name = name_calls("CrossShard::add_param_group");
        let Params { entries, buckets, frozen, options, .. } = &self.optimizer.params;
        let (before, options, rules) =
            ([entries.len(), buckets.len(), frozen.len()], options.clone(), rules.into());
        // A step that is due in one group must not end the others.
        let ready = self.optimizer.check_outcomes().and_then(|()| self.optimizer.reducer.check_idle());
        let text = match &ready {
            Ok(()) => layout_state::describe(&layout, &rules, &options),
            Err(error) => objection(Some(error)),
        };
        agreed(&*self.world, &options, ready, &text)?;
        let added = self.optimizer.add_param_group(layout, rules, initial);
        let text = objection(added.as_ref().err());
        let same = agree::same_everywhere(&*self.world, &options, &text);
        match (added, same) {
            (Ok(()), Ok(_)) => self.first_values(before),
            (Ok(()), Err(others)) => {
                self.optimizer.reducer.abort();
                self.world.abort();
                Err(others)
            }
            (Err(error), _) => Err(error),
        }
    }

    /// Makes first values, which are equal within each group, equal in all groups, for the parameters, buckets and frozen vectors
    /// after the given counts.
    fn first_values(&mut self, [params, buckets, frozen]: [usize; 3]) -> Result<(), Error> {
        if self.optimizer.params.options.initial == Initial::Compare {
            let values = describe_values(&self.optimizer, params);
            let text = values.as_ref().map_or_else(|error| objection(Some(error)), String::clone);
            return agreed(&*self.world, &self.optimizer.params.options, values.map(drop), &text);
        }
        let sent = self.broadcast(buckets, frozen);
        self.end_if_alone(sent)
    }

    fn broadcast(&mut self, first_bucket: usize, first_frozen: usize) -> Result<(), Error> {
        let Params { buckets, frozen, options, .. } = &mut self.optimizer.params;
        let (buckets, frozen) = (&mut buckets[first_bucket..], &mut frozen[first_frozen..]);
        for values in buckets.iter_mut().map(|b| &mut b.params).chain(frozen).filter(|v| !v.is_empty()) {
            host_words::run(&*self.world, &options.queue, Op::broadcast(0), values)?;
        }
        buckets.iter_mut().try_for_each(Owned::fill_masters)
    }

    /// Returns the ranks of this rank's group, as ranks of [`world`](Self::world).
    pub fn group(&self) -> &[usize] {
        &self.group
    }

    /// Returns the communicator of all groups together.
    pub fn world(&self) -> &Arc<dyn Communicator> {
        &self.world
    }
}

impl MicroBatch<'_> {
    /// Refuses a gradient given as values at `indices`: reductions and rules here work on whole parameters. The micro-batch still
    /// takes the parameter's dense gradient.
    pub fn sparse_grad<'g>(
        &self,
        name: &str,
        indices: &[u64],
        values: impl Into<Slice<'g>>,
    ) -> Result<(), Error> {
        let len = self.param(name)?.len();
        let (indices, values) = (indices.len(), values.into().len());
        Err(Error::SparseGradient { name: name.to_owned(), indices, values, len })
    }
}

/// Returns the policy under which a group leaves parameters without gradients unchanged.
fn within_a_group(missing: Missing) -> Missing {
    match missing {
        Missing::Error | Missing::AllOrNone => Missing::AllOrNone,
        Missing::Zero | Missing::SkipIfMissingEverywhere => Missing::SkipIfMissingEverywhere,
    }
}

fn my_group(groups: &[Vec<usize>], world: &dyn Communicator, options: &Options) -> Result<usize, Error> {
    if options.stage != Stage::Replicated {
        return Err(Error::NotReplicated { stage: options.stage });
    }
    if options.precision.master == Master::Remainder {
        return Err(Error::RemaindersOfReplicas);
    }
    Ok(assignment::group_of(groups, world.world_size())?[world.rank()])
}

/// Returns the text that must agree on all ranks of the world.
fn describe(groups: &[Vec<usize>], layout: &Layout, rules: &Groups, options: &Options) -> String {
    let mut text = layout_state::describe(layout, rules, options);
    let _ = writeln!(text, "group assignment = {groups:?}");
    text
}

fn describe_values(optimizer: &Optimizer, first: usize) -> Result<String, Error> {
    let (Options { queue, meter, .. }, mut text) = (&optimizer.params.options, String::new());
    for param in optimizer.params().skip(first) {
        let digest = host_words::digest(queue, meter, optimizer.param(param.name())?)?;
        let _ = writeln!(text, "values of {:?} = digest {digest:016x}", param.name());
    }
    Ok(text)
}

/// Returns this rank's result, once all ranks of the world have shown success with the same text.
fn agreed<T>(
    world: &dyn Communicator,
    options: &Options,
    prepared: Result<T, Error>,
    text: &str,
) -> Result<T, Error> {
    let same = agree::same_everywhere(world, options, text);
    let prepared = prepared?;
    same?;
    Ok(prepared)
}
