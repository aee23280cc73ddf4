//! Gradients of a pass that is cut into segments, against those of the whole graph.

use crate::common::{Mlp, STAGES, applied, at, bits, on_ranks, options, sharded, tensor};
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, Var};
use meshstep_candle::{BackwardPass, Sharded, Tape};
use meshstep_comm::{Communicator, loopback};
use meshstep_optim::Sgd;
use meshstep_shard::{Missing, Options, Stage, StepArgs};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Four layers in a residual stream; the first matrix is also the last one.
struct Stream {
    tied: Var,
    layers: Vec<Var>,
}

impl Stream {
    fn new() -> Self {
        let var = |salt| Var::from_tensor(&tensor(&[6, 6], salt)).unwrap();
        Stream { tied: var(1), layers: (2..5).map(var).collect() }
    }

    fn vars(&self) -> Vec<(String, Var)> {
        let layers = self.layers.iter().enumerate().map(|(i, var)| (format!("layer.{i}"), var.clone()));
        [("tied".to_owned(), self.tied.clone())].into_iter().chain(layers).collect()
    }

    fn loss(&self, mut cut: impl FnMut(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
        let mut x = cut(&tensor(&[3, 6], 7).matmul(&self.tied)?)?;
        for layer in &self.layers {
            x = cut(&(&x + x.matmul(layer)?.tanh()?)?)?;
        }
        x.matmul(&self.tied.t()?)?.sqr()?.mean_all()
    }
}

/// Returns the gradients of one pass, which are the momentum after the first step.
fn gradients(vars: Vec<(String, Var)>, pass: BackwardPass<'_>) -> Vec<Vec<u32>> {
    let comm = loopback::world(loopback::Config::new(1)).unwrap().pop().unwrap();
    let rule = Sgd { momentum: 0.9, ..Sgd::default() };
    let mut opt = Sharded::new(comm, vars, rule, options(Stage::Zero2)).unwrap();
    applied(opt.backward_step(pass, StepArgs::default()));
    let gradient = |(name, _): (&str, &Var)| {
        let state = opt.optimizer().state(name).unwrap();
        let values = state.slots[0].1.typed::<f32>().unwrap();
        values.iter().map(|x| x.to_bits()).collect()
    };
    opt.vars().map(gradient).collect()
}

#[test]
fn gradients_of_segments_are_those_of_the_whole_graph_bit_for_bit() {
    let stream = Stream::new();
    let loss = stream.loss(|x| Ok(x.clone())).unwrap();
    let grads = loss.backward().unwrap();
    let whole = |(_, var): (String, Var)| {
        let grad = grads.get(&var).unwrap().flatten_all().unwrap();
        grad.to_vec1::<f32>().unwrap().into_iter().map(f32::to_bits).collect::<Vec<_>>()
    };
    let expected: Vec<_> = stream.vars().into_iter().map(whole).collect();
    let mut tape = Tape::new();
    let cut = stream.loss(|x| tape.cut(x)).unwrap();
    assert_eq!(cut.to_scalar::<f32>().unwrap(), loss.to_scalar::<f32>().unwrap());
    // Each optimizer has a network of its own, because a step changes the variables.
    assert_eq!(gradients(stream.vars(), BackwardPass::new(&cut).cut(tape)), expected);
    let other = Stream::new();
    assert_eq!(gradients(other.vars(), BackwardPass::new(&other.loss(|x| Ok(x.clone())).unwrap())), expected);
}

#[test]
fn cuts_change_no_bit_of_a_sharded_training() {
    let train = |stage, cuts: bool| {
        on_ranks(2, |comm| {
            let (mlp, rank) = (Mlp::new(2), comm.rank() as u64);
            let mut opt = sharded(comm, mlp.vars(), options(stage)).unwrap();
            for step in 0..3 {
                let (mut tape, batch) = (Tape::new(), 2 * step + rank);
                let loss = if cuts { mlp.cut_loss(batch, &mut tape) } else { mlp.loss(batch) };
                applied(opt.backward_step_cut(tape, &loss.unwrap(), at()));
            }
            bits(&opt)
        })
    };
    for stage in STAGES {
        let (whole, cut) = (train(stage, false), train(stage, true));
        assert_eq!((&whole[0], &cut[0]), (&whole[1], &whole[0]), "{stage:?}");
    }
}

/// Two segments read `shared`, no segment reads its exponential, and the loss reads `first` past its cut.
#[test]
fn cuts_of_any_shape_give_the_gradient() {
    let vars = || ["a", "b"].map(|name| (name.to_owned(), Var::from_tensor(&tensor(&[2, 2], 3)).unwrap()));
    let net = |[(_, a), (_, b)]: &[(String, Var); 2], cut: &mut dyn FnMut(&Tensor) -> Result<Tensor>| {
        let first = a.sqr()?;
        let shared = cut(&first)?;
        let _unread = cut(&shared.exp()?)?;
        let second = cut(&shared.matmul(b)?)?;
        ((second.sqr()? * &shared)? + first)?.sum_all()
    };
    let (own, whole) = (vars(), vars());
    let mut tape = Tape::new();
    let loss = net(&own, &mut |x| tape.cut(x)).unwrap();
    let got = gradients(own.to_vec(), BackwardPass::new(&loss).cut(tape));
    let loss = net(&whole, &mut |x| Ok(x.clone())).unwrap();
    let expected = gradients(whole.to_vec(), BackwardPass::new(&loss));
    for (x, y) in got.iter().flatten().zip(expected.iter().flatten()) {
        let (x, y) = (f32::from_bits(*x), f32::from_bits(*y));
        assert!((x - y).abs() <= 1e-6 * y.abs().max(1.0), "{x} and {y}");
    }
}

#[test]
fn a_variable_behind_a_cut_that_the_loss_does_not_read_has_no_gradient() {
    let left = on_ranks(2, |comm| {
        let vars = ["a", "b"].map(|name| (name, Var::from_tensor(&tensor(&[3], 4)).unwrap()));
        let before = vars[0].1.to_vec1::<f32>().unwrap();
        let skip = Options { missing: Missing::SkipIfMissingEverywhere, ..options(Stage::Zero2) };
        let mut opt = sharded(comm, vars.clone(), skip).unwrap();
        let mut tape = Tape::new();
        tape.cut(&vars[0].1.sqr().unwrap()).unwrap();
        let loss = vars[1].1.sqr().unwrap().sum_all().unwrap();
        applied(opt.backward_step_cut(tape, &loss, at()));
        vars[0].1.to_vec1::<f32>().unwrap() == before
    });
    assert_eq!(left, [true, true]);
}

/// The identity, whose backward pass notes the operations of the ranks so far.
struct Watch {
    comm: Arc<dyn Communicator>,
    seen: Arc<AtomicU64>,
}

impl CustomOp1 for Watch {
    fn name(&self) -> &'static str {
        "watch"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((storage.clone(), layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        self.seen.store(self.comm.stats().total().operations, Relaxed);
        Ok(Some(grad.clone()))
    }
}

#[test]
fn gradients_of_a_segment_travel_before_the_segment_before_it_is_differentiated() {
    for (cuts, expected) in [(false, 0), (true, 1)] {
        let ahead = on_ranks(2, |comm| {
            let (mlp, world) = (Mlp::new(1), Arc::clone(&comm));
            // Without overlap the thread that fills a bucket waits for its reduction. `down` is a bucket of its own.
            let alone = Options { overlap: false, ..options(Stage::Zero2) };
            let mut opt = sharded(comm, mlp.vars(), alone).unwrap();
            let (seen, mut tape) = (Arc::new(AtomicU64::new(0)), Tape::new());
            let watch = Watch { comm: Arc::clone(&world), seen: Arc::clone(&seen) };
            let hidden = mlp.hidden(&tensor(&[4, 5], 1)).unwrap().apply_op1(watch).unwrap();
            let hidden = if cuts { tape.cut(&hidden).unwrap() } else { hidden };
            let loss = hidden.matmul(&mlp.down).unwrap().sqr().unwrap().sum_all().unwrap();
            let before = world.stats().total().operations;
            applied(opt.backward_step_cut(tape, &loss, at()));
            seen.load(Relaxed) - before
        });
        assert_eq!(ahead, [expected; 2], "with cuts: {cuts}");
    }
}
