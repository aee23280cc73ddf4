//! A backend that keeps only the promises it must keep.

use crate::common::{Run, STAGES};
use meshstep_comm::{Action, Communicator, InFlight, Op, Stats, Tickets, loopback};
use meshstep_shard::Outcome;
use meshstep_tensor::{Buffer, Queue};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Backend that overwrites the chunks that a reduce-scatter leaves unspecified.
#[derive(Debug)]
struct Scribbling {
    inner: Arc<dyn Communicator>,
    done: Arc<Done>,
}

#[derive(Debug, Default)]
struct Done(Mutex<Vec<Option<Finished>>>);

type Finished = (Buffer, Result<(), meshstep_comm::Error>);

impl Tickets for Done {
    fn redeem(&self, ticket: usize, _on: &Queue) -> Finished {
        self.0.lock().unwrap()[ticket].take().unwrap()
    }

    fn is_done(&self, _ticket: usize) -> bool {
        true
    }

    fn ends_within(&self, _ticket: usize, _patience: Duration) -> bool {
        true
    }

    fn forget(&self, ticket: usize) {
        self.0.lock().unwrap()[ticket].take();
    }
}

impl Communicator for Scribbling {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world_size(&self) -> usize {
        self.inner.world_size()
    }

    fn start(
        &self,
        op: Op,
        buffer: Buffer,
        after: &Queue,
    ) -> Result<InFlight, (Buffer, meshstep_comm::Error)> {
        let (mut buffer, result) = self.inner.start(op, buffer, after)?.wait(after);
        if let Action::ReduceScatter(_) = op.action() {
            let (rank, chunk) = (self.rank(), buffer.len() / self.world_size());
            let values = buffer.typed_mut::<f32>().unwrap();
            values.iter_mut().enumerate().filter(|(i, _)| i / chunk != rank).for_each(|(_, x)| *x = 7.0);
        }
        let mut done = self.done.0.lock().unwrap();
        done.push(Some((buffer, result)));
        Ok(InFlight::new(Arc::clone(&self.done) as Arc<dyn Tickets>, done.len() - 1))
    }

    fn split(
        &self,
        color: Option<u32>,
        key: i64,
    ) -> Result<Option<Arc<dyn Communicator>>, meshstep_comm::Error> {
        self.inner.split(color, key)
    }

    fn abort(&self) {
        self.inner.abort();
    }

    fn stats(&self) -> Stats {
        self.inner.stats()
    }
}

#[test]
fn what_a_reduce_scatter_leaves_elsewhere_does_not_count() {
    for stage in STAGES {
        let run = Run { lens: vec![10, 3, 100], ..Run::default() }.stage(stage);
        let norms = loopback::spawn(4, |inner| {
            let comm: Arc<dyn Communicator> = Arc::new(Scribbling { inner, done: Arc::default() });
            let mut opt = run.build(comm).unwrap();
            let mut norms = Vec::new();
            for t in 1..=run.steps {
                run.hand_over(&mut opt, t, 0).unwrap();
                match opt.step(run.at(t)).unwrap().outcome().unwrap() {
                    Outcome::Applied { norm, .. } => norms.push(norm.to_bits()),
                    skipped => panic!("{skipped:?}"),
                }
            }
            norms
        });
        assert!(norms.unwrap().iter().all(|n| *n == run.run().norms), "{stage:?}");
    }
}
