//! Layers combined: an attention block on `tp` x `cp`, with weights cut by their placements, and losses with a mask.

use crate::parallel::common::{Here, assert_close, numbers, on_mesh, tensor};
use candle_core::{D, DType, Device, Module as _, Result, Tensor, Var};
use meshstep_candle::parallel::{
    Collectives, ColumnLinear, Residual, RowLinear, causal_attention, cross_entropy, rms_norm,
};
use meshstep_parallel3d::{Mesh, Placement, elements};

const WIDTH: usize = 8;
const HEADS: usize = 4;
const VOCAB: usize = 12;
const TOKENS: usize = 16;

/// Parameters of a network with one block: whole values and placements.
fn parameters(dtype: DType) -> [(&'static str, Tensor, Placement); 5] {
    let stream = Placement::whole();
    [
        ("ln", tensor(&[WIDTH], 1, dtype), stream),
        ("qkv", tensor(&[3 * WIDTH, WIDTH], 2, dtype), ColumnLinear::stacked([WIDTH; 3])),
        ("out", tensor(&[WIDTH, WIDTH], 3, dtype), RowLinear::placement()),
        ("wpe", tensor(&[TOKENS, WIDTH], 4, dtype), Placement::whole()),
        ("head", tensor(&[VOCAB, WIDTH], 5, dtype), ColumnLinear::placement()),
    ]
}

/// Returns the losses of this rank's tokens, for the whole stream `x` `[rows, TOKENS, WIDTH]`.
fn losses(w: &[Tensor], x: &Tensor, targets: &Tensor, tp: &Collectives, cp: &Collectives) -> Result<Tensor> {
    let stream = Residual::cut(tp.clone(), 1);
    let tokens = TOKENS / cp.world_size();
    let here = |whole: &Tensor, dim| whole.narrow(dim, cp.rank() * tokens, tokens);
    let x = stream.own(&here(x, 1)?.broadcast_add(&here(&w[3], 0)?)?, 1)?;
    let qkv = ColumnLinear::new(w[1].clone(), stream.clone()).forward(&rms_norm(&x, &w[0], 1e-5)?)?;
    let (rows, tokens, own) = qkv.dims3()?;
    let heads = HEADS / tp.world_size();
    let qkv = qkv.reshape((rows, tokens, 3, heads, own / 3 / heads))?.permute((2, 0, 3, 1, 4))?;
    let mixed = causal_attention(&qkv.get(0)?, &qkv.get(1)?, &qkv.get(2)?, cp)?;
    let mixed = mixed.transpose(1, 2)?.reshape((rows, tokens, own / 3))?;
    let x = (x + RowLinear::new(w[2].clone(), stream.clone()).forward(&mixed)?)?;
    let logits = ColumnLinear::new(w[4].clone(), stream).forward(&x)?;
    cross_entropy(&logits, &here(targets, 1)?, tp)
}

/// Returns the losses of all tokens and each parameter's gradient of their sum under `mask`, assembled from all ranks.
fn spread(tp: usize, cp: usize, dtype: DType, mask: &[f64]) -> (Vec<f64>, Vec<Vec<f64>>) {
    weighted(tp, cp, dtype, mask, &vec![1.0; cp])
}

/// Same as [`spread`], with each rank's gradient multiplied by a weight of its index along `cp`.
fn weighted(tp: usize, cp: usize, dtype: DType, mask: &[f64], weights: &[f64]) -> (Vec<f64>, Vec<Vec<f64>>) {
    let mesh: Mesh = format!("tp={tp},cp={cp}").parse().unwrap();
    let (x, targets) = (tensor(&[1, TOKENS, WIDTH], 6, dtype), targets());
    let ranks = on_mesh(tp, cp, |here: &Here| {
        let at = mesh.coordinate(here.cp.rank() * tp + here.tp.rank()).unwrap();
        let cut = |(name, whole, placement): &(&str, Tensor, Placement)| {
            let pieces = placement.pieces(name, whole.dims(), &mesh, &at).unwrap();
            let shape = placement.local_shape(name, whole.dims(), &mesh).unwrap();
            let (held, values) = (elements(whole.dims(), &pieces), numbers(whole));
            let own: Vec<f64> = held.iter().map(|&i| values[i]).collect();
            let own = Tensor::from_vec(own, shape, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
            (Var::from_tensor(&own).unwrap(), held)
        };
        let (vars, held): (Vec<Var>, Vec<Vec<usize>>) = parameters(dtype).iter().map(cut).unzip();
        let w: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
        let losses = losses(&w, &x, &targets, &here.tp, &here.cp).unwrap().flatten_all().unwrap();
        let own = losses.dim(0).unwrap();
        let mask = Tensor::new(&mask[here.cp.rank() * own..][..own], &Device::Cpu).unwrap();
        let valid = (losses.clone() * mask.to_dtype(dtype).unwrap()).unwrap();
        let grads = valid.sum_all().unwrap().backward().unwrap();
        let grads: Vec<Vec<f64>> = vars.iter().map(|var| numbers(grads.get(var).unwrap())).collect();
        (numbers(&losses), held, grads)
    });
    let parts: Vec<f64> = ranks.iter().step_by(tp).flat_map(|(losses, ..)| losses.clone()).collect();
    let whole = parameters(dtype).map(|(_, whole, _)| whole.elem_count());
    let sum = |(i, len): (usize, usize)| {
        let mut sum = vec![0.0; len];
        for (rank, (_, held, grads)) in ranks.iter().enumerate() {
            held[i].iter().zip(&grads[i]).for_each(|(&at, grad)| sum[at] += grad * weights[rank / tp]);
        }
        sum
    };
    (parts, whole.into_iter().enumerate().map(sum).collect())
}

fn targets() -> Tensor {
    Tensor::from_iter((0..TOKENS).map(|i| (i * i * 5 % VOCAB) as u32), &Device::Cpu)
        .unwrap()
        .reshape((1, TOKENS))
        .unwrap()
}

/// The same network from plain operations.
fn plain(dtype: DType, mask: &[f64]) -> (Vec<f64>, Vec<Vec<f64>>) {
    let vars = parameters(dtype).map(|(_, whole, _)| Var::from_tensor(&whole).unwrap());
    let w = vars.each_ref().map(|var| var.as_tensor().clone());
    let losses = (|| -> Result<Tensor> {
        let x = (tensor(&[1, TOKENS, WIDTH], 6, dtype).squeeze(0)? + &w[3])?;
        let size = (x.sqr()?.mean_keepdim(D::Minus1)? + 1e-5)?.sqrt()?;
        let qkv = x.broadcast_div(&size)?.broadcast_mul(&w[0])?.matmul(&w[1].t()?)?;
        let size = WIDTH / HEADS;
        let head = |h: usize| -> Result<Tensor> {
            let part = |i: usize| qkv.narrow(1, i * WIDTH + h * size, size)?.contiguous();
            let scores = (part(0)?.matmul(&part(1)?.t()?)? / (size as f64).sqrt())?.exp()?;
            let seen = Tensor::tril2(TOKENS, dtype, &Device::Cpu)?;
            let seen = (scores * seen)?;
            seen.broadcast_div(&seen.sum_keepdim(1)?)?.matmul(&part(2)?)
        };
        let mixed = Tensor::cat(&(0..HEADS).map(head).collect::<Result<Vec<_>>>()?, 1)?;
        let logits = (x + mixed.matmul(&w[2].t()?)?)?.matmul(&w[4].t()?)?;
        let chosen = logits.gather(&targets().t()?.contiguous()?, 1)?;
        (logits.exp()?.sum_keepdim(1)?.log()? - chosen)?.flatten_all()
    })();
    let losses = losses.unwrap();
    let mask = Tensor::new(mask, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
    let grads = (&losses * mask).unwrap().sum_all().unwrap().backward().unwrap();
    (numbers(&losses), vars.iter().map(|var| numbers(grads.get(var).unwrap())).collect())
}

fn assert_same(got: &[f64], expected: &[f64], what: &str) {
    let tensor = |x: &[f64]| Tensor::new(x, &Device::Cpu).unwrap();
    assert_close(&tensor(got), &tensor(expected), what);
}

const MESHES: [(usize, usize); 8] = [(1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2), (4, 2), (2, 4)];

#[test]
fn a_block_with_its_loss_is_the_same_on_every_mesh() {
    let mask = [1.0; TOKENS];
    let (losses, grads) = plain(DType::F64, &mask);
    for (tp, cp) in MESHES {
        let (got, got_grads) = spread(tp, cp, DType::F64, &mask);
        assert_same(&got, &losses, &format!("losses, tp={tp} cp={cp}"));
        for ((name, ..), (got, expected)) in parameters(DType::F64).iter().zip(got_grads.iter().zip(&grads)) {
            assert_same(got, expected, &format!("{name}, tp={tp} cp={cp}"));
        }
    }
}

/// One valid token: its loss reaches the keys of every rank before it.
#[test]
fn one_valid_token_has_the_same_gradient_however_its_sequence_is_cut() {
    for valid in [0, 5, TOKENS - 1] {
        let mask: [f64; TOKENS] = std::array::from_fn(|i| f64::from(u8::from(i == valid)));
        let (_, expected) = plain(DType::F64, &mask);
        for (tp, cp) in MESHES {
            let (_, got) = spread(tp, cp, DType::F64, &mask);
            for (i, (name, ..)) in parameters(DType::F64).iter().enumerate() {
                assert_same(&got[i], &expected[i], &format!("{name}, token {valid}, tp={tp} cp={cp}"));
            }
        }
    }
}

/// Means over each rank's own tokens, weighted by token counts: attention mixes gradients across ranks before the weights apply, so the
/// result is wrong if the counts differ. The sum over tokens divided by the number of all tokens is right.
#[test]
fn weights_come_too_late_for_ranks_with_different_numbers_of_tokens() {
    // One of the first rank's tokens is valid, and all of the second's.
    let valid: [f64; TOKENS] = std::array::from_fn(|i| f64::from(u8::from(i == 3 || i >= TOKENS / 2)));
    let counts = [1.0, TOKENS as f64 / 2.0];
    let all: f64 = counts.iter().sum();
    let (_, expected) = plain(DType::F64, &valid.map(|x| x / all));
    let (_, sums) = spread(1, 2, DType::F64, &valid.map(|x| x / all));
    let own_mean = std::array::from_fn::<f64, TOKENS, _>(|i| valid[i] / counts[i / (TOKENS / 2)]);
    let (_, means) = weighted(1, 2, DType::F64, &own_mean, &counts.map(|count| count / all));
    let apart = |got: &[f64], expected: &[f64]| {
        let largest = expected.iter().fold(0.0f64, |most, x| most.max(x.abs()));
        got.iter().zip(expected).fold(0.0f64, |most, (x, y)| most.max((x - y).abs())) / largest
    };
    let qkv = 1;
    assert!(apart(&sums[qkv], &expected[qkv]) < 1e-12);
    assert!(apart(&means[qkv], &expected[qkv]) > 0.1, "{}", apart(&means[qkv], &expected[qkv]));
}
