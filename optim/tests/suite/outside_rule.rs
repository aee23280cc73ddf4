//! A rule outside the crate, written with its public helpers: the bits of the built-in rule under every recipe.

use crate::common::{DTYPES, Memory, RECIPES, Recipe, difference};
use meshstep_optim::elementwise::{ElementRule, Real, Step, update_elements};
use meshstep_optim::{
    AdamW, Error, Flat, Isa, Rounding, Rule, Scalars, Segment, StateSlot, power, remainder,
};
use meshstep_tensor::{DType, Queue, bf16};

/// AdamW with decoupled decay, again.
#[derive(Clone, Debug)]
struct Outside(AdamW);

#[derive(Clone, Copy)]
struct Constants<T> {
    scale: T,
    lw: T,
    w1: T,
    b2: T,
    w2: T,
    bc2s: T,
    eps: T,
    step: T,
}

impl<T: Real> Step<T, 2> for Constants<T> {
    #[inline(always)]
    fn step(&self, p: T, g: T, [m, v]: [T; 2]) -> (T, [T; 2]) {
        let c = self;
        let g1 = g * c.scale;
        let m = c.w1.fma(g1 - m, m);
        let v = (c.w2 * g1).fma(g1, c.b2 * v);
        let den = v.root() / c.bc2s + c.eps;
        (p - c.lw.fma(p, (c.step * m) / den), [m, v])
    }
}

impl ElementRule<2> for Outside {
    type Step<T: Real> = Constants<T>;

    fn constants<T: Real>(&self, scalars: &Scalars, &Segment { t, .. }: &Segment) -> Constants<T> {
        let AdamW { beta1, beta2, eps, weight_decay, .. } = self.0;
        Constants {
            scale: T::from_f64(scalars.grad_scale),
            lw: T::from_f64(scalars.lr * weight_decay),
            w1: T::from_f64(1.0 - beta1),
            b2: T::from_f64(beta2),
            w2: T::from_f64(1.0 - beta2),
            bc2s: T::from_f64((1.0 - power(beta2, t)).sqrt()),
            eps: T::from_f64(eps),
            step: T::from_f64(scalars.lr / (1.0 - power(beta1, t))),
        }
    }
}

impl Rule for Outside {
    fn name(&self) -> &'static str {
        "outside"
    }

    fn state(&self) -> &'static [&'static str] {
        self.0.state()
    }

    fn check(&self) -> Result<(), Error> {
        self.0.check()
    }

    fn each_hyperparameter(&self, each: &mut dyn FnMut(&'static str, f64)) {
        self.0.each_hyperparameter(each);
    }

    fn slot(&self, slot: usize) -> StateSlot {
        self.0.slot(slot)
    }

    fn update_on(
        &self,
        isa: Isa,
        flat: Flat<'_, '_>,
        segments: &[Segment],
        scalars: &Scalars,
        queue: &Queue,
    ) -> Result<(), Error> {
        update_elements(self, isa, flat, segments, scalars, queue)
    }
}

/// Every recipe, and every combination of wide parameters.
fn recipes() -> Vec<Recipe> {
    let wide = DTYPES.map(|(params, grads, copy)| {
        let (state, rounding) = (params, Rounding::Nearest);
        Recipe { params, remainder: false, grads, state, copy, rounding }
    });
    RECIPES.into_iter().chain(wide).collect()
}

#[test]
fn a_rule_outside_has_the_bits_of_the_built_in_one() {
    // Retained little enough for bf16 moments rounded to nearest.
    let rule = AdamW { beta2: 0.99, weight_decay: 0.1, ..AdamW::default() };
    for recipe in recipes() {
        for (len, isa) in
            [0, 1, 17, 700, 140_001].into_iter().flat_map(|len| Isa::available().map(move |isa| (len, isa)))
        {
            let mut built_in = Memory::of(&rule, &recipe, len, len as u64 + 3);
            let mut outside = built_in.clone();
            for t in 1..4 {
                let scalars =
                    Scalars { lr: 0.01, grad_scale: 0.75, zero_grads: t == 3, rounding: recipe.rounding };
                let segments = [Segment { key: 7, first: 5, ..Segment::new(0..len, t) }];
                let rules: [(&dyn Rule, &mut Memory); 2] =
                    [(&rule, &mut built_in), (&Outside(rule.clone()), &mut outside)];
                for (rule, memory) in rules {
                    memory.new_grads(t);
                    memory.update(rule, isa, 0, &segments, &scalars).unwrap();
                }
            }
            assert_eq!(difference(&outside, &built_in), None, "{recipe:?} on {isa}: {len} elements");
        }
    }
}

#[test]
fn recipes_that_lose_steps_are_refused_for_a_rule_outside_too() {
    let rule = Outside(AdamW::default());
    let recipe = Recipe { rounding: Rounding::Nearest, state: DType::BF16, ..RECIPES[0] };
    let mut memory = Memory::of(&rule, &recipe, 8, 1);
    let told = memory.update(&rule, Isa::Reference, 0, &[Segment::new(0..8, 1)], &Scalars::default());
    assert!(matches!(told, Err(Error::NearestState { rule: "outside", .. })), "{told:?}");
    let amsgrad = Outside(AdamW { amsgrad: true, ..AdamW::default() });
    let mut memory = Memory::of(&amsgrad, &RECIPES[0], 8, 1);
    let told = memory.update(&amsgrad, Isa::Reference, 0, &[Segment::new(0..8, 1)], &Scalars::default());
    assert!(matches!(told, Err(Error::StateCount { given: 2, .. })), "{told:?}");
}

#[test]
fn masters_are_joined_from_parameters_and_remainders() {
    let values = [1.001f32, -std::f32::consts::PI, 0.0, -0.0, 1e-40, 65_504.0];
    let (params, remainders): (Vec<bf16>, Vec<u16>) = values.into_iter().map(remainder::split).unzip();
    assert!(params.iter().zip(values).all(|(p, x)| p.to_bits() == bf16::from_f32(x).to_bits()));
    let mut masters = [9f32; 6];
    remainder::join_all(&params, &remainders, &mut masters).unwrap();
    assert_eq!(masters.map(f32::to_bits), values.map(f32::to_bits));
    let told = remainder::join_all(&params, &remainders[1..], &mut masters).unwrap_err();
    assert!(matches!(told, Error::Len { what: "remainder", given: 5, expected: 6 }), "{told}");
    let told = remainder::join_all(&values, &remainders, &mut masters).unwrap_err();
    assert!(matches!(told, Error::DType { what: "params", given: DType::F32, .. }), "{told}");
}
