//! Collectives of threads that hold the baton one at a time, plain and slow. An operation ends some time after all ranks have
//! started it, on all ranks or, in case of a failure, on some.

use meshstep_comm::{Action, Called, Error, Op, Reduction};
use meshstep_tensor::{Buffer, DType};
use std::sync::Arc;
use std::time::Duration;

/// A group of ranks.
#[derive(Debug)]
pub(crate) struct Group {
    pub(crate) lives: Vec<Option<usize>>,
    /// Operations of each rank, in their order.
    calls: Vec<Vec<Call>>,
    /// Error that ended the group, as known to each rank.
    failed: Vec<Option<Error>>,
    /// True for ranks with no handle left.
    left: Vec<bool>,
    /// True if all ranks learn of an error at once, as on loopback; otherwise each rank runs into its own deadline.
    told: bool,
    /// End of the last operation.
    pub(crate) busy_until: Duration,
    /// Longest wait of an operation for the other ranks.
    pub(crate) deadline: Duration,
    /// True for a group of one worker's ranks.
    pub(crate) inside: bool,
    /// Groups that were split from this group and end with it.
    pub(crate) below: Vec<usize>,
}

#[derive(Debug)]
struct Call {
    op: Op,
    buffer: Option<Buffer>,
    end: Option<Result<(), Error>>,
}

impl Group {
    pub(crate) fn new(ranks: usize, told: bool, deadline: Duration) -> Self {
        Group {
            lives: vec![None; ranks],
            calls: (0..ranks).map(|_| Vec::new()).collect(),
            failed: vec![None; ranks],
            left: vec![false; ranks],
            told,
            busy_until: Duration::ZERO,
            deadline,
            inside: false,
            below: Vec::new(),
        }
    }

    /// Creates a group of one worker's ranks, which share their errors.
    pub(crate) fn inside(lives: Vec<Option<usize>>, deadline: Duration) -> Self {
        Group { inside: true, lives: lives.clone(), ..Group::new(lives.len(), true, deadline) }
    }

    /// Returns the number of the operation, and true if all ranks have started it.
    pub(crate) fn start(
        &mut self,
        rank: usize,
        op: Op,
        buffer: Buffer,
    ) -> Result<(usize, bool), (Buffer, Error)> {
        if let Err(error) = op.check(rank, self.lives.len(), buffer.len(), buffer.dtype()) {
            return Err((buffer, error));
        }
        if let Some(cause) = &self.failed[rank] {
            return Err((buffer, Error::Poisoned { cause: Arc::new(cause.clone()) }));
        }
        let number = self.calls[rank].len();
        self.calls[rank].push(Call { op, buffer: Some(buffer), end: None });
        let complete = self.calls.iter().all(|calls| calls.len() > number);
        if let Some(gone) = (0..self.left.len()).find(|&r| self.left[r] && self.calls[r].len() <= number)
            && self.told
        {
            self.fail(rank, &Error::Left { rank: gone, op_number: number as u64 });
        }
        Ok((number, complete && self.failed.iter().all(Option::is_none)))
    }

    /// Returns the end of this rank's operation, if it has ended.
    pub(crate) fn end(&self, rank: usize, number: usize) -> Option<&Result<(), Error>> {
        self.calls[rank].get(number).and_then(|call| call.end.as_ref())
    }

    pub(crate) fn take(&mut self, rank: usize, number: usize) -> (Buffer, Result<(), Error>) {
        let call = &mut self.calls[rank][number];
        (call.buffer.take().unwrap(), call.end.clone().unwrap())
    }

    /// Completes operation `number`, which fails on the ranks `without`.
    pub(crate) fn complete(&mut self, number: usize, without: &[usize]) {
        let ranks = self.lives.len();
        if (0..ranks).any(|rank| self.calls[rank][number].end.is_some()) {
            return;
        }
        let calls: Vec<Called> = (0..ranks).map(|rank| self.called(rank, number)).collect();
        let said = |call: &Called| (without_factor(call.action), call.len, call.dtype);
        // A mismatch is always a bug: an exchange that failed because of it would look like any other failure.
        assert!(calls.iter().all(|call| said(call) == said(&calls[0])), "a mismatch: {calls:?}");
        let mut buffers: Vec<Buffer> =
            self.calls.iter_mut().map(|calls| calls[number].buffer.take().unwrap()).collect();
        combine(&calls, &mut buffers);
        for (rank, buffer) in buffers.into_iter().enumerate() {
            self.calls[rank][number].buffer = Some(buffer);
            self.calls[rank][number].end = Some(Ok(()));
        }
        for &rank in without {
            self.calls[rank][number].end = None;
            self.fail(rank, &Error::Remote { rank, message: "its line is broken".to_owned() });
        }
    }

    fn called(&self, rank: usize, number: usize) -> Called {
        let call = &self.calls[rank][number];
        let (len, dtype) = call.buffer.as_ref().map_or((0, DType::F32), |b| (b.len(), b.dtype()));
        Called { op_number: number as u64, action: call.op.action(), len, dtype, by: None }
    }

    /// Creates a group of `ranks` of these ranks.
    pub(crate) fn part(&self, ranks: usize) -> Self {
        Group { inside: self.inside, ..Group::new(ranks, self.told, self.deadline) }
    }

    /// Returns the number of operations that a rank has started.
    pub(crate) fn calls_of(&self, rank: usize) -> usize {
        self.calls[rank].len()
    }

    /// Ends the waits of a rank that dies.
    pub(crate) fn give_up(&mut self, rank: usize) {
        self.fail_one(rank, &Error::Aborted { rank });
    }

    /// Returns the longest wait of a rank for the others in an operation.
    pub(crate) fn patience(&self, rank: usize, number: usize) -> Duration {
        self.calls[rank][number].op.deadline().unwrap_or(self.deadline)
    }

    /// Handles a rank's deadline for an operation.
    pub(crate) fn late(&mut self, rank: usize, number: usize) {
        if self.calls[rank][number].end.is_some() {
            return;
        }
        let (arrived, missing) = (0..self.lives.len()).partition(|&r| self.calls[r].len() > number);
        let (called, after) = (Box::new(self.called(rank, number)), self.patience(rank, number));
        let error = Error::Timeout { op_number: number as u64, called, arrived, missing, after };
        self.fail(rank, &error);
    }

    /// Removes a rank, and notifies the others.
    pub(crate) fn leave(&mut self, rank: usize) {
        self.left[rank] = true;
        let number = self.calls[rank].len();
        let needed = |r: usize| self.calls[r].len() > number;
        if self.told && (0..self.lives.len()).any(needed) {
            self.fail_all(&Error::Left { rank, op_number: number as u64 });
        }
    }

    pub(crate) fn fail_all(&mut self, error: &Error) {
        (0..self.lives.len()).for_each(|rank| self.fail_one(rank, error));
    }

    fn fail(&mut self, rank: usize, error: &Error) {
        if self.told { self.fail_all(error) } else { self.fail_one(rank, error) }
    }

    fn fail_one(&mut self, rank: usize, error: &Error) {
        let cause = self.failed[rank].get_or_insert_with(|| error.clone()).clone();
        for call in self.calls[rank].iter_mut().filter(|call| call.end.is_none()) {
            // A failed buffer is filled with NaN, so that any use of it shows.
            let bytes = call.buffer.as_mut().map(Buffer::as_mut);
            bytes.into_iter().for_each(|mut bytes| bytes.bytes_mut().unwrap().fill(0xff));
            call.end = Some(Err(cause.clone()));
        }
    }
}

/// Returns the action with the parts that must be equal on all ranks.
fn without_factor(action: Action) -> Action {
    match action {
        Action::AllReduce(Reduction::PreMulSum { .. }) => {
            Action::AllReduce(Reduction::PreMulSum { factor: 1.0 })
        }
        other => other,
    }
}

fn combine(calls: &[Called], buffers: &mut [Buffer]) {
    let ranks = buffers.len();
    match calls[0].action {
        // A single rank's buffer stays as it is.
        _ if ranks == 1 => {}
        Action::Barrier => {}
        Action::Broadcast { root } => {
            let bytes = buffers[root].as_slice().bytes().unwrap().to_vec();
            buffers.iter_mut().for_each(|b| b.as_mut().bytes_mut().unwrap().copy_from_slice(&bytes));
        }
        Action::AllGather => {
            let chunk = buffers[0].bytes() / ranks;
            let own = |r: usize| buffers[r].as_slice().bytes().unwrap()[r * chunk..(r + 1) * chunk].to_vec();
            let all: Vec<u8> = (0..ranks).flat_map(own).collect();
            buffers.iter_mut().for_each(|b| b.as_mut().bytes_mut().unwrap().copy_from_slice(&all));
        }
        // The other ranks' chunks after a scatter are undefined.
        Action::AllReduce(reduction) | Action::ReduceScatter(reduction) => {
            let factor = |call: &Called| match call.action {
                Action::AllReduce(Reduction::PreMulSum { factor }) => factor,
                _ => 1.0,
            };
            reduce(reduction, &calls.iter().map(factor).collect::<Vec<_>>(), buffers);
        }
        other => panic!("{other}"),
    }
}

fn reduce(reduction: Reduction, factors: &[f64], buffers: &mut [Buffer]) {
    let ranks = buffers.len();
    match buffers[0].dtype() {
        DType::U64 => {
            let word = |i: usize| buffers.iter().map(move |b| b.typed::<u64>().unwrap()[i]);
            let all = (0..buffers[0].len()).map(|i| match reduction {
                Reduction::Max => word(i).max().unwrap(),
                Reduction::Sum => word(i).fold(0, u64::wrapping_add),
                Reduction::SumThenMax { sums } if i < sums => word(i).fold(0, u64::wrapping_add),
                Reduction::SumThenMax { .. } => word(i).max().unwrap(),
                other => panic!("{other} of words"),
            });
            let all: Vec<u64> = all.collect();
            buffers.iter_mut().for_each(|b| b.typed_mut().unwrap().copy_from_slice(&all));
        }
        DType::F32 => {
            let value = |b: &Buffer, i: usize| f64::from(b.typed::<f32>().unwrap()[i]);
            let sum =
                |i: usize| buffers.iter().zip(factors).map(|(b, factor)| value(b, i) * factor).sum::<f64>();
            let by = match reduction {
                Reduction::Sum | Reduction::PreMulSum { .. } => 1.0,
                Reduction::Mean => ranks as f64,
                other => panic!("{other} of values"),
            };
            let all: Vec<f32> = (0..buffers[0].len()).map(|i| (sum(i) / by) as f32).collect();
            buffers.iter_mut().for_each(|b| b.typed_mut().unwrap().copy_from_slice(&all));
        }
        other => panic!("{reduction} of {other}"),
    }
}
