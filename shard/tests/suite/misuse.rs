//! Bad input, on one rank or on all: an error that names its cause, the same on every rank; nothing changes.

use crate::common::adamw;
use meshstep_comm::loopback;
use meshstep_optim::{AdamW, Norm, Sgd};
use meshstep_shard::{Combine, Error, Groups, Initial, Optimizer, Options, Plan, Stage, StepArgs};
use meshstep_tensor::{DType, Layout, Param, Slice, SliceMut};

fn zeros(_: &Param, _: SliceMut<'_>) -> Result<(), meshstep_tensor::Error> {
    Ok(())
}

fn layout(names: &[&str]) -> Layout {
    names.iter().fold(Layout::builder(), |b, n| b.param(*n, &[3, 2], DType::F32)).build().unwrap()
}

/// Returns the error of each of 3 ranks that build with the arguments of `of`.
fn built(of: impl Fn(usize) -> (Layout, Groups, Options) + Sync) -> Vec<String> {
    let told = loopback::spawn(3, |comm| {
        let (layout, groups, options) = of(comm.rank());
        match Optimizer::new(comm, layout, groups, zeros, options) {
            Ok(_) => "built".to_owned(),
            Err(error) => error.to_string(),
        }
    });
    told.unwrap()
}

fn differs(of: impl Fn(bool) -> (Layout, Groups, Options) + Sync, expected: &str) {
    for odd in 1..3 {
        let told = built(|rank| of(rank == odd));
        assert!(told.iter().all(|t| *t == expected.replace("{odd}", &odd.to_string())), "{told:#?}");
    }
}

fn usual() -> (Layout, Groups, Options) {
    (layout(&["a", "b"]), Groups::new(adamw()), Options::default())
}

#[test]
fn ranks_that_were_given_different_things_are_told_what_differs() {
    let name = |odd| if odd { (layout(&["a", "c"]), usual().1, usual().2) } else { usual() };
    differs(
        name,
        "ranks disagree on parameter 1: rank 0 has \"b\" [3, 2] f32, rank {odd} has \"c\" [3, 2] f32",
    );
    let order = |odd| if odd { (layout(&["b", "a"]), usual().1, usual().2) } else { usual() };
    differs(
        order,
        "ranks disagree on parameter 0: rank 0 has \"a\" [3, 2] f32, rank {odd} has \"b\" [3, 2] f32",
    );
    let shape = |odd| {
        let other = Layout::builder().param("a", &[3, 2], DType::F32).param("b", &[2, 3], DType::F32);
        if odd { (other.build().unwrap(), usual().1, usual().2) } else { usual() }
    };
    differs(
        shape,
        "ranks disagree on parameter 1: rank 0 has \"b\" [3, 2] f32, rank {odd} has \"b\" [2, 3] f32",
    );
    let rule = |odd| {
        let groups = Groups::new(AdamW { beta2: if odd { 0.99 } else { 0.999 }, ..adamw() });
        (usual().0, groups, usual().2)
    };
    differs(rule, "ranks disagree on beta2 of group 0: rank 0 has 0.999, rank {odd} has 0.99");
    let stage = |odd| {
        (
            usual().0,
            usual().1,
            Options { stage: if odd { Stage::Zero2 } else { Stage::Zero1 }, ..Options::default() },
        )
    };
    differs(stage, "ranks disagree on stage: rank 0 has Zero1, rank {odd} has Zero2");
}

#[test]
fn what_one_rank_cannot_do_no_rank_does() {
    for odd in 0..3 {
        let told = built(|rank| {
            let beta2 = if rank == odd { 1.5 } else { 0.999 };
            (usual().0, Groups::new(AdamW { beta2, ..adamw() }), usual().2)
        });
        for (rank, told) in told.iter().enumerate() {
            if rank == odd {
                assert!(told.contains("beta2") && told.contains("1.5"), "{told}");
            } else {
                let said = format!("ranks disagree on this call: rank 0 has no objection, rank {odd} has");
                assert!(odd == 0 || told.contains(&said), "{told}");
                assert!(told.contains("beta2"), "{told}");
            }
        }
    }
}

#[test]
fn a_norm_that_one_rank_cannot_take_leaves_the_communicator_to_all() {
    let told = loopback::spawn(3, |comm| {
        let norm = if comm.rank() == 1 { Norm::P(-1.0) } else { Norm::L2 };
        let (layout, groups, options) = usual();
        let odd = Options { norm, ..options.clone() };
        let told =
            Optimizer::new(comm.clone(), layout.clone(), groups.clone(), zeros, odd).map(drop).unwrap_err();
        Optimizer::new(comm, layout, groups, zeros, options).map(drop).unwrap();
        told.to_string()
    });
    let told = told.unwrap();
    assert!(told.iter().all(|told| told.contains("norm")), "{told:?}");
    assert!(told[0] == told[2] && told[0].contains("rank 1 has"), "{told:?}");
}

#[test]
fn contradictions_are_refused() {
    let refused = |of: (Layout, Groups, Options), needles: &[&str]| {
        let told = built(|_| of.clone());
        assert!(told.iter().all(|t| needles.iter().all(|n| t.contains(n))), "{told:?} {needles:?}");
    };
    let (layout, groups, options) = usual();
    let bf16 = Layout::builder().param("half", &[3], DType::BF16).build().unwrap();
    refused(
        (bf16.clone(), groups.clone(), options.clone()),
        &["half", "bf16", "Master::F32", "Remainder", "Stochastic"],
    );
    let wide = Options { grads: Some(DType::F64), ..options.clone() };
    refused((layout.clone(), groups.clone(), wide), &["\"b\"", "f64 gradients"]);
    let weighted = Options { grads: Some(DType::F16), combine: Combine::Weighted, ..options.clone() };
    refused((layout.clone(), groups.clone(), weighted), &["f16", "bf16 or f32"]);
    refused(
        (layout.clone(), groups.clone(), Options { bucket_len: Some(0), ..options.clone() }),
        &["bucket_len"],
    );
    refused((layout.clone(), groups.clone(), Options { norm: Norm::P(-1.0), ..options.clone() }), &["-1"]);
    let unknown = groups.clone().with(adamw(), ["nope"]);
    refused((layout.clone(), unknown, options.clone()), &["nope"]);
    let twice = groups.clone().with(adamw(), ["a"]).with(adamw(), ["a"]);
    refused((layout.clone(), twice, options.clone()), &["\"a\"", "two groups"]);
    refused(
        (layout.clone(), groups.clone().with_lr(adamw(), -1.0, ["a"]), options.clone()),
        &["lr_scale", "-1"],
    );
    let frozen = Layout::builder().frozen("a", &[3], DType::F32).build().unwrap();
    refused((frozen, groups, options), &["frozen"]);
    assert!(matches!(Plan::new(&layout, 0, &Options::default()), Err(Error::NoRanks)));
    assert!(matches!(
        Plan::new(&layout, usize::MAX / 2, &Options::default()),
        Err(Error::TooManyRanks { .. })
    ));
}

#[test]
fn initial_values_are_compared_or_fail_together() {
    let build = |initial: Initial, values: &(dyn Fn(usize, &str) -> Result<f32, ()> + Sync)| {
        let told = loopback::spawn(3, |comm| {
            let rank = comm.rank();
            let fill = |p: &Param, mut out: SliceMut<'_>| match values(rank, p.name()) {
                Ok(value) => out.copy_from(Slice::from(&[value; 6][..])),
                Err(()) => out.copy_from(Slice::from(&[0f32; 5][..])),
            };
            let options = Options { initial, ..Options::default() };
            Optimizer::new(comm, layout(&["a", "b"]), adamw(), fill, options)
                .map(drop)
                .map_err(|e| e.to_string())
        });
        told.unwrap()
    };
    assert!(build(Initial::Compare, &|_, _| Ok(1.0)).iter().all(Result::is_ok));
    let differing = build(Initial::Compare, &|rank, name| Ok(f32::from(rank == 2 && name == "b")));
    assert!(
        differing
            .iter()
            .all(|d| d.as_ref().is_err_and(|d| d.contains("values of \"b\"") && d.contains("rank 2")))
    );
    for (initial, bad) in [(Initial::Compare, 1), (Initial::Broadcast, 0)] {
        let failing = build(initial, &|rank, _| if rank == bad { Err(()) } else { Ok(1.0) });
        assert!(failing.iter().all(|f| f.as_ref().is_err_and(|f| f.contains("\"a\""))), "{failing:?}");
    }
}

#[test]
fn a_wrong_gradient_is_refused_and_the_right_one_still_taken() {
    loopback::spawn(2, |comm| {
        let mut opt =
            Optimizer::new(comm, layout(&["a"]), Sgd::default(), zeros, Options::default()).unwrap();
        let mb = opt.micro_batch(1).unwrap();
        assert!(matches!(mb.grad("x", &[1f32][..]), Err(Error::UnknownParam { count: 1, .. })));
        assert!(matches!(mb.slot("x"), Err(Error::UnknownParam { .. })));
        assert!(matches!(mb.grad("a", &[1f32][..]), Err(Error::GradLen { expected: 6, given: 1, .. })));
        let wide = mb.grad("a", &[1f64; 6][..]);
        assert!(matches!(wide, Err(Error::GradDType { expected: DType::F32, given: DType::F64, .. })));
        mb.grad("a", &[1f32; 6][..]).unwrap();
        assert!(matches!(mb.grad("a", &[1f32; 6][..]), Err(Error::GradTwice { .. })));
        mb.finish().unwrap();
        assert!(matches!(opt.micro_batch(1).map(drop), Err(Error::StepDue)));
        let _ = opt.step(StepArgs { lr: 1.0, ..StepArgs::default() }).unwrap();
        assert_eq!(opt.param("a").unwrap().typed::<f32>().unwrap(), [-1.0; 6]);
    })
    .unwrap();
}
