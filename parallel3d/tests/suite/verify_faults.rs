//! A rank that fails alone during a verification, or makes another call, is an error on all ranks, and none waits.

use crate::common::{AT, STAGES, fill};
use meshstep_cases::{long, stride, tried};
use meshstep_comm::{Communicator, Error as CommError, InFlight, Op, Stats, loopback};
use meshstep_optim::AdamW;
use meshstep_parallel3d::{Axis, Error, Gradient, Model, Optimizer, Placement};
use meshstep_shard::{Options, Stage, Step};
use meshstep_tensor::DType::F32;
use meshstep_tensor::{Buffer, Category, Meter, Queue};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Barrier, Mutex};
use std::time::Duration;

/// Communicator that refuses one of its rank's calls; it records the communicators split from it and their aborts.
#[derive(Debug)]
struct Failing {
    inner: Arc<dyn Communicator>,
    left: Arc<AtomicUsize>,
    aborted: Arc<AtomicBool>,
    made: Arc<Mutex<Vec<Arc<AtomicBool>>>>,
}

impl Failing {
    fn of(
        inner: Arc<dyn Communicator>,
        left: Arc<AtomicUsize>,
        made: Arc<Mutex<Vec<Arc<AtomicBool>>>>,
    ) -> Self {
        let aborted = Arc::new(AtomicBool::new(false));
        made.lock().unwrap().push(Arc::clone(&aborted));
        Failing { inner, left, aborted, made }
    }

    /// Counts down and fails at the call at which the count is 0.
    fn call(&self) -> Result<(), CommError> {
        let refused = meshstep_tensor::Error::OutOfMemory { bytes: 1, category: Category::Staging };
        if self.left.fetch_sub(1, SeqCst) == 0 { Err(refused.into()) } else { Ok(()) }
    }
}

impl Communicator for Failing {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world_size(&self) -> usize {
        self.inner.world_size()
    }

    fn start(&self, op: Op, buffer: Buffer, after: &Queue) -> Result<InFlight, (Buffer, CommError)> {
        match self.call() {
            Ok(()) => self.inner.start(op, buffer, after),
            Err(error) => Err((buffer, error)),
        }
    }

    fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Arc<dyn Communicator>>, CommError> {
        self.call()?;
        let of = |inner| Failing::of(inner, Arc::clone(&self.left), Arc::clone(&self.made));
        Ok(self.inner.split(color, key)?.map(|inner| Arc::new(of(inner)) as Arc<dyn Communicator>))
    }

    fn abort(&self) {
        self.aborted.store(true, SeqCst);
        self.inner.abort();
    }

    fn sound(&self) -> Result<(), CommError> {
        self.inner.sound()
    }

    fn stats(&self) -> Stats {
        self.inner.stats()
    }
}

fn built(world: Arc<dyn Communicator>, mesh: &str, stage: Stage) -> Optimizer {
    let whole = Placement::whole();
    let model = Model::builder()
        .param("in", &[8, 40], F32, whole.clone().cut(Axis::Tp, 0))
        .unit("block")
        .param("pos", &[50], F32, whole.clone())
        .param("ln", &[9], F32, whole.gradient(Gradient::PartialSum))
        .build()
        .unwrap();
    let options = Options { stage, bucket_len: Some(40), meter: Meter::new(), ..Options::default() };
    Optimizer::new(world, mesh.parse().unwrap(), &model, AdamW::default(), fill, options).unwrap()
}

/// Runs two verifications around a step, and one of its gradients.
fn verify_and_step(opt: &mut Optimizer) -> Result<(), Error> {
    opt.verify()?;
    let lens: Vec<(String, usize)> =
        opt.optimizer().params().map(|p| (p.name().to_owned(), p.len())).collect();
    let mb = opt.micro_batch(1)?;
    lens.iter().try_for_each(|(name, len)| mb.grad(name, &vec![1f32; *len][..]).map(drop))?;
    mb.finish()?;
    opt.verify_gradients()?;
    opt.step(AT)?.outcome()?;
    opt.verify()?;
    Ok(())
}

/// Runs `call` on four ranks that all keep their communicators until the last ends, so that no error comes from a rank that left.
fn on_four<T: Send>(call: impl Fn(Arc<dyn Communicator>) -> (T, Optimizer) + Sync) -> Vec<T> {
    let config = loopback::Config { timeout: Duration::from_secs(3), ..loopback::Config::new(4) };
    let ended = Barrier::new(4);
    let told = loopback::spawn_with(config, |world: Arc<dyn Communicator>| {
        let (told, kept) = call(Arc::clone(&world));
        ended.wait();
        drop((kept, world));
        told
    });
    told.unwrap()
}

fn is_prompt(told: &Result<(), Error>) -> bool {
    let timeout = |error: &Error| {
        let comm = match error {
            Error::Shard(meshstep_shard::Error::Comm(comm)) | Error::Split { source: comm, .. } => comm,
            _ => return false,
        };
        matches!(comm, CommError::Timeout { .. })
    };
    !told.as_ref().is_err_and(timeout)
}

#[test]
fn a_rank_that_fails_alone_in_a_verification_ends_it_for_all() {
    let meshes = ["tp=2,dp=2", "dp_replicate=2,tp=2", "tp=4"];
    let all = meshes.into_iter().flat_map(|mesh| STAGES.map(|stage| (mesh, stage)));
    // Short runs try one or two combinations of each mesh and stage, long runs all.
    let some = |i: usize| long() || (i / STAGES.len() + i % STAGES.len()).is_multiple_of(3);
    for (_, (mesh, stage)) in all.enumerate().filter(|(i, _)| some(*i) && tried(*i, 1)) {
        for at in (0..).step_by(stride(1)) {
            let told = on_four(|world| {
                let odd = world.rank() == 1;
                let left = Arc::new(AtomicUsize::new(usize::MAX));
                let made = Arc::default();
                let failing = Failing::of(Arc::clone(&world), Arc::clone(&left), Arc::clone(&made));
                let mut opt = built(if odd { Arc::new(failing) } else { world }, mesh, stage);
                left.store(at, SeqCst);
                let told = verify_and_step(&mut opt);
                let aborted = made.lock().unwrap().iter().all(|aborted| aborted.load(SeqCst));
                ((told, left.load(SeqCst) <= at, aborted), opt)
            });
            let all = |of: fn(&Result<(), Error>) -> bool| told.iter().all(|(told, ..)| of(told));
            assert!(all(is_prompt), "{mesh} {stage:?} call {at}: {told:?}");
            // A failed call wraps the count, and the rank must have aborted all its communicators.
            if told[1].1 {
                assert!(all(Result::is_ok) && at > 10, "{mesh} {stage:?} call {at}: {told:?}");
                break;
            }
            assert!(told[1].0.is_err() && told[1].2, "{mesh} {stage:?} call {at}: {told:?}");
        }
    }
}

#[test]
fn a_rank_that_gathers_while_others_verify_is_told() {
    type Call = fn(&mut Optimizer) -> Result<(), Error>;
    let verify: [Call; 3] =
        [|opt| opt.verify().map(drop), |opt| opt.verify_every(1), |opt| opt.repair().map(drop)];
    for mesh in ["tp=2,dp=2", "dp_replicate=2,dp_shard=2", "dp=4"] {
        for (i, verify) in verify.iter().enumerate() {
            for odd in 0..4 {
                let told = on_four(|world| {
                    let rank = world.rank();
                    let mut opt = built(world, mesh, Stage::Zero3);
                    let gathers = |opt: &Optimizer| opt.gather("block").map(drop);
                    (if rank == odd { gathers(&opt) } else { verify(&mut opt) }, opt)
                });
                let ended = told.iter().all(|told| told.is_err() && is_prompt(told));
                assert!(ended, "{mesh}, call {i}, rank {odd}: {told:?}");
            }
        }
    }
}
