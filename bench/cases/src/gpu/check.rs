//! Compares the first step of a case with the CPU: parts of every vector, bit for bit, and the whole norm.

use super::Result;
use super::cases::Case;
use super::job::{Job, KEY, LR, MAX_NORM};
use super::vectors::{PERIOD, Vectors};
use meshstep_optim::cuda::{Answer, Verdict};
use meshstep_optim::{Norm, NormAccumulator, Scalars, Segment, clip_coef};
use meshstep_tensor::{Buffer, Category, Meter, Queue};
use std::ops::Range;
use std::time::Instant;

/// Length of a compared part in elements.
const PART: usize = 10_007;

/// Runs the first step. Returns the number of elements compared in each vector, and the seconds from the request for the
/// step to its end.
pub(crate) fn first_step(case: &Case, job: &mut Job, queue: &Queue) -> Result<(usize, f64)> {
    let norm = norm(case, job.len)?;
    let begun = Instant::now();
    let answer = job.go(queue)?;
    queue.synchronize()?;
    let took = begun.elapsed().as_secs_f64();
    if let Some(there) = &job.norm
        && there.read(queue)? != norm
    {
        return Err(format!("{}: the norm differs from the CPU's", case.name).into());
    }
    let grad_scale = answer.map_or(Ok(1.0), |answer| clipped(case, &answer, norm.finish()))?;
    let Some(rule) = &case.rule else { return Ok((job.len, took)) };
    let scalars = Scalars { lr: LR, grad_scale, zero_grads: false, rounding: case.recipe.rounding };
    let parts = parts(job.len);
    for range in &parts {
        let mut expected = Vectors::new(case, range, &Queue::cpu())?;
        let part = [Segment { key: KEY, first: range.start as u64, ..Segment::new(0..range.len(), 1) }];
        expected.flat(|flat| rule.update(flat, &part, &scalars, &Queue::cpu())).transpose()?;
        compare(case, job, &expected, range, queue)?;
    }
    Ok((parts.iter().map(Range::len).sum(), took))
}

/// Returns the compared ranges: at the beginning, around the middle, and at the end.
pub(crate) fn parts(len: usize) -> Vec<Range<usize>> {
    let part = |start: usize| start..len.min(start + PART);
    let mut parts = vec![part(0), part(len / 2 - len.min(PART) / 2), part(len.saturating_sub(PART))];
    parts.dedup();
    parts
}

fn compare(case: &Case, job: &Job, expected: &Vectors, range: &Range<usize>, queue: &Queue) -> Result<()> {
    for ((name, there), (_, here)) in job.vectors.all().zip(expected.all()) {
        let found = downloaded(there, range, queue)?;
        if found.as_slice().bytes()? != here.as_slice().bytes()? {
            let name = format!("{}: {name} of elements {range:?}", case.name);
            return Err(format!("{name} differ from the CPU's").into());
        }
    }
    Ok(())
}

/// Downloads elements `range` of a device vector.
pub(crate) fn downloaded(there: &Buffer, range: &Range<usize>, queue: &Queue) -> Result<Buffer> {
    let mut found = Buffer::zeroed(range.len(), there.dtype(), &Meter::new(), Category::Staging)?;
    queue.download(there.as_slice().slice(range.clone())?, found.as_mut())?;
    Ok(found)
}

/// Returns the norm of the gradients, from the norm of one period times the number of periods, and of the rest.
fn norm(case: &Case, len: usize) -> Result<NormAccumulator> {
    let mut whole = NormAccumulator::new(Norm::L2);
    if !case.norm {
        return Ok(whole);
    }
    let period = Vectors::new(case, &(0..PERIOD.min(len)), &Queue::cpu())?;
    let mut once = NormAccumulator::new(Norm::L2);
    once.add(period.grads.as_slice())?;
    (0..len / PERIOD).for_each(|_| whole.merge(&once));
    whole.add(period.grads.as_slice().slice(0..len % PERIOD)?)?;
    Ok(whole)
}

/// Returns the clipping factor after checking that the device decided as the CPU would.
fn clipped(case: &Case, answer: &Answer, norm: f64) -> Result<f64> {
    let (decided, coef) = (answer.read()?, clip_coef(norm, MAX_NORM)?);
    let right = decided.verdict == Verdict::Applied as u32 && decided.norm == norm && decided.coef == coef;
    if right { Ok(coef) } else { Err(format!("{}: {decided:?} of a norm of {norm}", case.name).into()) }
}
