//! Descriptions of state vectors against the effect of updates.

use crate::common::{Memory, Values, rules, segment};
use meshstep_optim::{Carry, Isa, Rounding, Rule, Scalars};

/// Returns state vector `slot` after an update, from `before`, of one f64 element.
fn update(rule: &dyn Rule, slot: usize, before: f64, t: u64) -> f64 {
    let values = |x: f64| Values::F64(vec![x]);
    let mut state: Vec<Values> = rule.state().iter().map(|_| values(0.75)).collect();
    state[slot] = values(before);
    let mut memory = Memory { params: values(1.5), grads: values(0.5), state, copy: None, remainder: None };
    let scalars = Scalars { lr: 0.1, grad_scale: 1.0, zero_grads: false, rounding: Rounding::Nearest };
    memory.update(rule, Isa::detect(), 0, &[segment(0..1, t)], &scalars).unwrap();
    memory.state[slot].f64()[0]
}

#[test]
fn an_update_leaves_what_the_rule_says() {
    for rule in rules() {
        for slot in 0..rule.state().len() {
            let what = format!("{rule:?}, {}", rule.state()[slot]);
            for t in [1, 2, 7] {
                let [low, high] = [0.5, 2.0].map(|before| update(&*rule, slot, before, t));
                match rule.slot(slot).left(t - 1, t) {
                    Some(left) => {
                        assert!((high - low - 1.5 * left).abs() < 1e-12, "{what}, t {t}: {low} {high}")
                    }
                    None => {
                        assert_eq!(rule.slot(slot).carry, Carry::Maximum);
                        assert!(low > 0.5 && high == 2.0, "{what}, t {t}: {low} {high}");
                    }
                }
            }
        }
    }
}

#[test]
fn after_several_updates_the_shares_are_multiplied() {
    for rule in rules() {
        for slot in (0..rule.state().len()).map(|slot| rule.slot(slot)) {
            for (then, now) in [(0, 0), (0, 1), (0, 5), (3, 8), (4, 2)] {
                let each: Option<Vec<f64>> = (then..now).map(|t| slot.left(t, t + 1)).collect();
                let product = each.map(|each| each.iter().product::<f64>());
                match (slot.left(then, now), product) {
                    (Some(left), Some(product)) => assert!((left - product).abs() < 1e-12, "{slot:?}"),
                    (left, _) => assert_eq!((left, slot.carry), (None, Carry::Maximum)),
                }
            }
        }
    }
}

#[test]
fn squares_are_those_of_which_a_root_is_taken() {
    for rule in rules() {
        for (slot, name) in rule.state().iter().enumerate() {
            let squares = ["v", "vmax", "square_avg", "sum"].contains(name);
            assert_eq!(rule.slot(slot).squares, squares, "{rule:?}, {name}");
        }
    }
}
