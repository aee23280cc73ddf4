//! What a step does, decided on the device: the host sends what it was asked for, and hears later what became of it.

use super::kernels::{Kernel, argument};
use super::{Decided, FIELDS, Progress, Settings, StepBlock};
use crate::Error;
use meshstep_tensor::cuda::{Letter, Mail, Stream};
use meshstep_tensor::{Buffer, Category, DType, Meter, Place, Queue, Slice, SliceMut};

/// Summed words before the norm's: non-finite count and weight.
const HEAD: usize = 2;
/// Words of the other vector before those of parameters and [`FIELDS`].
const MAXIMA: usize = 4;

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
    norm: Kernel,
    sends: Mail,
    answers: Mail,
    settings: Buffer,
    progress: Buffer,
    decided: Buffer,
    step: StepBlock,
    /// Parameters of which ranks count who has a gradient.
    counted: usize,
    /// Of these, how many must be even.
    even: usize,
    /// What is sent.
    message: Vec<u8>,
}

impl Decision {
    /// Decisions on the queue's device, from `progress` on, where ranks count who has a gradient for each of `counted`
    /// parameters.
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

    /// Goes on from here. Waits for the queue.
    pub fn set_progress(&mut self, progress: &Progress, queue: &Queue) -> Result<(), Error> {
        let words: &[u64] = bytemuck::cast_slice(std::slice::from_ref(progress));
        Ok(queue.upload(words.into(), self.progress.as_mut())?)
    }

    /// The coming steps are taken with `settings` and, where parameters are counted, with gradients for those of them that
    /// `present` says, from the queue's next work on. The host goes on; a step that was captured takes them too.
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

    /// Writes into an exchange's vectors what this rank brings besides its norm.
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
        // SAFETY: the blocks are of the kernel's layouts, with `counted` bytes and the fill behind the settings; both vectors are
        // as long as it needs, checked above, and all are of the stream's device.
        unsafe { self.bring.launch(stream, 1, arguments) }
    }

    /// Decides from the vectors, once exchanged: writes [`step`](Self::step) and counts the step.
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
        // SAFETY: as in `bring`; there are as many bytes behind the step and what is decided.
        unsafe { self.decide.launch(stream, 1, arguments) }
    }

    /// Sends the host what was decided last, after the queue's work so far: by [`decide`](Self::decide), or by a launch of a
    /// graph that it is part of.
    pub fn answer(&self, queue: &Queue) -> Result<Answer, Error> {
        let letter = self.answers.fetch(stream(queue)?, self.decided.as_slice())?;
        Ok(Answer { letter, counted: self.counted })
    }

    /// Where the run is. Waits for the queue.
    pub fn progress(&self, queue: &Queue) -> Result<Progress, Error> {
        let mut progress = Progress::new(0, None);
        let words: &mut [u64] = bytemuck::cast_slice_mut(std::slice::from_mut(&mut progress));
        queue.download(self.progress.as_slice(), words.into())?;
        Ok(progress)
    }

    /// Notes the norm of a step that was decided before it was known, from vectors to which it was written and which were
    /// exchanged again. [`Settings::dynamic`] is 0.
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

    /// Where the loss scale of the coming step is, an f64 on the device.
    pub fn loss_scale_address(&self) -> u64 {
        (self.progress.as_slice().address() + std::mem::offset_of!(Progress, scale)) as u64
    }

    /// What updates go by.
    pub fn step(&self) -> &StepBlock {
        &self.step
    }

    /// Whether the vectors are an exchange's, and there.
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

/// What was decided, on its way to the host.
#[derive(Debug)]
pub struct Answer {
    letter: Letter,
    counted: usize,
}

impl Answer {
    /// Whether [`read`](Self::read) does not wait.
    pub fn has_arrived(&self) -> Result<bool, Error> {
        Ok(self.letter.has_arrived()?)
    }

    /// Waits for what was decided.
    pub fn read(&self) -> Result<Decided, Error> {
        let mut decided = Decided::default();
        self.letter.read(bytemuck::bytes_of_mut(&mut decided))?;
        Ok(decided)
    }

    /// Waits, and tells for each parameter that is counted whether some rank has its gradient, so that it was updated if the
    /// step was applied.
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
