//! Decision of a step on the device: the host sends the settings, and reads the decision later.

use super::kernels::{Kernel, argument};
use super::{Decided, FIELDS, Progress, Settings, StepBlock};
use crate::Error;
use meshstep_tensor::cuda::{Letter, Mail, Stream};
use meshstep_tensor::{Buffer, Category, DType, Meter, Place, Queue, Slice, SliceMut};

/// Words of `sum` before the norm's: non-finite count and weight.
const HEAD: usize = 2;
/// Words of `max` before those of parameters and [`FIELDS`].
const MAXIMA: usize = 4;

/// Decisions of all steps of a run, in device memory.
///
/// A step consists of [`set`](Self::set), [`bring`](Self::bring), an exchange if there are several ranks, and [`decide`](Self::decide);
/// [`answer`](Self::answer) sends the decision to the host. `bring` and `decide` can be part of a CUDA graph, and with them a whole step:
/// resetting, adding to and writing a [`NormSum`](crate::NormSum), and the updates. A norm allocates a table for each new vector length,
/// which a capture does not allow: add each vector once before the capture. A launch of the graph uses the latest settings and advances
/// `t`, skip counts and the loss scale.
#[derive(Debug)]
pub struct Decision {
    bring: Kernel,
    decide: Kernel,
    norm: Kernel,
    sends: Mail,
    answers: Mail,
    settings: Buffer,
    progress: Buffer,
    decided: Buffer,
    step: StepBlock,
    /// Number of parameters with counted gradients.
    counted: usize,
    /// Number of these that need a gradient on all ranks or on none.
    even: usize,
    /// Staging bytes of a message to the device.
    message: Vec<u8>,
}

impl Decision {
    /// Creates a decision on the queue's device that starts from `progress`. Ranks count the gradients of `counted` parameters.
    pub fn new(progress: &Progress, counted: usize, queue: &Queue, meter: &Meter) -> Result<Self, Error> {
        let stream = stream(queue)?;
        let words = |bytes: usize| {
            Buffer::zeroed_on(queue, bytes / size_of::<u64>(), DType::U64, meter, Category::Staging)
        };
        let mail = |bytes: usize| Mail::new(stream.device(), bytes, meter);
        let bytes = counted.next_multiple_of(size_of::<u64>());
        let (sent, told) = (size_of::<Settings>() + bytes, size_of::<Decided>() + bytes);
        let mut decision = Decision {
            bring: Kernel::find(stream.device(), "decide_bring")?,
            decide: Kernel::find(stream.device(), "decide")?,
            norm: Kernel::find(stream.device(), "decide_norm")?,
            sends: mail(sent),
            answers: mail(told),
            settings: words(sent)?,
            progress: words(size_of::<Progress>())?,
            decided: words(told)?,
            step: StepBlock::of(counted, queue, meter)?,
            counted,
            even: 0,
            message: vec![0; sent],
        };
        decision.set_progress(progress, queue)?;
        Ok(decision)
    }

    /// Sets the progress. Waits for the queue.
    pub fn set_progress(&mut self, progress: &Progress, queue: &Queue) -> Result<(), Error> {
        let words: &[u64] = bytemuck::cast_slice(std::slice::from_ref(progress));
        Ok(queue.upload(words.into(), self.progress.as_mut())?)
    }

    /// Sets `settings` for the steps that follow in the queue; for counted parameters, `present` states which ones have a gradient on
    /// this rank. The host does not wait. A captured step uses the new settings too.
    pub fn set(
        &mut self,
        settings: &Settings,
        present: impl IntoIterator<Item = bool>,
        queue: &Queue,
    ) -> Result<(), Error> {
        let stream = stream(queue)?;
        let even = usize::try_from(settings.params).unwrap_or(usize::MAX);
        if ![0, self.counted].contains(&even) {
            let what = "Settings::params";
            return Err(Error::Len { what, given: even, expected: self.counted });
        }
        let (head, bytes) = self.message.split_at_mut(size_of::<Settings>());
        head.copy_from_slice(bytemuck::bytes_of(settings));
        bytes.fill(0);
        bytes[..self.counted].iter_mut().zip(present).for_each(|(byte, here)| *byte = here.into());
        self.sends.send(stream, &self.message, self.settings.as_mut())?;
        self.even = even;
        Ok(())
    }

    /// Writes this rank's contribution, except its norm, into the exchange's vectors.
    pub fn bring(&mut self, sum: SliceMut<'_>, max: SliceMut<'_>, queue: &Queue) -> Result<(), Error> {
        let stream = stream(queue)?;
        self.check(sum.as_slice(), max.as_slice(), queue)?;
        let mut at = self.addresses(sum.as_slice(), max.as_slice());
        let ([settings, progress, sum, max, ..], mut counted) = (&mut at, self.counted as u64);
        let arguments = &mut [
            argument(settings),
            argument(progress),
            argument(sum),
            argument(max),
            argument(&mut counted),
        ];
        // SAFETY: the blocks have the kernel's layouts, with `counted` bytes and padding after the settings. Both vectors are as long as
        // the kernel needs, checked above, and all memory is on the stream's device.
        unsafe { self.bring.launch(stream, 1, arguments) }
    }

    /// Decides from the exchanged vectors: writes [`step`](Self::step) and counts the step.
    pub fn decide(&mut self, sum: Slice<'_>, max: Slice<'_>, queue: &Queue) -> Result<(), Error> {
        let stream = stream(queue)?;
        self.check(sum, max, queue)?;
        let mut at = self.addresses(sum, max);
        let ([settings, progress, sum, max, step, decided], mut counted) = (&mut at, self.counted as u64);
        let arguments = &mut [
            argument(settings),
            argument(progress),
            argument(sum),
            argument(max),
            argument(step),
            argument(decided),
            argument(&mut counted),
        ];
        // SAFETY: as in `bring`; as many bytes follow the step and the decision.
        unsafe { self.decide.launch(stream, 1, arguments) }
    }

    /// Sends the latest decision to the host, after the queue's work so far: that of [`decide`](Self::decide), or of a graph launch that
    /// includes it.
    pub fn answer(&self, queue: &Queue) -> Result<Answer, Error> {
        let letter = self.answers.fetch(stream(queue)?, self.decided.as_slice())?;
        Ok(Answer { letter, counted: self.counted })
    }

    /// Returns the progress. Waits for the queue.
    pub fn progress(&self, queue: &Queue) -> Result<Progress, Error> {
        let mut progress = Progress::new(0, None);
        let words: &mut [u64] = bytemuck::cast_slice_mut(std::slice::from_mut(&mut progress));
        queue.download(self.progress.as_slice(), words.into())?;
        Ok(progress)
    }

    /// Records the norm of a step that was decided before its norm was known, from vectors with that norm after a second exchange.
    /// [`Settings::dynamic`] is 0.
    pub fn norm(&mut self, sum: Slice<'_>, max: Slice<'_>, queue: &Queue) -> Result<(), Error> {
        let stream = stream(queue)?;
        self.check(sum, max, queue)?;
        let mut at = self.addresses(sum, max);
        let [settings, progress, sum, max, _, decided] = &mut at;
        let arguments =
            &mut [argument(settings), argument(progress), argument(sum), argument(max), argument(decided)];
        // SAFETY: as in `bring`.
        unsafe { self.norm.launch(stream, 1, arguments) }
    }

    /// Returns the device address of the next step's loss scale, an f64.
    pub fn loss_scale_address(&self) -> u64 {
        (self.progress.as_slice().address() + std::mem::offset_of!(Progress, scale)) as u64
    }

    /// Returns the step that updates read.
    pub fn step(&self) -> &StepBlock {
        &self.step
    }

    /// Checks that the vectors have the exchange's type, length and place.
    fn check(&self, sum: Slice<'_>, max: Slice<'_>, queue: &Queue) -> Result<(), Error> {
        let sums = HEAD + crate::ExactSum::WORDS + self.counted.div_ceil(2) + 1;
        for (what, vector, expected) in [("sum", sum, sums), ("max", max, MAXIMA + self.even + 2 * FIELDS)] {
            vector.place().check(queue.place())?;
            if vector.dtype() != DType::U64 {
                return Err(Error::DType { what, given: vector.dtype(), works: "u64" });
            }
            if vector.len() < expected {
                return Err(Error::Len { what, given: vector.len(), expected });
            }
        }
        Ok(())
    }

    fn addresses(&self, sum: Slice<'_>, max: Slice<'_>) -> [u64; 6] {
        let own = |buffer: &Buffer| buffer.as_slice().address() as u64;
        let (sum, max) = (sum.address() as u64, max.address() as u64);
        [own(&self.settings), own(&self.progress), sum, max, self.step.address(), own(&self.decided)]
    }
}

/// Decision on its way to the host.
#[derive(Debug)]
pub struct Answer {
    letter: Letter,
    counted: usize,
}

impl Answer {
    /// Returns true if [`read`](Self::read) would not wait.
    pub fn has_arrived(&self) -> Result<bool, Error> {
        Ok(self.letter.has_arrived()?)
    }

    /// Waits for the decision and returns it.
    pub fn read(&self) -> Result<Decided, Error> {
        let mut decided = Decided::default();
        self.letter.read(bytemuck::bytes_of_mut(&mut decided))?;
        Ok(decided)
    }

    /// Waits for the decision. Returns for each counted parameter whether some rank has its gradient, so that it was updated if the step
    /// was applied.
    pub fn updated(&self) -> Result<Vec<bool>, Error> {
        let mut bytes = vec![0; size_of::<Decided>() + self.counted];
        self.letter.read(&mut bytes)?;
        Ok(bytes[size_of::<Decided>()..].iter().map(|&byte| byte != 0).collect())
    }
}

fn stream(queue: &Queue) -> Result<&Stream, Error> {
    let wrong = meshstep_tensor::Error::Place { given: queue.place(), expected: Place::Cuda(0) };
    queue.stream().ok_or(wrong.into())
}
