//! `arbiter`: the arbiter of elastic workers as a command, which serves until it is ended and continues from its log.

use std::io::Write;
use std::path::Path;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result};
use meshstep_membership::{Config, Service};

use super::{Run, elastic};
use crate::args::arbiter::Arbiter;

/// Interval between two looks at the service.
const LOOK: Duration = Duration::from_millis(200);

/// Serves until the process is ended; returns only with the error that stopped the service.
pub(crate) fn run(asked: &Arbiter, manifest: &Path, out: &mut impl Write) -> Result<()> {
    let service = serve(asked, &Run::prepare(&asked.train, manifest)?)?;
    let (run, workers) = (asked.train.local.run(), asked.train.ranks);
    writeln!(
        out,
        "arbiter of run {run:?} on {}, which begins with {workers} workers; log {}",
        service.addr(),
        asked.log.display()
    )?;
    out.flush()?;
    loop {
        if let Some(error) = service.failed() {
            return Err(error).context("the arbiter has stopped");
        }
        thread::sleep(LOOK);
    }
}

/// Starts the service for the workers of a run.
pub(super) fn serve(asked: &Arbiter, run: &Run) -> Result<Service> {
    let seconds = |seconds: usize| Duration::from_secs(seconds as u64);
    let config = Config {
        min_workers: asked.min_workers,
        silence: seconds(asked.silence),
        patience: seconds(asked.patience),
        ..Config::new(elastic::digest(run)?, asked.train.ranks)
    };
    let token = elastic::token()?;
    Ok(Service::start(asked.addr, token.as_ref(), asked.train.local.run(), config, &asked.log)?)
}
