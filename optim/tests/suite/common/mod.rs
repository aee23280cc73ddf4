//! Shared test code: tables of rules and types, random memory with special values, comparison of bits.

pub(crate) mod naive;

use meshstep_optim::{
    Adagrad, Adam, AdamW, Adopt, Decay, Error, Flat, Isa, Lamb, Lars, Lion, Moments, Momentum,
    NEAREST_RETENTION, QhAdamW, QhAdopt, RmsProp, Rounding, Rule, Scalars, ScheduleFreeAdamW, Segment, Sgd,
    UncorrectedAdam,
};
use meshstep_tensor::{DType, Queue, Slice, SliceMut, bf16, f16};
use std::ops::Range;

/// All rules with all options that change the arithmetic. Add rows for a new rule.
pub(crate) fn rules() -> Vec<Box<dyn Rule>> {
    let momentum = Sgd { momentum: 0.9, ..Sgd::default() };
    let average = |debias| Sgd { form: Momentum::Average { debias }, ..momentum.clone() };
    let inside = Sgd { form: Momentum::LrInside, ..momentum.clone() };
    let centered = RmsProp { centered: true, ..RmsProp::default() };
    let (coupled, fully) = (Decay::Coupled, Decay::FullyDecoupled { lr_max: 0.02 });
    let moments =
        |n: usize| Moments::new(&[(0.9, 0.3), (0.99, 0.2), (0.999, 0.25), (0.5, 0.1)][..n]).unwrap();
    let schedule_free = ScheduleFreeAdamW { beta1: 0.95, ..ScheduleFreeAdamW::default() };
    vec![
        Box::new(AdamW::default()),
        Box::new(AdamW { weight_decay: 0.0, eps: 0.0, ..AdamW::default() }),
        Box::new(AdamW { beta1: 0.0, beta2: 0.5, weight_decay: 0.3, maximize: true, ..AdamW::default() }),
        Box::new(AdamW { amsgrad: true, decay: fully, ..AdamW::default() }),
        Box::new(Adam::default()),
        Box::new(Adam { weight_decay: 0.1, maximize: true, amsgrad: true, ..Adam::default() }),
        Box::new(Sgd::default()),
        Box::new(Sgd { weight_decay: 0.1, maximize: true, ..Sgd::default() }),
        Box::new(momentum.clone()),
        Box::new(Sgd { dampening: 0.3, weight_decay: 0.01, ..momentum.clone() }),
        Box::new(Sgd { nesterov: true, ..momentum.clone() }),
        Box::new(Sgd {
            nesterov: true,
            weight_decay: 0.01,
            maximize: true,
            decay: fully,
            ..momentum.clone()
        }),
        Box::new(average(false)),
        Box::new(Sgd { weight_decay: 0.1, ..average(true) }),
        Box::new(Sgd { weight_decay: 0.1, decay: Decay::Decoupled, ..inside }),
        Box::new(RmsProp::default()),
        Box::new(RmsProp { momentum: 0.9, weight_decay: 0.1, ..RmsProp::default() }),
        Box::new(RmsProp { maximize: true, ..centered.clone() }),
        Box::new(RmsProp { momentum: 0.9, weight_decay: 0.1, decay: fully, ..centered }),
        Box::new(Adagrad::default()),
        Box::new(Adagrad {
            lr_decay: 0.1,
            initial_accumulator_value: 0.1,
            weight_decay: 0.1,
            ..Adagrad::default()
        }),
        Box::new(Lion::default()),
        Box::new(Lion { weight_decay: 0.1, decay: coupled, ..Lion::default() }),
        Box::new(Adopt::default()),
        Box::new(Adopt { weight_decay: 0.1, decay: coupled, maximize: true, ..Adopt::default() }),
        Box::new(QhAdopt::default()),
        Box::new(QhAdopt { moments: moments(2), weight_decay: 0.1, ..QhAdopt::default() }),
        Box::new(QhAdopt { moments: moments(3), ..QhAdopt::default() }),
        Box::new(QhAdopt { moments: moments(4), ..QhAdopt::default() }),
        Box::new(QhAdamW::default()),
        Box::new(QhAdamW { moments: moments(2), weight_decay: 0.1, decay: coupled, ..QhAdamW::default() }),
        Box::new(QhAdamW { moments: moments(3), ..QhAdamW::default() }),
        Box::new(QhAdamW { moments: moments(4), ..QhAdamW::default() }),
        Box::new(UncorrectedAdam::default()),
        Box::new(UncorrectedAdam {
            clip: 0.5,
            weight_decay: 0.1,
            decay: coupled,
            ..UncorrectedAdam::default()
        }),
        Box::new(ScheduleFreeAdamW::default()),
        Box::new(ScheduleFreeAdamW {
            warmup_steps: 2,
            weight_decay: 0.1,
            maximize: true,
            ..schedule_free.clone()
        }),
        Box::new(ScheduleFreeAdamW { beta1: 0.5, beta2: 0.9, eps: 0.0, r: 0.75, ..schedule_free.clone() }),
        schedule_free.evaluation().unwrap(),
        Box::new(Lamb::default()),
        Box::new(Lars::default()),
    ]
}

/// Valid combinations of parameter, gradient and copy types.
pub(crate) const DTYPES: [(DType, DType, Option<DType>); 8] = [
    (DType::F32, DType::F32, None),
    (DType::F32, DType::F32, Some(DType::BF16)),
    (DType::F32, DType::BF16, None),
    (DType::F32, DType::BF16, Some(DType::BF16)),
    (DType::F32, DType::BF16, Some(DType::F16)),
    (DType::F32, DType::F16, None),
    (DType::F32, DType::F16, Some(DType::F16)),
    (DType::F64, DType::F64, None),
];

/// Types of all memory that an update touches, and its rounding.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Recipe {
    pub(crate) params: DType,
    pub(crate) remainder: bool,
    pub(crate) grads: DType,
    pub(crate) state: DType,
    pub(crate) copy: Option<DType>,
    pub(crate) rounding: Rounding,
}

impl Recipe {
    /// Returns true if this recipe's state type can represent the decay of `rule`.
    pub(crate) fn suits(&self, rule: &dyn Rule) -> bool {
        let nearest = self.state == DType::BF16 && self.rounding == Rounding::Nearest;
        !nearest || rule.state().is_empty() || rule.retention() <= NEAREST_RETENTION
    }
}

/// f32 throughout.
pub(crate) const F32_RECIPE: Recipe = Recipe {
    params: DType::F32,
    remainder: false,
    grads: DType::F32,
    state: DType::F32,
    copy: None,
    rounding: Rounding::Nearest,
};
const MOMENTS: Recipe = Recipe { state: DType::BF16, rounding: Rounding::Stochastic, ..F32_RECIPE };
const SPLIT: Recipe = Recipe { params: DType::BF16, grads: DType::BF16, remainder: true, ..F32_RECIPE };

/// Every recipe with parameters or state other than f32 or f64.
pub(crate) const RECIPES: [Recipe; 9] = [
    SPLIT,
    Recipe { grads: DType::F16, ..SPLIT },
    Recipe { grads: DType::F32, ..MOMENTS.with_params(SPLIT) },
    MOMENTS,
    Recipe { grads: DType::BF16, copy: Some(DType::BF16), ..MOMENTS },
    Recipe { grads: DType::F16, copy: Some(DType::F16), ..MOMENTS },
    Recipe { rounding: Rounding::Nearest, ..MOMENTS },
    Recipe { remainder: false, rounding: Rounding::Stochastic, ..SPLIT },
    Recipe { remainder: false, ..MOMENTS.with_params(SPLIT) },
];

impl Recipe {
    const fn with_params(self, other: Recipe) -> Recipe {
        Recipe { params: other.params, remainder: other.remainder, ..self }
    }
}

pub(crate) const LENGTHS: [usize; 11] = [0, 1, 15, 16, 17, 63, 64, 65, 65_535, 65_537, 278_011];

pub(crate) use meshstep_cases::{long, tried};

/// Returns the proptest configuration: `normal` cases, or `long` in the long run.
pub(crate) fn cases(normal: u32, long: u32) -> proptest::test_runner::Config {
    proptest::test_runner::Config::with_cases(meshstep_cases::cases(normal, long))
}

/// Returns the instruction sets to compare with the reference. Prints those skipped; `REQUIRE_AVX512=1` makes a skip a failure.
pub(crate) fn fast() -> Vec<Isa> {
    for isa in [Isa::Avx2, Isa::Avx512].into_iter().filter(|isa| !isa.is_available()) {
        println!("skipped: this machine has no {isa}");
        assert_ne!(std::env::var("REQUIRE_AVX512").as_deref(), Ok("1"), "{isa} is required");
    }
    Isa::available().filter(|&isa| isa != Isa::Reference).collect()
}

/// Small generator (xorshift64*), so that a seed determines a case.
#[derive(Clone)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Returns a number between -1 and 1.
    pub(crate) fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }

    /// Returns a number that is mostly ordinary, and sometimes extremely small, large or special.
    pub(crate) fn any(&mut self) -> f64 {
        match self.next() % 64 {
            0 => f64::NAN,
            1 => f64::INFINITY,
            2 => -0.0,
            3 => 0.0,
            4 => self.unit() * f64::from(f32::MAX),
            5 => self.unit() * 1e-40,
            6 => self.unit() * 65_520.0,
            7 => self.unit() * 6e-8,
            8 => self.unit() * 1e-300,
            _ => self.unit(),
        }
    }
}

/// Flat memory of one type.
#[derive(Clone, Debug)]
pub(crate) enum Values {
    F32(Vec<f32>),
    F64(Vec<f64>),
    BF16(Vec<bf16>),
    F16(Vec<f16>),
    U16(Vec<u16>),
}

impl Values {
    pub(crate) fn new(dtype: DType, len: usize, mut value: impl FnMut() -> f64) -> Self {
        match dtype {
            DType::F32 => Values::F32((0..len).map(|_| value() as f32).collect()),
            DType::F64 => Values::F64((0..len).map(|_| value()).collect()),
            DType::BF16 => Values::BF16((0..len).map(|_| bf16::from_f32(value() as f32)).collect()),
            DType::F16 => Values::F16((0..len).map(|_| f16::from_f32(value() as f32)).collect()),
            other => panic!("no values of {other}"),
        }
    }

    pub(crate) fn slice(&self) -> Slice<'_> {
        match self {
            Values::F32(x) => x[..].into(),
            Values::F64(x) => x[..].into(),
            Values::BF16(x) => x[..].into(),
            Values::F16(x) => x[..].into(),
            Values::U16(x) => x[..].into(),
        }
    }

    pub(crate) fn slice_mut(&mut self) -> SliceMut<'_> {
        match self {
            Values::F32(x) => (&mut x[..]).into(),
            Values::F64(x) => (&mut x[..]).into(),
            Values::BF16(x) => (&mut x[..]).into(),
            Values::F16(x) => (&mut x[..]).into(),
            Values::U16(x) => (&mut x[..]).into(),
        }
    }

    /// Returns the values as bits, with all NaN equal.
    pub(crate) fn bits(&self) -> Vec<u64> {
        let one = |nan: bool, bits: u64| if nan { u64::MAX } else { bits };
        match self {
            Values::F32(x) => x.iter().map(|x| one(x.is_nan(), x.to_bits().into())).collect(),
            Values::F64(x) => x.iter().map(|x| one(x.is_nan(), x.to_bits())).collect(),
            Values::BF16(x) => x.iter().map(|x| one(x.is_nan(), x.to_bits().into())).collect(),
            Values::F16(x) => x.iter().map(|x| one(x.is_nan(), x.to_bits().into())).collect(),
            Values::U16(x) => x.iter().map(|&x| x.into()).collect(),
        }
    }

    /// Returns the first index at which bits differ, with all NaN equal.
    pub(crate) fn first_other(&self, b: &Values) -> Option<usize> {
        macro_rules! first {
            ($a:ident, $b:ident) => {
                $a.iter().zip($b).position(|(a, b)| a.to_bits() != b.to_bits() && !(a.is_nan() && b.is_nan()))
            };
        }
        match (self, b) {
            (Values::F32(a), Values::F32(b)) => first!(a, b),
            (Values::F64(a), Values::F64(b)) => first!(a, b),
            (Values::BF16(a), Values::BF16(b)) => first!(a, b),
            (Values::F16(a), Values::F16(b)) => first!(a, b),
            (Values::U16(a), Values::U16(b)) => a.iter().zip(b).position(|(a, b)| a != b),
            _ => panic!("two types"),
        }
    }

    pub(crate) fn f64(&self) -> Vec<f64> {
        match self {
            Values::F32(x) => x.iter().map(|&x| x.into()).collect(),
            Values::F64(x) => x.clone(),
            Values::BF16(x) => x.iter().map(|&x| x.into()).collect(),
            Values::F16(x) => x.iter().map(|&x| x.into()).collect(),
            Values::U16(x) => x.iter().map(|&x| x.into()).collect(),
        }
    }
}

/// All memory that an update touches.
#[derive(Clone, Debug)]
pub(crate) struct Memory {
    pub(crate) params: Values,
    pub(crate) grads: Values,
    pub(crate) state: Vec<Values>,
    pub(crate) copy: Option<Values>,
    pub(crate) remainder: Option<Values>,
}

impl Memory {
    /// Creates random parameters, gradients, state and copy.
    pub(crate) fn random(
        rule: &dyn Rule,
        (params, grads, copy): (DType, DType, Option<DType>),
        len: usize,
        seed: u64,
    ) -> Self {
        let mut random = Random::new(seed);
        Memory {
            params: Values::new(params, len, || random.any()),
            grads: Values::new(grads, len, || random.any()),
            state: rule.state().iter().map(|_| Values::new(params, len, || random.any().abs())).collect(),
            copy: copy.map(|copy| Values::new(copy, len, || random.any())),
            remainder: None,
        }
    }

    /// Creates random memory of a recipe's types. Remainders are within half a bf16 ulp.
    pub(crate) fn of(rule: &dyn Rule, recipe: &Recipe, len: usize, seed: u64) -> Self {
        let mut memory = Memory::random(rule, (recipe.params, recipe.grads, recipe.copy), len, seed);
        let mut random = Random::new(seed + 1);
        let state = |_: &_| Values::new(recipe.state, len, || random.any().abs());
        memory.state = rule.state().iter().map(state).collect();
        let params = memory.params.f64();
        let remainder = |p: &f64| if p.is_normal() { (random.unit() * 32767.0) as i16 as u16 } else { 0 };
        memory.remainder = recipe.remainder.then(|| Values::U16(params.iter().map(remainder).collect()));
        memory
    }

    /// Updates `segments` of the elements from `offset` on.
    pub(crate) fn update(
        &mut self,
        rule: &dyn Rule,
        isa: Isa,
        offset: usize,
        segments: &[Segment],
        scalars: &Scalars,
    ) -> Result<(), Error> {
        self.flat(offset, |flat| rule.update_on(isa, flat, segments, scalars, &Queue::cpu()))
    }

    /// Calls `f` with the elements from `offset` on.
    pub(crate) fn flat<R>(&mut self, offset: usize, f: impl FnOnce(Flat<'_, '_>) -> R) -> R {
        let mut state: Vec<SliceMut<'_>> = self.state.iter_mut().map(|s| from(offset, s)).collect();
        f(Flat {
            params: from(offset, &mut self.params),
            grads: from(offset, &mut self.grads),
            state: &mut state,
            copy: self.copy.as_mut().map(|copy| from(offset, copy)),
            remainder: self.remainder.as_mut().map(|remainder| from(offset, remainder)),
        })
    }

    /// Iterates over all vectors.
    fn all(&self) -> impl Iterator<Item = &Values> {
        let fixed = [&self.params, &self.grads].into_iter();
        fixed.chain(&self.state).chain(&self.copy).chain(&self.remainder)
    }

    /// Returns all bits, vector by vector.
    pub(crate) fn bits(&self) -> Vec<Vec<u64>> {
        self.all().map(Values::bits).collect()
    }

    /// Replaces the gradients by new random ones.
    pub(crate) fn new_grads(&mut self, seed: u64) {
        let mut random = Random::new(seed);
        let slice = self.grads.slice();
        self.grads = Values::new(slice.dtype(), slice.len(), || random.any());
    }
}

fn from(offset: usize, values: &mut Values) -> SliceMut<'_> {
    let slice = values.slice_mut();
    let len = slice.len();
    slice.slice(offset..len).unwrap()
}

pub(crate) fn segment(range: Range<usize>, t: u64) -> Segment {
    Segment::new(range, t)
}

/// Describes the first difference between two memories, with all NaN equal.
pub(crate) fn difference(a: &Memory, b: &Memory) -> Option<String> {
    let name = |i: usize| ["params", "grads"].get(i).copied().unwrap_or("state, copy or remainder");
    a.all().zip(b.all()).enumerate().find_map(|(i, (a, b))| {
        let at = a.first_other(b)?;
        Some(format!("{}[{at}]: {:#x} and {:#x}", name(i), a.bits()[at], b.bits()[at]))
    })
}
