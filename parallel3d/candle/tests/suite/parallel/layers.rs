//! Layers against their equivalents on one rank.

use crate::parallel::common::{Along, Here, Lies, SAME, check, tensor};
use candle_core::{D, DType, Device, Module as _, Result, Tensor};
use meshstep_candle::parallel::{
    ColumnLinear, Residual, RowLinear, VocabEmbedding, causal_attention, cross_entropy, rms_norm,
};
use proptest::prelude::*;

const DEGREES: [usize; 3] = [1, 2, 4];
const TYPES: [DType; 2] = [DType::F32, DType::F64];

/// A rank's residual stream, and its distribution.
type Stream = (fn(&Here) -> Residual, Lies);

/// Whole on each rank, and cut along the sequence, dimension 1.
fn residuals() -> [Stream; 2] {
    [
        (|here| Residual::whole(here.tp.clone()), SAME),
        (|here| Residual::cut(here.tp.clone(), 1), [Along::Cut(1), Along::Same]),
    ]
}

/// Returns the distribution of the gradient of a parameter that acts on such a stream: the same on each rank, or a term.
fn on_stream(stream: Lies) -> Lies {
    [if stream == SAME { Along::Same } else { Along::Terms }, Along::Same]
}

fn linear(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    x.broadcast_matmul(&weight.t()?)
}

/// Rows, tokens, width and another width: small, and multiples of four for cut dimensions.
fn sizes() -> impl Strategy<Value = [usize; 4]> {
    let small = (1usize..=3, 1usize..=2, 1usize..=3, 1usize..=3);
    small.prop_map(|(rows, tokens, width, other)| [rows, 4 * tokens, 3 * width, 4 * other])
}

fn cases() -> ProptestConfig {
    ProptestConfig::with_cases(meshstep_cases::cases(6, 200))
}

proptest! {
    #![proptest_config(cases())]

    /// Column-parallel layer, nonlinearity, row-parallel layer: the MLP of a block.
    #[test]
    fn columns_and_rows_are_one_mlp([rows, tokens, width, hidden] in sizes(), salt in 0u64..1000) {
        for (residual, stream) in residuals() {
            for tp in DEGREES {
                for dtype in TYPES {
                    let x = tensor(&[rows, tokens, width], salt, dtype);
                    let up = tensor(&[hidden, width], salt + 1, dtype);
                    let down = tensor(&[width, hidden], salt + 2, dtype);
                    let inputs = [(x, stream), (up, [Along::Cut(0), Along::Same]), (down, [Along::Cut(1), Along::Same])];
                    let layer = |here: &Here, x: &[Tensor]| {
                        let up = ColumnLinear::new(x[1].clone(), residual(here));
                        let down = RowLinear::new(x[2].clone(), residual(here));
                        down.forward(&up.forward(&x[0])?.sqr()?)
                    };
                    check((tp, 1), &inputs, stream, layer, |x| linear(&linear(&x[0], &x[1])?.sqr()?, &x[2]));
                }
            }
        }
    }

    #[test]
    fn tokens_find_their_rows_on_whichever_rank([rows, tokens, width, vocab] in sizes(), salt in 0u64..1000) {
        let ids = ids(&[rows, tokens], vocab, salt);
        for (residual, stream) in residuals() {
            for tp in DEGREES {
                for dtype in TYPES {
                    let weight = tensor(&[vocab, width], salt, dtype);
                    let layer = |here: &Here, x: &[Tensor]| {
                        VocabEmbedding::new(x[0].clone(), residual(here)).forward(&ids)
                    };
                    let reference = |x: &[Tensor]| {
                        x[0].index_select(&ids.flatten_all()?, 0)?.reshape((rows, tokens, width))
                    };
                    check((tp, 1), &[(weight, [Along::Cut(0), Along::Same])], stream, layer, reference);
                }
            }
        }
    }

    #[test]
    fn a_loss_of_parts_of_the_logits_is_that_of_all([rows, tokens, _, vocab] in sizes(), salt in 0u64..1000) {
        let targets = ids(&[rows, tokens], vocab, salt + 7);
        for tp in DEGREES {
            for dtype in TYPES {
                // Logits up to 90: e^90 overflows f32.
                let logits = (tensor(&[rows, tokens, vocab], salt, dtype) * 90.0).unwrap();
                let cut = [Along::Cut(2), Along::Same];
                let layer = |here: &Here, x: &[Tensor]| cross_entropy(&x[0], &targets, &here.tp);
                check((tp, 1), &[(logits, cut)], SAME, layer, |x| plain_cross_entropy(&x[0], &targets));
            }
        }
    }

    #[test]
    fn own_queries_see_all_keys_before_them([rows, tokens, size, heads] in sizes(), salt in 0u64..1000) {
        let cut = [Along::Same, Along::Cut(2)];
        for cp in DEGREES {
            for dtype in TYPES {
                let input = |i: u64| (tensor(&[rows, heads, tokens, size], salt + i, dtype), cut);
                let layer = |here: &Here, x: &[Tensor]| causal_attention(&x[0], &x[1], &x[2], &here.cp);
                check((1, cp), &[input(0), input(1), input(2)], cut, layer, plain_attention);
            }
        }
    }

    #[test]
    fn a_norms_weight_has_terms_of_its_gradient([rows, tokens, width, _] in sizes(), salt in 0u64..1000) {
        for (_, stream) in residuals() {
            for tp in DEGREES {
                for dtype in TYPES {
                    let (x, weight) = (tensor(&[rows, tokens, width], salt, dtype), tensor(&[width], salt + 1, dtype));
                    let inputs = [(x, stream), (weight, on_stream(stream))];
                    check((tp, 1), &inputs, stream, |_, x| rms_norm(&x[0], &x[1], 1e-5), plain_norm);
                }
            }
        }
    }
}

/// Position embeddings added to the stream: each rank adds those of its own tokens.
#[test]
fn a_rank_takes_its_own_part_of_what_all_have() {
    for (residual, stream) in residuals() {
        for tp in DEGREES {
            let (x, positions) = (tensor(&[2, 8, 3], 1, DType::F64), tensor(&[8, 3], 2, DType::F64));
            let layer = |here: &Here, x: &[Tensor]| x[0].broadcast_add(&residual(here).own(&x[1], 0)?);
            let inputs = [(x, stream), (positions, on_stream(stream))];
            check((tp, 1), &inputs, stream, layer, |x| x[0].broadcast_add(&x[1]));
        }
    }
}

/// Padded vocabulary entries may be masked out with minus infinity.
#[test]
fn a_logit_of_minus_infinity_costs_nothing() {
    let shut = Tensor::new(
        &[[f64::NEG_INFINITY, 1.0, 2.0, f64::NEG_INFINITY], [0.5, f64::NEG_INFINITY, 0.0, 3.0]],
        &Device::Cpu,
    );
    let (shut, targets) = (shut.unwrap(), Tensor::new(&[2u32, 3], &Device::Cpu).unwrap());
    for tp in DEGREES {
        let layer = |here: &Here, x: &[Tensor]| cross_entropy(&x[0], &targets, &here.tp);
        let inputs = [(shut.clone(), [Along::Cut(1), Along::Same])];
        check((tp, 1), &inputs, SAME, layer, |x| plain_cross_entropy(&x[0], &targets));
    }
}

fn ids(shape: &[usize], vocab: usize, salt: u64) -> Tensor {
    let pick = |i: usize| ((i * 7 + salt as usize * 3) * (i + 5) % vocab) as u32;
    Tensor::from_iter((0..shape.iter().product()).map(pick), &Device::Cpu).unwrap().reshape(shape).unwrap()
}

/// By the definition: log of the sum of exponentials, minus the target's logit.
fn plain_cross_entropy(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let largest = logits.max_keepdim(D::Minus1)?.detach();
    let sum = logits.broadcast_sub(&largest)?.exp()?.sum_keepdim(D::Minus1)?;
    let chosen = logits.gather(&targets.unsqueeze(D::Minus1)?, logits.rank() - 1)?;
    ((sum.log()? + largest)? - chosen)?.squeeze(D::Minus1)
}

/// Token by token: softmax of the products with all keys up to the token, times the values.
fn plain_attention(x: &[Tensor]) -> Result<Tensor> {
    let (_, _, tokens, size) = x[0].dims4()?;
    let token = |i: usize| {
        let (q, k, v) = (x[0].narrow(2, i, 1)?, x[1].narrow(2, 0, i + 1)?, x[2].narrow(2, 0, i + 1)?);
        let scores = (q.contiguous()?.matmul(&k.t()?.contiguous()?)? / (size as f64).sqrt())?;
        let weights = scores.exp()?;
        weights.broadcast_div(&weights.sum_keepdim(D::Minus1)?)?.matmul(&v.contiguous()?)
    };
    Tensor::cat(&(0..tokens).map(token).collect::<Result<Vec<_>>>()?, 2)
}

fn plain_norm(x: &[Tensor]) -> Result<Tensor> {
    let size = (x[0].sqr()?.mean_keepdim(D::Minus1)? + 1e-5)?.sqrt()?;
    x[0].broadcast_div(&size)?.broadcast_mul(&x[1])
}
