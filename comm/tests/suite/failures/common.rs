//! Runs that must end by themselves, and a manual clock.

use crate::backends::{BACKENDS, Backend};
use meshstep_comm::{Clock, Communicator, Error, Op, loopback};
use meshstep_tensor::{Buffer, Category, Element, Meter};
use std::sync::{Arc, mpsc};
use std::time::Duration;

pub(crate) type Comm = Arc<dyn Communicator>;
pub(crate) type Outcome = Result<(), Error>;

pub(crate) const SECOND: Duration = Duration::from_secs(1);

pub(crate) fn buffer<T: Element>(values: &[T]) -> Buffer {
    Buffer::from_slice(values, &Meter::new(), Category::Grads).unwrap()
}

pub(crate) fn floats(len: usize) -> Buffer {
    buffer(&vec![1.0f32; len])
}

pub(crate) fn run(comm: &Comm, op: Op, len: usize) -> Outcome {
    comm.run(op, &mut floats(len))
}

/// Fails the test if `body` hangs.
pub(crate) fn in_time<T: Send + 'static>(body: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, ended) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        let result = body();
        let _ = done.send(());
        result
    });
    let waited = ended.recv_timeout(Duration::from_secs(30));
    assert!(waited != Err(mpsc::RecvTimeoutError::Timeout), "a rank hangs");
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Runs `body` on 2 and on 4 ranks (over sockets and shared memory on 4, except in long runs) and passes every rank's outcome to `check`. The clock stands still, so no deadline ever
/// expires: a run ends because its cause is known.
pub(crate) fn each_rank(body: fn(&Comm) -> Outcome, check: impl Fn(usize, usize, Error)) {
    for n in [2, 4] {
        for &backend in
            BACKENDS.iter().filter(|backend| n == 4 || !backend.is_tcp() || meshstep_cases::long())
        {
            let config = loopback::Config { clock: Clock::manual(), ..loopback::Config::new(n) };
            let outcomes = in_time(move || backend.spawn_with(config, |comm| body(&comm)).unwrap());
            let first = outcomes[0].clone().expect_err("every rank must fail");
            for (rank, outcome) in outcomes.into_iter().enumerate() {
                let error = outcome.expect_err("every rank must fail");
                assert!(
                    error.cause() == first.cause() || !is_shared(&error),
                    "{backend:?}: {error}, {first}"
                );
                check(n, rank, error);
            }
        }
    }
}

/// Returns true if every rank returns the error. A rank's own error of its body is not the group's.
fn is_shared(error: &Error) -> bool {
    !matches!(error, Error::Aborted { .. } | Error::Left { .. })
}

pub(crate) fn is_mismatch(_n: usize, rank: usize, error: Error) {
    assert!(matches!(error, Error::Mismatch { .. }), "rank {rank}: {error}");
}

/// Moves the clock until every rank has ended.
pub(crate) fn while_time_passes<T: Send + 'static>(
    backend: Backend,
    config: loopback::Config,
    body: impl Fn(&Comm) -> T + Send + Sync + 'static,
) -> Vec<T> {
    let clock = config.clock.clone();
    in_time(move || {
        std::thread::scope(|scope| {
            let ranks = scope.spawn(|| backend.spawn_with(config, |comm| body(&comm)).unwrap());
            while !ranks.is_finished() {
                std::thread::sleep(Duration::from_millis(1));
                clock.advance(SECOND);
            }
            ranks.join().unwrap()
        })
    })
}
