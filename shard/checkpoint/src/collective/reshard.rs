//! Resharding without files: every rank describes its present and its future state, and sends elements to the ranks that lack them.

use super::compatibility::Fitting;
use super::load::{Staged, take_in};
use super::load_options::Load;
use super::ranks::Ranks;
use super::transfer_plan::{Move, Moves, Side, Tensor};
use super::windowed_transfer::{Window, partners};
use super::write::STAGING;
use crate::contents::{Contents, Saveable};
use crate::error::CheckpointError;
use crate::failure::Error;
use crate::format::catalog::Catalog;
use crate::format::local_pieces::Part;
use crate::format::piece::Piece;
use crate::format::placement::ModelPlacement;
use crate::format::settings::{Settings, TiedNames};
use crate::parts::{CheckpointCall, SavedParts};
use crate::tensors::SavedTensor;
use meshstep_comm::Communicator;
use meshstep_shard::Options;
use meshstep_shard::extend::OptimizerShard;
use meshstep_shard::extend::objection;
use meshstep_tensor::{Buffer, Category, Queue, SliceMut};
use std::ops::Range;
use std::sync::Arc;

/// Bytes that a reshard moved on this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Moved {
    /// Sent to other ranks, which did not have them.
    pub sent: u64,
    /// Received from other ranks.
    pub received: u64,
    /// Copied from this rank's present state to its future state.
    pub kept: u64,
}

/// Moves parameters, state and progress from an optimizer on some ranks to one on other ranks, of any number, stage and buckets. Collective
/// over `via`, which contains all these ranks: a leaving rank passes `from`, a joining rank `to`, and a rank that stays passes both.
///
/// A rank receives each element it lacks once. Ranks with copies of an element share the sending, in messages of at most 16 MiB. Received
/// values stay in host memory until every rank has its own; then they are copied, which does not fail. This takes as much additional memory
/// as this rank is to hold. `from` stays as it is. Names, shapes, types, rules, schedule and rounding must be the same, as for
/// [`load`](super::load::load). An error is the same on every rank and has changed nothing on any; `via` stays usable too, unless the ranks have
/// lost each other.
///
/// ```
/// # use meshstep_optim::AdamW;
/// # use meshstep_checkpoint::{Error, reshard};
/// # use meshstep_shard::{Optimizer, Options};
/// # use meshstep_tensor::{DType, Layout};
/// # let make = |comm| -> Result<Optimizer, meshstep_shard::Error> {
/// #     let layout = Layout::builder().param("w", &[3, 5], DType::F32).build()?;
/// #     Optimizer::new(comm, layout, AdamW::default(), |_, _| Ok(()), Options::default())
/// # };
/// // Rank 0 leaves, rank 3 joins.
/// let moved = meshstep_comm::loopback::spawn(4, |via| -> Result<(), Error> {
///     let among = |ranks: std::ops::Range<usize>| via.split(ranks.contains(&via.rank()).then_some(0), 0);
///     let (old, new) = (among(0..3)?, among(1..4)?);
///     let mut old = old.map(make).transpose()?;
///     let mut new = new.map(make).transpose()?;
///     reshard(&via, old.as_mut(), new.as_mut()).map(drop)
/// })?;
/// moved.into_iter().collect::<Result<(), Error>>()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn reshard<T: Saveable + ?Sized>(
    via: &Arc<dyn Communicator>,
    from: Option<&mut T>,
    to: Option<&mut T>,
) -> Result<Moved, Error> {
    let [mut from, mut to] = [from, to].map(|side| side.map(|thing| thing.contents()));
    move_all(via, held(&mut from)?, held(&mut to)?)
}

/// State on this rank, and the placement of its parameters.
struct ReshardSide<'a> {
    parts: &'a mut dyn SavedParts,
    placing: Box<dyn ModelPlacement + 'a>,
}

fn held<'a>(side: &'a mut Option<Contents<'_>>) -> Result<Option<ReshardSide<'a>>, Error> {
    let Some(contents) = side else { return Ok(None) };
    let (parts, placing) = contents.for_group(CheckpointCall::Reshard)?;
    Ok(Some(ReshardSide { parts, placing }))
}

/// Moves the contents of `from` to `to`. Collective over `via`.
fn move_all<'a>(
    via: &Arc<dyn Communicator>,
    mut from: Option<ReshardSide<'a>>,
    mut to: Option<ReshardSide<'a>>,
) -> Result<Moved, Error> {
    let ready = ready(&mut from).and_then(|()| ready(&mut to));
    let side = from.as_mut().or(to.as_mut());
    let options = side.map_or_else(Options::default, |held| held.parts.optimizer().options().clone());
    let text = match &ready {
        Ok(()) => "this call = reshard\n".to_owned(),
        Err(error) => objection(Some(error)),
    };
    let before = [sent(&mut from), sent(&mut to)];
    let same = meshstep_shard::same_everywhere(&**via, &options, &text);
    ready?;
    same?;
    let moved =
        Reshard { via: &**via, ranks: Ranks::new(via, &options), options }.carry_out(&mut from, &mut to);
    if let Err(Error::Shard(_)) = moved {
        // No rank must wait for a message that this rank will not send.
        via.abort();
    }
    exclude_since(before[0], from);
    exclude_since(before[1], to);
    moved
}

/// Checks that no step is in progress.
fn ready(side: &mut Option<ReshardSide<'_>>) -> Result<(), meshstep_shard::Error> {
    let Some(held) = side else { return Ok(()) };
    let opt = held.parts.optimizer();
    opt.healthy()?;
    opt.between_two_steps()?;
    // This includes steps that a GPU decides.
    opt.describe_counters().map(drop)
}

/// Returns the bytes sent so far by an optimizer's communicators; `via` may be one of them.
fn sent(side: &mut Option<ReshardSide<'_>>) -> u64 {
    side.as_mut().map_or(0, |held| held.parts.optimizer().bytes_sent())
}

fn exclude_since(before: u64, side: Option<ReshardSide<'_>>) {
    if let Some(held) = side {
        held.parts.optimizer().exclude_sent_since(before);
    }
}

struct Reshard<'a> {
    via: &'a dyn Communicator,
    ranks: Ranks,
    options: Options,
}

/// Present or future state of an optimizer on one rank.
type ReshardPieces = (Vec<SavedTensor>, Side);

/// Present state of a rank, if it has one.
type Old<'a> = Option<(&'a mut dyn SavedParts, Vec<SavedTensor>)>;

/// Memory for a rank's future state.
struct TransferRoom {
    contents: Vec<SavedTensor>,
    staged: Staged,
    /// Index in `staged` of each parameter's first vector.
    firsts: Vec<usize>,
    /// Index in the local part of the parameter of each vector's first element.
    begins: Vec<usize>,
}

impl Reshard<'_> {
    fn carry_out(
        &self,
        from: &mut Option<ReshardSide<'_>>,
        to: &mut Option<ReshardSide<'_>>,
    ) -> Result<Moved, Error> {
        let described = from.as_mut().map(describe).transpose();
        let described = described.and_then(|old| Ok((old, to.as_mut().map(describe).transpose()?)));
        let (old, new) = self.ranks.agree(described)?;
        let sides = (old.as_ref().map(|(_, side)| side), new.as_ref().map(|(_, side)| side));
        let sides = self.ranks.gather(&serde_json::to_vec(&sides).unwrap_or_default())?;
        let sides: Result<Vec<_>, _> = sides.iter().map(|text| serde_json::from_slice(text)).collect();
        let moves = self.ranks.agree(sides.map_err(CheckpointError::memory).and_then(Moves::new))?;
        let room = to.as_mut().zip(new).map(|(to, (contents, _))| room(to, contents, &moves)).transpose();
        let made = room.and_then(|room| Ok((room, self.window(&moves)?)));
        let (mut room, mut window) = self.ranks.agree(made)?;
        let mut old: Old<'_> = match (from, old) {
            (Some(held), Some((contents, _))) => Some((&mut *held.parts, contents)),
            _ => None,
        };
        let moved = self.exchange(&moves, &mut old, &mut room, &mut window)?;
        drop(window);
        self.ranks.agree(Ok(()))?;
        if let (Some(held), Some(room)) = (to, room) {
            let Staged { vectors, t, settings, .. } = &room.staged;
            held.parts.apart(|parts| take_in(parts, vectors, t, settings))?;
        }
        Ok(moved)
    }

    /// Makes a window as long as the longest message.
    fn window(&self, moves: &Moves) -> Result<Window<'_>, CheckpointError> {
        let rank = self.ranks.rank();
        let others = (0..self.via.world_size()).filter(|&other| other != rank);
        let most = others.map(|other| moves.bytes(rank, other).max(moves.bytes(other, rank))).max();
        let bytes = most.unwrap_or(0).min(STAGING as u64) as usize;
        let window = Window::new(self.via, &self.options.queue, &self.options.meter, bytes);
        window.map_err(CheckpointError::memory)
    }

    /// Fills the room: first from this rank's present state, then with one other rank after another.
    fn exchange(
        &self,
        moves: &Moves,
        old: &mut Old<'_>,
        room: &mut Option<TransferRoom>,
        window: &mut Window<'_>,
    ) -> Result<Moved, meshstep_shard::Error> {
        let rank = self.ranks.rank();
        let mut moved = Moved { kept: moves.bytes(rank, rank), ..Moved::default() };
        if let (Some((parts, contents)), Some(room)) = (&mut *old, &mut *room) {
            moves.each(rank, rank, &mut |part| room.copy(part, *parts, contents))?;
        }
        for peer in partners(rank, self.via.world_size()) {
            // The lower rank sends first.
            for sends in [rank < peer, peer < rank] {
                let (from, to) = if sends { (rank, peer) } else { (peer, rank) };
                let bytes = moves.bytes(from, to);
                window.begin(peer, bytes);
                match (sends, &mut *old, &mut *room) {
                    (true, Some((parts, contents)), _) => {
                        moved.sent += bytes;
                        moves.each(from, to, &mut |part| send(part, *parts, contents, window))?;
                    }
                    (false, _, Some(room)) => {
                        moved.received += bytes;
                        moves.each(from, to, &mut |part| room.receive(part, window))?;
                    }
                    _ => {}
                }
            }
        }
        Ok(moved)
    }
}

/// Describes an optimizer on this rank.
fn describe(ReshardSide { parts, placing }: &mut ReshardSide<'_>) -> Result<ReshardPieces, CheckpointError> {
    let contents = parts.tensors(&**placing)?;
    let mut tensors = Vec::new();
    for (param, content) in contents.iter().enumerate() {
        let pieces = |range: Range<usize>| {
            let parts = content.holding.parts(range.start as u64..range.end as u64);
            parts.into_iter().map(|Part { global, .. }| global).collect::<Vec<Piece>>()
        };
        let mut slots = Vec::new();
        for vector in &content.vectors {
            let (first, values) = parts.vector(param, vector.slot).map_err(CheckpointError::memory)?;
            slots.push((vector.name.clone(), vector.dtype, pieces(first..first + values.len())));
        }
        let (name, shape) = (content.name.clone(), content.holding.shape.clone());
        tensors.push(Tensor { name, t: content.t, shape, slots, owned: pieces(content.owned.clone()) });
    }
    let settings = parts.all_settings(&**placing).members().clone();
    Ok((contents, Side { tensors, settings }))
}

fn room(
    ReshardSide { parts, placing }: &mut ReshardSide<'_>,
    contents: Vec<SavedTensor>,
    moves: &Moves,
) -> Result<TransferRoom, CheckpointError> {
    let saved = Catalog::pack(&moves.manifest())?;
    let settings = Settings::new(saved.settings().clone());
    let TiedNames { mut tied } = settings.section()?;
    tied.extend(placing.tied());
    let Fitting { t, .. } = Fitting::new(&contents, &saved, &tied, &Load::default())?;
    parts.compare_settings(&settings, &parts.all_settings(&**placing))?;
    parts.check(&settings)?;
    let meter = parts.optimizer().options().meter.clone();
    let (mut vectors, mut firsts, mut begins) = (Vec::new(), Vec::new(), Vec::new());
    for (param, content) in contents.iter().enumerate() {
        firsts.push(vectors.len());
        for vector in &content.vectors {
            let (first, values) = parts.vector(param, vector.slot).map_err(CheckpointError::memory)?;
            let (len, dtype) = (values.len(), values.dtype());
            let buffer = Buffer::zeroed(len, dtype, &meter, Category::Staging);
            vectors.push((param, vector.slot, buffer.map_err(CheckpointError::memory)?));
            begins.push(first);
        }
    }
    let staged = Staged { vectors, t, settings, ..Staged::default() };
    Ok(TransferRoom { contents, staged, firsts, begins })
}

/// Sends this rank's elements of a move.
fn send(
    part: Move<'_>,
    from: &mut dyn SavedParts,
    contents: &[SavedTensor],
    window: &mut Window<'_>,
) -> Result<(), meshstep_shard::Error> {
    let content = &contents[part.source];
    let Some(vector) = content.vectors.iter().find(|vector| vector.name == part.slot) else { return Ok(()) };
    let (first, values) = from.vector(part.source, vector.slot)?;
    places(content, part.pieces[0], part.run.from, part.run.len)
        .into_iter()
        .try_for_each(|place| window.send(values.slice(place.start - first..place.end - first)?))
}

impl TransferRoom {
    /// Copies elements of a move that this rank has already.
    fn copy(
        &mut self,
        part: Move<'_>,
        had: &mut dyn SavedParts,
        contents: &[SavedTensor],
    ) -> Result<(), meshstep_shard::Error> {
        let content = &contents[part.source];
        let Some(vector) = content.vectors.iter().find(|vector| vector.name == part.slot) else {
            return Ok(());
        };
        let queue: Queue = had.queue();
        let (first, values) = had.vector(part.source, vector.slot)?;
        let mut done = 0;
        for from in places(content, part.pieces[0], part.run.from, part.run.len) {
            let mut values = values.slice(from.start - first..from.end - first)?;
            for to in self.places(&part, done, from.len() as u64) {
                let len = to.len();
                queue.download(values.slice(0..len)?, self.at(&part, to)?)?;
                values = values.slice(len..values.len())?;
            }
            done += from.len() as u64;
        }
        Ok(())
    }

    /// Receives the elements of a move.
    fn receive(&mut self, part: Move<'_>, window: &mut Window<'_>) -> Result<(), meshstep_shard::Error> {
        let places = self.places(&part, 0, part.run.len);
        places.into_iter().try_for_each(|to| window.receive(self.at(&part, to)?))
    }

    /// Returns the local ranges for `len` of a move's elements, from element `done` on.
    fn places(&self, part: &Move<'_>, done: u64, len: u64) -> Vec<Range<usize>> {
        places(&self.contents[part.target], part.pieces[1], part.run.to + done, len)
    }

    /// Returns the memory for local elements `place` of a move's target.
    fn at(&mut self, part: &Move<'_>, place: Range<usize>) -> Result<SliceMut<'_>, meshstep_tensor::Error> {
        let number = self.firsts[part.target] + part.vector;
        let first = self.begins[number];
        let (_, _, buffer) = &mut self.staged.vectors[number];
        buffer.as_mut().slice(place.start - first..place.end - first)
    }
}

/// Returns the ranges in the local part of `len` elements of a piece, from element `at` on.
fn places(content: &SavedTensor, piece: &Piece, at: u64, len: u64) -> Vec<Range<usize>> {
    let start = piece.range.start + at;
    let local = content.holding.boxes.iter().find(|(global, _)| *global == piece.region);
    let Some((_, region)) = local else { return Vec::new() };
    let (part, held) = (Piece { region: region.clone(), range: start..start + len }, content.held());
    part.runs(&held).map(|run| run.to as usize..(run.to + run.len) as usize).collect()
}
