//! Parameters where their model is evaluated, for rules that train them at another point: computed from parameters and state, window by
//! window, by the rule's own update.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use meshstep_checkpoint::extend::{MASTER, PARAM, REMAINDER};
use meshstep_checkpoint::{Piece, Run, Saved, SavedVectors, TensorEntry, Type, WINDOW};
use meshstep_optim::{Flat, Rounding, Rule, Scalars, ScheduleFreeAdamW, Segment};
use meshstep_shard::extend::rounding_key;
use meshstep_tensor::{Buffer, Category, Meter, Queue, SliceMut};

/// Elements that are converted at a time.
const ELEMENTS: u64 = WINDOW / 2;

/// State of the rule that the point of evaluation depends on.
const Z: &str = "z";

/// Rules of a saved step that are evaluated elsewhere than trained, by tensor.
#[derive(Debug)]
pub(super) struct Evaluations {
    rules: BTreeMap<String, Box<dyn Rule>>,
    rounding: Rounding,
    seed: u64,
}

impl Evaluations {
    /// Reads the rules from the step's settings. Fails if the rule of a tensor with the state of such a rule is not known.
    pub(super) fn of(saved: &Saved) -> Result<Self> {
        let settings = &saved.manifest().settings;
        let texts: BTreeMap<String, Vec<String>> = match settings.get("rules") {
            Some(rules) => serde_json::from_value(rules.clone()).context("the setting `rules`")?,
            None => BTreeMap::new(),
        };
        let (mut rules, mut known) = (BTreeMap::new(), Vec::new());
        for (text, tensors) in &texts {
            known.extend(tensors);
            if let Some(beta1) = beta1(text)? {
                let rule = || ScheduleFreeAdamW { beta1, ..ScheduleFreeAdamW::default() }.evaluation();
                rules.extend(tensors.iter().filter_map(|tensor| Some((tensor.clone(), rule()?))));
            }
        }
        for (tensor, entry) in saved.manifest().tensors.iter().filter(|_| !rules.is_empty()) {
            ensure!(
                known.contains(&tensor) || !entry.slots.contains_key(Z),
                "the settings name no rule of tensor {tensor:?}, which has the state of schedule-free AdamW; --state exports the \
                 trained parameters"
            );
        }
        let seed =
            settings.get("rounding").and_then(|text| text.as_str()?.strip_prefix("Stochastic with seed "));
        let (rounding, seed) = match seed {
            Some(seed) => (Rounding::Stochastic, seed.parse().context("the setting `rounding`")?),
            None => (Rounding::Nearest, 0),
        };
        Ok(Evaluations { rules, rounding, seed })
    }

    /// Returns true if the tensor is evaluated elsewhere than trained.
    pub(super) fn has(&self, tensor: &str) -> bool {
        self.rules.contains_key(tensor)
    }

    /// Passes the tensor's values to `take`, every element once: the index in the tensor of each contiguous run, and its bytes.
    pub(super) fn read(
        &self,
        tensor: &str,
        entry: &TensorEntry,
        reader: &mut SavedVectors<'_>,
        mut take: impl FnMut(u64, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let rule = self.rules.get(tensor).with_context(|| format!("tensor {tensor:?} has no such rule"))?;
        let z = entry.slots.get(Z).with_context(|| format!("tensor {tensor:?} has no state {Z:?}"))?;
        let (key, whole) = (rounding_key(self.seed, tensor), Piece::whole(&entry.shape));
        for Piece { region, range } in z.pieces.iter().map(|entry| entry.piece()) {
            let mut from = range.start;
            while from < range.end {
                let to = range.end.min(from + ELEMENTS);
                let part = Piece { region: region.clone(), range: from..to };
                let mut vectors = Vectors::read(tensor, entry, &part, reader)?;
                let runs: Vec<Run> = whole.runs(&part).collect();
                let segment = |run: &Run| {
                    let range = run.to as usize..(run.to + run.len) as usize;
                    Segment { key, first: run.from, ..Segment::new(range, entry.t + 1) }
                };
                let segments: Vec<Segment> = runs.iter().map(segment).collect();
                let scalars = Scalars { lr: 0.0, rounding: self.rounding, ..Scalars::default() };
                rule.update(vectors.flat(&mut Vec::new()), &segments, &scalars, &Queue::cpu())?;
                let (size, bytes) = (vectors.params.dtype().size(), vectors.params.as_slice().bytes()?);
                for run in runs {
                    let [first, len] = [run.to, run.len].map(|elements| elements as usize * size);
                    take(run.from, &bytes[first..first + len])?;
                }
                from = to;
            }
        }
        Ok(())
    }
}

/// Returns the rule's `beta1` if the text, as an optimizer saves it, is that of schedule-free AdamW.
fn beta1(text: &str) -> Result<Option<f64>> {
    let mut words = text.split(' ');
    if words.next() != Some(ScheduleFreeAdamW::default().name()) {
        return Ok(None);
    }
    let beta1 = words.find_map(|word| word.strip_prefix("beta1="));
    let beta1 = beta1.and_then(|value| value.parse().ok());
    beta1.with_context(|| format!("the rule {text:?} has no beta1")).map(Some)
}

/// Vectors of some elements of a tensor, as an update takes them.
struct Vectors {
    params: Buffer,
    /// The update reads no gradients.
    grads: Buffer,
    master: Option<Buffer>,
    remainder: Option<Buffer>,
    z: Buffer,
    /// The update reads no second moments.
    v: Buffer,
}

impl Vectors {
    /// Reads the elements of `part`.
    fn read(tensor: &str, entry: &TensorEntry, part: &Piece, reader: &mut SavedVectors<'_>) -> Result<Self> {
        let meter = Meter::new();
        let zeros = |dtype: Type| -> Result<Buffer> {
            let dtype = dtype.dtype().context("bytes are no parameters")?;
            Ok(Buffer::zeroed(part.len() as usize, dtype, &meter, Category::Staging)?)
        };
        let mut filled = |slot: &str| -> Result<Option<Buffer>> {
            let Some(of) = entry.slots.get(slot) else { return Ok(None) };
            let mut buffer = zeros(of.dtype)?;
            let size = of.dtype.size();
            let mut slice = buffer.as_mut();
            let room = slice.bytes_mut()?;
            reader.read(tensor, slot, part, |at, bytes| -> Result<()> {
                let first = (at * size) as usize;
                room[first..first + bytes.len()].copy_from_slice(bytes);
                Ok(())
            })?;
            Ok(Some(buffer))
        };
        let missing = |slot: &str| format!("tensor {tensor:?} has no slot {slot:?}");
        let params = filled(PARAM)?.with_context(|| missing(PARAM))?;
        let (master, remainder) = (filled(MASTER)?, filled(REMAINDER)?);
        let z = filled(Z)?.with_context(|| missing(Z))?;
        let v = zeros(entry.slots.get("v").with_context(|| missing("v"))?.dtype)?;
        let grads = zeros(entry.slots[PARAM].dtype)?;
        Ok(Vectors { params, grads, master, remainder, z, v })
    }

    fn flat<'a, 's>(&'a mut self, state: &'s mut Vec<SliceMut<'a>>) -> Flat<'a, 's> {
        let Vectors { params, grads, master, remainder, z, v } = self;
        state.extend([z.as_mut(), v.as_mut()]);
        let (params, copy) = match master {
            Some(master) => (master.as_mut(), Some(params.as_mut())),
            None => (params.as_mut(), None),
        };
        Flat { params, grads: grads.as_mut(), state, copy, remainder: remainder.as_mut().map(Buffer::as_mut) }
    }
}
