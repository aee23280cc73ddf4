//! One rank's run through a program.

use crate::program::{Program, Random, Step, Trouble, len};
use meshstep_comm::{Action, Communicator, Error, InFlight, Op, Reduction};
use meshstep_tensor::{Buffer, Category, DType, Meter, Queue, Threads};
use std::ops::ControlFlow;
use std::sync::Arc;

/// Outcomes of a rank's steps; `None` for a step without a look at its result.
pub(crate) type Outcomes = Vec<Option<Result<(), Error>>>;

pub(crate) struct Rank<'a> {
    pub(crate) comm: Arc<dyn Communicator>,
    pub(crate) program: &'a Program,
    pub(crate) random: Random,
    pub(crate) outcomes: Outcomes,
    pub(crate) flying: Vec<(usize, InFlight)>,
}

impl<'a> Rank<'a> {
    pub(crate) fn new(comm: Arc<dyn Communicator>, program: &'a Program, random: Random) -> Self {
        Rank { comm, program, random, outcomes: vec![None; program.steps.len()], flying: Vec::new() }
    }
}

impl Rank<'_> {
    /// Runs the program to its end, also after failures. Returns `false` if the rank is to panic.
    pub(crate) fn run(&mut self) -> bool {
        let me = self.comm.rank();
        for (i, &step) in self.program.steps.iter().enumerate() {
            let (mut op, mut len, mut dtype) = (step.op(me), len(self.program.ranks), DType::F32);
            match self.program.trouble(me, i) {
                Some(Trouble::Return) => break,
                Some(Trouble::Panic) => {
                    self.land();
                    return false;
                }
                Some(Trouble::Abort) => {
                    self.land();
                    self.comm.abort();
                }
                Some(Trouble::Wrong(other, other_len, other_dtype)) => {
                    (op, len, dtype) = (other, other_len, other_dtype);
                }
                _ => {}
            }
            if step.needs(me) {
                self.call(i, step, op, values(me, len, dtype));
            }
        }
        self.land();
        true
    }

    fn call(&mut self, i: usize, step: Step, op: Op, mut buffer: Buffer) {
        if matches!(step, Step::Split) {
            let result = self.comm.split(Some(0), 0).map(drop);
            return self.outcomes[i] = Some(result);
        }
        if let (Action::AllReduce(reduction), 0) = (op.action(), self.random.below(3)) {
            let result = self.keep(reduction, &mut buffer);
            self.check_sum(step, &buffer, &result);
            return self.outcomes[i] = Some(result);
        }
        if let Action::ReduceAndGather(reduction) = op.action() {
            return self.outcomes[i] = Some(self.reduce_and_gather(reduction, buffer));
        }
        if op.action() == Action::AllGather && self.random.below(2) == 0 {
            return self.outcomes[i] = Some(self.gather(buffer));
        }
        if self.random.below(2) == 0 {
            let result = self.comm.run(op, &mut buffer);
            self.check_sum(step, &buffer, &result);
            return self.outcomes[i] = Some(result);
        }
        match self.comm.start(op, buffer, &Queue::cpu()) {
            Ok(started) => self.flying.push((i, started)),
            Err((_, error)) => self.outcomes[i] = Some(Err(error)),
        }
    }

    /// Reduces `values` where they lie, in slices of this rank's own; after an error they are as before.
    fn keep(&mut self, reduction: Reduction, values: &mut Buffer) -> Result<(), Error> {
        let (len, dtype) = (values.len(), values.dtype());
        let room = || Buffer::zeroed(len, dtype, &Meter::new(), Category::Staging).unwrap();
        let mut before = room();
        before.as_mut().copy_from(values.as_slice()).unwrap();
        let (first, second) = values.as_mut().split_at(self.random.below(len + 1)).unwrap();
        let (kept, result) = self.comm.all_reduce_keeping(reduction, None, &mut [first, second], room());
        let unchanged = if result.is_ok() { &kept } else { &*values };
        assert_eq!(unchanged.as_slice().bytes().unwrap(), before.as_slice().bytes().unwrap());
        result.map(|found| assert_eq!(found, 0))
    }

    /// Gathers a chunk that this rank writes meanwhile: its values again.
    fn gather(&mut self, mut buffer: Buffer) -> Result<(), Error> {
        let (rank, ranks) = (self.comm.rank(), self.comm.world_size());
        let mut written = 0;
        buffer.as_mut().zero().unwrap();
        let on = Queue::cpu_on(&Threads::caller());
        let (buffer, result) = self.comm.all_gather_written(buffer, &on, &mut |first, mut part| {
            assert_eq!(std::mem::replace(&mut written, first + part.len()), first);
            part.copy_from(values(rank, part.len(), part.dtype()).as_slice()).unwrap();
            ControlFlow::Continue(())
        });
        assert_eq!(written, buffer.len() / ranks, "the whole chunk, whatever becomes of the operation");
        if let (Ok(()), Ok(values)) = (&result, buffer.typed::<f32>()) {
            let chunks = values.chunks(values.len() / ranks).enumerate();
            assert!({ chunks }.all(|(of, chunk)| chunk.iter().all(|&x| x == of as f32 + 1.0)));
        }
        result
    }

    /// Reduces the values and gathers them in another buffer.
    fn reduce_and_gather(&mut self, reduction: Reduction, mut from: Buffer) -> Result<(), Error> {
        let n = self.comm.world_size() as f32;
        let into = Buffer::zeroed(from.len(), from.dtype(), &Meter::new(), Category::Staging).unwrap();
        let on = Queue::cpu_on(&Threads::caller());
        let mut written = 0;
        let (into, result) = self.comm.reduce_and_gather(
            reduction,
            (&mut from, into),
            &on,
            &mut |first, reduced, mut part| {
                assert_eq!(std::mem::replace(&mut written, first + part.len()), first);
                part.copy_from(reduced.as_slice()).unwrap();
                ControlFlow::Continue(())
            },
        );
        if let (Ok(()), Ok(values)) = (&result, into.typed::<f32>()) {
            assert!(values.iter().all(|&x| x == n * (n + 1.0) / 2.0));
        }
        result
    }

    /// Waits for the operations in flight, or forgets them.
    fn land(&mut self) {
        for (i, started) in std::mem::take(&mut self.flying) {
            if self.random.below(8) > 0 {
                let (buffer, result) = started.wait(&Queue::cpu());
                self.check_sum(self.program.steps[i], &buffer, &result);
                self.outcomes[i] = Some(result);
            }
        }
    }

    fn check_sum(&self, step: Step, buffer: &Buffer, result: &Result<(), Error>) {
        let summed = matches!(step, Step::All(op) if op == Op::all_reduce(Reduction::Sum));
        if summed && result.is_ok() {
            let n = self.program.ranks as f32;
            assert!(buffer.typed::<f32>().unwrap().iter().all(|&x| x == n * (n + 1.0) / 2.0));
        }
    }
}

pub(crate) fn values(rank: usize, len: usize, dtype: DType) -> Buffer {
    match dtype {
        DType::F32 => {
            Buffer::from_slice(&vec![rank as f32 + 1.0; len], &Meter::new(), Category::Grads).unwrap()
        }
        other => Buffer::zeroed(len, other, &Meter::new(), Category::Grads).unwrap(),
    }
}
