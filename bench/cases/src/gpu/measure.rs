//! Measures one case from its first step on, and finds the number of parameters that fit on the device.

use super::Result;
use super::cases::{self, Case};
use super::check;
use super::job::Job;
use super::lbfgs;
use super::race::{self, Copy, Go, Measured, stream};
use super::slots::{Counted, issue_seconds};
use meshstep_tensor::{Buffer, Category, DType, Meter, Queue, cuda};
use std::time::Instant;

pub fn measure(
    case: &Case,
    copy: &mut Copy,
    (len, rounds): (usize, usize),
    queue: &Queue,
) -> Result<Measured> {
    let mut job = Job::new(case, len, queue)?;
    let (compared, first) = check::first_step(case, &mut job, queue)?;
    let begun = Instant::now();
    job.go(queue)?;
    queue.synchronize()?;
    let first_step = Some((job.loading + first - begun.elapsed().as_secs_f64()).max(0.0));
    let kernels = std::mem::take(&mut job.kernels);
    let measured = timed(copy, (len, rounds), &kernels, &mut || job.go(queue).map(drop), queue)?;
    Ok(Measured { compared, first_step, ..measured })
}

/// Times checked work.
pub(crate) fn timed(
    copy: &mut Copy,
    (len, rounds): (usize, usize),
    kernels: &Counted,
    go: Go<'_>,
    queue: &Queue,
) -> Result<Measured> {
    let waits = race::waits(go, queue)?;
    let times = race::race(copy, go, rounds, queue)?;
    let issue = issue_seconds(kernels, len, stream(queue)?.device())?;
    Ok(Measured { compared: 0, first_step: None, waits, times, issue })
}

/// Returns the largest number of parameters, a power of two up to `2^log2`, that fits into the device's memory.
pub fn fitting(log2: usize, queue: &Queue) -> Result<usize> {
    let resident = cases::cases().iter().map(Case::resident).max().unwrap_or(0);
    let each = resident.max(lbfgs::RESIDENT) + Copy::RESIDENT;
    for log2 in (0..=log2.min(40)).rev() {
        // Reserve for tables and the driver.
        let bytes = (each << log2) + (64 << 20).min(each << log2);
        match Buffer::zeroed_on(queue, bytes / 8, DType::U64, &Meter::new(), Category::Staging) {
            Ok(_) => return Ok(1 << log2),
            Err(meshstep_tensor::Error::Cuda(cuda::Error::OutOfMemory { .. })) => {}
            Err(other) => return Err(other.into()),
        }
    }
    Err("the device has no memory left".into())
}
