//! Tensors that cannot be exchanged: an error with values on the affected ranks; the group stays usable.

use crate::parallel::common::{on_mesh, tensor};
use candle_core::{DType, Device, Module as _, Tensor};
use meshstep_candle::parallel::{Collectives, LayerError, Residual, VocabEmbedding, cause, cross_entropy};
use meshstep_comm::loopback;

fn told(error: &candle_core::Error) -> LayerError {
    cause(error).unwrap_or_else(|| panic!("{error}")).clone()
}

#[test]
fn bad_input_is_told_and_the_group_goes_on() {
    on_mesh(2, 1, |here| {
        let (tp, x) = (&here.tp, tensor(&[2, 3], 1, DType::F32));
        let uneven = tp.reduce_scatter(&x, 1).unwrap_err();
        assert_eq!(told(&uneven), LayerError::Uneven { shape: vec![2, 3], dim: 1, ranks: 2 });
        let uneven = Residual::cut(tp.clone(), 1).own(&x, 1).unwrap_err();
        assert_eq!(told(&uneven), LayerError::Uneven { shape: vec![2, 3], dim: 1, ranks: 2 });
        assert!(tp.all_gather(&x, 2).is_err() && tp.reduce_scatter(&x, 7).is_err(), "no such dimension");
        let integers = Tensor::new(&[1u32, 2], &Device::Cpu).unwrap();
        assert_eq!(
            told(&tp.all_reduce(&integers).unwrap_err()),
            LayerError::Unsupported { dtype: DType::U32 }
        );
        let tokens = Tensor::new(&[0u32, 4], &Device::Cpu).unwrap();
        let embedding = VocabEmbedding::new(x.clone(), Residual::whole(tp.clone()));
        assert_eq!(
            told(&embedding.forward(&tokens).unwrap_err()),
            LayerError::NoSuchToken { token: 4, vocab: 4 }
        );
        let error = cross_entropy(&tensor(&[2, 2], 2, DType::F32), &tokens, tp).unwrap_err();
        assert_eq!(told(&error), LayerError::NoSuchToken { token: 4, vocab: 4 });
        // None of these calls started a collective.
        assert_eq!(tp.all_gather(&x, 0).unwrap().dims(), [4, 3]);
    });
}

#[test]
fn ranks_that_exchange_different_things_are_told() {
    let told = loopback::spawn(2, |world| {
        let rank = world.rank();
        let x = tensor(&[2, 2 + rank], 1, DType::F32);
        told(&Collectives::new(world).all_reduce(&x).unwrap_err())
    });
    for error in told.unwrap() {
        assert!(matches!(error, LayerError::Comm(meshstep_comm::Error::Mismatch { .. })), "{error}");
    }
}
