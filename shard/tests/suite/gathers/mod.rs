//! Sharded parameters: gathered whole while they are read, freed afterwards, the same on every rank; and their failures.

mod parted;
mod units;

use crate::common::{F32_MASTER, Run, fetch, name, param, params};
use meshstep_comm::{Communicator, Kind, loopback};
use meshstep_optim::Sgd;
use meshstep_shard::{Clip, Error, Initial, Optimizer, Options, Outcome, Stage, StepArgs};
use meshstep_tensor::{Category, DType, Layout, LayoutBuilder, Param, Slice, SliceMut};
use std::sync::Arc;

fn sharded() -> Run {
    Run::default().stage(Stage::Zero3)
}

/// Three units of equal length, a frozen parameter, and one more unit.
fn layout() -> Layout {
    let add = |b: LayoutBuilder, (unit, name, len): (&str, &str, usize)| {
        b.unit(unit).param(name, &[len], DType::F32)
    };
    let units = [("a", "a.w", 100), ("b", "b.w", 100), ("c", "c.w", 100), ("d", "d.w", 300)];
    units.into_iter().fold(Layout::builder().frozen("f", &[3], DType::F32), add).build().unwrap()
}

fn first(p: &Param, mut out: SliceMut<'_>) -> Result<(), meshstep_tensor::Error> {
    let salt = p.name().len() + usize::from(p.name().as_bytes()[0]);
    out.copy_from(Slice::from(&(0..p.len()).map(|i| (i * 7 + salt) as f32).collect::<Vec<_>>()[..]))
}

fn build(comm: Arc<dyn Communicator>, options: Options) -> Result<Optimizer, Error> {
    let meter = meshstep_tensor::Meter::new();
    Optimizer::new(comm, layout(), Sgd::default(), first, Options { stage: Stage::Zero3, meter, ..options })
}

fn step(opt: &mut Optimizer) -> Result<Outcome, Error> {
    let mb = opt.micro_batch(1)?;
    for (name, len) in [("d.w", 300), ("c.w", 100), ("b.w", 100), ("a.w", 100)] {
        mb.grad(name, &vec![1f32; len][..])?;
    }
    mb.finish()?;
    opt.step(StepArgs::default())?.outcome()
}

/// At every read each rank has the replicas' values, while other units, gradients and another thread's data are in flight.
#[test]
fn what_is_read_is_what_replicas_have() {
    for ranks in [1, 2, 3, 4] {
        for dtype in [DType::F32, DType::BF16] {
            let precision = if dtype == DType::BF16 { F32_MASTER } else { Options::default().precision };
            let options = Options { precision, ..Run::default().options };
            let run = Run { ranks, dtype, grads: dtype, options, ..Run::default() };
            let replicas = loopback::spawn(ranks, |comm| {
                let mut opt = run.stage(Stage::Replicated).build(comm).unwrap();
                let mut seen = vec![params(&opt)];
                for t in 1..=run.steps {
                    run.hand_over(&mut opt, t, 0).unwrap();
                    let _ = opt.step(run.at(t)).unwrap();
                    seen.push(params(&opt));
                }
                seen
            });
            let replicas = &replicas.unwrap()[0];
            let run = run.stage(Stage::Zero3);
            loopback::spawn(ranks, |comm| {
                let rank = comm.rank();
                let mut opt = run.build(comm).unwrap();
                for t in 1..=run.steps {
                    let of = |i: usize| opt.unit_of(&name(i)).unwrap().unwrap().to_owned();
                    let of: Vec<String> = (0..run.lens.len()).map(of).collect();
                    let mut units: Vec<String> = opt.units().map(str::to_owned).collect();
                    let own =
                        |unit: &str| -> Vec<usize> { (0..of.len()).filter(|&i| of[i] == unit).collect() };
                    let seen = &replicas[t as usize - 1];
                    let mb = opt.micro_batch(1).unwrap();
                    let same = |unit: &meshstep_shard::Gathered<'_>| {
                        for i in own(unit.unit()) {
                            let here = fetch(unit.param(&name(i)).unwrap(), &run.options.queue);
                            assert_eq!(here, seen[i], "{dtype} on rank {rank} of {ranks}, step {t}: p{i}");
                        }
                        Ok(())
                    };
                    crate::common::pass(&mb, &units, same).unwrap();
                    units.reverse();
                    crate::common::pass(&mb, &units, |unit| {
                        same(unit)?;
                        // From several threads, while the next unit is in flight.
                        std::thread::scope(|s| {
                            for i in own(unit.unit()) {
                                let mb = &mb;
                                let grad = run.gradient(t, 0, rank, i);
                                s.spawn(move || {
                                    crate::common::with_dtype(dtype, &grad, |grad| mb.grad(&name(i), grad))
                                        .unwrap();
                                });
                            }
                        });
                        same(unit)
                    })
                    .unwrap();
                    mb.finish().unwrap();
                    let _ = opt.step(run.at(t)).unwrap();
                    assert_eq!(params(&opt), replicas[t as usize]);
                }
            })
            .unwrap();
        }
    }
}

/// A rank keeps its own part of a unit between gathers.
#[test]
fn each_rank_keeps_its_own_part() {
    for stage in crate::common::STAGES {
        let parts = loopback::spawn(3, |comm| {
            let run = Run { ranks: 3, ..Run::default() }.stage(stage);
            let mut opt = run.build(comm).unwrap();
            run.hand_over(&mut opt, 1, 0).unwrap();
            let _ = opt.step(run.at(1)).unwrap();
            let whole = params(&opt);
            let part = |i: usize| {
                let state = opt.state(&name(i)).unwrap();
                assert_eq!(state.values.len(), state.range.len());
                let own = fetch(state.values, &run.options.queue);
                assert_eq!(own, whole[i][state.range.start * 4..state.range.end * 4], "{stage:?} p{i}");
                own.len()
            };
            ((0..run.lens.len()).map(part).sum::<usize>(), run.lens.iter().sum::<usize>() * 4)
        });
        let parts = parts.unwrap();
        let owned: usize = parts.iter().map(|(own, _)| own).sum();
        let times = if stage == Stage::Replicated { 3 } else { 1 };
        assert_eq!(owned, times * parts[0].1, "{stage:?}");
    }
}

/// Two units fit in either order; a third takes memory until it is dropped.
#[test]
fn dropping_a_unit_frees_it() {
    loopback::spawn(2, |comm| {
        let opt = build(comm.clone(), Options::default()).unwrap();
        let live = || opt.options().meter.live(Category::Gathered);
        // c and d, padded to 64 elements a rank.
        let room = (128 + 384) * 4;
        assert_eq!(live(), room);
        let kept = opt.options().meter.live(Category::Params);
        assert_eq!(kept, ((3 * 128 + 384) / 2 + 64) * 4);
        for unit in ["a", "b", "c", "d", "c", "b", "a"] {
            assert_eq!(opt.gather(unit).unwrap().unit(), unit);
        }
        let (c, d) = (opt.start_gather("c").unwrap(), opt.start_gather("d").unwrap());
        let d = d.wait().unwrap();
        drop(c);
        let (c, a) = (opt.gather("c").unwrap(), opt.gather("a").unwrap());
        assert_eq!(live(), room + 128 * 4);
        for (unit, name) in [(&a, "a.w"), (&c, "c.w"), (&d, "d.w")] {
            let values = unit.param(name).unwrap().typed::<f32>().unwrap();
            let expected = 3 + usize::from(name.as_bytes()[0]);
            assert!(values.iter().enumerate().all(|(i, &v)| v == (i * 7 + expected) as f32), "{name}");
            assert_eq!(unit.param("f").unwrap().len(), 3);
        }
        drop((a, c, d));
        assert_eq!(live(), room);
        assert_eq!(opt.options().meter.peak(Category::Gathered), room + 128 * 4);
    })
    .unwrap();
}

#[test]
fn a_step_gathers_nothing() {
    loopback::spawn(3, |comm| {
        let run = Run { ranks: 3, ..sharded() };
        let mut opt = run.build(comm.clone()).unwrap();
        let gathers = || comm.stats().of(Kind::AllGather).operations;
        let before = gathers();
        for t in 1..=3 {
            run.hand_over(&mut opt, t, 0).unwrap();
            let Outcome::Applied { traffic, .. } = opt.step(run.at(t)).unwrap().outcome().unwrap() else {
                panic!("gradients are finite")
            };
            assert!(traffic.sent > 0);
        }
        assert_eq!(gathers(), before);
    })
    .unwrap();
}

/// Initial values are requested in registration order, whole, one at a time; a failure is an error on every rank.
#[test]
fn first_values_come_whole_and_in_order() {
    for initial in [Initial::Broadcast, Initial::Compare] {
        let options = Options { stage: Stage::Zero3, initial, ..Options::default() };
        loopback::spawn(3, |comm| {
            let rank = comm.rank();
            let asked = initial == Initial::Compare || rank == 0;
            let mut seen = Vec::new();
            let options = Options { meter: meshstep_tensor::Meter::new(), ..options.clone() };
            let counted = |p: &Param, out: SliceMut<'_>| {
                seen.push((p.name().to_owned(), out.len()));
                first(p, out)
            };
            let opt =
                Optimizer::new(comm.clone(), layout(), Sgd::default(), counted, options.clone()).unwrap();
            let all = [("f", 3), ("a.w", 100), ("b.w", 100), ("c.w", 100), ("d.w", 300)];
            let all = all.map(|(name, len)| (name.to_owned(), len)).to_vec();
            assert_eq!(seen, if asked { all } else { Vec::new() });
            for name in ["a.w", "b.w", "c.w", "d.w", "f"] {
                assert_eq!(param(&opt, name), param_of(name), "{initial:?} {name}");
            }
            let peak = opt.options().meter.peak_total();
            assert_eq!(peak, opt.options().meter.live_total(), "values are staged where units will be");
            // Values that the initializer does not write are zeros, whatever the memory held before.
            let some = |p: &Param, out: SliceMut<'_>| if p.name() == "b.w" { Ok(()) } else { first(p, out) };
            let opt = Optimizer::new(comm.clone(), layout(), Sgd::default(), some, options.clone()).unwrap();
            assert!(param(&opt, "b.w").iter().all(|&byte| byte == 0));
            let fails = |p: &Param, out: SliceMut<'_>| {
                let wrong = meshstep_tensor::Error::WrongLen { given: 1, expected: 2 };
                if p.name() == "b.w" && rank == 0 { Err(wrong) } else { first(p, out) }
            };
            let told = Optimizer::new(comm.clone(), layout(), Sgd::default(), fails, options.clone());
            let told = told.map(drop).unwrap_err().to_string();
            assert!(told.contains("no initial value for parameter \"b.w\""), "{told}");
            if initial == Initial::Compare {
                let differs = |p: &Param, mut out: SliceMut<'_>| {
                    first(p, out.reborrow())?;
                    if p.name() == "c.w" && rank == 2 {
                        out.typed_mut::<f32>()?[99] += 1.0;
                    }
                    Ok(())
                };
                let told = Optimizer::new(comm, layout(), Sgd::default(), differs, options).map(drop);
                let told = told.unwrap_err().to_string();
                assert!(told.starts_with("ranks disagree on values of \"c.w\""), "{told}");
            }
        })
        .unwrap();
    }
}

#[test]
fn what_needs_whole_gradients_is_refused() {
    loopback::spawn(2, |comm| {
        let clip = build(comm, Options { clip: Clip::BeforeReduce, ..Options::default() }).map(drop);
        assert!(matches!(clip, Err(Error::ClipNeedsGradients)));
    })
    .unwrap();
}

fn param_of(name: &str) -> Vec<u8> {
    let layout = layout();
    let param = layout.get(name).unwrap();
    let mut values = vec![0f32; param.len()];
    first(param, SliceMut::from(&mut values[..])).unwrap();
    Slice::from(&values[..]).bytes().unwrap().to_vec()
}
