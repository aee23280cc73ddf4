//! What a step does, decided on the device: the host sends what it was asked for, and hears later what became of it.

use super::kernels::{Kernel, argument};
use super::{Decided, Progress, Settings, StepBlock};
use crate::Error;
use meshstep_tensor::cuda::{Letter, Mail, Stream};
use meshstep_tensor::{Buffer, Category, DType, Meter, Place, Queue, Slice, SliceMut};

/// The decision of every step of a run, in memory of a device.
///
/// A step is [`set`](Self::set), [`bring`](Self::bring), an exchange of ranks if there are several, and
/// [`decide`](Self::decide); [`answer`](Self::answer) is for who wants to know. `bring` and `decide` can be part of a CUDA graph,
/// and with them a whole step: a [`NormSum`](crate::NormSum) that is reset, added to and written, and the updates. Tables that
/// a norm makes for vectors of a length it has not met cannot: add each vector once before the capture. A launch of the graph
/// takes what was `set` last, and counts `t`, skips and the loss scale on.
#[derive(Debug)]
pub struct Decision {
    bring: Kernel,
    decide: Kernel,
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

    /// The coming steps are taken with `settings`, from the queue's next work on. The host goes on; a step that was captured
    /// takes them too.
    pub fn set(&mut self, settings: &Settings, queue: &Queue) -> Result<(), Error> {
        Ok(self.sends.send(stream(queue)?, bytemuck::bytes_of(settings), self.settings.as_mut())?)
    }

    /// Writes into an exchange's vectors what this rank brings besides its norm.
    pub fn bring(&mut self, sum: SliceMut<'_>, max: SliceMut<'_>, queue: &Queue) -> Result<(), Error> {
        let stream = stream(queue)?;
        check(sum.as_slice(), max.as_slice(), queue)?;
        let mut at = self.addresses(sum.as_slice(), max.as_slice());
        let [settings, progress, sum, max, ..] = &mut at;
        let arguments = &mut [argument(settings), argument(progress), argument(sum), argument(max)];
        // SAFETY: the blocks are of the kernel's layouts; both vectors are as long as it needs, checked above, and all are of the
        // stream's device.
        unsafe { self.bring.launch(stream, 1, arguments) }
    }

    /// Decides from the vectors, once exchanged: writes [`step`](Self::step) and counts the step.
    pub fn decide(&mut self, sum: Slice<'_>, max: Slice<'_>, queue: &Queue) -> Result<(), Error> {
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
        unsafe { self.decide.launch(stream, 1, arguments) }
    }

    /// Sends the host what was decided last, after the queue's work so far: by [`decide`](Self::decide), or by a launch of a
    /// graph that it is part of.
    pub fn answer(&self, queue: &Queue) -> Result<Answer, Error> {
        Ok(Answer(self.answers.fetch(stream(queue)?, self.decided.as_slice())?))
    }

    /// Where the run is. Waits for the queue.
    pub fn progress(&self, queue: &Queue) -> Result<Progress, Error> {
        let mut progress = Progress::new(0, None);
        let words: &mut [u64] = bytemuck::cast_slice_mut(std::slice::from_mut(&mut progress));
        queue.download(self.progress.as_slice(), words.into())?;
        Ok(progress)
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
