//! L-BFGS with a full history: the work between two evaluations, mostly products and the direction.

use super::Result;
use super::race::{Copy, Measured, Times, Waits, stream};
use super::vectors::made;
use meshstep_optim::{Alone, Lbfgs, Loss, accumulate};
use meshstep_tensor::cuda::{self, Moment};
use meshstep_tensor::{DType, Meter, Queue, Slice, SliceMut};

pub const NAME: &str = "lbfgs direction, history of 10";

pub(crate) const HISTORY: usize = 10;
/// Iterations before measuring: until the history is full, and one more.
const WARM: u64 = HISTORY as u64 + 2;

/// Bytes that one iteration reads and writes per parameter. Reads the direction, the gradient and the previous gradient,
/// and writes their difference; reads the pairs, except the oldest, which the new pair replaces, for products with the
/// gradient; reads the gradient and the pairs for the direction and writes the direction; moves the parameters along it and
/// saves them.
pub const BYTES: usize = 4 * (3 + 1 + 2 * (HISTORY - 1) + 1 + 2 * HISTORY + 1 + 4);

/// Bytes of memory, per parameter of the other cases.
pub const RESIDENT: usize = 4 * (2 * (HISTORY + 1) + 4) / PART;

/// Maximum number of elements that are compared with the CPU.
const MOST_COMPARED: usize = 10_007;

/// Divisor of the number of parameters, because L-BFGS needs many vectors.
const PART: usize = 4;

pub fn params(len: usize) -> usize {
    len.div_ceil(PART)
}

/// Measures in turns with a copy, by the device's clock, after comparing a few elements with the CPU.
pub fn measure(copy: &mut Copy, len: usize, rounds: usize, queue: &Queue) -> Result<Measured> {
    let compared = compare(len.min(MOST_COMPARED), queue)?;
    let mut times = Times { copy: Vec::new(), case: Vec::new(), copied: copy.bytes() };
    // Start of an evaluation, end of its copy, end of the evaluation; and the host's wait count at both ends.
    let mut marks: Vec<([Moment; 3], [u64; 2])> = Vec::new();
    let closure = |x: Slice<'_>, g: SliceMut<'_>| -> Result<Loss> {
        let (stream, waits) = (stream(queue)?, cuda::waits());
        let begins = stream.moment()?;
        // Work is enqueued during the copy, so that launch latency rarely affects the timing.
        copy.go(queue)?;
        let copied = stream.moment()?;
        gradient(x, g, queue)?;
        marks.push(([begins, copied, stream.moment()?], [waits, cuda::waits()]));
        Ok(Loss::Whole(1.0))
    };
    run(len, WARM + rounds as u64, queue, closure)?;
    let mut waits = 0;
    for pair in marks.windows(2).skip(WARM as usize - 1) {
        let [([begins, copied, ends], [_, before]), ([next, ..], [after, _])] = pair else { continue };
        times.copy.push(copied.since(begins)?);
        times.case.push(next.since(ends)?);
        waits += after - before;
    }
    let per_step = waits as f64 / times.case.len() as f64;
    Ok(Measured { compared, first_step: None, waits: Waits { per_step, ahead: false }, times, issue: None })
}

/// Runs L-BFGS on `len` elements and returns the first resulting parameters.
fn run(
    len: usize,
    iterations: u64,
    queue: &Queue,
    closure: impl FnMut(Slice<'_>, SliceMut<'_>) -> Result<Loss>,
) -> Result<Vec<f32>> {
    let rule = Lbfgs {
        lr: 0.1,
        max_iter: iterations,
        max_eval: Some(u64::MAX),
        tolerance_grad: 0.0,
        tolerance_change: 0.0,
        history_len: HISTORY,
        ..Lbfgs::default()
    };
    let mut state = rule.state_on(len, DType::F32, queue, &Meter::new())?;
    let mut x = made(DType::F32, (1, 1.0), &(0..len), queue)?;
    rule.step(x.as_mut(), closure, &Alone, &mut state).map_err(|error| error.to_string())?;
    let mut end = vec![0f32; len.min(MOST_COMPARED)];
    queue.download(x.as_slice().slice(0..end.len())?, (&mut end[..]).into())?;
    Ok(end)
}

/// Writes the gradient of c x^2 / 2, with a different c in the second half.
fn gradient(x: Slice<'_>, g: SliceMut<'_>, queue: &Queue) -> Result<()> {
    let half = x.len() / 2;
    let (low, high) = g.split_at(half)?;
    accumulate(low, x.slice(0..half)?, 1.0, true, queue)?;
    Ok(accumulate(high, x.slice(half..x.len())?, 3.0, true, queue)?)
}

/// Compares runs until the history is full on the CPU and on the device.
fn compare(len: usize, queue: &Queue) -> Result<usize> {
    let end =
        |queue: &Queue| run(len, WARM + 3, queue, |x, g| gradient(x, g, queue).map(|()| Loss::Whole(1.0)));
    let (here, there) = (end(&Queue::cpu())?, end(queue)?);
    if here == there { Ok(len) } else { Err(format!("{NAME}: parameters differ from the CPU's").into()) }
}
