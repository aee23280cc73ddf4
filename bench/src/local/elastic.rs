//! `train --local METHOD --arbiter ADDR --worker ID`: this process is one worker, which joins a run and may be lost at any time.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use meshstep_comm::rendezvous::Token;
use meshstep_local::LocalError;
use meshstep_membership::{Caller, Contact, Digest, Error as MembershipError, Membership, Refusal, Remote};
use meshstep_shard::Error as ShardError;
use serde::Serialize;

use super::company::{Company, Connect};
use super::job::Job;
use super::worker::{self, Done, Epoch};
use super::{Run, Schedule};
use crate::ranks::progress::Progress;
use crate::train::compare::digest as digest_of;
use crate::train::trainer::cause;

/// Default of the longest wait for an answer of the arbiter: twice the time that members wait for each other by default.
const ANSWER: Duration = Duration::from_secs(120);

/// Number of times that a worker which was taken for lost joins again.
const REJOINS: usize = 16;

/// Identity of this worker, and its way to the others.
pub(super) struct Elastic<'a> {
    pub(super) worker: u64,
    /// Joins the arbiter's run with the digest of the method.
    pub(super) join: &'a dyn Fn(Digest) -> Result<Arc<dyn Membership>, MembershipError>,
    pub(super) connect: &'a Connect<'a>,
}

/// Content of `worker-ID.json`.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) worker: u64,
    /// Text of the worker, in bytes.
    pub(super) part: std::ops::Range<usize>,
    /// The times that the worker was a member.
    pub(super) lives: Vec<Life>,
}

/// One membership of the worker, from its joining to its end.
#[derive(Debug, Serialize)]
pub(super) struct Life {
    /// First step of the worker.
    pub(super) began: u64,
    pub(super) losses: Vec<f64>,
    pub(super) held_out: Vec<(u64, f64)>,
    /// Bytes sent to other workers.
    pub(super) sent: u64,
    /// Bytes of successful exchanges by the plan; none if results arrive later than in their step.
    pub(super) planned: Option<u64>,
    pub(super) epochs: Vec<Epoch>,
    /// Steps with a failed exchange.
    pub(super) failed: Vec<u64>,
    /// Digest of the final parameters, those of the outer optimizers included.
    pub(super) digest: String,
    /// Reason for which the worker had to join again.
    pub(super) ended: Option<String>,
}

/// Trains the worker that the options name, prints a summary, and writes `worker-ID.json` into `folder`.
pub(crate) fn run(run: &Run, folder: &Path, out: &mut impl Write) -> Result<()> {
    let local = &run.asked.local;
    let Some(worker) = local.worker else { bail!("--arbiter needs --worker") };
    let (token, contact) = (Token::from_env()?, Contact::free(local.contact())?);
    let deadline = local.answer.map_or(ANSWER, |seconds| Duration::from_secs(seconds as u64));
    std::fs::create_dir_all(folder)
        .with_context(|| format!("--out {}: making the folder", folder.display()))?;
    let join = |digest| {
        let (run, contact) = (local.run().to_owned(), contact.to_string());
        let (addrs, token, alone) = (local.arbiter.clone(), token.clone(), local.alone());
        let caller = Caller { addrs, token, run, id: worker, digest, contact, deadline, alone };
        Remote::join(caller).map(|remote| Arc::new(remote) as Arc<dyn Membership>)
    };
    let connect = |round: &_| Contact::connect(round, local.run(), token.as_ref(), local.deadline());
    let report = train(run, &Elastic { worker, join: &join, connect: &connect })?;
    report.lives.iter().try_for_each(|life| writeln!(out, "worker {worker}: {}", life.describe()))?;
    let path = folder.join(format!("worker-{worker}.json"));
    crate::report::write_json(&report, &path)?;
    writeln!(out, "wrote {}", path.display())?;
    Ok(())
}

/// Trains one worker to the last step; a worker that was taken for lost joins again.
pub(super) fn train(run: &Run, elastic: &Elastic<'_>) -> Result<Report> {
    let job = job(run)?;
    let Elastic { worker, join, connect } = *elastic;
    let digest = worker::digest(&job)?;
    let (part, mut lives, mut missed) = (job.part(job.seat(worker)), Vec::new(), 0);
    let tokens = job.batch * job.model.context;
    let progress = Progress::new(format!("worker {worker}"), job.steps, 1, tokens);
    loop {
        let member = join(digest).context("joining the run")?;
        let company = Company::Elastic { member: Arc::clone(&member), connect };
        let (done, error) = match worker::train_elastic(&job, worker, company, &progress) {
            Err(error) if is_lost(&error) && missed < REJOINS => {
                missed += 1;
                tracing::warn!("worker {worker} asks again to join: {error:#}");
                continue;
            }
            trained => trained?,
        };
        let again = error.as_ref().is_some_and(is_lost) && lives.len() < REJOINS;
        lives.push(Life::of(done, error.as_ref()));
        match error {
            None => break,
            Some(error) if again => tracing::warn!("worker {worker} joins again: {error:#}"),
            Some(error) => return Err(error),
        }
    }
    progress.finish();
    Ok(Report { worker, part, lives })
}

fn job(run: &Run) -> Result<Job<'_>> {
    let [method] = run.methods.as_slice() else {
        bail!("--arbiter needs one method with rare exchanges, such as --local des-loc")
    };
    ensure!(
        method.plan.is_some(),
        "--local {} has no rare exchanges; use another with --arbiter",
        method.task
    );
    Ok(Job::new(run.common(), method, run.asked.seed, Schedule::default())?.0)
}

/// Returns true if the other workers go on without this one, which has to join again; or if it joined while another one was lost.
fn is_lost(error: &anyhow::Error) -> bool {
    match cause(error) {
        Some(LocalError::Missed { .. } | LocalError::Shard(ShardError::Comm(_))) => true,
        Some(LocalError::Membership(MembershipError::World { .. })) => true,
        Some(LocalError::Membership(MembershipError::Refused(Refusal::StateLost { .. }))) => false,
        Some(LocalError::Membership(MembershipError::Refused(refusal))) => refusal.is_final(),
        _ => false,
    }
}

impl Life {
    fn of(done: Done, error: Option<&anyhow::Error>) -> Self {
        let Done { began, losses, held_out, total, planned, epochs, failed, finals, outer, .. } = done;
        let (digest, ended) = (digest_of([&finals, &outer]), error.map(|error| format!("{error:#}")));
        Life { began, losses, held_out, sent: total, planned, epochs, failed, digest, ended }
    }

    fn describe(&self) -> String {
        let Life { began, losses, held_out, epochs, failed, digest, ended, .. } = self;
        let held_out = held_out.last().map_or("not measured".to_owned(), |(_, loss)| format!("{loss:.4}"));
        let ended = ended.as_ref().map(|why| format!("; ended: {why}")).unwrap_or_default();
        format!(
            "steps {began} to {}, {} epochs, {} failed exchanges, held-out loss {held_out}, parameters {digest}{ended}",
            began + losses.len() as u64,
            epochs.len(),
            failed.len()
        )
    }
}

#[cfg(test)]
mod tests;
