//! Module and optimizer on one GPU. Burn's kernels need a real one: the stand-in does not run them.

use crate::common::{applied, named};
use burn::module::{Module, Param};
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use meshstep_burn::{Error, Sharded, hand_over};
use meshstep_cases::hash;
use meshstep_comm::{Communicator, loopback, nccl};
use meshstep_optim::{AdamW, Sgd};
use meshstep_shard::{Optimizer, Options, Stage, StepArgs};
use meshstep_tensor::cuda::{self, Stream};
use meshstep_tensor::{DType as Flat, Layout, Place, Queue};
use std::sync::Arc;

const STAGES: [Stage; 3] = [Stage::Replicated, Stage::Zero1, Stage::Zero2];

/// Returns true if there are a GPU and NCCL; otherwise prints a note, or fails under REQUIRE_GPU=1.
#[expect(clippy::print_stdout, reason = "a test says that it is skipped")]
fn available() -> bool {
    let missing = match (cuda::probe(), nccl::probe()) {
        (Ok(_), Ok(_)) => return true,
        (Err(missing), _) => missing.to_string(),
        (_, Err(missing)) => missing.to_string(),
    };
    assert!(std::env::var_os("REQUIRE_GPU").is_none(), "{missing}");
    println!("skipped: {missing}");
    false
}

/// Runs `body` as the only rank, on the first GPU.
fn on_gpu<T: Send>(body: impl Fn(Arc<dyn Communicator>, Queue) -> T + Sync) -> T {
    let ranks = nccl::spawn(&[0], nccl::Options::default(), |comm| {
        let queue = Queue::cuda(Stream::new(comm.device()).unwrap());
        body(comm, queue)
    });
    ranks.unwrap().remove(0)
}

fn device() -> Device {
    Device::cuda(0).autodiff()
}

fn tensor<const D: usize>(shape: [usize; D], salt: u64) -> Tensor<D> {
    let len = shape.iter().product::<usize>() as u64;
    let number = |i| (hash(&[salt, i]) >> 40) as f32 / (1u32 << 23) as f32 - 1.0;
    Tensor::from_data(TensorData::new((0..len).map(number).collect::<Vec<f32>>(), shape), &device())
}

fn numbers<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_cast(DType::F32).unwrap().try_into_vec().unwrap()
}

/// Network with a matrix that is used twice, transposed at first, a frozen vector and running means.
#[derive(Module, Debug)]
struct Net {
    up: Linear,
    tied: Param<Tensor<2>>,
    again: Param<Tensor<2>>,
    norm: BatchNorm,
    frozen: Param<Tensor<1>>,
}

impl Net {
    fn new(device: &Device) -> Self {
        let param = |salt| Param::from_tensor(tensor([7, 9], salt).to_device(device));
        let mut up = LinearConfig::new(5, 9).init(device);
        up.weight = Param::from_tensor(tensor([5, 9], 1).to_device(device));
        up.bias = Some(Param::from_tensor(tensor([9], 2).to_device(device)));
        let tied = param(3);
        let frozen = Param::from_tensor(tensor([9], 4).to_device(device)).no_grad();
        Net { up, again: tied.clone(), tied, norm: BatchNormConfig::new(9).init(device), frozen }
    }

    fn loss(&self, step: u64) -> Tensor<1> {
        let x = self.up.forward(tensor([8, 5], 100 + step)) + self.frozen.val().unsqueeze();
        let x = self.norm.forward(x).tanh().matmul(self.tied.val().transpose());
        x.matmul(self.again.val()).square().mean()
    }
}

/// Trains ten steps; returns losses and all float tensors.
fn trained(comm: Arc<dyn Communicator>, options: Options) -> (Vec<f32>, Vec<(String, Vec<f32>)>) {
    let mut model = Net::new(&device());
    let mut opt = Sharded::new(comm, &mut model, AdamW::default(), options).unwrap();
    let losses = (0..10).map(|step| {
        let loss = model.loss(step);
        let at = StepArgs { lr: 0.01, max_norm: Some(0.5), ..StepArgs::default() };
        applied(opt.backward_step(&mut model, loss.clone(), at));
        loss.into_scalar()
    });
    (losses.collect(), named(&model))
}

#[test]
fn the_gpus_optimizer_trains_as_the_cpus_does() {
    if !available() {
        return;
    }
    let (losses, expected) = loopback::spawn(1, |comm| trained(comm, Options::default())).unwrap().remove(0);
    assert!(losses[9] < losses[0], "{losses:?}");
    for stage in STAGES {
        let (ours, finals) = on_gpu(|comm, queue| {
            trained(comm, Options { stage, queue, bucket_len: Some(30), ..Options::default() })
        });
        for (x, y) in ours.iter().zip(&losses) {
            assert!((x - y).abs() <= 1e-4 * y, "{stage:?}: {ours:?} and {losses:?}");
        }
        for ((name, ours), (_, theirs)) in finals.iter().zip(&expected) {
            let apart = ours.iter().zip(theirs).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max);
            assert!(apart <= 1e-4, "{stage:?}: {name} differs by {apart}");
        }
    }
}

/// Takes one step of SGD at the rate 1 from zeros, with one gradient; returns the parameter.
fn negative<const D: usize>(grad: Tensor<D>, dtype: Flat) -> Vec<f32> {
    on_gpu(|comm, queue| {
        let shape = grad.shape().to_vec();
        let layout = Layout::builder().param("w", &shape, dtype).build().unwrap();
        let options = Options { queue: queue.clone(), ..Options::default() };
        let mut opt = Optimizer::new(comm, layout, Sgd::default(), |_, mut w| w.zero(), options).unwrap();
        let mb = opt.micro_batch(1).unwrap();
        hand_over(&mb, "w", grad.clone()).unwrap();
        mb.finish().unwrap();
        opt.step(StepArgs { lr: 1.0, ..StepArgs::default() }).unwrap().outcome().unwrap();
        let mut values = vec![0f32; grad.shape().num_elements()];
        queue.download(opt.param("w").unwrap(), (&mut values).into()).unwrap();
        values
    })
}

#[test]
fn a_gradient_and_new_values_are_copied_without_a_kernel_of_burn() {
    if !available() {
        return;
    }
    let grad = tensor([1000], 8).inner();
    let expected: Vec<f32> = numbers(grad.clone()).into_iter().map(|x| -x).collect();
    assert_eq!(negative(grad, Flat::F32), expected);
    for stage in STAGES {
        on_gpu(|comm, queue| {
            let (mut model, options) = (Net::new(&device()), Options { stage, queue, ..Options::default() });
            let before = named(&model);
            let opt = Sharded::new(comm, &mut model, Sgd::default(), options).unwrap();
            let mut other = Net::new(&device());
            other.tied = Param::initialized(other.tied.id, tensor([7, 9], 77).require_grad());
            opt.refresh(&mut other).unwrap();
            assert_eq!((named(&model), named(&other)), (before.clone(), before));
            assert!(other.up.weight.is_require_grad() && !other.frozen.is_require_grad());
        });
    }
}

#[test]
fn gradients_of_any_layout_and_type_arrive_in_row_major_order() {
    if !available() {
        return;
    }
    let whole = tensor([6, 33], 9).inner();
    let grads = [
        whole.clone(),
        whole.clone().transpose(),
        whole.clone().slice([2..5, 0..33]),
        whole.clone().slice([1..6, 3..20]).transpose(),
        whole.clone().slice([2..3, 0..33]).expand([4, 33]),
        whole.cast(DType::BF16),
    ];
    for grad in grads {
        let expected: Vec<f32> = numbers(grad.clone()).into_iter().map(|x| -x).collect();
        assert_eq!(negative(grad.clone(), Flat::F32), expected, "{:?} {:?}", grad.shape(), grad.dtype());
    }
}

#[test]
fn a_module_that_is_elsewhere_is_refused_and_stays() {
    if !available() {
        return;
    }
    on_gpu(|comm, queue| {
        let mut model = LinearConfig::new(2, 3).init(&Device::flex().autodiff());
        let before = named(&model);
        let options = Options { queue: queue.clone(), ..Options::default() };
        let refused = Sharded::new(comm, &mut model, Sgd::default(), options).unwrap_err();
        let Error::Device { name, place: Place::Cuda(0), .. } = &refused else { panic!("{refused:?}") };
        assert_eq!(name, "weight");
        assert_eq!(named(&model), before);
    });
}
