//! Parameters of one layout, with their memory and groups, built before the ranks have agreed on them.

use crate::config::options::Options;
use crate::config::param_groups::Groups;
use crate::config::precision::rounding_key;
use crate::config::quote::quote;
use crate::config::slots::SlotRuns;
use crate::config::stage::Stage;
use crate::error::Error;
use crate::plan::bucket::Placed;
use crate::plan::bytes::VectorSpec;
use crate::plan::layout_plan::Part;
use crate::plan::matrix_exchange::matrix_of;
use crate::ranks::host_words;
use crate::ranks::roles::RankRoles;
use crate::reduce::bucket_fill::BucketFill;
use crate::reduce::chunk_norm::ChunkNorm;
use crate::reduce::reducer_config::BucketInfo;
use crate::reduce::slot_sums::SlotSums;
use crate::reduce::together::objection;
use crate::update::matrix_exchange::PartExchange;
use crate::update::owned_bucket::{Owned, ParamKey};
use crate::update::params::{ParamEntry, ParamPlace, Params};
use crate::update::vector_memory::{VectorMemory, zeroed, zeroed_to_travel};
use meshstep_comm::{Communicator, Op};
use meshstep_tensor::{Buffer, Category, Layout, Param, Place, Queue, Slice, SliceMut};
use std::fmt::Write;
use std::sync::Arc;

/// Additions of one layout. Indices are the optimizer's and continue those of earlier layouts; bucket indices alone start
/// at 0, because buckets are ordered among those of other layouts.
#[derive(Debug)]
pub(crate) struct LayoutState {
    pub(crate) entries: Vec<ParamEntry>,
    pub(crate) kept: Vec<BucketInfo>,
    pub(crate) fills: Vec<BucketFill>,
    pub(crate) buckets: Vec<Owned>,
    pub(crate) frozen: Vec<Buffer>,
    pub(crate) groups: Groups,
    pub(crate) among: Arc<RankRoles>,
    pub(crate) first_vector: usize,
    /// Exchange of the matrices that chunks or a mesh cut.
    pub(crate) exchange: Option<Arc<PartExchange>>,
}

/// Sizes of an optimizer before a layout is added.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Before {
    pub(crate) params: usize,
    pub(crate) vectors: usize,
    pub(crate) groups: usize,
    /// Position of the next parameter, or of the first one with a position of its own.
    pub(crate) position: usize,
}

impl Before {
    /// Returns the sizes of `params`.
    pub(crate) fn of(params: &Params) -> Self {
        Before {
            params: params.entries.len(),
            vectors: params.frozen.len(),
            groups: params.groups.len(),
            position: params.entries.iter().map(|entry| entry.position + 1).max().unwrap_or(0),
        }
    }

    /// Adds the sizes of `layout_state`.
    pub(crate) fn count(&mut self, layout_state: &LayoutState) {
        self.params += layout_state.entries.len();
        self.vectors += layout_state.frozen.len();
        self.groups += layout_state.groups.groups.len();
    }
}

impl LayoutState {
    /// Allocates a part's memory, or says what is wrong; touches nothing else.
    pub(crate) fn new(
        part: &Part,
        groups: Groups,
        before: Before,
        (rank, among): (usize, &Arc<RankRoles>),
        options: &Options,
    ) -> Result<Self, Error> {
        let layout = part.layout();
        let group_of = groups.assign(layout)?;
        let mut entries = entries(part, &group_of, before);
        let count = part.buckets().len();
        let mut layout_state = LayoutState {
            entries: Vec::new(),
            kept: Vec::with_capacity(count),
            fills: Vec::with_capacity(count),
            buckets: Vec::with_capacity(count),
            frozen: frozen(layout, &mut entries, before, options)?,
            groups,
            among: Arc::clone(among),
            first_vector: before.vectors,
            exchange: None,
        };
        layout_state.entries = entries;
        let states = layout_state.groups.state().len();
        let vectors = (0..count).flat_map(|b| part.owned_vectors(b, rank, states));
        let mut memory = VectorMemory::new(vectors, options)?;
        for b in 0..count {
            layout_state.add_bucket(part, b, &group_of, before, (rank, among), (&mut memory, options))?;
        }
        let series = part.series();
        for kept in &mut layout_state.kept {
            kept.series = series.iter().position(|series| series.dtype == kept.plan.dtype).unwrap_or(0);
        }
        Ok(layout_state)
    }

    fn add_bucket(
        &mut self,
        part: &Part,
        b: usize,
        group_of: &[usize],
        before: Before,
        (rank, among): (usize, &Arc<RankRoles>),
        (memory, options): (&mut VectorMemory<'_>, &Options),
    ) -> Result<(), Error> {
        let mut bucket = part.buckets()[b].clone();
        let states = self.groups.state().len();
        let seed = options.precision.seed;
        let of = |p: usize| {
            let param = &self.entries[p].param;
            let key = rounding_key(seed, param.name());
            ParamKey { group: group_of[p] + before.groups, key, parts: among.parts.get(param.name()) }
        };
        let comm = &*among.shards;
        let owned_ranges = part.owned(b, rank);
        let mut owned = Owned::new(&bucket, &owned_ranges, states, of, comm, (memory, options))?;
        owned.shift_params(before.params);
        let name = |p: &Placed| self.entries[p.param].param.shared_name();
        let names = bucket.params.iter().map(name).collect();
        bucket.params.iter_mut().for_each(|p| p.param += before.params);
        let apart = |first: usize| owned.streams(first * bucket.grads.size());
        let spec = |len| VectorSpec { dtype: bucket.grads, category: Category::Grads, len };
        let shard = match options.cuts_grads() {
            true => Some(memory.zeroed(spec(bucket.len / part.sizes().shards), || apart(0))?),
            false => None,
        };
        let vector = |_| zeroed_to_travel(comm, spec(bucket.len), options, &apart(owned.first()));
        let mut vectors: Vec<Buffer> = (0..part.grad_vectors(rank)).map(vector).collect::<Result<_, _>>()?;
        let whole = vectors.pop();
        let sums =
            part.slots().map(|tree| SlotSums::new(tree.runs().run(rank), tree.adds_in_place(), vectors));
        self.fills.push(BucketFill::new(&bucket, whole, shard, sums));
        let (counted, gathered) = (part.counted(b, rank), part.gathered(b));
        let among = Arc::clone(among);
        // Gradients that are added to a shard, reduced again, or on a GPU have their norm later.
        let observed = options.queue.place() == Place::Cpu
            && !options.cuts_grads()
            && options.slots.is_none()
            && among.counts_in_norm
            && among.extra_reductions.is_empty();
        let chunk_norm = if observed { ChunkNorm::new(options.norm, &counted) } else { None };
        self.kept.push(BucketInfo {
            counted,
            chunk_norm: chunk_norm.map(Arc::new),
            one_pass: false,
            gathered,
            gathers: None,
            series: 0,
            names,
            owned: owned_ranges,
            among,
            plan: bucket,
        });
        self.buckets.push(owned);
        Ok(())
    }

    /// Registers the buffers that travel whole: parameters, and gradients that are kept whole. Collective.
    pub(crate) fn register(&mut self, options: &Options) -> Result<(), Error> {
        let params = self.buckets.iter().map(|owned| &owned.params).filter(|_| !options.stage.cuts_params());
        // Registered memory must be the same vector on every rank, and sums over slots change places among several.
        let alike = options.slots.as_ref().is_none_or(SlotRuns::are_single);
        let grads = self.fills.iter().filter_map(|filling| filling.whole.as_ref()).filter(|_| alike);
        for buffer in params.chain(grads).filter(|buffer| !buffer.is_empty()) {
            self.among.shards.register(buffer)?;
        }
        let chunks = options.reduce_in_step && options.stage == Stage::Zero1;
        for ((kept, fill), owned) in self.kept.iter_mut().zip(&self.fills).zip(&self.buckets) {
            let grads = fill.whole.as_ref().filter(|_| chunks);
            let one_pass = |grads| self.among.shards.reduces_in_one_pass(grads, &owned.params);
            kept.one_pass = grads.is_some_and(one_pass);
        }
        Ok(())
    }

    /// Calls `initial` for every parameter's first value.
    pub(crate) fn fill(
        &mut self,
        options: &Options,
        mut initial: impl FnMut(&Param, SliceMut<'_>) -> Result<(), meshstep_tensor::Error>,
    ) -> Result<(), Error> {
        for entry in &self.entries {
            let values = match &entry.place {
                ParamPlace::Bucket { bucket, range, .. } => {
                    self.buckets[*bucket].params.as_mut().slice(range.clone())?
                }
                ParamPlace::Frozen { vector, range } => {
                    self.frozen[vector - self.first_vector].as_mut().slice(range.clone())?
                }
            };
            let name = || entry.param.name().to_owned();
            let Options { queue, meter, .. } = options;
            let filled = host_words::fill(queue, meter, values, |values| initial(&entry.param, values));
            filled.map_err(|source| Error::Initial { name: name(), source })?;
        }
        Ok(())
    }

    /// Broadcasts rank 0's values. Collective.
    pub(crate) fn broadcast(&mut self, comm: &dyn Communicator, queue: &Queue) -> Result<(), Error> {
        for values in self.buckets.iter_mut().map(|b| &mut b.params).filter(|b| !b.is_empty()) {
            host_words::run(comm, queue, Op::broadcast(0), values)?;
        }
        self.broadcast_frozen(comm, queue)
    }

    /// Broadcasts rank 0's values of the frozen parameters only. Collective.
    pub(crate) fn broadcast_frozen(&mut self, comm: &dyn Communicator, queue: &Queue) -> Result<(), Error> {
        for values in self.frozen.iter_mut().filter(|b| !b.is_empty()) {
            host_words::run(comm, queue, Op::broadcast(0), values)?;
        }
        Ok(())
    }

    /// Writes one line per parameter with a digest of its values.
    pub(crate) fn describe_values(&self, options: &Options, text: &mut String) -> Result<(), Error> {
        for entry in &self.entries {
            let digest = host_words::digest(&options.queue, &options.meter, self.values(&entry.place)?)?;
            let _ = writeln!(text, "values of {:?} = digest {digest:016x}", entry.param.name());
        }
        Ok(())
    }

    fn values(&self, place: &ParamPlace) -> Result<Slice<'_>, Error> {
        Ok(match place {
            ParamPlace::Bucket { bucket, range, .. } => {
                self.buckets[*bucket].params.as_slice().slice(range.clone())?
            }
            ParamPlace::Frozen { vector, range } => {
                self.frozen[vector - self.first_vector].as_slice().slice(range.clone())?
            }
        })
    }
}

/// Writes the facts about the sharing ranks that must agree on all ranks.
pub(crate) fn describe_roles(among: &RankRoles, text: &mut String) {
    let extra_reductions: Vec<_> =
        among.extra_reductions.iter().map(|(comm, by)| (comm.world_size(), by)).collect();
    let (shards, copies) = (among.shards.world_size(), among.replicas.world_size());
    let _ = writeln!(text, "ranks that divide the state = {shards}");
    let _ = writeln!(text, "ranks that reduce further = {extra_reductions:?}");
    let _ = writeln!(text, "ranks with the same parameters = {copies}");
}

/// Returns the text that must agree on all ranks, one `key = value` line per fact.
pub(crate) fn describe(layout: &Layout, groups: &Groups, options: &Options) -> String {
    let mut text = objection(None);
    for (i, p) in layout.params().iter().enumerate() {
        let _ = write!(text, "parameter {i} = ");
        quote(&mut text, p.name());
        let _ = write!(text, " {:?} {}{}", p.shape(), p.dtype(), if p.frozen() { " frozen" } else { "" });
        if let Some(unit) = p.unit() {
            text.push_str(" in unit ");
            quote(&mut text, unit);
        }
        text.push('\n');
    }
    groups.describe(layout, &mut text);
    let Options {
        stage,
        bucket_len,
        combine,
        accumulate,
        slots,
        missing,
        non_finite,
        initial,
        grads,
        precision,
        norm,
        clip,
        reduce_in_step,
        loss_scale,
        schedule,
        max_skips,
        ..
    } = options;
    let _ = writeln!(text, "stage = {stage:?}\nbucket_len = {bucket_len:?}\ncombine = {combine:?}");
    let _ = writeln!(text, "non_finite = {non_finite:?}\nreduce_in_step = {reduce_in_step}");
    let runs =
        slots.as_ref().map(|slots| (0..slots.ranks()).map(|rank| slots.run(rank).len()).collect::<Vec<_>>());
    let _ = writeln!(text, "accumulate = {accumulate:?}\nslots of each rank = {runs:?}");
    let _ = writeln!(
        text,
        "missing = {missing:?}\ninitial = {initial:?}\ngrads = {grads:?}\nprecision = {precision:?}"
    );
    let _ = writeln!(
        text,
        "norm = {norm:?}\nclip = {clip:?}\nloss_scale = {loss_scale:?}\nmax_skips = {max_skips}"
    );
    text + &crate::config::schedule::describe(schedule.as_ref())
}

fn entries(part: &Part, group_of: &[usize], before: Before) -> Vec<ParamEntry> {
    let nowhere = ParamPlace::Frozen { vector: 0, range: 0..0 };
    let first = before.position;
    let entry = |(i, (p, &group)): (usize, (&Param, &usize))| {
        let (position, whole) = part.in_model(i);
        let (param, place, group) = (p.clone(), nowhere.clone(), group + before.groups);
        let matrix = matrix_of(part.whole_shape(i));
        ParamEntry { param, place, group, t: 0, position: first + position, whole, matrix, paused: false }
    };
    let params = part.layout().params().iter().zip(group_of).enumerate();
    let mut entries: Vec<ParamEntry> = params.map(entry).collect();
    for (b, bucket) in part.buckets().iter().enumerate() {
        for (index, placed) in bucket.params.iter().enumerate() {
            let range = placed.range();
            entries[placed.param].place = ParamPlace::Bucket { bucket: b, index, range };
        }
    }
    entries
}

/// Allocates one vector per type for the frozen parameters.
fn frozen(
    layout: &Layout,
    entries: &mut [ParamEntry],
    before: Before,
    options: &Options,
) -> Result<Vec<Buffer>, Error> {
    let mut vectors = Vec::new();
    for dtype in layout.params().iter().map(|p| p.dtype()).collect::<std::collections::BTreeSet<_>>() {
        let first = layout.trainable_len(dtype);
        let vector = before.vectors + vectors.len();
        for i in layout.flat_order(dtype).into_iter().filter(|&i| layout.params()[i].frozen()) {
            let range = layout.params()[i].range();
            entries[i].place = ParamPlace::Frozen { vector, range: range.start - first..range.end - first };
        }
        let (category, len) = (Category::Params, layout.len(dtype) - first);
        vectors.push(zeroed(VectorSpec { dtype, category, len }, options, &[])?);
    }
    Ok(vectors)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Owners, Sizes};
    use meshstep_optim::AdamW;
    use meshstep_tensor::DType;

    /// Chunks a little longer than whole pages, so that ranks start at different offsets in a page.
    const LEN: usize = 4 * (70 * 1024 + 64);

    /// Checks parameters, gradients and moments from the element where this rank's update starts reading.
    #[test]
    fn what_an_update_streams_together_differs_modulo_a_page() {
        let layout = Layout::builder().param("a", &[LEN], DType::F32).param("b", &[7_777], DType::F32);
        let layout = layout.build().unwrap();
        let whole = Stage::WholeParams(Owners::SortedGreedy);
        let alone = meshstep_comm::loopback::spawn(1, |comm| Arc::new(RankRoles::all(comm)));
        let all = alone.unwrap().remove(0);
        for stage in [Stage::Replicated, Stage::Zero1, Stage::Zero2, Stage::Zero3, whole] {
            for rank in (0..4).cycle().take(40) {
                let options = Options { stage, bucket_len: Some(8_000), ..Options::default() };
                let part = Part::new(layout.clone(), Sizes::all(4), [], &options).unwrap();
                let groups = Groups::new(AdamW::default());
                let layout_state =
                    LayoutState::new(&part, groups, Before::default(), (rank, &all), &options).unwrap();
                for (owned, filling) in layout_state.buckets.iter().zip(&layout_state.fills) {
                    let mut streams = owned.streams(0);
                    let address = |b: &Buffer| b.as_ptr().addr().get();
                    streams.extend(filling.whole.as_ref().map(|g| address(g) + owned.first() * 4));
                    streams.extend(filling.shard.as_ref().map(address));
                    let state: usize = owned.state().iter().map(Buffer::bytes).sum();
                    streams.iter_mut().for_each(|address| *address %= 4096);
                    streams.sort();
                    let len = streams.len();
                    streams.dedup();
                    // The allocator places vectors shorter than a page anywhere.
                    assert!(
                        streams.len() == len || state < 2 * 4096,
                        "{stage:?} on rank {rank}: {streams:?}"
                    );
                }
            }
        }
    }
}
