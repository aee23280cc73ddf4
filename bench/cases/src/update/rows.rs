//! Table of updates: every rule in f32, and AdamW with every recipe. A new rule or recipe is a new row.

use meshstep_optim::{
    Adagrad, Adam, AdamW, Adopt, Lamb, Lars, Lion, Moments, Momentum, QhAdamW, QhAdopt, RmsProp, Rounding,
    Rule, ScheduleFreeAdamW, Sgd, UncorrectedAdam,
};
use meshstep_tensor::DType;

/// A rule with a recipe, and its required speed.
pub struct Row {
    pub name: &'static str,
    pub rule: Box<dyn Rule>,
    pub recipe: Recipe,
    /// Minimum speed in percent of the copy's speed.
    pub bar: f64,
    /// True if the rule also reads its state when it measures sums.
    pub measures_state: bool,
    /// Reason for a low bar, if it is not obvious.
    pub reason: Option<&'static str>,
}

/// Types of all vectors of an update.
#[derive(Clone, Copy)]
pub struct Recipe {
    pub params: DType,
    pub grads: DType,
    pub state: DType,
    pub copy: Option<DType>,
    pub remainder: bool,
    pub rounding: Rounding,
}

const F32: Recipe = Recipe {
    params: DType::F32,
    grads: DType::F32,
    state: DType::F32,
    copy: None,
    remainder: false,
    rounding: Rounding::Nearest,
};
const MASTER: Recipe = Recipe { grads: DType::BF16, copy: Some(DType::BF16), ..F32 };
const SPLIT: Recipe = Recipe { params: DType::BF16, grads: DType::BF16, remainder: true, ..F32 };
const MOMENTS: Recipe = Recipe { state: DType::BF16, rounding: Rounding::Stochastic, ..F32 };

const RANDOM: Option<&str> = Some(
    "compute-bound: ten rounds of Philox produce 16 random bits per rounded number, and bf16 halves the bytes that could hide them",
);

pub fn rows() -> Vec<Row> {
    fn row(name: &'static str, rule: impl Rule + 'static, recipe: Recipe, bar: f64) -> Row {
        Row { name, rule: Box::new(rule), recipe, bar, measures_state: false, reason: None }
    }
    let momentum = Sgd { momentum: 0.9, weight_decay: 1e-4, ..Sgd::default() };
    let average = Sgd { form: Momentum::Average { debias: true }, ..momentum.clone() };
    let inside = Sgd { form: Momentum::LrInside, ..momentum.clone() };
    let centered = RmsProp { centered: true, momentum: 0.9, ..RmsProp::default() };
    let four = Moments::new(&[(0.9, 0.25); 4]).unwrap();
    vec![
        row("adamw", AdamW::default(), F32, 95.0),
        row("adam", Adam { weight_decay: 0.01, ..Adam::default() }, F32, 95.0),
        row("adamw, amsgrad", AdamW { amsgrad: true, ..AdamW::default() }, F32, 95.0),
        row("sgd", Sgd::default(), F32, 95.0),
        row("sgd, momentum", momentum, F32, 95.0),
        row("sgd, average", average, F32, 95.0),
        row("sgd, lr inside", inside, F32, 95.0),
        row("rmsprop", RmsProp::default(), F32, 90.0),
        row("rmsprop, centered, momentum", centered, F32, 90.0),
        row("adagrad", Adagrad::default(), F32, 90.0),
        row("lion", Lion::default(), F32, 90.0),
        row("adam, uncorrected", UncorrectedAdam::default(), F32, 90.0),
        row("adopt", Adopt::default(), F32, 90.0),
        row("qhadopt", QhAdopt::default(), F32, 90.0),
        row("qhadamw", QhAdamW::default(), F32, 90.0),
        row("qhadamw, 4 moments", QhAdamW { moments: four, ..QhAdamW::default() }, F32, 90.0),
        row("adamw, schedule-free", ScheduleFreeAdamW::default(), F32, 90.0),
        Row { measures_state: true, ..row("lamb", Lamb::default(), F32, 90.0) },
        row("lars", Lars::default(), F32, 90.0),
        row("adamw, f32 master, bf16 grads and copy", AdamW::default(), MASTER, 85.0),
        row("adamw, bf16 and remainder, bf16 grads", AdamW::default(), SPLIT, 85.0),
        Row { reason: RANDOM, ..row("adamw, bf16 moments, stochastic", AdamW::default(), MOMENTS, 45.0) },
    ]
}
