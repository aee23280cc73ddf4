//! Runs copy and case in turns, timed by the device, and counts the waits of the host.

use super::Result;
use super::vectors::made;
use meshstep_optim::accumulate;
use meshstep_tensor::cuda::{self, Stream};
use meshstep_tensor::{Buffer, Category, DType, Meter, Queue};
use std::time::Instant;

/// Steps enqueued in a row for counting the host's waits.
const AHEAD: u64 = 8;

/// Seed and size of the copied numbers.
const SOURCE: (u64, f32) = (2, 1.0);

/// The reference: the device's own memory copy.
pub struct Copy {
    from: Buffer,
    to: Buffer,
}

/// Times in seconds, one for each round.
pub struct Times {
    pub copy: Vec<f64>,
    pub case: Vec<f64>,
    /// Bytes that the copy reads and writes.
    pub copied: usize,
}

/// Behaviour of the host while it enqueued steps.
#[derive(Clone, Copy)]
pub struct Waits {
    /// Number of waits for the device per step.
    pub per_step: f64,
    /// True if the host enqueued the last step before the first one was done.
    pub ahead: bool,
}

pub struct Measured {
    /// Number of elements compared with the CPU.
    pub compared: usize,
    /// Additional seconds of the first step compared with a later one, by the host's clock: the time to load the kernels
    /// and compile them for the device, unless an earlier case did so.
    pub first_step: Option<f64>,
    pub waits: Waits,
    pub times: Times,
    /// Seconds that the device needs to issue the case's instructions; `None` if they were not counted.
    pub issue: Option<f64>,
}

impl Copy {
    /// Bytes of memory for each parameter.
    pub const RESIDENT: usize = 8;

    pub fn new(len: usize, queue: &Queue) -> Result<Self> {
        // Random bits, because a device may move zeros with less power and therefore faster.
        let from = made(DType::F32, SOURCE, &(0..len), queue)?;
        Ok(Copy { from, to: Buffer::zeroed_on(queue, len, DType::F32, &Meter::new(), Category::Staging)? })
    }

    /// Returns the number of f32 parameters that the copy moves.
    pub fn params(&self) -> usize {
        self.from.len()
    }

    /// Returns the bytes that the copy reads and writes.
    pub fn bytes(&self) -> usize {
        self.from.bytes() + self.to.bytes()
    }

    pub fn go(&mut self, queue: &Queue) -> Result<()> {
        Ok(queue.copy(self.from.as_slice(), self.to.as_mut())?)
    }
}

/// Enqueues a case's work once.
pub(crate) type Go<'a> = &'a mut dyn FnMut() -> Result<()>;

pub(crate) fn race(copy: &mut Copy, go: Go<'_>, rounds: usize, queue: &Queue) -> Result<Times> {
    const WARM: usize = 3;
    let stream = stream(queue)?;
    let mut times = Times { copy: Vec::new(), case: Vec::new(), copied: copy.bytes() };
    for round in 0..WARM + rounds {
        // Work is enqueued during the first copy, so that launch latency does not affect the timing.
        copy.go(queue)?;
        let begins = stream.moment()?;
        copy.go(queue)?;
        let copied = stream.moment()?;
        go()?;
        let ends = stream.moment()?;
        if round >= WARM {
            times.copy.push(copied.since(&begins)?);
            times.case.push(ends.since(&copied)?);
        }
    }
    Ok(times)
}

/// Launch times in microseconds by the host's clock, medians.
#[derive(Clone, Copy, Debug)]
pub struct Launch {
    /// Time to enqueue the smallest launch.
    pub ask: f64,
    /// Time to enqueue the launch and wait for its end.
    pub ask_and_wait: f64,
}

/// Times launches of one element, first without waiting in between, then one by one.
pub fn launch(queue: &Queue) -> Result<Launch> {
    const WARM: usize = 20;
    const COUNTED: usize = 200;
    let from = made(DType::F32, SOURCE, &(0..1), queue)?;
    let mut to = made(DType::F32, SOURCE, &(0..1), queue)?;
    let mut micros = |waits: bool| -> Result<f64> {
        let mut times = Vec::new();
        for round in 0..WARM + COUNTED {
            let begun = Instant::now();
            accumulate(to.as_mut(), from.as_slice(), 1.0, true, queue)?;
            if waits {
                queue.synchronize()?;
            }
            if round >= WARM {
                times.push(begun.elapsed().as_secs_f64() * 1e6);
            }
        }
        queue.synchronize()?;
        Ok(median(&times))
    };
    Ok(Launch { ask: micros(false)?, ask_and_wait: micros(true)? })
}

/// Enqueues several steps after a copy and counts waits; a first pass allocates all memory, a second pass counts.
pub(crate) fn waits(go: Go<'_>, queue: &Queue) -> Result<Waits> {
    let mut counted = Waits { per_step: 0.0, ahead: false };
    for _ in 0..2 {
        queue.synchronize()?;
        let before = cuda::waits();
        go()?;
        let first = stream(queue)?.record()?;
        for _ in 1..AHEAD {
            go()?;
        }
        let ahead = !first.is_done()?;
        counted = Waits { per_step: (cuda::waits() - before) as f64 / AHEAD as f64, ahead };
    }
    queue.synchronize()?;
    Ok(counted)
}

pub(crate) fn stream(queue: &Queue) -> Result<&Stream> {
    queue.stream().ok_or_else(|| "a queue of the CPU".into())
}

/// Returns the median; NaN without values.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => f64::NAN,
        len if len % 2 == 1 => sorted[middle],
        _ => (sorted[middle - 1] + sorted[middle]) / 2.0,
    }
}
