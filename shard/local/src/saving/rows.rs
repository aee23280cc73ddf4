//! Rows of a checkpoint of workers: every tensor, in the same order on all ranks.
//!
//! | tensor | contents |
//! |---|---|
//! | `worker.W/NAME` | a worker's own parameter and state |
//! | `fragment.F/NAME` | state that all workers share for fragment `F` of a parameter: last result, outer state, mean in flight |
//! | `sent.W.F/NAME` | the values that a worker sent of these elements, if their mean is in flight |

use crate::exchange::fragment_state::Parts;
use crate::exchange::in_flight::{Flight, Sent};
use crate::{LocalPlan, ParamSpec, What};
use meshstep_checkpoint::extend::{Named, SavedTensor};
use meshstep_checkpoint::{CheckpointError, LocalPieces, Type};
use meshstep_shard::extend::VectorKind as Slot;
use meshstep_tensor::{Buffer, DType};

/// Tensor of the checkpoint.
#[derive(Clone, Debug)]
pub(super) enum Row {
    /// Parameter `entry` of the optimizer.
    Param {
        worker: usize,
        entry: usize,
    },
    Shared(Elements),
    Sent {
        worker: usize,
        elements: Elements,
    },
}

/// Elements of one parameter that belong to a fragment.
#[derive(Clone, Debug)]
pub(super) struct Elements {
    pub(super) fragment: usize,
    pub(super) entry: usize,
    name: String,
    len: usize,
    /// True if these are all elements of the parameter.
    all: bool,
    vectors: Vec<(Kind, Named)>,
}

/// Kind of a saved vector; it belongs to the `of`th vector that the fragment exchanges.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Kind {
    Anchor { of: usize },
    Outer { of: usize, slot: usize },
    Mean { of: usize },
    Sent { of: usize },
}

/// Vector that a fragment exchanges: its name, its type, and the type in which it travels.
type OwnRows = (String, DType, DType);

/// Rows of a checkpoint.
#[derive(Clone, Debug, Default)]
pub(super) struct Rows {
    pub(super) rows: Vec<Row>,
    /// Workers, by the numbers under which they are saved.
    pub(super) workers: Vec<usize>,
    /// True for a checkpoint of an optimizer that was no worker.
    pub(super) bare: bool,
    /// Number of parameters of each worker, and of rows shared by all workers.
    params: usize,
    shared: usize,
}

impl Rows {
    /// Returns all rows of `entries` parameters, and of the plan's state with these flights.
    pub(super) fn new(
        plan: &LocalPlan,
        (params, places): &(Vec<ParamSpec>, Vec<usize>),
        entries: usize,
        workers: Vec<usize>,
        flights: &[Flight],
    ) -> Result<Self, CheckpointError> {
        let mut rows = Self::params(entries, workers);
        let (mut shared, mut sent) = (Vec::new(), Vec::new());
        for f in 0..plan.fragments.len() {
            let flight = flights.iter().any(|flight| flight.fragments.contains(&f));
            for chosen in plan.chosen(f, params).map_err(CheckpointError::memory)? {
                let param = &params[chosen.param];
                let own = plan.own(f, param);
                let (name, len, entry) = (param.name.clone(), chosen.range.len(), places[chosen.param]);
                let all = len == param.len;
                let of = |vectors: Vec<(Kind, Named)>| Elements {
                    fragment: f,
                    entry,
                    name: name.clone(),
                    len,
                    all,
                    vectors,
                };
                shared.push(of(plan.shared(f, &own, flight)?));
                if flight && plan.fragments[f].keeps_sent() {
                    sent.push(of(snapshots(&own)?));
                }
            }
        }
        shared.retain(|elements| !elements.vectors.is_empty());
        rows.shared = shared.len();
        rows.rows.extend(shared.into_iter().map(Row::Shared));
        for &worker in &rows.workers {
            let row = |elements: &Elements| Row::Sent { worker, elements: elements.clone() };
            rows.rows.extend(sent.iter().map(row));
        }
        Ok(rows)
    }

    /// Returns the rows of parameters alone.
    pub(super) fn params(entries: usize, workers: Vec<usize>) -> Self {
        let row = |worker| (0..entries).map(move |entry| Row::Param { worker, entry });
        let rows = workers.iter().copied().flat_map(row).collect();
        Rows { rows, workers, params: entries, ..Rows::default() }
    }

    /// Returns the row of every worker that corresponds to `row`.
    pub(super) fn alike(&self, row: usize) -> Vec<usize> {
        let (workers, params) = (self.workers.len(), self.params);
        let sent = workers * params + self.shared;
        let every = |first: usize, each: usize| (0..workers).map(move |w| first + w * each);
        match self.rows[row] {
            Row::Param { .. } => every(row % params, params).collect(),
            Row::Shared(_) => vec![row],
            Row::Sent { .. } => {
                let each = (self.rows.len() - sent) / workers;
                every(sent + (row - sent) % each, each).collect()
            }
        }
    }

    /// Returns the name of a tensor.
    pub(super) fn name(&self, row: &Row, param: &str) -> String {
        match row {
            Row::Param { .. } if self.bare => param.to_owned(),
            Row::Param { worker, .. } => format!("worker.{worker}/{param}"),
            Row::Shared(elements) => format!("fragment.{}/{}", elements.fragment, elements.name),
            Row::Sent { worker, elements } => {
                format!("sent.{worker}.{}/{}", elements.fragment, elements.name)
            }
        }
    }
}

/// Returns true if a tensor belongs to one of these workers, or is shared by all workers.
pub(super) fn is_of(name: &str, workers: &[usize], with_fragments: bool) -> bool {
    let whose = name.split('/').next().unwrap_or_default();
    let worker = |text: &str| text.split('.').next().and_then(|w| w.parse().ok());
    match (whose.strip_prefix("worker."), whose.strip_prefix("sent.")) {
        (Some(own), _) => worker(own).is_none_or(|w| workers.contains(&w)),
        (_, Some(sent)) => with_fragments && worker(sent).is_none_or(|w| workers.contains(&w)),
        (None, None) => with_fragments || !whose.starts_with("fragment."),
    }
}

impl Elements {
    /// Returns the spot and the kind of one of these vectors, if this rank has a part of it.
    pub(super) fn place(&self, parts: &Parts, slot: Slot) -> Option<(usize, Kind)> {
        let Slot::State(i) = slot else { return None };
        let kind = self.vectors.get(i)?.0;
        let (Kind::Anchor { of } | Kind::Outer { of, .. } | Kind::Mean { of } | Kind::Sent { of }) = kind;
        Some((self.first_spot(parts)? + of, kind))
    }

    /// Returns the number of vectors; for sent values, the number that the fragment exchanges of the parameter.
    pub(super) fn count(&self) -> usize {
        self.vectors.len()
    }

    /// Returns the first of this rank's spots of the parameter.
    pub(super) fn first_spot(&self, parts: &Parts) -> Option<usize> {
        parts.of(self.fragment).spots.iter().position(|spot| spot.entry == self.entry)
    }

    /// Describes this rank's part; `whole` is the rank's holding of the parameter.
    pub(super) fn content(&self, name: String, t: u64, parts: &Parts, whole: &LocalPieces) -> SavedTensor {
        let spot = self.first_spot(parts).map(|i| &parts.of(self.fragment).spots[i]);
        let owned = spot.map_or(0..0, |spot| spot.first..spot.first + spot.range.len());
        let vectors = self.vectors.iter().map(|(_, named)| named.clone()).collect();
        let holding = if self.all { whole.clone() } else { LocalPieces::whole(&[self.len as u64]) };
        // All workers have the same values.
        SavedTensor { name, t, holding, owned, shared: true, vectors }
    }
}

impl Kind {
    /// Returns the vector's values on this rank.
    pub(super) fn buffer<'a>(
        self,
        parts: &'a Parts,
        flights: &'a [Flight],
        (f, i): (usize, usize),
    ) -> Result<Option<meshstep_tensor::Slice<'a>>, meshstep_tensor::Error> {
        let (spot, kept) = (&parts.of(f).spots[i], &parts.of(f).kept[i]);
        let sent = || flights.iter().find_map(|flight| Some((flight, sent_of(flight, f)?)));
        Ok(match self {
            Kind::Anchor { .. } => kept.anchor.as_ref().map(Buffer::as_slice),
            Kind::Outer { slot, .. } => kept.outer.get(slot).map(Buffer::as_slice),
            Kind::Mean { .. } => match sent() {
                Some((flight, sent)) => flight.landed(&flight.sent[sent], i, spot.range.len())?,
                None => None,
            },
            Kind::Sent { .. } => {
                let sent = sent().and_then(|(flight, sent)| flight.sent[sent].snapshots.get(i));
                sent.map(|(values, _)| values.as_slice())
            }
        })
    }

    /// Same as [`buffer`](Self::buffer), for writing.
    pub(super) fn buffer_mut<'a>(
        self,
        parts: &'a mut Parts,
        flights: &'a mut [Flight],
        (f, i): (usize, usize),
    ) -> Result<Option<meshstep_tensor::SliceMut<'a>>, meshstep_tensor::Error> {
        let len = parts.of(f).spots[i].range.len();
        let kept = &mut parts.of_mut(f).kept[i];
        Ok(match self {
            Kind::Anchor { .. } => kept.anchor.as_mut().map(Buffer::as_mut),
            Kind::Outer { slot, .. } => kept.outer.get_mut(slot).map(Buffer::as_mut),
            Kind::Mean { .. } => {
                match flights.iter_mut().find_map(|flight| Some((sent_of(flight, f)?, flight))) {
                    Some((sent, flight)) => flight.landed_mut(sent, i, len)?,
                    None => None,
                }
            }
            Kind::Sent { .. } => sent_mut(flights, f)
                .and_then(|sent| sent.snapshots.get_mut(i))
                .map(|(values, _)| values.as_mut()),
        })
    }
}

/// Returns the index of fragment `f` in a flight.
fn sent_of(flight: &Flight, f: usize) -> Option<usize> {
    flight.fragments.iter().position(|&of| of == f)
}

/// Returns the sent values of a fragment in flight.
pub(super) fn sent_mut(flights: &mut [Flight], f: usize) -> Option<&mut Sent> {
    flights
        .iter_mut()
        .find_map(|flight| Some((sent_of(flight, f)?, flight)))
        .map(|(k, flight)| &mut flight.sent[k])
}

impl LocalPlan {
    /// Returns the vectors of a parameter that a fragment exchanges.
    pub(super) fn own(&self, f: usize, param: &ParamSpec) -> Vec<OwnRows> {
        let fragment = &self.fragments[f];
        let of = |own: DType| move |name: &str| (name.to_owned(), own, fragment.wire_of(param));
        match &fragment.what {
            What::Params => vec![of(param.values)("param")],
            What::State(slots) => param.named(slots).map(of(param.state)).collect(),
            What::OuterMomentum(outer) => {
                self.outer_state(*outer).iter().copied().map(of(DType::F64)).collect()
            }
        }
    }

    /// Returns the vectors that all workers keep for a fragment's own vectors.
    fn shared(&self, f: usize, own: &[OwnRows], flight: bool) -> Result<Vec<(Kind, Named)>, CheckpointError> {
        let mut vectors = Vec::new();
        for (of, (name, own, wire)) in own.iter().enumerate() {
            if self.fragments[f].has_anchor(*wire, *own) {
                vectors.push((Kind::Anchor { of }, format!("{name}.anchor"), *own));
            }
            for (slot, state) in self.outer_state(f).iter().enumerate() {
                vectors.push((Kind::Outer { of, slot }, format!("outer.{state}"), DType::F64));
            }
            if flight {
                vectors.push((Kind::Mean { of }, format!("{name}.mean"), *wire));
            }
        }
        number(vectors)
    }
}

/// Returns the vectors that a worker sent.
fn snapshots(own: &[OwnRows]) -> Result<Vec<(Kind, Named)>, CheckpointError> {
    let sent = |(of, (name, own, _)): (usize, &OwnRows)| (Kind::Sent { of }, format!("{name}.sent"), *own);
    number(own.iter().enumerate().map(sent).collect())
}

fn number(vectors: Vec<(Kind, String, DType)>) -> Result<Vec<(Kind, Named)>, CheckpointError> {
    let number = |(i, (kind, name, dtype)): (usize, (Kind, String, DType))| match Type::of(dtype) {
        Some(dtype) => Ok((kind, Named { slot: Slot::State(i), name, dtype })),
        None => Err(CheckpointError::memory(format!("{dtype} is not saved"))),
    };
    vectors.into_iter().enumerate().map(number).collect()
}
