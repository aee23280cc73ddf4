//! Cases of the GPU benchmark: a new case is a new row. Cases that PyTorch also has use the same names in
//! bench/python/gpu_torch.py.

use meshstep_optim::{
    Adagrad, AdamW, Adopt, Lion, QhAdamW, QhAdopt, RmsProp, Rounding, Rule, ScheduleFreeAdamW, Sgd,
    UncorrectedAdam,
};
use meshstep_tensor::DType::{self, BF16, F16, F32};

/// Work on every parameter: a norm of the gradients, an update, or both with the clipping decision in between.
pub struct Case {
    pub name: &'static str,
    /// Update rule; `None` for a case without an update.
    pub rule: Option<Box<dyn Rule>>,
    /// True if the case takes the gradients' exact norm; together with a rule, the step is clipped.
    pub norm: bool,
    pub recipe: Recipe,
    /// Number of segments of the update, as for so many tensors in one table.
    pub segments: usize,
}

/// Types of all vectors of an update, and its rounding.
#[derive(Clone, Copy)]
pub struct Recipe {
    pub params: DType,
    pub remainder: bool,
    pub grads: DType,
    pub state: DType,
    pub copy: Option<DType>,
    pub rounding: Rounding,
}

const ALL_F32: Recipe =
    Recipe { params: F32, remainder: false, grads: F32, state: F32, copy: None, rounding: Rounding::Nearest };
const COPIED: Recipe = Recipe { copy: Some(BF16), ..ALL_F32 };
const BF16_GRADS: Recipe = Recipe { grads: BF16, ..ALL_F32 };
const COPIED_BF16_GRADS: Recipe = Recipe { copy: Some(BF16), ..BF16_GRADS };
const REMAINDER: Recipe = Recipe { params: BF16, remainder: true, ..BF16_GRADS };
const F16_GRADS: Recipe = Recipe { grads: F16, ..ALL_F32 };
const ALL_BF16: Recipe = Recipe { params: BF16, grads: BF16, ..NARROW_STATE };
const BY_CHANCE: Recipe = Recipe { state: F32, ..ALL_BF16 };
const NARROW_REMAINDER: Recipe = Recipe { remainder: true, ..ALL_BF16 };
const NARROW_STATE: Recipe = Recipe { state: BF16, rounding: Rounding::Stochastic, ..ALL_F32 };

fn rule(rule: impl Rule + 'static) -> Option<Box<dyn Rule>> {
    Some(Box::new(rule))
}

fn adamw() -> Option<Box<dyn Rule>> {
    rule(AdamW::default())
}

fn update(name: &'static str, rule: Option<Box<dyn Rule>>, recipe: Recipe) -> Case {
    Case { name, rule, norm: false, recipe, segments: 1 }
}

/// Returns the cases, most informative first.
pub fn cases() -> Vec<Case> {
    let norm = |name, recipe| Case { norm: true, ..update(name, None, recipe) };
    let step = |name, recipe| Case { norm: true, ..update(name, adamw(), recipe) };
    let rms = RmsProp { centered: true, momentum: 0.9, ..RmsProp::default() };
    vec![
        update("adamw f32", adamw(), ALL_F32),
        norm("exact norm bf16", BF16_GRADS),
        update("adamw bf16 + remainder, bf16 gradients", adamw(), REMAINDER),
        step("step bf16 + remainder, bf16 gradients", REMAINDER),
        update("adamw f32, bf16 moments by chance", adamw(), NARROW_STATE),
        update("adamw bf16 by chance", adamw(), ALL_BF16),
        update("adamw f32, bf16 copy", adamw(), COPIED),
        update("adamw f32, bf16 gradients", adamw(), BF16_GRADS),
        update("adamw f32, bf16 gradients and copy", adamw(), COPIED_BF16_GRADS),
        update("adamw f32, f16 gradients", adamw(), F16_GRADS),
        update("adamw bf16 + remainder, bf16 moments by chance", adamw(), NARROW_REMAINDER),
        update("adamw bf16 by chance, f32 moments", adamw(), BY_CHANCE),
        norm("exact norm f32", ALL_F32),
        norm("exact norm f16", F16_GRADS),
        step("step f32", ALL_F32),
        step("step f32, bf16 copy", COPIED),
        step("step f32, bf16 gradients", BF16_GRADS),
        step("step f32, bf16 gradients and copy", COPIED_BF16_GRADS),
        update("sgd momentum f32", rule(Sgd { momentum: 0.9, ..Sgd::default() }), ALL_F32),
        update("lion f32", rule(Lion::default()), ALL_F32),
        update("amsgrad f32", rule(AdamW { amsgrad: true, ..AdamW::default() }), ALL_F32),
        update("adopt f32", rule(Adopt::default()), ALL_F32),
        update("qhadamw f32", rule(QhAdamW::default()), ALL_F32),
        update("qhadopt f32", rule(QhAdopt::default()), ALL_F32),
        update("rmsprop f32", rule(RmsProp::default()), ALL_F32),
        update("rmsprop centered momentum f32", rule(rms), ALL_F32),
        update("adagrad f32", rule(Adagrad::default()), ALL_F32),
        update("uncorrected adam f32", rule(UncorrectedAdam::default()), ALL_F32),
        update("schedule-free adamw f32", rule(ScheduleFreeAdamW::default()), ALL_F32),
        update("sgd f32", rule(Sgd::default()), ALL_F32),
    ]
}

/// Returns the first case with as many tensors as a model of billions of parameters, and with many more.
pub fn segmented() -> Vec<Case> {
    let of = |name, segments| Case { segments, ..update(name, adamw(), ALL_F32) };
    vec![of("adamw f32, 300 segments", 300), of("adamw f32, 10000 segments", 10_000)]
}

impl Case {
    /// Returns the number of state vectors.
    pub fn states(&self) -> usize {
        self.rule.as_ref().map_or(0, |rule| rule.state().len())
    }

    /// Returns the bytes that must be read and written for each parameter.
    pub fn bytes(&self) -> usize {
        let Recipe { params, remainder, grads, state, copy, .. } = self.recipe;
        let norm = if self.norm { grads.size() } else { 0 };
        if self.rule.is_none() {
            return norm;
        }
        let kept = params.size() + self.states() * state.size() + if remainder { 2 } else { 0 };
        norm + grads.size() + 2 * kept + copy.map_or(0, DType::size)
    }

    /// Returns the bytes of memory for each parameter.
    pub fn resident(&self) -> usize {
        let Recipe { params, remainder, grads, state, copy, .. } = self.recipe;
        let updated = params.size() + self.states() * state.size() + copy.map_or(0, DType::size);
        grads.size() + if self.rule.is_some() { updated + if remainder { 2 } else { 0 } } else { 0 }
    }
}
