//! Results of the rules against numbers computed by hand; defaults.

use crate::common::{Memory, Random, Values, rules, segment};
use meshstep_optim::{
    Adagrad, Adam, AdamW, Adopt, Isa, Lion, Moments, QhAdamW, QhAdopt, RmsProp, Rounding, Rule, Scalars,
    ScheduleFreeAdamW, Sgd, UncorrectedAdam,
};
use meshstep_tensor::DType;

const SCALARS: Scalars =
    Scalars { lr: 0.05, grad_scale: 1.0, zero_grads: false, rounding: Rounding::Nearest };

/// Takes two steps: parameter 1, gradients 0.5 and 0.25, learning rate 0.1, all exact to f64's last digits.
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
    // The first step is lr * sign(g) for any gradient; decay comes on top of it or is part of g.
    let rule = AdamW { eps: 0.0, weight_decay: 0.0, ..AdamW::default() };
    let [first, second] = two_steps(&rule);
    let (m, v) = (0.1 * 0.9 * 0.5 + 0.1 * 0.25, 0.001 * 0.999 * 0.25 + 0.001 * 0.0625);
    let expected = 0.9 - 0.1 * (m / (1.0 - 0.81)) / f64::sqrt(v / (1.0 - 0.999 * 0.999));
    close([first, second], [0.9, expected]);
    assert!((two_steps(&AdamW { weight_decay: 0.2, ..rule.clone() })[0] - 0.88).abs() < 1e-12);
    assert!((two_steps(&AdamW { maximize: true, ..rule })[0] - 1.1).abs() < 1e-12);
    // A penalty of -2 * p outweighs the gradient: the sign flips.
    let coupled = Adam { eps: 0.0, weight_decay: 2.0, maximize: true, ..Adam::default() };
    assert!((two_steps(&coupled)[0] - 0.9).abs() < 1e-12);
}

/// Asserts a rule's name, its state and all its hyperparameters.
fn is(rule: &dyn Rule, name: &str, state: &[&str], hyperparameters: &[(&str, f64)]) {
    assert_eq!((rule.name(), rule.state()), (name, state));
    assert_eq!(rule.hyperparameters(), hyperparameters, "{name}");
    assert_eq!(rule.check(), Ok(()));
}

#[test]
fn defaults_are_the_fields() {
    let ends = |own: &[(&'static str, f64)], weight_decay, decay| {
        let ends = [("weight_decay", weight_decay), ("decay", decay), ("lr_max", 0.0), ("maximize", 0.0)];
        [own, &ends].concat()
    };
    let adam = [("beta1", 0.9), ("beta2", 0.999), ("eps", 1e-8), ("amsgrad", 0.0)];
    is(&AdamW::default(), "adamw", &["m", "v"], &ends(&adam, 0.01, 1.0));
    is(&Adam::default(), "adam", &["m", "v"], &ends(&adam, 0.0, 0.0));
    let sgd = [("momentum", 0.0), ("form", 0.0), ("debias", 0.0), ("dampening", 0.0), ("nesterov", 0.0)];
    is(&Sgd::default(), "sgd", &[], &ends(&sgd, 0.0, 0.0));
    let rmsprop = [("alpha", 0.99), ("eps", 1e-8), ("momentum", 0.0), ("centered", 0.0)];
    is(&RmsProp::default(), "rmsprop", &["square_avg"], &ends(&rmsprop, 0.0, 0.0));
    let adagrad = [("lr_decay", 0.0), ("initial_accumulator_value", 0.0), ("eps", 1e-10)];
    is(&Adagrad::default(), "adagrad", &["sum"], &ends(&adagrad, 0.0, 0.0));
    is(&Lion::default(), "lion", &["m"], &ends(&[("beta1", 0.9), ("beta2", 0.99)], 0.0, 1.0));
    let plain = [("beta1", 0.9), ("beta2", 0.999), ("lambda", 1e-8), ("clip", f64::INFINITY)];
    is(&UncorrectedAdam::default(), "uncorrected_adam", &["m", "v"], &ends(&plain, 0.0, 1.0));
    let own = [("beta1", 0.9), ("beta2", 0.999), ("eps", 1e-8), ("warmup_steps", 0.0), ("r", 0.0)];
    let free = [&own[..], &[("weight_lr_power", 2.0)]].concat();
    is(&ScheduleFreeAdamW::default(), "schedulefree_adamw", &["z", "v"], &ends(&free, 0.0, 1.0));
    let adopt = [("beta1", 0.9), ("beta2", 0.9999), ("eps", 1e-6)];
    is(&Adopt::default(), "adopt", &["m", "v"], &ends(&adopt, 0.0, 1.0));
    let qhadopt = [("beta1", 0.999), ("weight", 0.9), ("beta2", 0.9999), ("eps", 1e-6)];
    is(&QhAdopt::default(), "qhadopt", &["m", "v"], &ends(&qhadopt, 0.0, 1.0));
    let qhadamw = [("beta1", 0.995), ("weight", 0.7), ("beta2", 0.999), ("eps", 1e-8)];
    is(&QhAdamW::default(), "qhadamw", &["m", "v"], &ends(&qhadamw, 0.01, 1.0));
}

#[test]
fn options_have_state_and_show() {
    let moments = Moments::new(&[(0.9, 0.1), (0.99, 0.2), (0.999, 0.3), (0.5, 0.4)]).unwrap();
    let states = |rule: &dyn Rule| rule.state();
    assert_eq!(states(&AdamW { amsgrad: true, ..AdamW::default() }), ["m", "v", "vmax"]);
    assert_eq!(states(&Sgd { momentum: 0.1, ..Sgd::default() }), ["momentum"]);
    assert_eq!(states(&RmsProp { momentum: 0.1, ..RmsProp::default() }), ["square_avg", "momentum"]);
    assert_eq!(states(&RmsProp { centered: true, ..RmsProp::default() }), ["square_avg", "grad_avg"]);
    let three = Moments::new(&moments.pairs()[..3]).unwrap();
    assert_eq!(states(&QhAdopt { moments: three, ..QhAdopt::default() }), ["m0", "m1", "m2", "v"]);
    assert_eq!(states(&QhAdamW { moments, ..QhAdamW::default() }), ["m0", "m1", "m2", "m3", "v"]);
    // Ranks that compare hyperparameters detect any different value: no two rows of the table are equal.
    let rows: Vec<_> = rules().iter().map(|rule| (rule.name(), rule.hyperparameters())).collect();
    assert!((0..rows.len()).all(|i| !rows[..i].contains(&rows[i])));
}

#[test]
fn retention_is_the_slowest_decay() {
    let moments = Moments::new(&[(0.9, 0.1), (0.9999, 0.2)]).unwrap();
    let rows: [(&dyn Rule, f64); 12] = [
        (&AdamW::default(), 0.999),
        (&Adam { beta1: 0.5, beta2: 0.4, ..Adam::default() }, 0.5),
        (&Sgd { momentum: 0.8, ..Sgd::default() }, 0.8),
        (&RmsProp::default(), 0.99),
        (&RmsProp { alpha: 0.1, momentum: 0.9, ..RmsProp::default() }, 0.9),
        (&Adagrad::default(), 1.0),
        (&Lion::default(), 0.99),
        (&UncorrectedAdam::default(), 0.999),
        (&Adopt::default(), 0.9999),
        (&ScheduleFreeAdamW::default(), 1.0),
        (&QhAdopt::default(), 0.9999),
        (&QhAdamW { moments, ..QhAdamW::default() }, 0.9999),
    ];
    for (rule, retention) in rows {
        assert_eq!(rule.retention(), retention, "{rule:?}");
    }
}

#[test]
fn adopt_by_hand() {
    let rule = Adopt { beta1: 0.5, beta2: 0.5, ..Adopt::default() };
    // First v = 0.25 and nothing else; then h = 0.25 / 0.5, half of it in m.
    close(two_steps(&rule), [1.0, 1.0 - 0.1 * 0.25]);
    // A fifth of the step is 0.25, the rest h itself.
    let mixed = QhAdopt { moments: Moments::one(0.5, 0.2), beta2: 0.5, ..QhAdopt::default() };
    close(two_steps(&mixed), [1.0, 1.0 - 0.1 * (0.8 * 0.5 + 0.2 * 0.25)]);
    // The first step does not decay either, the second does.
    close(two_steps(&Adopt { weight_decay: 0.5, ..rule }), [1.0, 0.95 - 0.1 * 0.25]);
}

#[test]
fn lion_by_hand() {
    let rule = Lion { beta1: 0.5, ..Lion::default() };
    close(two_steps(&rule), [0.9, 0.8]);
    close(two_steps(&Lion { weight_decay: 0.5, ..rule }), [0.85, 0.85 * 0.95 - 0.1]);
    // Without a gradient there is no sign to follow.
    let values = |x: f64| Values::F32(vec![x as f32; 3]);
    let mut memory = Memory {
        params: values(1.0),
        grads: values(0.0),
        state: vec![values(0.0)],
        copy: None,
        remainder: None,
    };
    memory.update(&Lion::default(), Isa::detect(), 0, &[segment(0..3, 1)], &SCALARS).unwrap();
    assert_eq!((memory.params.f64(), memory.state[0].f64()), (vec![1.0; 3], vec![0.0; 3]));
}

#[test]
fn a_centered_variance_below_zero_is_zero() {
    // Steady gradients: the variance tends to 0, and its rounding error has either sign.
    let rule = RmsProp { centered: true, alpha: 0.5, eps: 1.0, ..RmsProp::default() };
    let mut random = Random::new(5);
    let grads = Values::new(DType::F32, 1000, || random.unit());
    let zeros = || Values::new(DType::F32, 1000, || 0.0);
    let mut memory =
        Memory { params: zeros(), grads, state: vec![zeros(), zeros()], copy: None, remainder: None };
    for t in 1..=60 {
        memory.update(&rule, Isa::detect(), 0, &[segment(0..1000, t)], &SCALARS).unwrap();
    }
    let (squares, means) = (memory.state[0].f64(), memory.state[1].f64());
    assert!(squares.iter().zip(&means).any(|(square, mean)| square < &(mean * mean)), "met");
    assert!(memory.params.f64().iter().all(|p| p.is_finite()));
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
    // 1 - 1e-8 is 1 in f32; subtracting 1e-8 of each parameter changes how the sums round, exactly on average.
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

#[test]
fn schedule_free_by_hand() {
    // Without eps the first step is lr * sign(g) from 1. The second, whose gradient is half as large, moves z by d, and x to the middle.
    let rule = ScheduleFreeAdamW { beta1: 0.8, beta2: 0.5, eps: 0.0, ..ScheduleFreeAdamW::default() };
    let v: f64 = (0.5 * 0.5 * 0.25 + 0.5 * 0.0625) / 0.75;
    let d = 0.1 * 0.25 / v.sqrt();
    let z = [0.9, 0.9 - d];
    let x = (z[0] + z[1]) / 2.0;
    close(two_steps(&rule), [0.9, 0.8 * x + 0.2 * z[1]]);
    // Half the rate at first, and a quarter of the weight; decay is part of d, taken at y.
    let warm = ScheduleFreeAdamW { warmup_steps: 2, weight_decay: 0.5, ..rule };
    let first = 1.0 - 0.05 - 0.05 * 0.5;
    let second = first - d - 0.1 * 0.5 * first;
    close(two_steps(&warm), [first, 0.8 * (0.2 * first + 0.8 * second) + 0.2 * second]);
}
