//! Copy and case in turns, timed by the device; and whether the host ever waits.

use super::Result;
use super::figures::median;
use super::vectors::made;
use meshstep_optim::accumulate;
use meshstep_tensor::cuda::{self, Stream};
use meshstep_tensor::{Buffer, Category, DType, Meter, Queue};
use std::time::Instant;

/// Steps asked for in a row, to count the host's waits.
const AHEAD: u64 = 8;

/// Seed and size of the numbers that are copied.
const SOURCE: (u64, f32) = (2, 1.0);

/// The floor: the device's own copy of memory.
pub struct Copy {
    from: Buffer,
    to: Buffer,
}

/// Seconds, one for each round.
pub struct Times {
    pub copy: Vec<f64>,
    pub case: Vec<f64>,
    /// Of the kernel that the case is a variant of; empty where it is none.
    pub base: Vec<f64>,
    /// Bytes that the copy reads and writes.
    pub copied: usize,
}

/// What the host did while it asked for steps.
#[derive(Clone, Copy)]
pub struct Waits {
    /// Its waits for the device, for each step.
    pub per_step: f64,
    /// Whether it had asked for the last step before the first was done.
    pub ahead: bool,
}

pub struct Measured {
    /// Elements that were compared with the CPU.
    pub compared: usize,
    /// Seconds that the first step takes more than a later one, by the host's clock: the kernels are loaded and compiled for
    /// the device, if no earlier case has had them.
    pub first_step: Option<f64>,
    pub waits: Waits,
    pub times: Times,
    /// Seconds in which the device issues the case's instructions; none where they are not counted.
    pub issue: Option<f64>,
}

impl Copy {
    /// Bytes of memory for each parameter.
    pub const RESIDENT: usize = 8;

    pub fn new(len: usize, queue: &Queue) -> Result<Self> {
        // Random bits: a device may move zeros with less power, and so faster.
        let from = made(DType::F32, SOURCE, &(0..len), queue)?;
        Ok(Copy { from, to: Buffer::zeroed_on(queue, len, DType::F32, &Meter::new(), Category::Staging)? })
    }

    /// Parameters whose f32 numbers it copies.
    pub fn params(&self) -> usize {
        self.from.len()
    }

    /// Bytes that it reads and writes.
    pub fn bytes(&self) -> usize {
        self.from.bytes() + self.to.bytes()
    }

    pub fn go(&mut self, queue: &Queue) -> Result<()> {
        Ok(queue.copy(self.from.as_slice(), self.to.as_mut())?)
    }
}

/// Work that is asked for by its number: the case's comes last, its base's before it.
pub(crate) type Go<'a> = &'a mut dyn FnMut(usize) -> Result<()>;

pub(crate) fn race(
    copy: &mut Copy,
    (works, go): (usize, Go<'_>),
    rounds: usize,
    queue: &Queue,
) -> Result<Times> {
    const WARM: usize = 3;
    let stream = stream(queue)?;
    let mut times = Times { copy: Vec::new(), case: Vec::new(), base: Vec::new(), copied: copy.bytes() };
    for round in 0..WARM + rounds {
        // Work is asked for during the first copy, so that no launch is waited for while the clock runs.
        copy.go(queue)?;
        let mut moments = vec![stream.moment()?];
        copy.go(queue)?;
        moments.push(stream.moment()?);
        for work in 0..works {
            go(work)?;
            moments.push(stream.moment()?);
        }
        let mut took = moments.windows(2).map(|pair| pair[1].since(&pair[0]));
        let (copied, done) = (took.next().transpose()?, took.next_back().transpose()?);
        let base = took.next().transpose()?;
        if round >= WARM {
            times.copy.extend(copied);
            times.case.extend(done);
            times.base.extend(base);
        }
    }
    Ok(times)
}

/// Microseconds by the host's clock, medians.
#[derive(Clone, Copy, Debug)]
pub struct Launch {
    /// To ask for the smallest launch.
    pub ask: f64,
    /// To ask for it, and to wait for its end.
    pub ask_and_wait: f64,
}

/// Asks for launches of one element, first in a row, then one by one.
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

/// Asks for some steps in a row, behind a copy, once to have all memory there and once to count.
pub(crate) fn waits(go: &mut dyn FnMut() -> Result<()>, queue: &Queue) -> Result<Waits> {
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
