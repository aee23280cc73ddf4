//! Whole parameters read at every stage, and wrong arguments of a read.

use crate::common::{STAGES, adamw};
use meshstep_comm::loopback;
use meshstep_shard::{Error, Optimizer, Options, ReadError, Stage, StepArgs, UnitError};
use meshstep_tensor::{DType, Layout, Param, SliceMut, bf16};

fn layout() -> Layout {
    let layout =
        Layout::builder().frozen("table", &[5], DType::F32).unit("h.0").param("w", &[7, 3], DType::F32);
    let layout = layout.param("none", &[0], DType::F32).unit("h.1").param("b", &[5], DType::F32);
    layout.param("wide", &[9], DType::F64).build().unwrap()
}

fn built(comm: std::sync::Arc<dyn meshstep_comm::Communicator>, stage: Stage) -> Optimizer {
    let from = |p: &Param, mut out: SliceMut<'_>| {
        let values: Vec<f64> = (0..p.len()).map(|i| i as f64 - 1.5).collect();
        out.cast_from((&values).into())
    };
    Optimizer::new(comm, layout(), adamw(), from, Options { stage, ..Options::default() }).unwrap()
}

fn step(opt: &mut Optimizer) {
    let mb = opt.micro_batch(1).unwrap();
    mb.grad("w", &[0.5f32; 21]).unwrap();
    mb.grad("none", &[0f32; 0]).unwrap();
    mb.grad("b", &vec![-0.5f32; 5]).unwrap();
    mb.grad("wide", &[0.25f64; 9]).unwrap();
    mb.finish().unwrap();
    opt.step(StepArgs::default()).unwrap().outcome().unwrap();
}

/// Reads everything between two steps, and returns it with the values after the second.
fn all(opt: &mut Optimizer) -> (Vec<Vec<f32>>, Vec<f64>) {
    opt.also_called("tied", "w").unwrap();
    let mut both = (Vec::new(), vec![0f64; 9]);
    for _ in 0..2 {
        step(opt);
        for (name, len) in [("tied", 21), ("none", 0), ("table", 5), ("b", 5)] {
            let mut out = vec![9f32; len];
            opt.read(name, &mut out).unwrap();
            both.0.push(out);
        }
        opt.read("wide", &mut both.1).unwrap();
    }
    both
}

#[test]
fn every_stage_reads_the_same_values_on_every_rank() {
    let whole = loopback::spawn(1, |comm| all(&mut built(comm, Stage::Replicated))).unwrap().remove(0);
    assert_eq!(whole.0[2], [-1.5, -0.5, 0.5, 1.5, 2.5]);
    assert_ne!(whole.0[0], whole.0[4]);
    for stage in STAGES {
        let read = loopback::spawn(3, |comm| all(&mut built(comm, stage))).unwrap();
        assert!(read.iter().all(|read| *read == whole), "{stage:?}");
    }
}

#[test]
fn wrong_arguments_are_the_same_error_on_every_rank() {
    for stage in STAGES {
        loopback::spawn(2, |comm| {
            let mut opt = built(comm, stage);
            let error = opt.read("x", &mut [0f32; 3]).unwrap_err();
            assert!(matches!(error, Error::UnknownParam { .. }), "{error}");
            let error = opt.read("w", &mut [0f32; 3]).unwrap_err().to_string();
            assert_eq!(error, "\"w\" was to be read into 3 elements; its shape [7, 3] has 21");
            let error = opt.read("w", &mut vec![bf16::ONE; 21]).unwrap_err();
            assert!(matches!(error, Error::Read(ReadError::DType { .. })), "{error}");
            step(&mut opt);
            opt.read("b", &mut [0f32; 5]).unwrap();
        })
        .unwrap();
    }
}

#[test]
fn a_wrong_argument_of_one_rank_ends_the_sharded_read_of_all() {
    for odd in 0..3 {
        loopback::spawn(3, |comm| {
            let is_odd = comm.rank() == odd;
            let mut opt = built(comm, Stage::Zero3);
            let error = opt.read("w", &mut vec![0f32; if is_odd { 3 } else { 21 }]).unwrap_err();
            assert!(odd == 0 || is_odd == matches!(error, Error::Read(_)), "{error}");
            assert!(error.to_string().contains("was to be read into 3 elements"), "{error}");
            let error = opt.read(if is_odd { "x" } else { "w" }, &mut vec![0f32; 21]).unwrap_err();
            assert!(error.to_string().contains("no parameter \"x\""), "{error}");
            let error =
                opt.read(if is_odd { "b" } else { "table" }, &mut vec![0f32; 5]).unwrap_err().to_string();
            assert!(error.contains("read \"b\"") && error.contains("read \"table\""), "{error}");
            step(&mut opt);
            opt.read("w", &mut [0f32; 21]).unwrap();
        })
        .unwrap();
    }
}

#[test]
fn a_sharded_read_in_the_middle_of_a_step_is_refused() {
    loopback::spawn(2, |comm| {
        let mut opt = built(comm, Stage::Zero3);
        opt.accumulate(1).unwrap().finish().unwrap();
        let mut out = [0f32; 21];
        assert!(matches!(opt.read("w", &mut out), Err(Error::StepDue)));
        opt.discard_gradients().unwrap();
        opt.read("w", &mut out).unwrap();
        assert!(matches!(opt.param("w"), Err(Error::Unit(UnitError::Sharded { .. }))));
    })
    .unwrap();
}
