//! Ranks that should hold the same are compared bit by bit, and a vector that one rank alone holds with its last update.

mod compared;
mod repairs;
mod steps;

use crate::common::{F32_MASTER, Run, STAGES, adamw, draws, fetch, params, state, turns};
use meshstep_comm::loopback;
use meshstep_shard::{Difference, Error, Optimizer, Options, Stage};
use meshstep_tensor::{DType, Layout, Param, SliceMut};

/// Every rank owns a part of every kind of parameter, at every stage.
fn wide() -> Run {
    let options = Options { bucket_len: Some(400), ..Options::default() };
    Run { lens: vec![300, 70, 130, 500, 64, 90], options, ..Run::default() }
}

fn take(run: &Run, opt: &mut Optimizer, t: u64) -> Result<(), Error> {
    run.hand_over(opt, t, 0)?;
    opt.step(run.at(t))?.outcome().map(drop)
}

/// Finds an element of a vector that this rank holds: its parameter, index and bits.
fn target(opt: &Optimizer, slot: &str) -> (String, usize, u64) {
    let bits = |bytes: &[u8], size: usize, i: usize| {
        let mut word = [0; 8];
        word[..size].copy_from_slice(&bytes[i * size..][..size]);
        u64::from_le_bytes(word)
    };
    let queue = &opt.options().queue;
    for param in opt.params() {
        let state = opt.state(param.name()).unwrap();
        let (first, values) = match (slot, &state.master) {
            ("param", _) => match opt.param(param.name()) {
                Ok(whole) => (0, whole),
                Err(_) => (state.range.start, state.values),
            },
            ("master", Some(master)) => (state.range.start, *master),
            _ => match state.slots.iter().find(|(name, _)| *name == slot) {
                Some((_, values)) => (state.range.start, *values),
                None => continue,
            },
        };
        if values.len() > 20 {
            let i = values.len() * 2 / 3;
            return (
                param.name().to_owned(),
                first + i,
                bits(&fetch(values, queue), values.dtype().size(), i),
            );
        }
    }
    panic!("no rank has so little");
}

fn difference(error: &Error) -> Difference {
    match error {
        Error::Differs(difference) => (**difference).clone(),
        other => panic!("{other}"),
    }
}

/// Flips a bit on one rank between two steps: `verify` and the next step report the same difference on every rank; after flipping
/// it back training continues unchanged.
fn flipped(run: &Run, slot: &'static str, odd: usize, bit: u32) -> (Difference, (String, usize, u64)) {
    let ranks = loopback::spawn(run.ranks, |comm| {
        let rank = comm.rank();
        let mut opt = run.build(comm).unwrap();
        opt.verify_every(1).unwrap();
        take(run, &mut opt, 1).unwrap();
        let at = (rank == odd).then(|| target(&opt, slot));
        let flip = |opt: &mut Optimizer| {
            at.iter().for_each(|(name, element, _)| opt.flip_bit(name, slot, *element, bit).unwrap());
        };
        let clean = (params(&opt), state(&opt));
        flip(&mut opt);
        let told = opt.verify().unwrap_err();
        assert_eq!(take(run, &mut opt, 2).unwrap_err().to_string(), told.to_string());
        flip(&mut opt);
        assert_eq!((params(&opt), state(&opt)), clean);
        opt.verify().unwrap();
        take(run, &mut opt, 2).unwrap();
        (difference(&told), at, params(&opt))
    });
    let ranks = ranks.unwrap();
    let expected = Run { steps: 2, ..run.clone() }.run().params;
    assert!(ranks.iter().all(|(told, _, end)| *told == ranks[0].0 && *end == expected));
    let at = ranks.iter().find_map(|(_, at, _)| at.clone()).unwrap();
    (ranks[0].0.clone(), at)
}

#[test]
fn one_flipped_bit_is_named() {
    let bf16 = |stage| {
        let run = Run { dtype: DType::BF16, grads: DType::BF16, ..wide() };
        Run { options: Options { precision: F32_MASTER, ..run.options.clone() }, ..run }.stage(stage)
    };
    let mut drawn = draws(1);
    for (s, stage) in STAGES.into_iter().enumerate() {
        let cut = stage != Stage::Replicated;
        let all = [
            (wide().stage(stage), "param", DType::F32),
            (wide().stage(stage), "m", DType::F32),
            (wide().stage(stage), "v", DType::F32),
            (bf16(stage), "param", DType::BF16),
            (bf16(stage), "master", DType::F32),
            (bf16(stage), "m", DType::F32),
        ];
        for (i, (run, slot, dtype)) in all.into_iter().enumerate() {
            if !drawn() {
                continue;
            }
            for (odd, bit) in turns(&[(1, 0), (3, 8 * dtype.size() as u32 - 1)], s + i, 1) {
                let (told, (name, element, bits)) = flipped(&run, slot, odd, bit);
                let alone = cut && (slot != "param" || stage == Stage::Zero3);
                assert_eq!((&told.param, told.slot, told.element), (&name, slot, Some(element)), "{stage:?}");
                assert_eq!((told.odd(), told.dtype, told.more), (vec![odd], dtype, 0), "{told}");
                assert_eq!(told.values(), Some([bits, bits ^ 1 << bit]), "{told}");
                assert_eq!(told.held.len(), if alone { 1 } else { run.ranks }, "{stage:?} {slot}");
                assert_eq!(told.wrote, alone.then_some(bits));
                if bit == 0 {
                    assert_eq!(told.apart().unwrap().ulps, 1);
                }
            }
        }
    }
}

/// Two changes of a vector that one rank alone holds are found, and not attributed to one element.
#[test]
fn more_than_one_change_is_told_as_such() {
    let run = wide().stage(Stage::Zero2);
    let told = loopback::spawn(run.ranks, |comm| {
        let rank = comm.rank();
        let mut opt = run.build(comm).unwrap();
        opt.verify_every(1).unwrap();
        take(&run, &mut opt, 1).unwrap();
        if rank == 2 {
            let (name, element, _) = target(&opt, "v");
            opt.flip_bit(&name, "v", element, 0).unwrap();
            opt.flip_bit(&name, "v", element + 1, 30).unwrap();
        }
        difference(&opt.verify().unwrap_err())
    });
    let told = told.unwrap();
    assert!(told.iter().all(|difference| *difference == told[0]));
    assert_eq!((told[0].slot, told[0].element, told[0].odd()), ("v", None, vec![2]));
    assert_eq!(told[0].values(), None);
}

/// With several differences the first is reported, and the number of the others.
#[test]
fn the_first_of_several_differences_is_told() {
    let run = wide().stage(Stage::Zero1);
    let told = loopback::spawn(run.ranks, |comm| {
        let rank = comm.rank();
        let mut opt = run.build(comm).unwrap();
        opt.verify_every(1).unwrap();
        take(&run, &mut opt, 1).unwrap();
        if rank == 1 {
            opt.flip_bit("p3", "param", 101, 4).unwrap();
        }
        if rank >= 2 {
            opt.flip_bit("p0", "param", 65 + rank, 4).unwrap();
            let (name, element, _) = target(&opt, "m");
            opt.flip_bit(&name, "m", element, 0).unwrap();
        }
        difference(&opt.verify().unwrap_err())
    });
    for told in told.unwrap() {
        // Two of four ranks differ, each in another way: the other two are no majority.
        assert_eq!((&told.param[..], told.slot, told.element, told.more), ("p0", "param", Some(67), 3));
        assert_eq!((told.majority(), told.odd()), (None, vec![]));
        let hashes: Vec<u64> = told.held.iter().map(|held| held.hash).collect();
        assert!(hashes[0] == hashes[1] && hashes[2] != hashes[3] && hashes[2] != hashes[0]);
    }
}

#[test]
fn numbers_are_compared_by_their_bits() {
    let values = [f32::from_bits(0x7fc0_0001), 0.0, f32::from_bits(0xffff_ffff)];
    let layout = || Layout::builder().param("w", &[3], DType::F32).frozen("still", &[3], DType::F32).build();
    let told = loopback::spawn(3, |comm| {
        let rank = comm.rank();
        let fill = |_: &Param, mut out: SliceMut<'_>| out.copy_from((&values[..]).into());
        let mut opt = Optimizer::new(comm, layout().unwrap(), adamw(), fill, Options::default()).unwrap();
        opt.verify().unwrap();
        let mut flip = |name, element, bit| {
            (0..2)
                .map(|_| {
                    if rank == 1 {
                        opt.flip_bit(name, "param", element, bit).unwrap();
                    }
                    opt.verify().map(drop)
                })
                .collect::<Vec<_>>()
        };
        let all = [flip("w", 0, 1), flip("w", 1, 31), flip("still", 2, 0)];
        assert!(all.iter().all(|told| told[1].is_ok()));
        all.map(|told| difference(told[0].as_ref().unwrap_err()))
    });
    for [nan, zero, frozen] in told.unwrap() {
        assert_eq!((nan.element, nan.values()), (Some(0), Some([0x7fc0_0001, 0x7fc0_0003])));
        assert_eq!((zero.element, zero.values()), (Some(1), Some([0, 0x8000_0000])));
        assert_eq!((zero.apart().unwrap().ulps, zero.apart().unwrap().abs), (1, 0.0));
        assert_eq!((&frozen.param[..], frozen.element, frozen.odd()), ("still", Some(2), vec![1]));
    }
}
