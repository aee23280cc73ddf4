//! Child processes of the test: a worker that trains a small model over comm::tcp, and an arbiter or its standby.

use super::told::{Line, Told};
use super::{ALONE, ANSWER, DEADLINE, LEN, PLANS, config, token};
use meshstep_cases::hash;
use meshstep_comm::loopback;
use meshstep_local::{LocalError, LocalOptimizer, LocalPlan, LocalStep, Workers};
use meshstep_membership::{
    Caller, Contact, Error, Log, Membership, Refusal, Remote, Round, Service, Standby,
};
use meshstep_optim::AdamW;
use meshstep_shard::{Optimizer, Options, Step, StepArgs};
use meshstep_tensor::{DType, Layout, Slice, SliceMut};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::sleep;
use std::time::Duration;

/// What a process is, and its arguments, separated by `|`.
pub(super) const ROLE: &str = "MESHSTEP_TEST_ELASTIC";
/// Time that a step computes.
const COMPUTE: Duration = Duration::from_millis(4);
/// Number of times that a worker joins again.
const LIVES: usize = 12;

/// Runs the process as its variable says; does nothing in a normal test run.
pub(super) fn run() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let words: Vec<&str> = role.split('|').collect();
    match words[..] {
        ["worker", id, plan, addrs, ip, told, stop] => {
            let worker = Trains {
                id: id.parse().unwrap(),
                plan: PLANS[plan.parse::<usize>().unwrap()](),
                addrs: addrs.split(',').map(|addr| addr.parse().unwrap()).collect(),
                ip: ip.parse().unwrap(),
                stop: stop.into(),
            };
            worker.run(&mut Told::create(Path::new(told)));
        }
        ["arbiter", plan, addr, log, promote] => {
            let log = Path::new(log);
            if promote == "promote" {
                Log::promote(log).unwrap();
            }
            let config = config(PLANS[plan.parse::<usize>().unwrap()]().digest(&optimizer()));
            let service = Service::start(addr.parse().unwrap(), Some(&token()), "run", config, log).unwrap();
            println!("\nserving term {}", service.term());
            serve(|| service.failed(), || service.has_standby());
        }
        ["standby", addr, log] => {
            let addrs: [SocketAddr; 1] = [addr.parse().unwrap()];
            let standby = Standby::start(&addrs, Some(&token()), "run", Path::new(log)).unwrap();
            println!("\nfollowing");
            serve(|| standby.failed(), || standby.kept().follows);
        }
        _ => panic!("{role}"),
    }
}

/// Says once that the standby follows, and ends with the error that stopped the service or the standby.
fn serve(failed: impl Fn() -> Option<Error>, follows: impl Fn() -> bool) {
    let mut told = false;
    loop {
        if let Some(error) = failed() {
            return println!("\nfailed {error:?}");
        }
        if !told && follows() {
            told = true;
            println!("\nfollowed");
        }
        sleep(Duration::from_millis(5));
    }
}

fn optimizer() -> Optimizer {
    let comm = loopback::world(loopback::Config::new(1)).unwrap().remove(0);
    let layout = Layout::builder().param("x", &[LEN], DType::F32).build().unwrap();
    let first: Vec<f32> = (0..LEN).map(|i| (i as f32).sin()).collect();
    let first = |_: &_, mut x: SliceMut<'_>| x.copy_from(Slice::from(&first[..]));
    Optimizer::new(comm, layout, AdamW::default(), first, Options::default()).unwrap()
}

/// A worker of a run. Its loss is the distance to a point that is the same for all workers; its gradients have noise.
struct Trains {
    id: u64,
    plan: LocalPlan,
    addrs: Vec<SocketAddr>,
    ip: IpAddr,
    /// File with the step after which the run ends.
    stop: PathBuf,
}

impl Trains {
    fn run(&self, told: &mut Told) {
        for _ in 0..LIVES {
            match self.live(told) {
                Ok(()) => return told.say(&Line::Done),
                Err(error) if joins_again(&error) => told.say(&Line::Again(format!("{error:?}"))),
                Err(error) => return told.say(&Line::Ended(format!("{error:?}"))),
            }
        }
        told.say(&Line::Ended(format!("{LIVES} lives")));
    }

    /// Joins, and trains until the run ends or this membership does.
    fn live(&self, told: &mut Told) -> Result<(), LocalError> {
        let inner = optimizer();
        let (addrs, digest, run) = (self.addrs.clone(), self.plan.digest(&inner), "run".to_owned());
        let contact = Contact::free(self.ip)?.to_string();
        let (token_of_run, deadline) = (Some(token()), ANSWER);
        let caller =
            Caller { addrs, token: token_of_run, run, id: self.id, digest, contact, deadline, alone: ALONE };
        let member = Arc::new(Remote::join(caller)?);
        let connect = |round: &Round| {
            let world = Contact::connect(round, "run", Some(&token()), DEADLINE)?;
            Ok(Workers { across: Arc::clone(&world), world })
        };
        let mut local = LocalOptimizer::join(inner, self.plan.clone(), member.clone(), connect)?;
        told.say(&Line::Joined(local.steps()));
        loop {
            let round = match local.follow(connect) {
                Ok(round) => round.cloned(),
                Err(error) if goes_on(&error) => None,
                Err(error) => return Err(error),
            };
            let alone = round.is_none();
            match self.step(&mut local) {
                Ok(stepped) => self.tell(&local, &stepped, round, told),
                Err(error) if goes_on(&error) => told.say(&Line::Alone(local.steps())),
                Err(error) => return Err(error),
            }
            // The last exchange has to be one of all members.
            if !alone && self.is_over(told) {
                return Ok(member.leave()?);
            }
        }
    }

    fn step(&self, local: &mut LocalOptimizer) -> Result<LocalStep, LocalError> {
        sleep(COMPUTE);
        let step = local.steps();
        let x = local.param("x")?.typed::<f32>().unwrap().to_vec();
        let noise = |i: u64| (hash(&[i, self.id, step]) >> 40) as f32 / (1 << 24) as f32 - 0.5;
        let grad: Vec<f32> = (0..).zip(&x).map(|(i, x)| x - target(i) + noise(i as u64)).collect();
        let mb = local.micro_batch(1)?;
        mb.grad("x", &grad[..])?;
        mb.finish()?;
        local.step(StepArgs { lr: 0.01, ..StepArgs::default() })
    }

    /// Reports a committed exchange, or a step that exchanged nothing although it was due.
    fn tell(&self, local: &LocalOptimizer, stepped: &LocalStep, round: Option<Round>, told: &mut Told) {
        let failed = !stepped.exchanged.failed.is_empty();
        let Some(round) = round.filter(|_| !failed && !stepped.exchanged.merged.is_empty()) else {
            if failed {
                told.say(&Line::Alone(local.steps()));
            }
            return;
        };
        let members = round.members.iter().map(|seat| seat.id).collect();
        let (hash, loss) =
            (digest(local, stepped.exchanged.merged.len() == self.plan.fragments.len()), loss(local));
        told.say(&Line::Exchanged { step: local.steps(), epoch: round.epoch, members, hash, loss });
    }

    /// Returns true if the last reported exchange is at or after the last step of the run.
    fn is_over(&self, told: &Told) -> bool {
        let last = std::fs::read_to_string(&self.stop).ok().and_then(|text| text.parse().ok());
        told.exchanged.zip(last).is_some_and(|(step, last): (u64, u64)| step >= last)
    }
}

fn target(i: usize) -> f32 {
    (i as f32).cos()
}

fn loss(local: &LocalOptimizer) -> f64 {
    let x = local.param("x").unwrap();
    let apart = (0..).zip(x.typed::<f32>().unwrap()).map(|(i, x)| f64::from(x - target(i)).powi(2));
    apart.sum::<f64>() / LEN as f64
}

/// Digest of the parameters, and of the moments if all of them were exchanged too.
fn digest(local: &LocalOptimizer, all: bool) -> u64 {
    let state = local.state("x").unwrap();
    let moments = state.slots.iter().map(|(_, slot)| slot.bytes().unwrap()).filter(|_| all);
    let bytes = std::iter::once(local.param("x").unwrap().bytes().unwrap()).chain(moments);
    let words: Vec<u64> = bytes.flat_map(|bytes| bytes.iter().map(|byte| u64::from(*byte))).collect();
    hash(&words)
}

/// Returns true if the worker takes further steps in this membership.
fn goes_on(error: &LocalError) -> bool {
    let LocalError::Membership(error) = error else { return false };
    matches!(error, Error::Unanswered { .. } | Error::Refused(Refusal::TooFew { .. }))
}

/// Returns true if the worker has to join again: the others go on without it.
fn joins_again(error: &LocalError) -> bool {
    match error {
        LocalError::Missed { .. } | LocalError::Shard(meshstep_shard::Error::Comm(_)) => true,
        LocalError::Membership(Error::Refused(Refusal::StateLost { .. })) => false,
        LocalError::Membership(Error::Refused(refusal)) => refusal.is_final(),
        LocalError::Membership(error) => matches!(error, Error::World { .. } | Error::Communicator(_)),
        _ => false,
    }
}
