//! Comparison with a reference layer on whole tensors: distributed over ranks, the layer returns each rank's part of the same numbers.

use candle_core::{DType, Device, Result, Tensor, Var};
use meshstep_candle::parallel::Collectives;
use meshstep_comm::{Communicator, loopback};
use meshstep_parallel3d::{Axis, Communicators, Mesh};
use std::sync::Arc;

/// Distribution of a tensor or its gradient along an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Along {
    /// Same values on every rank.
    Same,
    /// Same on every rank, with a gradient that is the sum of the ranks' terms.
    Terms,
    /// Cut in this dimension, one part for each rank.
    Cut(usize),
}

/// Distribution along `tp` and along `cp`.
pub(crate) type Lies = [Along; 2];

pub(crate) const SAME: Lies = [Along::Same, Along::Same];

/// A rank's groups along both axes.
pub(crate) struct Here {
    pub(crate) tp: Collectives,
    pub(crate) cp: Collectives,
}

impl Here {
    fn place(&self, axis: usize) -> (usize, usize) {
        let group = [&self.tp, &self.cp][axis];
        (group.rank(), group.world_size())
    }

    /// Returns this rank's part. A dimension cut along both axes is cut along `cp` first, then along `tp`.
    pub(crate) fn part(&self, whole: &Tensor, lies: Lies) -> Tensor {
        [1, 0].into_iter().fold(whole.clone(), |x, axis| match (lies[axis], self.place(axis)) {
            (Along::Cut(dim), (at, of)) => {
                let len = x.dim(dim).unwrap() / of;
                x.narrow(dim, at * len, len).unwrap().contiguous().unwrap()
            }
            _ => x,
        })
    }
}

/// Runs `body` on every rank of a mesh with `tp` innermost; returns the results in rank order.
pub(crate) fn on_mesh<T: Send>(tp: usize, cp: usize, body: impl Fn(&Here) -> T + Sync) -> Vec<T> {
    let mesh: Mesh = format!("tp={tp},cp={cp}").parse().unwrap();
    let ranks = loopback::spawn(tp * cp, |world: Arc<dyn Communicator>| {
        let comms = Communicators::new(world, mesh.clone(), [Axis::Tp.into(), Axis::Cp.into()]).unwrap();
        let along = |axis: Axis| Collectives::new(Arc::clone(comms.along(axis).unwrap()));
        body(&Here { tp: along(Axis::Tp), cp: along(Axis::Cp) })
    });
    ranks.unwrap()
}

/// Returns numbers between -1 and 1 that depend on `salt` and the index.
pub(crate) fn tensor(shape: &[usize], salt: u64, dtype: DType) -> Tensor {
    let number = |i: u64| {
        let mixed = (i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ salt.wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 29)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed >> 40) as f64 / f64::from(1u32 << 23) - 1.0
    };
    let len = shape.iter().product::<usize>() as u64;
    let numbers = Tensor::from_iter((0..len).map(number), &Device::Cpu).unwrap();
    numbers.to_dtype(dtype).unwrap().reshape(shape).unwrap()
}

/// Returns all numbers in f64, in row-major order.
pub(crate) fn numbers(x: &Tensor) -> Vec<f64> {
    x.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1().unwrap()
}

/// Asserts equality up to rounding in the tensors' type.
pub(crate) fn assert_close(got: &Tensor, expected: &Tensor, what: &str) {
    assert_eq!(got.dims(), expected.dims(), "{what}");
    let unit = if expected.dtype() == DType::F64 { 1e-12 } else { 2e-5 };
    let (got, expected) = (numbers(got), numbers(expected));
    let size = expected.iter().fold(1.0f64, |size, x| size.max(x.abs()));
    for (i, (x, y)) in got.iter().zip(&expected).enumerate() {
        assert!((x - y).abs() <= unit * size, "{what}: element {i} is {x}, not {y}");
    }
}

/// Returns a layer's result and the gradient of each input, for the loss sum(result * coefficients).
fn run(
    layer: impl Fn(&[Tensor]) -> Result<Tensor>,
    inputs: Vec<Tensor>,
    coefficients: impl Fn(&Tensor) -> Tensor,
) -> (Tensor, Vec<Tensor>) {
    let vars: Vec<Var> = inputs.iter().map(|x| Var::from_tensor(x).unwrap()).collect();
    let inputs: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
    let result = layer(&inputs).unwrap();
    let loss = (&result * coefficients(&result)).unwrap().sum_all().unwrap();
    let grads = loss.backward().unwrap();
    let grads = vars.iter().map(|var| grads.get(var).unwrap().clone());
    (result.detach(), grads.collect())
}

/// Compares `layer` on a mesh with `reference` on whole tensors.
pub(crate) fn check(
    (tp, cp): (usize, usize),
    inputs: &[(Tensor, Lies)],
    result: Lies,
    layer: impl Fn(&Here, &[Tensor]) -> Result<Tensor> + Sync,
    reference: impl Fn(&[Tensor]) -> Result<Tensor>,
) {
    let whole = inputs.iter().map(|(x, _)| x.clone()).collect();
    let salted = |x: &Tensor| tensor(x.dims(), 99, x.dtype());
    let (expected, expected_grads) = run(reference, whole, salted);
    let ranks = on_mesh(tp, cp, |here| {
        let own = inputs.iter().map(|(x, lies)| here.part(x, *lies)).collect();
        let (got, grads) = run(|x| layer(here, x), own, |_| here.part(&salted(&expected), result));
        assert_close(&got, &here.part(&expected, result), &format!("result, tp={tp} cp={cp}"));
        let expected_grads =
            expected_grads.iter().zip(inputs).map(|(grad, (_, lies))| here.part(grad, *lies));
        (grads, expected_grads.collect::<Vec<_>>())
    });
    for (input, (_, lies)) in inputs.iter().enumerate() {
        for (rank, (_, expected)) in ranks.iter().enumerate() {
            // Ranks that hold the terms of this rank's gradient, including itself.
            let peer = |other: &usize| {
                let place = |rank: usize| [rank % tp, rank / tp];
                (0..2).all(|axis| lies[axis] == Along::Terms || place(rank)[axis] == place(*other)[axis])
            };
            let terms = (0..tp * cp).filter(peer).map(|other| ranks[other].0[input].clone());
            let sum = terms.reduce(|a, b| (a + b).unwrap()).unwrap();
            assert_close(
                &sum,
                &expected[input],
                &format!("gradient {input}, rank {rank} of tp={tp} cp={cp}"),
            );
        }
    }
}
