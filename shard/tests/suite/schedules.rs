//! Learning rates by a schedule: the same on every rank or refused at construction, and correct across skips, errors and
//! restarts.

use meshstep_comm::{Communicator, loopback};
use meshstep_optim::schedule::{Cosine, Curve, Linear, MultiStepLR, Schedule, StepLR};
use meshstep_optim::{Lbfgs, Sgd};
use meshstep_shard::{
    CrossShard, Error, Fault, NonFinite, NotForLbfgs, Optimizer, Options, Outcome, ShardedLbfgs, Stage, Step,
    StepArgs,
};
use meshstep_tensor::{DType, Layout, Param, SliceMut};
use std::sync::Arc;

fn layout() -> Layout {
    Layout::builder().param("w", &[3], DType::F32).build().unwrap()
}

fn zeros(_: &Param, _: SliceMut<'_>) -> Result<(), meshstep_tensor::Error> {
    Ok(())
}

fn schedule(lr: f64, curve: impl Curve + 'static) -> Schedule {
    Schedule::new(lr, curve).unwrap()
}

fn with(schedule: Option<Schedule>) -> Options {
    Options { schedule, ..Options::default() }
}

fn new(comm: Arc<dyn Communicator>, options: Options) -> Result<Optimizer, Error> {
    Optimizer::new(comm, layout(), Sgd::default(), zeros, options)
}

#[test]
fn a_rank_with_another_schedule_is_refused_when_the_optimizer_is_made() {
    let cosine = || schedule(0.1, Cosine::new(10, 100));
    let linear = Linear { num_warmup_steps: 10, num_training_steps: 100 };
    let steps = |last| schedule(0.1, MultiStepLR { milestones: vec![3, last], gamma: 0.5 });
    let table = [
        (Some(cosine()), Some(schedule(0.1, linear)), "curve of schedule"),
        (Some(cosine()), Some(schedule(0.1, Cosine::new(11, 100))), "curve of schedule"),
        (Some(cosine()), Some(schedule(0.1f64.next_up(), Cosine::new(10, 100))), "lr of schedule"),
        (Some(cosine()), Some(cosine().after_warmup(5, 0.1).unwrap()), "warm-up of schedule"),
        (Some(steps(7)), Some(steps(8)), "curve of schedule"),
        (Some(cosine()), None, "schedule"),
    ];
    for (usual, other, expected) in &table {
        for odd in 0..3 {
            let told = loopback::spawn(3, |comm: Arc<dyn Communicator>| {
                let own = if comm.rank() == odd { other } else { usual };
                new(comm, with(own.clone())).unwrap_err()
            });
            for error in told.unwrap() {
                let Error::Disagree { what, rank, .. } = &error else { panic!("{error}") };
                assert_eq!((&what[..], *rank), (*expected, odd.max(1)), "{error}");
            }
        }
    }
    let told = loopback::spawn(2, |comm: Arc<dyn Communicator>| {
        let own = schedule(0.1, Cosine::new(10 + comm.rank() as u64, 100));
        new(comm, with(Some(own))).unwrap_err().to_string()
    });
    assert!(told.unwrap()[0].contains("num_warmup_steps: 11"));
    assert_eq!(cosine().parameters()[0], ("lr", "0.1".to_owned()));
}

fn step(opt: &mut Optimizer, at: StepArgs, grads: Option<f32>) -> Result<Outcome, Error> {
    let mb = opt.micro_batch(1).unwrap();
    if let Some(g) = grads {
        mb.grad("w", &[g; 3][..]).unwrap();
    }
    mb.finish().unwrap();
    opt.step(at)?.outcome()
}

fn value(opt: &Optimizer) -> f32 {
    opt.param("w").unwrap().typed::<f32>().unwrap()[0]
}

/// A skipped step consumes its rate; a failed step gets the same rate again.
#[test]
fn rates_are_the_schedules_over_skips_errors_and_restarts() {
    let cosine = || schedule(0.3, Cosine::new(3, 20)).after_warmup(4, 0.1).unwrap();
    for stage in [Stage::Replicated, Stage::Zero1, Stage::Zero2] {
        loopback::spawn(2, |comm: Arc<dyn Communicator>| {
            let options = Options { stage, ..with(Some(cosine())) };
            let mut opt = new(Arc::clone(&comm), options.clone()).unwrap();
            let mut plain = new(Arc::clone(&comm), Options { stage, ..with(None) }).unwrap();
            let mut taken = 0;
            for (i, grads) in
                [Some(1.0), Some(f32::NAN), Some(-2.0), None, Some(4.0), Some(0.5)].into_iter().enumerate()
            {
                assert_eq!(opt.steps(), taken);
                let at = opt.scheduled().unwrap();
                assert_eq!(at, StepArgs { lr: cosine().at(taken), max_norm: None, grad_scale: 1.0 });
                let outcome = step(&mut opt, at, grads);
                let told =
                    step(&mut plain, StepArgs { lr: cosine().at(taken), ..StepArgs::default() }, grads);
                assert_eq!(outcome.is_err(), grads.is_none());
                assert_eq!((told.is_ok(), value(&opt)), (outcome.is_ok(), value(&plain)), "{i}");
                taken += u64::from(outcome.is_ok());
            }
            assert_eq!((taken, opt.steps()), (5, 5));
            // Continue in another optimizer.
            let first = value(&opt);
            let from = |_: &Param, mut w: SliceMut<'_>| w.copy_from((&[first; 3][..]).into());
            let mut later = Optimizer::new(comm, layout(), Sgd::default(), from, options).unwrap();
            later.restore_steps(opt.steps()).unwrap();
            for _ in 0..3 {
                let (one, other) = (opt.scheduled().unwrap(), later.scheduled().unwrap());
                let _ = step(&mut opt, one, Some(1.5)).unwrap();
                let _ = step(&mut later, other, Some(1.5)).unwrap();
                assert_eq!(value(&later), value(&opt));
            }
            assert_eq!(later.steps(), 8);
        })
        .unwrap();
    }
}

#[test]
fn another_rate_than_the_schedules_is_an_error_on_every_rank() {
    loopback::spawn(3, |comm: Arc<dyn Communicator>| {
        let rank = comm.rank();
        let mut opt = new(comm, with(Some(schedule(0.3, StepLR { step_size: 1, gamma: 0.5 })))).unwrap();
        let at = opt.scheduled().unwrap();
        let other = if rank == 1 { StepArgs { lr: at.lr.next_down(), ..at } } else { at };
        let told = step(&mut opt, other, Some(1.0));
        assert!(matches!(told, Err(Error::Fault { rank: 1, fault: Fault::Schedule })), "{told:?}");
        // The rate of an earlier step is wrong for this one.
        let _ = step(&mut opt, at, Some(1.0)).unwrap();
        let told = step(&mut opt, at, Some(1.0));
        assert!(matches!(told, Err(Error::Fault { rank: 0, fault: Fault::Schedule })), "{told:?}");
        assert_eq!((value(&opt), opt.steps()), (-0.3, 1));
        // One rank continues from another step.
        opt.restore_steps(if rank == 2 { 7 } else { 1 }).unwrap();
        let at = opt.scheduled().unwrap();
        let told = step(&mut opt, at, Some(1.0));
        assert!(matches!(&told, Err(Error::Disagree { what, rank: 2, .. }) if what == "step"), "{told:?}");
    })
    .unwrap();
}

#[test]
fn what_has_no_schedule_says_so() {
    loopback::spawn(2, |comm: Arc<dyn Communicator>| {
        let mut opt = new(Arc::clone(&comm), with(None)).unwrap();
        assert!(matches!(opt.scheduled(), Err(Error::NoSchedule)));
        let constant = with(Some(schedule(0.5, StepLR { step_size: 1, gamma: 0.5 })));
        let lbfgs = ShardedLbfgs::new(Arc::clone(&comm), layout(), Lbfgs::default(), zeros, constant.clone());
        assert!(matches!(lbfgs, Err(Error::NotForLbfgs(NotForLbfgs::Option { option: "schedule" }))));
        let options = Options { stage: Stage::Replicated, non_finite: NonFinite::Propagate, ..constant };
        let groups = [vec![0], vec![1]];
        let mut replicas =
            CrossShard::new(comm, Some(&groups), layout(), Sgd::default(), zeros, options).unwrap();
        replicas.restore_steps(2).unwrap();
        assert_eq!(replicas.scheduled().unwrap().lr, 0.125);
    })
    .unwrap();
}
