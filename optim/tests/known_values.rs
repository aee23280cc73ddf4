//! What the rules compute, against PyTorch's formulas written out in f64 and against numbers worked out by hand.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "tests fail by panicking and say what they skip"
)]

mod common;

use common::{DTYPES, Memory, Random, Values, segment};
use meshstep_optim::{Adam, AdamW, Isa, Rounding, Rule, Scalars, Sgd};
use meshstep_tensor::DType;

const LR: f64 = 0.05;
const SCALARS: Scalars = Scalars { lr: LR, grad_scale: 1.0, zero_grads: false, rounding: Rounding::Nearest };

/// `torch.optim.Adam` or `AdamW` for one element, its single-tensor code line by line, in f64.
struct TorchAdam {
    rule: AdamW,
    coupled: bool,
    exp_avg: f64,
    exp_avg_sq: f64,
}

impl TorchAdam {
    fn step(&mut self, mut param: f64, grad: f64, step: i32) -> f64 {
        let AdamW { beta1, beta2, eps, weight_decay, maximize } = self.rule;
        let mut grad = if maximize { -grad } else { grad };
        if self.coupled {
            grad += weight_decay * param;
        } else {
            param *= 1.0 - LR * weight_decay;
        }
        self.exp_avg += (grad - self.exp_avg) * (1.0 - beta1);
        self.exp_avg_sq = self.exp_avg_sq * beta2 + (1.0 - beta2) * grad * grad;
        let bias_correction1 = 1.0 - beta1.powi(step);
        let bias_correction2_sqrt = (1.0 - beta2.powi(step)).sqrt();
        let denom = self.exp_avg_sq.sqrt() / bias_correction2_sqrt + eps;
        param - LR / bias_correction1 * (self.exp_avg / denom)
    }
}

/// `torch.optim.SGD` for one element, in f64.
struct TorchSgd {
    rule: Sgd,
    momentum_buffer: Option<f64>,
}

impl TorchSgd {
    fn step(&mut self, param: f64, grad: f64) -> f64 {
        let Sgd { momentum, dampening, nesterov, weight_decay, maximize } = self.rule;
        let mut grad = if maximize { -grad } else { grad };
        grad += weight_decay * param;
        if momentum != 0.0 {
            let buf = self.momentum_buffer.map_or(grad, |buf| buf * momentum + (1.0 - dampening) * grad);
            self.momentum_buffer = Some(buf);
            grad = if nesterov { grad + momentum * buf } else { buf };
        }
        param - LR * grad
    }
}

/// 30 steps of `rule` on one element in f64 and in f32 stay close to `torch`'s.
fn follow(rule: &dyn Rule, mut torch: impl FnMut(f64, f64, i32) -> f64) {
    let mut random = Random::new(7);
    let mut expected = 0.7;
    let mut memories = [DTYPES[7], DTYPES[0]].map(|dtypes| {
        let values = |x| Values::new(dtypes.0, 1, || x);
        // What a momentum buffer holds before its first step must not matter.
        let state = rule.state().iter().map(|&name| values(if name == "momentum" { f64::NAN } else { 0.0 }));
        Memory {
            params: values(0.7),
            grads: values(0.0),
            state: state.collect(),
            copy: None,
            remainder: None,
        }
    });
    for t in 1..=30 {
        let grad = f64::from(random.unit() as f32);
        expected = torch(expected, grad, t);
        for (memory, tolerance) in memories.iter_mut().zip([1e-13, 1e-5]) {
            memory.grads = Values::new(memory.grads.slice().dtype(), 1, || grad);
            memory.update(rule, Isa::detect(), 0, &[segment(0..1, t as u64)], &SCALARS).unwrap();
            let got = memory.params.f64()[0];
            assert!((got - expected).abs() < tolerance, "{rule:?} at t = {t}: {got}, expected {expected}");
        }
    }
}

#[test]
fn adam_and_adamw_are_pytorchs() {
    for (weight_decay, maximize, beta1) in [(0.0, false, 0.9), (0.1, false, 0.8), (0.1, true, 0.0)] {
        let rule = AdamW { beta1, beta2: 0.99, eps: 1e-6, weight_decay, maximize };
        let coupled = Adam { beta1, beta2: 0.99, eps: 1e-6, weight_decay, maximize };
        let torch = |coupled| TorchAdam { rule: rule.clone(), coupled, exp_avg: 0.0, exp_avg_sq: 0.0 };
        let (mut w, mut l2) = (torch(false), torch(true));
        follow(&rule, |param, grad, t| w.step(param, grad, t));
        follow(&coupled, |param, grad, t| l2.step(param, grad, t));
    }
}

#[test]
fn sgd_is_pytorchs() {
    let table = [
        Sgd::default(),
        Sgd { weight_decay: 0.1, maximize: true, ..Sgd::default() },
        Sgd { momentum: 0.9, ..Sgd::default() },
        Sgd { momentum: 0.9, dampening: 0.4, weight_decay: 0.1, ..Sgd::default() },
        Sgd { momentum: 0.9, nesterov: true, weight_decay: 0.1, ..Sgd::default() },
        Sgd { momentum: 0.5, nesterov: true, maximize: true, ..Sgd::default() },
    ];
    for rule in table {
        let mut torch = TorchSgd { rule: rule.clone(), momentum_buffer: None };
        follow(&rule, |param, grad, _| torch.step(param, grad));
    }
}

/// Two steps by hand: parameter 1, gradients 0.5 and 0.25, learning rate 0.1, all exact to f64's last places.
fn two_steps(rule: &dyn Rule) -> [f64; 2] {
    let values = |x: f64| Values::F64(vec![x]);
    let state = rule.state().iter().map(|_| values(0.0)).collect();
    let mut memory = Memory { params: values(1.0), grads: values(0.5), state, copy: None, remainder: None };
    let scalars = Scalars { lr: 0.1, ..SCALARS };
    [(1, 0.5), (2, 0.25)].map(|(t, grad)| {
        memory.grads = values(grad);
        memory.update(rule, Isa::detect(), 0, &[segment(0..1, t)], &scalars).unwrap();
        memory.params.f64()[0]
    })
}

fn close(got: [f64; 2], expected: [f64; 2]) {
    assert!(got.iter().zip(expected).all(|(got, x)| (got - x).abs() < 1e-12), "{got:?}, not {expected:?}");
}

#[test]
fn sgd_by_hand() {
    let momentum = Sgd { momentum: 0.8, ..Sgd::default() };
    close(two_steps(&Sgd::default()), [0.95, 0.925]);
    // Buffers 0.5, then 0.8 * 0.5 + 0.25 = 0.65.
    close(two_steps(&momentum), [0.95, 0.885]);
    // The first buffer is not dampened: 0.5, then 0.4 + 0.5 * 0.25 = 0.525.
    close(two_steps(&Sgd { dampening: 0.5, ..momentum.clone() }), [0.95, 0.8975]);
    // 0.5 + 0.8 * 0.5 = 0.9, then 0.25 + 0.8 * 0.65 = 0.77.
    close(two_steps(&Sgd { nesterov: true, ..momentum.clone() }), [0.91, 0.833]);
    close(two_steps(&Sgd { maximize: true, ..momentum }), [1.05, 1.115]);
    // 0.5 + 0.2 * 1 = 0.7, then 0.25 + 0.2 * 0.93 = 0.436.
    close(two_steps(&Sgd { weight_decay: 0.2, ..Sgd::default() }), [0.93, 0.8864]);
}

#[test]
fn adam_by_hand() {
    // The first step is lr * sign(g), whatever the gradient; decay comes on top of it or is part of g.
    let rule = AdamW { eps: 0.0, weight_decay: 0.0, ..AdamW::default() };
    let [first, second] = two_steps(&rule);
    let (m, v) = (0.1 * 0.9 * 0.5 + 0.1 * 0.25, 0.001 * 0.999 * 0.25 + 0.001 * 0.0625);
    let expected = 0.9 - 0.1 * (m / (1.0 - 0.81)) / f64::sqrt(v / (1.0 - 0.999 * 0.999));
    close([first, second], [0.9, expected]);
    assert!((two_steps(&AdamW { weight_decay: 0.2, ..rule.clone() })[0] - 0.88).abs() < 1e-12);
    assert!((two_steps(&AdamW { maximize: true, ..rule })[0] - 1.1).abs() < 1e-12);
    // A penalty of -2 * p outweighs the gradient: the sign turns.
    let coupled = Adam { eps: 0.0, weight_decay: 2.0, maximize: true, ..Adam::default() };
    assert!((two_steps(&coupled)[0] - 0.9).abs() < 1e-12);
}

#[test]
fn defaults_are_pytorchs() {
    let (w, l2) = (AdamW::default(), Adam::default());
    assert_eq!((w.beta1, w.beta2, w.eps, w.weight_decay, w.maximize), (0.9, 0.999, 1e-8, 0.01, false));
    assert_eq!((l2.beta1, l2.beta2, l2.eps, l2.weight_decay, l2.maximize), (0.9, 0.999, 1e-8, 0.0, false));
    let zeros = Sgd { momentum: 0.0, dampening: 0.0, nesterov: false, weight_decay: 0.0, maximize: false };
    assert_eq!(Sgd::default(), zeros);
    assert_eq!((w.name(), l2.name(), zeros.name()), ("adamw", "adam", "sgd"));
    assert_eq!((w.state(), zeros.state()), (&["m", "v"][..], &[][..]));
    assert_eq!(Sgd { momentum: 0.1, ..zeros }.state(), ["momentum"]);
    assert_eq!(w.hyperparameters()[3], ("weight_decay", 0.01));
}

#[test]
fn gradients_are_scaled_first_and_the_copy_is_of_the_new_parameters() {
    let rule = Sgd::default();
    let mut memory = Memory {
        params: Values::F32(vec![1.0, 2.0]),
        grads: Values::new(DType::F16, 2, || 8.0),
        state: vec![],
        copy: Some(Values::new(DType::BF16, 2, || 0.0)),
        remainder: None,
    };
    let scalars = Scalars { lr: 0.5, grad_scale: 0.25, zero_grads: true, ..Scalars::default() };
    memory.update(&rule, Isa::detect(), 0, &[segment(0..2, 1)], &scalars).unwrap();
    assert_eq!((memory.params.f64(), memory.grads.f64()), (vec![0.0, 1.0], vec![0.0, 0.0]));
    assert_eq!(memory.copy.unwrap().f64(), [0.0, 1.0]);
}

#[test]
fn a_decay_too_small_for_a_factor_is_not_lost() {
    // 1 - 1e-8 is 1 in f32; subtracting 1e-8 of each parameter shows in how the sums round, on average exactly.
    let len = 1 << 20;
    let mean = |weight_decay: f64| {
        let rule = AdamW { weight_decay, ..AdamW::default() };
        let mut random = Random::new(11);
        let mut memory = Memory {
            params: Values::new(DType::F32, len, || 1.5 + 0.5 * random.unit()),
            grads: Values::new(DType::F32, len, || random.unit()),
            state: vec![Values::new(DType::F32, len, || random.unit()), Values::new(DType::F32, len, || 1.0)],
            copy: None,
            remainder: None,
        };
        let scalars = Scalars { lr: 1e-3, ..SCALARS };
        memory.update(&rule, Isa::detect(), 0, &[segment(0..len, 1000)], &scalars).unwrap();
        memory.params.f64().iter().sum::<f64>() / len as f64
    };
    let lost = mean(0.0) - mean(1e-5);
    assert!((lost - 1.5e-8).abs() < 1e-9, "{lost:e} of 1.5e-8");
}
