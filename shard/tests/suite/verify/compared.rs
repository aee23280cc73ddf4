//! Other values that are compared: reduced gradients and hyperparameters.

use super::{difference, take, wide};
use crate::common::elsewhere::Elsewhere;
use crate::common::{Run, STAGES, name, params, state};
use meshstep_comm::loopback;
use meshstep_shard::{Clip, Error, Optimizer, Options, Stage, VerifyError};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

#[test]
fn reduced_gradients_are_compared_on_demand() {
    for stage in STAGES {
        let run = wide().stage(stage);
        let whole = !matches!(stage, Stage::Zero1 | Stage::Zero2 | Stage::Zero3);
        loopback::spawn(run.ranks, |comm| {
            let rank = comm.rank();
            let mut opt = run.build(comm).unwrap();
            let refused = |opt: &mut Optimizer| {
                let told = opt.verify_gradients().unwrap_err();
                assert!(matches!(told, Error::Verify(VerifyError::NoGradients)), "{told}");
            };
            refused(&mut opt);
            run.hand_over(&mut opt, 1, 0).unwrap();
            let verified = opt.verify_gradients().unwrap();
            let some = run.lens.len();
            let expected = if whole { (some, 0) } else { (0, some) };
            assert_eq!((verified.compared, verified.unchecked), expected, "{stage:?}");
            if rank == 3 && whole {
                opt.flip_bit("p0", "grad", 69, 31).unwrap();
            }
            let told = opt.verify_gradients();
            if whole {
                let told = difference(&told.unwrap_err());
                assert_eq!((&told.param[..], told.slot, told.element), ("p0", "grad", Some(69)));
                assert_eq!(told.odd(), [3]);
            }
            opt.discard_gradients().unwrap();
            refused(&mut opt);
            take(&run, &mut opt, 1).unwrap();
            opt.verify().unwrap();
        })
        .unwrap();
    }
    let options = Options { clip: Clip::BeforeReduce, stage: Stage::Replicated, ..wide().options };
    let run = Run { options, ..wide() };
    loopback::spawn(run.ranks, |comm| {
        let mut opt = run.build(comm).unwrap();
        run.hand_over(&mut opt, 1, 0).unwrap();
        let told = opt.verify_gradients().unwrap_err();
        assert!(matches!(told, Error::Verify(VerifyError::HeldBack)), "{told}");
        let _ = opt.step(run.at(1)).unwrap().outcome().unwrap();
    })
    .unwrap();
}

/// A hyperparameter that changes on one rank after construction is found before a step uses it, for rules with and without
/// kernels.
#[test]
fn hyperparameters_are_compared_by_their_bits() {
    for (kernels, verifying) in [(true, false), (false, false), (false, true), (true, true)] {
        hyperparameters_are_compared(kernels, verifying);
    }
}

fn hyperparameters_are_compared(kernels: bool, verifying: bool) {
    let run = wide().stage(Stage::Zero1);
    loopback::spawn(run.ranks, |comm| {
        let rank = comm.rank();
        let beta1 = Arc::new(AtomicU64::new(0.9f64.to_bits()));
        let rule = Elsewhere { beta1: Arc::clone(&beta1), kernels };
        let mut opt = Optimizer::new(comm, run.layout(), rule, |_, _| Ok(()), run.options.clone()).unwrap();
        opt.verify_every(verifying.into()).unwrap();
        take(&run, &mut opt, 1).unwrap();
        if rank == 3 {
            beta1.fetch_xor(1, SeqCst);
        }
        let clean = (params(&opt), state(&opt));
        for told in [opt.verify().map(drop), take(&run, &mut opt, 2)] {
            let told = told.unwrap_err();
            assert!(
                matches!(&told, Error::Disagree { what, rank: 3, .. } if what == "beta1 of group 0"),
                "{told}"
            );
        }
        assert_eq!((params(&opt), state(&opt)), clean);
        beta1.store(0.9f64.to_bits(), SeqCst);
        take(&run, &mut opt, 2).unwrap();
    })
    .unwrap();
}

#[test]
fn bits_that_are_not_there_are_refused() {
    let run = wide().stage(Stage::Replicated);
    loopback::spawn(1, |comm| {
        let mut opt = run.build(comm).unwrap();
        for (slot, element, bit) in
            [("m", 300, 0), ("m", 0, 32), ("master", 0, 0), ("n", 0, 0), ("param", usize::MAX, 0)]
        {
            let told = opt.flip_bit(&name(0), slot, element, bit).unwrap_err();
            assert!(matches!(told, Error::Verify(VerifyError::NoSuchBit { .. })), "{told}");
        }
        assert!(matches!(opt.flip_bit("w", "param", 0, 0), Err(Error::UnknownParam { .. })));
        opt.flip_bit(&name(0), "m", 299, 31).unwrap();
    })
    .unwrap();
}
