//! Order in which a step starts operations and waits for them, if buckets arrive only at the wait for them.

use crate::common::{Run, WhichRule};
use crate::propagate::propagating;
use meshstep_comm::{Action, Communicator, Error, InFlight, Op, Stats, Tickets, loopback};
use meshstep_shard::{Owners, Stage};
use meshstep_tensor::{Buffer, DType, Queue};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Logs starts and waits; starts a reduction of gradients only at the wait for it.
#[derive(Debug)]
struct Watched {
    inner: Arc<dyn Communicator>,
    flights: Arc<Flights>,
    aside: bool,
}

#[derive(Debug)]
struct Flights {
    inner: Arc<dyn Communicator>,
    /// Name of each ticket in the log, and its operation.
    kept: Mutex<Vec<Option<(&'static str, Flight)>>>,
    log: Arc<Mutex<Vec<&'static str>>>,
}

#[derive(Debug)]
enum Flight {
    Waits(Op, Buffer),
    Started(InFlight),
}

impl Watched {
    fn new(inner: Arc<dyn Communicator>, log: Arc<Mutex<Vec<&'static str>>>, aside: bool) -> Self {
        let flights = Flights { inner: Arc::clone(&inner), kept: Mutex::default(), log };
        Watched { inner, flights: Arc::new(flights), aside }
    }
}

impl Tickets for Flights {
    fn redeem(&self, ticket: usize, on: &Queue) -> (Buffer, Result<(), Error>) {
        let (name, flight) = self.kept.lock().unwrap()[ticket].take().unwrap();
        if !name.is_empty() {
            self.log.lock().unwrap().push(name);
        }
        match flight {
            Flight::Started(flight) => flight.wait(on),
            Flight::Waits(op, buffer) => match self.inner.start(op, buffer, on) {
                Ok(flight) => flight.wait(on),
                Err((buffer, error)) => (buffer, Err(error)),
            },
        }
    }

    fn is_done(&self, _ticket: usize) -> bool {
        false
    }

    fn ends_within(&self, _ticket: usize, _patience: Duration) -> bool {
        true
    }

    fn forget(&self, ticket: usize) {
        self.kept.lock().unwrap()[ticket] = None;
    }
}

impl Communicator for Watched {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world_size(&self) -> usize {
        self.inner.world_size()
    }

    fn start(&self, op: Op, buffer: Buffer, after: &Queue) -> Result<InFlight, (Buffer, Error)> {
        let flight = match op.action() {
            Action::AllGather | Action::Broadcast { .. } => {
                self.flights.log.lock().unwrap().push("gather");
                ("", Flight::Started(self.inner.start(op, buffer, after)?))
            }
            _ if buffer.dtype() == DType::U64 => {
                let name = if self.aside { "words" } else { "fold" };
                (name, Flight::Started(self.inner.start(op, buffer, after)?))
            }
            _ => ("reduce", Flight::Waits(op, buffer)),
        };
        let mut kept = self.flights.kept.lock().unwrap();
        kept.push(Some(flight));
        Ok(InFlight::new(Arc::clone(&self.flights) as _, kept.len() - 1))
    }

    fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Arc<dyn Communicator>>, Error> {
        let Some(inner) = self.inner.split(color, key)? else { return Ok(None) };
        Ok(Some(Arc::new(Watched::new(inner, Arc::clone(&self.flights.log), true))))
    }

    fn abort(&self) {
        self.inner.abort();
    }

    fn stats(&self) -> Stats {
        self.inner.stats()
    }
}

/// Returns the log of rank 1 of two in its second step.
fn order(run: &Run) -> String {
    let orders = loopback::spawn(2, |inner| {
        let log = Arc::new(Mutex::new(Vec::new()));
        let mut opt = run.build(Arc::new(Watched::new(inner, Arc::clone(&log), false))).unwrap();
        for t in 1..=2 {
            log.lock().unwrap().clear();
            run.hand_over(&mut opt, t, 0).unwrap();
            let _ = opt.step(run.at(t)).unwrap();
        }
        let log = std::mem::take(&mut *log.lock().unwrap());
        log.join(" ")
    });
    orders.unwrap().swap_remove(1)
}

#[test]
fn a_bucket_is_updated_and_sent_off_before_the_next_has_arrived() {
    let options = meshstep_shard::Options { bucket_len: Some(64), ..Default::default() };
    let run = Run { lens: vec![100; 2], ranks: 2, max_norm: None, options, ..Run::default() };
    let clips = Run { max_norm: Some(1.0), ..run.clone() };
    let lamb = Run { rule: WhichRule::Lamb, ..run.clone() };
    let lars = Run { rule: WhichRule::Lars, ..run.clone() };
    let whole = Stage::WholeParams(Owners::RoundRobin);
    for stage in [Stage::Zero1, Stage::Zero2, whole] {
        let cut = if stage == whole { "" } else { " fold" };
        let ahead = "words reduce gather reduce gather words".to_owned();
        let totals = format!("words reduce reduce{cut} gather gather words");
        let cases = [
            (propagating(&run), ahead),
            (propagating(&lamb), totals.clone()),
            (propagating(&lars), totals),
            (propagating(&clips), "reduce reduce words gather gather words".to_owned()),
            (run.clone(), "reduce reduce fold gather gather".to_owned()),
        ];
        for (run, expected) in cases {
            assert_eq!(order(&run.stage(stage)), expected, "{stage:?} {:?}", run.rule);
        }
    }
    assert_eq!(order(&propagating(&run.stage(Stage::Replicated))), "words reduce reduce words");
}
