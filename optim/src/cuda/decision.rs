//! What a step does, decided on the device: the host sends what it was asked for, and hears later what became of it.

use super::kernels::{Kernel, argument};
use super::{Decided, Progress, Settings, StepBlock};
use crate::Error;
use meshstep_tensor::cuda::{Letter, Mail, Stream};
use meshstep_tensor::{Buffer, Category, DType, Meter, Place, Queue, Slice, SliceMut};

/// The decision of every step of a run, in memory of a device.
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
}

impl Decision {
    /// Decisions on the queue's device, from `progress` on.
    pub fn new(progress: &Progress, queue: &Queue, meter: &Meter) -> Result<Self, Error> {
        let stream = stream(queue)?;
        let words = |bytes: usize| {
            Buffer::zeroed_on(queue, bytes / size_of::<u64>(), DType::U64, meter, Category::Staging)
        };
        let mail = |bytes: usize| Mail::new(stream.device(), bytes, meter);
        let mut decision = Decision {
            bring: Kernel::find(stream.device(), "decide_bring")?,
            decide: Kernel::find(stream.device(), "decide")?,
            norm: Kernel::find(stream.device(), "decide_norm")?,
            sends: mail(size_of::<Settings>()),
            answers: mail(size_of::<Decided>()),
            settings: words(size_of::<Settings>())?,
            progress: words(size_of::<Progress>())?,
            decided: words(size_of::<Decided>())?,
            step: StepBlock::new(queue, meter)?,
        };
        decision.set_progress(progress, queue)?;
        Ok(decision)
    }

    /// Goes on from here. Waits for the queue.
    pub fn set_progress(&mut self, progress: &Progress, queue: &Queue) -> Result<(), Error> {
        let words: &[u64] = bytemuck::cast_slice(std::slice::from_ref(progress));
        Ok(queue.upload(words.into(), self.progress.as_mut())?)
    }

    /// Writes into an exchange's vectors what this rank brings besides its norm.
    pub fn bring(
        &mut self,
        settings: &Settings,
        sum: SliceMut<'_>,
        max: SliceMut<'_>,
        queue: &Queue,
    ) -> Result<(), Error> {
        let stream = stream(queue)?;
        check(sum.as_slice(), max.as_slice(), queue)?;
        self.sends.send(stream, bytemuck::bytes_of(settings), self.settings.as_mut())?;
        let mut at = self.addresses(sum.as_slice(), max.as_slice());
        let [settings, progress, sum, max, ..] = &mut at;
        let arguments = &mut [argument(settings), argument(progress), argument(sum), argument(max)];
        // SAFETY: the blocks are of the kernel's layouts; both vectors are as long as it needs, checked above, and all are of the
        // stream's device.
        unsafe { self.bring.launch(stream, 1, arguments) }
    }

    /// Decides from the vectors, once exchanged: writes [`step`](Self::step), counts the step, and sends the host a letter.
    pub fn decide(&mut self, sum: Slice<'_>, max: Slice<'_>, queue: &Queue) -> Result<Answer, Error> {
        let stream = stream(queue)?;
        check(sum, max, queue)?;
        let mut at = self.addresses(sum, max);
        let [settings, progress, sum, max, step, decided] = &mut at;
        let arguments = &mut [
            argument(settings),
            argument(progress),
            argument(sum),
            argument(max),
            argument(step),
            argument(decided),
        ];
        // SAFETY: as in `bring`.
        unsafe { self.decide.launch(stream, 1, arguments)? };
        Ok(Answer(self.answers.fetch(stream, self.decided.as_slice())?))
    }

    /// Tells the norm of a step that was decided before it was known, from vectors to which it was written and which were
    /// exchanged again. [`Settings::dynamic`] is 0.
    pub fn norm(&mut self, sum: Slice<'_>, max: Slice<'_>, queue: &Queue) -> Result<Answer, Error> {
        let stream = stream(queue)?;
        check(sum, max, queue)?;
        let mut at = self.addresses(sum, max);
        let [settings, progress, sum, max, _, decided] = &mut at;
        let arguments =
            &mut [argument(settings), argument(progress), argument(sum), argument(max), argument(decided)];
        // SAFETY: as in `bring`.
        unsafe { self.norm.launch(stream, 1, arguments)? };
        Ok(Answer(self.answers.fetch(stream, self.decided.as_slice())?))
    }

    /// What updates go by.
    pub fn step(&self) -> &StepBlock {
        &self.step
    }

    fn addresses(&self, sum: Slice<'_>, max: Slice<'_>) -> [u64; 6] {
        let own = |buffer: &Buffer| buffer.as_slice().address() as u64;
        let (sum, max) = (sum.address() as u64, max.address() as u64);
        [own(&self.settings), own(&self.progress), sum, max, self.step.address(), own(&self.decided)]
    }
}

/// What was decided, on its way to the host.
#[derive(Debug)]
pub struct Answer(Letter);

impl Answer {
    /// Whether [`read`](Self::read) does not wait.
    pub fn has_arrived(&self) -> Result<bool, Error> {
        Ok(self.0.has_arrived()?)
    }

    /// Waits for what was decided.
    pub fn read(&self) -> Result<Decided, Error> {
        let mut decided = Decided::default();
        self.0.read(bytemuck::bytes_of_mut(&mut decided))?;
        Ok(decided)
    }
}

fn stream(queue: &Queue) -> Result<&Stream, Error> {
    let wrong = meshstep_tensor::Error::Place { given: queue.place(), expected: Place::Cuda(0) };
    queue.stream().ok_or(wrong.into())
}

/// Whether the vectors are an exchange's, and there.
fn check(sum: Slice<'_>, max: Slice<'_>, queue: &Queue) -> Result<(), Error> {
    /// Non-finite count and weight, before the norm's words.
    const HEAD: usize = 2;
    for (what, vector, expected) in [("sum", sum, HEAD + crate::ExactSum::WORDS), ("max", max, 4)] {
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
