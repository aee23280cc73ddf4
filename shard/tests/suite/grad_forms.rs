//! Gradients are handed over as references to vectors, arrays and slices of every element type.

use meshstep_comm::loopback;
use meshstep_optim::Sgd;
use meshstep_shard::{Error, Master, Optimizer, Options, Precision, StepArgs};
use meshstep_tensor::{DType, Element, Layout, Place, Slice, SliceMut, bf16, f16};

/// Hands one gradient over in each form, on parameters and gradients of `T`, and returns the parameters' bytes.
fn stepped<T: Element>(one: T, two: T) -> Vec<Vec<u8>> {
    let mut ranks = loopback::spawn(1, |comm| -> Result<Vec<Vec<u8>>, Error> {
        let names = ["vec", "array", "slice", "wrapped"];
        let layout =
            names.iter().fold(Layout::builder(), |b, name| b.param(*name, &[2], T::DTYPE)).build()?;
        let master = if T::DTYPE.size() == 2 { Master::F32 } else { Master::None };
        let options =
            Options { precision: Precision { master, ..Precision::default() }, ..Options::default() };
        let rule = Sgd::default();
        let mut opt =
            Optimizer::new(comm, layout, rule, |_, mut w| w.copy_from((&[one, two]).into()), options)?;
        let vec = vec![one, two];
        let mb = opt.micro_batch(1)?;
        mb.grad("vec", &vec)?;
        mb.grad("array", &[one, two])?;
        mb.grad("slice", &vec[..])?;
        mb.grad("wrapped", Slice::from(&vec))?;
        mb.finish()?;
        opt.step(StepArgs { lr: 0.5, ..StepArgs::default() })?.outcome()?;
        names.iter().map(|name| Ok(opt.param(name)?.bytes()?.to_vec())).collect()
    })
    .unwrap();
    ranks.remove(0).unwrap()
}

#[test]
fn every_form_of_a_gradient_is_taken_in_every_type() {
    let half = |values: &[Vec<u8>], expected: &[u8]| {
        assert!(values.iter().all(|value| value == expected), "{values:?} {expected:?}");
    };
    half(&stepped(1f32, 2.0), bytes(&[0.5f32, 1.0]));
    half(&stepped(1f64, 2.0), bytes(&[0.5f64, 1.0]));
    half(&stepped(bf16::ONE, bf16::from_f32(2.0)), bytes(&[bf16::from_f32(0.5), bf16::ONE]));
    half(&stepped(f16::ONE, f16::from_f32(2.0)), bytes(&[f16::from_f32(0.5), f16::ONE]));
}

fn bytes<T: Element, const N: usize>(values: &[T; N]) -> &[u8] {
    Slice::from(values).bytes().unwrap()
}

#[test]
fn a_micro_batch_shows_the_type_and_the_queue_of_its_gradients() {
    for (grads, expected) in [(None, DType::BF16), (Some(DType::F32), DType::F32)] {
        let ranks = loopback::spawn(1, |comm| {
            let layout = Layout::builder().param("w", &[2], DType::BF16).build().unwrap();
            let precision = Precision { master: Master::F32, ..Precision::default() };
            let options = Options { grads, precision, ..Options::default() };
            let mut opt = Optimizer::new(comm, layout, Sgd::default(), |_, mut w| w.zero(), options).unwrap();
            let mb = opt.micro_batch(1).unwrap();
            assert!(matches!(mb.grad_dtype("x"), Err(Error::UnknownParam { .. })));
            assert_eq!((mb.grad_dtype("w").unwrap(), mb.queue().place()), (expected, Place::Cpu));
            // The micro-batch takes the type that it shows.
            match expected {
                DType::F32 => mb.grad("w", &[1f32; 2]).unwrap(),
                _ => mb.grad("w", &[bf16::ONE; 2]).unwrap(),
            }
            mb.finish().unwrap();
        });
        ranks.unwrap();
    }
}

#[test]
fn values_are_read_into_vectors_and_arrays() {
    let mut vec = vec![DType::F32.size() as u16; 3];
    let mut array = [0u16; 3];
    SliceMut::from(&mut array).copy_from(Slice::from(&vec)).unwrap();
    assert_eq!(array, [4; 3]);
    SliceMut::from(&mut vec).zero().unwrap();
    assert_eq!(vec, [0; 3]);
}
