//! Every rule with every option follows its published program, written out in f64 element by element.

use crate::common::{DTYPES, Memory, Random, Values, segment};
use meshstep_optim::{
    Adagrad, Adam, AdamW, Adopt, Decay, Isa, Lion, Moments, Momentum, QhAdamW, QhAdopt, RmsProp, Rounding,
    Rule, Scalars, Sgd, UncorrectedAdam,
};

pub(crate) const STEPS: i32 = 48;
const ELEMENTS: usize = 16;

/// Returns the learning rate of a step, which falls.
pub(crate) fn lr(t: i32) -> f64 {
    0.02 - 0.0002 * f64::from(t)
}

/// Function of a program: returns the next parameter, from parameter, gradient and t.
pub(crate) type Program = Box<dyn FnMut(f64, f64, i32) -> f64>;

/// Weight decay as in the programs: the parameter after its decay, and the gradient with its penalty.
#[derive(Clone, Copy)]
struct Ends {
    weight_decay: f64,
    decay: Decay,
    maximize: bool,
}

impl Ends {
    fn begin(self, p: f64, g: f64, lr: f64) -> (f64, f64) {
        let g = if self.maximize { -g } else { g };
        match self.decay {
            Decay::Coupled => (p, g + self.weight_decay * p),
            Decay::Decoupled => (p * (1.0 - lr * self.weight_decay), g),
            Decay::FullyDecoupled { lr_max } => (p * (1.0 - lr / lr_max * self.weight_decay), g),
        }
    }
}

/// Every form of decay, minimised and maximised, for a rule made from it.
fn ends() -> impl Iterator<Item = Ends> {
    let table = [
        (0.0, Decay::Coupled, false),
        (0.1, Decay::Coupled, true),
        (0.1, Decay::Decoupled, false),
        (0.01, Decay::FullyDecoupled { lr_max: 0.02 }, false),
    ];
    table.into_iter().map(|(weight_decay, decay, maximize)| Ends { weight_decay, decay, maximize })
}

/// Asserts that all steps of `rule` in f64 and in f32 stay close to `program`'s. States named in `unread` start as NaN: their values
/// before the first step must not matter.
pub(crate) fn follow(rule: &dyn Rule, unread: &[&str], program: impl Fn() -> Program) {
    follow_at(lr, rule, unread, program);
}

/// The same at another learning rate.
pub(crate) fn follow_at(lr: fn(i32) -> f64, rule: &dyn Rule, unread: &[&str], program: impl Fn() -> Program) {
    let mut random = Random::new(7);
    let mut start = || (0..ELEMENTS).map(|_| f64::from(random.unit() as f32)).collect::<Vec<_>>();
    let mut expected = start();
    let mut programs: Vec<Program> = (0..ELEMENTS).map(|_| program()).collect();
    let mut memories = [DTYPES[7], DTYPES[0]].map(|(dtype, ..)| {
        let from = |from: &[f64]| {
            let mut next = from.iter().copied();
            Values::new(dtype, ELEMENTS, || next.next().unwrap())
        };
        let state = rule.state().iter().map(|name| if unread.contains(name) { f64::NAN } else { 0.0 });
        let state = state.map(|x| from(&[x; ELEMENTS])).collect();
        Memory { params: from(&expected), grads: from(&expected), state, copy: None, remainder: None }
    });
    for t in 1..=STEPS {
        let grads = start();
        for (program, (p, g)) in programs.iter_mut().zip(expected.iter_mut().zip(&grads)) {
            *p = program(*p, *g, t);
        }
        let scalars = Scalars { lr: lr(t), grad_scale: 1.0, zero_grads: false, rounding: Rounding::Nearest };
        for (memory, tolerance) in memories.iter_mut().zip([1e-13, 5e-6]) {
            let mut next = grads.iter().copied();
            memory.grads = Values::new(memory.grads.slice().dtype(), ELEMENTS, || next.next().unwrap());
            memory.update(rule, Isa::detect(), 0, &[segment(0..ELEMENTS, t as u64)], &scalars).unwrap();
            for (got, expected) in memory.params.f64().iter().zip(&expected) {
                let far = (got - expected).abs() / expected.abs().max(0.1);
                assert!(far < tolerance, "{rule:?} at t = {t}: {got}, expected {expected}");
            }
        }
    }
}

/// `torch.optim.Adam` and `AdamW`.
fn adam(rule: AdamW, ends: Ends) -> Program {
    let (mut m, mut v, mut vmax) = (0.0, 0.0, 0f64);
    Box::new(move |p, g, t| {
        let (p, g) = ends.begin(p, g, lr(t));
        m += (g - m) * (1.0 - rule.beta1);
        v = v * rule.beta2 + (1.0 - rule.beta2) * g * g;
        vmax = vmax.max(v);
        let second = if rule.amsgrad { vmax } else { v };
        let denom = second.sqrt() / (1.0 - rule.beta2.powi(t)).sqrt() + rule.eps;
        p - lr(t) / (1.0 - rule.beta1.powi(t)) * (m / denom)
    })
}

#[test]
fn adam_and_adamw_are_pytorchs() {
    for ends @ Ends { weight_decay, decay, maximize } in ends() {
        for (beta1, beta2, amsgrad) in [(0.9, 0.99, false), (0.0, 0.5, true), (0.8, 0.9, true)] {
            let rule = AdamW { beta1, beta2, eps: 1e-6, amsgrad, weight_decay, decay, maximize };
            let same = Adam { beta1, beta2, eps: 1e-6, amsgrad, weight_decay, decay, maximize };
            follow(&rule, &[], || adam(rule.clone(), ends));
            follow(&same, &[], || adam(rule.clone(), ends));
        }
    }
}

/// `torch.optim.SGD`, and the two other forms of momentum.
fn sgd(rule: Sgd, ends: Ends) -> Program {
    let (mut buffer, mut sum) = (None, 0.0);
    Box::new(move |p, g, t| {
        let Sgd { momentum, form, dampening, nesterov, .. } = rule;
        let (p, g) = ends.begin(p, g, lr(t));
        if momentum == 0.0 {
            return p - lr(t) * g;
        }
        match form {
            Momentum::PyTorch => {
                let b = buffer.map_or(g, |b| b * momentum + (1.0 - dampening) * g);
                buffer = Some(b);
                p - lr(t) * if nesterov { g + momentum * b } else { b }
            }
            Momentum::Average { debias } => {
                sum = momentum * sum + (1.0 - momentum) * g;
                p - lr(t) * if debias { sum / (1.0 - momentum.powi(t)) } else { sum }
            }
            Momentum::LrInside => {
                sum = momentum * sum + lr(t) * g;
                p - sum
            }
        }
    })
}

#[test]
fn sgd_is_pytorchs_and_two_others() {
    let sgd_of =
        |momentum, form, dampening, nesterov| Sgd { momentum, form, dampening, nesterov, ..Sgd::default() };
    let table = [
        sgd_of(0.0, Momentum::PyTorch, 0.0, false),
        sgd_of(0.9, Momentum::PyTorch, 0.0, false),
        sgd_of(0.9, Momentum::PyTorch, 0.4, false),
        sgd_of(0.9, Momentum::PyTorch, 0.0, true),
        sgd_of(0.0, Momentum::Average { debias: true }, 0.0, false),
        sgd_of(0.9, Momentum::Average { debias: false }, 0.0, false),
        sgd_of(0.9, Momentum::Average { debias: true }, 0.0, false),
        sgd_of(0.0, Momentum::LrInside, 0.0, false),
        sgd_of(0.9, Momentum::LrInside, 0.0, false),
    ];
    for rule in table {
        for ends @ Ends { weight_decay, decay, maximize } in ends() {
            let rule = Sgd { weight_decay, decay, maximize, ..rule.clone() };
            let unread: &[&str] =
                if matches!(rule.form, Momentum::Average { .. }) { &[] } else { &["momentum"] };
            follow(&rule, unread, || sgd(rule.clone(), ends));
        }
    }
}

/// `torch.optim.RMSprop`.
fn rmsprop(rule: RmsProp, ends: Ends) -> Program {
    let (mut square_avg, mut grad_avg, mut buffer) = (0.0, 0.0, 0.0);
    Box::new(move |p, g, t| {
        let (p, g) = ends.begin(p, g, lr(t));
        square_avg = square_avg * rule.alpha + (1.0 - rule.alpha) * g * g;
        grad_avg += (g - grad_avg) * (1.0 - rule.alpha);
        let square = if rule.centered { square_avg - grad_avg * grad_avg } else { square_avg };
        let step = g / (f64::sqrt(square) + rule.eps);
        buffer = buffer * rule.momentum + step;
        p - lr(t) * buffer
    })
}

#[test]
fn rmsprop_is_pytorchs() {
    for (alpha, momentum, centered) in
        [(0.99, 0.0, false), (0.9, 0.0, true), (0.9, 0.8, false), (0.95, 0.5, true)]
    {
        for ends @ Ends { weight_decay, decay, maximize } in ends() {
            let rule = RmsProp { alpha, eps: 1e-3, momentum, centered, weight_decay, decay, maximize };
            follow(&rule, &[], || rmsprop(rule.clone(), ends));
        }
    }
}

/// `torch.optim.Adagrad`.
fn adagrad(rule: Adagrad, ends: Ends) -> Program {
    let mut sum = rule.initial_accumulator_value;
    Box::new(move |p, g, t| {
        let clr = lr(t) / (1.0 + f64::from(t - 1) * rule.lr_decay);
        let (p, g) = ends.begin(p, g, clr);
        sum += g * g;
        p - clr * g / (f64::sqrt(sum) + rule.eps)
    })
}

#[test]
fn adagrad_is_pytorchs() {
    for (lr_decay, initial_accumulator_value, eps) in [(0.0, 0.0, 1e-10), (0.1, 0.5, 1e-3)] {
        for ends @ Ends { weight_decay, decay, maximize } in ends() {
            let rule = Adagrad { lr_decay, initial_accumulator_value, eps, weight_decay, decay, maximize };
            follow(&rule, &["sum"], || adagrad(rule.clone(), ends));
        }
    }
}

/// The paper's algorithm, and its authors' program.
fn lion(rule: Lion, ends: Ends) -> Program {
    let mut m = 0.0;
    Box::new(move |p, g, t| {
        let (p, g) = ends.begin(p, g, lr(t));
        let update = rule.beta1 * m + (1.0 - rule.beta1) * g;
        m = rule.beta2 * m + (1.0 - rule.beta2) * g;
        p - lr(t) * if update == 0.0 { 0.0 } else { update.signum() }
    })
}

#[test]
fn lion_is_the_papers() {
    for (beta1, beta2) in [(0.9, 0.99), (0.5, 0.8), (0.0, 0.0)] {
        for ends @ Ends { weight_decay, decay, maximize } in ends() {
            let rule = Lion { beta1, beta2, weight_decay, decay, maximize };
            follow(&rule, &[], || lion(rule.clone(), ends));
        }
    }
}

/// Step 5 of DES-LOC's algorithm, after its clipping.
fn uncorrected_adam(rule: UncorrectedAdam, ends: Ends) -> Program {
    let (mut m, mut v) = (0.0, 0.0);
    Box::new(move |p, g, t| {
        let (p, g) = ends.begin(p, g, lr(t));
        let g = g.clamp(-rule.clip, rule.clip);
        m = rule.beta1 * m + (1.0 - rule.beta1) * g;
        v = rule.beta2 * v + (1.0 - rule.beta2) * g * g;
        p - lr(t) * m / f64::sqrt(v + rule.lambda * rule.lambda)
    })
}

#[test]
fn uncorrected_adam_is_the_papers() {
    for (beta1, beta2, lambda, clip) in [(0.9, 0.999, 1e-8, f64::INFINITY), (0.5, 0.8, 0.1, 0.3)] {
        for ends @ Ends { weight_decay, decay, maximize } in ends() {
            let rule = UncorrectedAdam { beta1, beta2, lambda, clip, weight_decay, decay, maximize };
            follow(&rule, &[], || uncorrected_adam(rule.clone(), ends));
        }
    }
}

/// One to four slow moments.
const MOMENTS: [&[(f64, f64)]; 5] = [
    &[(0.9, 0.7)],
    &[(0.9, 0.5), (0.99, 0.25)],
    &[(0.5, 0.25), (0.9, 0.25), (0.99, 0.5)],
    &[(0.0, 0.1), (0.5, 0.2), (0.9, 0.0), (0.95, 0.4)],
    &[(0.9, 1.0)],
];

/// QHAdam with nu2 = 1 and AdamW's decay, mixed over all moments.
fn qhadamw(rule: QhAdamW, ends: Ends) -> Program {
    let (mut m, mut v) = ([0.0; 4], 0.0);
    Box::new(move |p, g, t| {
        let (p, g) = ends.begin(p, g, lr(t));
        v = v * rule.beta2 + (1.0 - rule.beta2) * g * g;
        let mut update = g;
        for (m, (beta, weight)) in m.iter_mut().zip(rule.moments.pairs()) {
            *m = beta * *m + (1.0 - beta) * g;
            update += weight * (*m / (1.0 - beta.powi(t)) - g);
        }
        p - lr(t) * update / (f64::sqrt(v / (1.0 - rule.beta2.powi(t))) + rule.eps)
    })
}

#[test]
fn qhadamw_is_the_papers_with_any_number_of_moments() {
    for pairs in MOMENTS {
        for ends @ Ends { weight_decay, decay, maximize } in ends() {
            let moments = Moments::new(pairs).unwrap();
            let rule = QhAdamW { moments, beta2: 0.99, eps: 1e-6, weight_decay, decay, maximize };
            follow(&rule, &[], || qhadamw(rule.clone(), ends));
        }
    }
}

/// ADOPT's program, with its step mixed as in QHAdam.
fn qhadopt(rule: QhAdopt, ends: Ends) -> Program {
    let (mut m, mut v) = ([0.0; 4], 0f64);
    Box::new(move |p, g, t| {
        let (decayed, g) = ends.begin(p, g, lr(t));
        if t == 1 {
            v = g * g;
            return p;
        }
        let bound = f64::from(t - 1).powf(0.25);
        let h = (g / v.sqrt().max(rule.eps)).clamp(-bound, bound);
        let mut update = h;
        for (m, (beta, weight)) in m.iter_mut().zip(rule.moments.pairs()) {
            *m = beta * *m + (1.0 - beta) * h;
            update += weight * (*m - h);
        }
        v = v * rule.beta2 + (1.0 - rule.beta2) * g * g;
        decayed - lr(t) * update
    })
}

#[test]
fn qhadopt_and_adopt_are_the_authors_with_any_number_of_moments() {
    for (row, pairs) in MOMENTS.into_iter().enumerate() {
        for ends @ Ends { weight_decay, decay, maximize } in ends() {
            let moments = Moments::new(pairs).unwrap();
            // An eps large enough to take effect.
            let (beta2, eps) = (0.9, if row % 2 == 0 { 0.3 } else { 1e-6 });
            let rule = QhAdopt { moments, beta2, eps, weight_decay, decay, maximize };
            follow(&rule, &["v"], || qhadopt(rule.clone(), ends));
            if pairs == [(0.9, 1.0)] {
                let plain = Adopt { beta1: 0.9, beta2, eps, weight_decay, decay, maximize };
                follow(&plain, &["v"], || qhadopt(rule.clone(), ends));
            }
        }
    }
}
