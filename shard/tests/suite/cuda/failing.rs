//! Driver calls that fail on one rank alone, in the middle of a collective call: every rank gets an error, and none waits.

use crate::common::gpus::{fail, two};
use crate::common::{self, Run, params, state};
use crate::cuda::lbfgs::{self, SEARCHES};
use crate::cuda::{alone, stand_in};
use crate::lbfgs::problems::Problem;
use meshstep_comm::Communicator;
use meshstep_optim::LineSearch;
use meshstep_shard::{Error, Initial, Optimizer, Options, Stage};
use meshstep_tensor::{DType, Layout, Param, SliceMut};
use std::ffi::CStr;
use std::sync::Barrier;

const OUT_OF_MEMORY: i32 = 2;
const LAUNCH_FAILED: i32 = 719;

/// After the `at`th iterate one kernel launch fails, on the first rank to reach it: a launch that computes a direction, without
/// an exchange afterwards, or one that measures before an exchange.
#[test]
fn a_direction_or_measurement_of_l_bfgs() {
    let _alone = alone();
    if !stand_in() {
        return println!("skipped: needs the stand-ins");
    }
    for search in SEARCHES {
        for at in [1, 2] {
            let exchanged = search == LineSearch::StrongWolfe && at == 2;
            let both = Barrier::new(2);
            let told = two(|base, comm| {
                let rank = comm.rank();
                let run = lbfgs::run(Problem::Rosenbrock, &[40, 9], search, Stage::Zero1);
                let run = lbfgs::there(&run, &base.options.queue);
                let mut opt = run.build(comm).unwrap();
                let mut seen = 0;
                let told = opt.step_watched(
                    |mb| run.backward(mb, &run.read(mb)?, rank, 2),
                    |_| {
                        seen += 1;
                        if seen == at {
                            both.wait();
                            if rank == 1 {
                                fail(c"cuLaunchKernel", LAUNCH_FAILED);
                            }
                            both.wait();
                        }
                    },
                );
                let next = opt.step(|mb| run.backward(mb, &run.read(mb)?, rank, 2));
                assert_eq!(next.is_ok(), exchanged, "{search:?}, {at}, rank {rank}: {next:?}");
                told.unwrap_err()
            });
            let [own, other] = if is_own(&told[0]) { [&told[0], &told[1]] } else { [&told[1], &told[0]] };
            let heard = matches!(
                (exchanged, other),
                (true, Error::ClosureElsewhere { .. }) | (false, Error::Comm(_))
            );
            assert!(is_own(own) && heard, "{search:?}, {at}: {told:?}");
        }
    }
}

/// Returns true if the error is the driver's refusal.
fn is_own(error: &Error) -> bool {
    matches!(error, Error::Tensor(_) | Error::Optim(_) | Error::Initial { .. })
}

/// Tries each driver call that builds parameters, or fills them after their values are requested, when all memory is allocated.
#[test]
fn parameters_that_are_added() {
    let _alone = alone();
    if !stand_in() {
        return println!("skipped: needs the stand-ins");
    }
    let calls: [(&CStr, i32, bool); 5] = [
        (c"cuMemAlloc_v2", OUT_OF_MEMORY, false),
        (c"cuMemsetD8Async", LAUNCH_FAILED, false),
        (c"cuMemcpyHtoDAsync_v2", LAUNCH_FAILED, true),
        (c"cuMemcpyDtoHAsync_v2", LAUNCH_FAILED, true),
        // Masters are filled last.
        (c"cuLaunchKernel", LAUNCH_FAILED, true),
    ];
    for initial in [Initial::Broadcast, Initial::Compare] {
        for (call, code, asked) in calls {
            let both = Barrier::new(2);
            let told = two(|base, comm| {
                let rank = comm.rank();
                let precision = common::F32_MASTER;
                let options = Options { initial, precision, ..base.options.clone() };
                let (dtype, grads) = (DType::BF16, DType::BF16);
                let run = Run { dtype, grads, options, ..base };
                let mut opt = run.build(comm).unwrap();
                run.hand_over(&mut opt, 1, 0).unwrap();
                opt.step(run.at(1)).unwrap().outcome().unwrap();
                let seen = |opt: &Optimizer| (params(opt), state(opt), opt.params().count());
                let before = seen(&opt);
                both.wait();
                if rank == 0 && !asked {
                    fail(call, code);
                }
                both.wait();
                let add = |opt: &mut Optimizer, fails: bool| {
                    let values = |_: &Param, _: SliceMut<'_>| {
                        if fails && asked && rank == 0 {
                            fail(call, code);
                        }
                        Ok(())
                    };
                    let layout = Layout::builder().param("more", &[40], DType::BF16).build().unwrap();
                    opt.add_param_group(layout, common::adamw(), values)
                };
                let Err(told) = add(&mut opt, true) else {
                    panic!("{call:?} {initial:?} {asked}: on rank {rank}")
                };
                fail(call, 0);
                if let Error::Comm(_) = told {
                    // No rank continues.
                    assert!(matches!(add(&mut opt, false), Err(Error::Comm(_))));
                } else {
                    both.wait();
                    assert_eq!(seen(&opt), before);
                    add(&mut opt, false).unwrap();
                }
                told
            });
            let own = told.iter().filter(|error| is_own(error)).count();
            assert!(own <= 1, "{call:?} {initial:?}: {told:?}");
        }
    }
}
