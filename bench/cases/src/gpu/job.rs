//! A case on the device, ready for repeated steps.

use super::Result;
use super::cases::{Case, Recipe};
use super::slots::Counted;
use super::vectors::Vectors;
use meshstep_optim::cuda::{
    Answer, Decision, FIELDS, Group, Progress, Settings, StepBlock, StepScalars, THREADS, Update, kernel,
    norm_code, norm_kernel, norm_tile, tile,
};
use meshstep_optim::{ExactSum, Norm, NormSum, Segment};
use meshstep_tensor::{Buffer, Category, DType, Meter, Queue};
use std::ops::Range;
use std::time::Instant;

/// Norm to which gradients are clipped; the norm of the gradients is larger.
pub(crate) const MAX_NORM: f64 = 0.125;
pub(crate) const LR: f64 = 1e-3;
/// Key of the random numbers.
pub(crate) const KEY: u64 = 0x5eed;

pub(crate) struct Job {
    pub(crate) len: usize,
    pub(crate) vectors: Vectors,
    pub(crate) norm: Option<NormSum>,
    /// Elementwise kernels.
    pub(crate) kernels: Counted,
    update: Option<Update>,
    deciding: Option<Deciding>,
    /// Step parameters of an update without a norm.
    block: StepBlock,
    /// Seconds spent on loading kernels and creating tables.
    pub(crate) loading: f64,
}

/// Exchange of one rank with itself, and the clipping decision based on it.
struct Deciding {
    decision: Decision,
    settings: Settings,
    sum: Buffer,
    max: Buffer,
}

impl Job {
    pub(crate) fn new(case: &Case, len: usize, queue: &Queue) -> Result<Self> {
        let (meter, rounding) = (Meter::new(), case.recipe.rounding);
        let mut vectors = Vectors::new(case, &(0..len), queue)?;
        let segments: Vec<Segment> =
            (0..case.segments).filter_map(|i| segment(i, case.segments, len)).collect();
        queue.synchronize()?;
        let begun = Instant::now();
        let made = case.rule.as_ref().and_then(|rule| {
            let group = Group { rule: &**rule, lr_scale: 1.0, segments: &segments, params: &[] };
            vectors.flat(|flat| Update::new(&flat, &[group], rounding, queue, &meter))
        });
        let update = made.transpose()?;
        let kernels = kernels(case, &mut vectors);
        let mut block = StepBlock::new(queue, &meter)?;
        block.set(&StepScalars { lr: LR, grad_scale: 1.0, skip: 0, zero_grads: 0 }, queue)?;
        let norm = case.norm.then(|| NormSum::new(Norm::L2, queue, &meter)).transpose()?;
        let decides = norm.is_some() && update.is_some();
        let deciding = decides.then(|| Deciding::new(queue, &meter)).transpose()?;
        queue.synchronize()?;
        let loading = begun.elapsed().as_secs_f64();
        Ok(Job { len, vectors, norm, kernels, update, deciding, block, loading })
    }

    /// Enqueues the case's work once. Returns the decision of a whole step.
    pub(crate) fn go(&mut self, queue: &Queue) -> Result<Option<Answer>> {
        if let Some(norm) = &mut self.norm {
            norm.reset(queue)?;
            norm.add(self.vectors.grads.as_slice(), queue)?;
        }
        let deciding = self.deciding.as_mut().zip(self.norm.as_ref());
        let answer = deciding.map(|(deciding, norm)| deciding.go(norm, queue)).transpose()?;
        if let Some(update) = &mut self.update {
            let step = self.deciding.as_ref().map_or(&self.block, |deciding| deciding.decision.step());
            self.vectors.flat(|flat| update.run(flat, step, queue)).transpose()?;
        }
        Ok(answer)
    }
}

fn kernels(case: &Case, vectors: &mut Vectors) -> Counted {
    let Recipe { params, grads, .. } = case.recipe;
    let of_thread = |tile: u64| tile / u64::from(THREADS);
    let norm = norm_kernel(Norm::L2, grads).filter(|_| case.norm);
    let family = case.rule.as_ref().and_then(|rule| rule.on_device()).map(|hyper| hyper.family);
    let update = family.and_then(|family| vectors.flat(|flat| kernel(family, &flat)));
    let norm = norm.map(|name| (name, of_thread(norm_tile(grads))));
    norm.into_iter().chain(update.map(|name| (name, of_thread(tile(params))))).collect()
}

impl Deciding {
    fn new(queue: &Queue, meter: &Meter) -> Result<Self> {
        let words = |len| Buffer::zeroed_on(queue, len, DType::U64, meter, Category::Staging);
        Ok(Deciding {
            decision: Decision::new(&Progress::new(0, None), 0, queue, meter)?,
            settings: settings(),
            sum: words(3 + ExactSum::WORDS)?,
            max: words(4 + 2 * FIELDS)?,
        })
    }

    fn go(&mut self, norm: &NormSum, queue: &Queue) -> Result<Answer> {
        let Deciding { decision, settings, sum, max } = self;
        norm.write(sum.as_mut(), max.as_mut(), queue)?;
        decision.set(settings, [], queue)?;
        decision.bring(sum.as_mut(), max.as_mut(), queue)?;
        decision.decide(sum.as_slice(), max.as_slice(), queue)?;
        Ok(decision.answer(queue)?)
    }
}

/// Returns segment `i` of `count` segments of nearly equal length, or `None` if it is empty. All segments are parts of one
/// tensor, so that they use the same random numbers as a single segment.
fn segment(i: usize, count: usize, len: usize) -> Option<Segment> {
    let bound = |i: usize| (i as u128 * len as u128 / count as u128) as usize;
    let range: Range<usize> = bound(i)..bound(i + 1);
    let first = range.start as u64;
    (!range.is_empty()).then(|| Segment { key: KEY, first, ..Segment::new(range, 1) })
}

/// Returns the settings of a clipped step of one rank and one micro-batch.
fn settings() -> Settings {
    Settings {
        lr: LR,
        max_norm: MAX_NORM,
        norm: norm_code(Norm::L2).unwrap_or_default(),
        max_skips: 0,
        ..Settings::default()
    }
}
