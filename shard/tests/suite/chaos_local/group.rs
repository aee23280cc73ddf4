//! Collectives of threads that hold the baton one at a time, plain and slow: an operation is over a while after all ranks have
//! started it, on all ranks or, where that is the trouble, only on some.

use meshstep_comm::{Action, Called, Error, Op, Reduction};
use meshstep_tensor::{Buffer, DType};
use std::sync::Arc;
use std::time::Duration;

/// The ranks of an epoch.
#[derive(Debug)]
pub(crate) struct Group {
    pub(crate) lives: Vec<Option<usize>>,
    /// What each rank has started, in its order.
    calls: Vec<Vec<Call>>,
    /// What has ended it, as far as the rank knows.
    failed: Vec<Option<Error>>,
    /// Whose last handle is gone.
    left: Vec<bool>,
    /// Whether what one rank meets all do at once, as on loopback; else each by its own deadline.
    told: bool,
    /// When the last operation is over.
    pub(crate) busy_until: Duration,
    /// How long an operation waits for the other ranks.
    pub(crate) deadline: Duration,
    /// Whether its ranks are of one worker.
    pub(crate) inside: bool,
    /// What was split from it, which ends with it.
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

    /// Ranks of one worker, which have the same fate.
    pub(crate) fn inside(lives: Vec<Option<usize>>, deadline: Duration) -> Self {
        Group { inside: true, lives: lives.clone(), ..Group::new(lives.len(), true, deadline) }
    }

    /// The number of the operation, and whether all ranks have come to it.
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

    /// How an operation of this rank has ended, if it has.
    pub(crate) fn end(&self, rank: usize, number: usize) -> Option<&Result<(), Error>> {
        self.calls[rank].get(number).and_then(|call| call.end.as_ref())
    }

    pub(crate) fn take(&mut self, rank: usize, number: usize) -> (Buffer, Result<(), Error>) {
        let call = &mut self.calls[rank][number];
        (call.buffer.take().unwrap(), call.end.clone().unwrap())
    }

    /// Operation `number` takes place; it fails on `without`.
    pub(crate) fn complete(&mut self, number: usize, without: &[usize]) {
        let ranks = self.lives.len();
        if (0..ranks).any(|rank| self.calls[rank][number].end.is_some()) {
            return;
        }
        let calls: Vec<Called> = (0..ranks).map(|rank| self.called(rank, number)).collect();
        let said = |call: &Called| (without_factor(call.action), call.len, call.dtype);
        // Whatever happens: an exchange that failed of it would look like any that fails.
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
        Called { op_number: number as u64, action: call.op.action(), len, dtype }
    }

    /// So many of its ranks.
    pub(crate) fn part(&self, ranks: usize) -> Self {
        Group { inside: self.inside, ..Group::new(ranks, self.told, self.deadline) }
    }

    /// As many operations as a rank has started.
    pub(crate) fn calls_of(&self, rank: usize) -> usize {
        self.calls[rank].len()
    }

    /// A rank that dies waits for nothing.
    pub(crate) fn give_up(&mut self, rank: usize) {
        self.fail_one(rank, &Error::Aborted { rank });
    }

    /// How long a rank waits for the others in one.
    pub(crate) fn patience(&self, rank: usize, number: usize) -> Duration {
        self.calls[rank][number].op.deadline().unwrap_or(self.deadline)
    }

    /// A rank's deadline for an operation has come.
    pub(crate) fn late(&mut self, rank: usize, number: usize) {
        if self.calls[rank][number].end.is_some() {
            return;
        }
        let (arrived, missing) = (0..self.lives.len()).partition(|&r| self.calls[r].len() > number);
        let (called, after) = (Box::new(self.called(rank, number)), self.patience(rank, number));
        let error = Error::Timeout { op_number: number as u64, called, arrived, missing, after };
        self.fail(rank, &error);
    }

    /// A rank has gone, and the others hear of it.
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
            // What is in it then is to show, wherever it goes.
            let bytes = call.buffer.as_mut().map(Buffer::as_mut);
            bytes.into_iter().for_each(|mut bytes| bytes.bytes_mut().unwrap().fill(0xff));
            call.end = Some(Err(cause.clone()));
        }
    }
}

/// What all ranks call alike.
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
        // Alone everything stays as it is.
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
        // What a scatter leaves in the other ranks' chunks is nobody's.
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
