//! Tests of the mapping from specs to rules: every name, every field, every default.

use std::fmt::Debug;

use meshstep_optim::{
    Adagrad, Adam, AdamW, Adjust, Adopt, Blocks, Decay, Lamb, Lars, Lbfgs, LineSearch, Lion, Moments,
    Momentum, Muon, QhAdamW, QhAdopt, RmsProp, ScheduleFreeAdamW, Sgd,
};
use serde_json::{Value, json};

use super::super::rule::{Recipe, recipe};
use super::super::spec::Spec;

fn read(optimizer: Value) -> Recipe {
    let spec = json!({"optimizer": optimizer, "steps": 1, "tolerance": {"rtol": 0.0, "atol": 0.0}});
    recipe(&Spec::parse(&spec.to_string()).unwrap()).unwrap_or_else(|why| panic!("{optimizer}: {why}"))
}

/// Checks that `optimizer` is read as `rule` with the learning rate `rate`.
fn is(optimizer: Value, rule: &impl Debug, rate: f64) {
    let Recipe::Steps { groups, lr, .. } = read(optimizer.clone()) else { panic!("not steps: {optimizer}") };
    let (got, wanted) = (format!("{groups:?}"), format!("rule: {rule:?},"));
    assert!(got.contains(&wanted), "{optimizer} is {got} and not {wanted}");
    assert_eq!(lr, rate, "{optimizer}");
}

#[test]
fn defaults_are_the_rules_own_and_pytorchs_rates() {
    is(json!({"name": "adam"}), &Adam::default(), 1e-3);
    is(json!({"name": "adamw"}), &AdamW::default(), 1e-3);
    is(json!({"name": "sgd"}), &Sgd::default(), 1e-3);
    is(json!({"name": "rmsprop"}), &RmsProp::default(), 1e-2);
    is(json!({"name": "adagrad"}), &Adagrad::default(), 1e-2);
    is(json!({"name": "lion"}), &Lion::default(), 1e-4);
    is(json!({"name": "adopt"}), &Adopt::default(), 1e-3);
    is(json!({"name": "qhadamw"}), &QhAdamW::default(), 1e-3);
    is(json!({"name": "qhadopt"}), &QhAdopt::default(), 1e-3);
    is(json!({"name": "schedulefree_adamw"}), &ScheduleFreeAdamW::default(), 2.5e-3);
    is(json!({"name": "lamb"}), &Lamb::default(), 1e-3);
    is(json!({"name": "lars"}), &Lars::default(), 1e-3);
    is(json!({"name": "muon"}), &Muon::default(), 1e-3);
    let ema = Sgd { momentum: 0.9, form: Momentum::Average { debias: false }, ..Sgd::default() };
    is(json!({"name": "sgd_ema", "lr": null, "beta": null}), &ema, 1e-3);
    assert!(matches!(read(json!({"name": "lbfgs"})), Recipe::Lbfgs(rule) if rule == Lbfgs::default()));
}

#[test]
fn every_field_arrives_in_adaptive_rules() {
    let adam = json!({"name": "adam", "lr": 0.2, "beta1": 0.81, "beta2": 0.82, "eps": 0.83, "weight_decay": 0.84,
        "amsgrad": true, "maximize": true, "decay": "decoupled"});
    let (beta1, beta2, eps, weight_decay, maximize) = (0.81, 0.82, 0.83, 0.84, true);
    let rule = Adam { beta1, beta2, eps, weight_decay, maximize, amsgrad: true, decay: Decay::Decoupled };
    is(adam.clone(), &rule, 0.2);
    let mut adamw = adam.clone();
    adamw["name"] = json!("adamw");
    adamw["decay"] = json!("fully_decoupled");
    adamw["lr_max"] = json!(0.3);
    let decay = Decay::FullyDecoupled { lr_max: 0.3 };
    is(adamw, &AdamW { beta1, beta2, eps, weight_decay, maximize, amsgrad: true, decay }, 0.2);
    let mut adopt = adam.clone();
    adopt.as_object_mut().unwrap().remove("amsgrad");
    adopt["decay"] = json!("coupled");
    adopt["name"] = json!("adopt");
    let decay = Decay::Coupled;
    is(adopt.clone(), &Adopt { beta1, beta2, eps, weight_decay, maximize, decay }, 0.2);
    let mut lion = adopt.clone();
    lion["name"] = json!("lion");
    lion.as_object_mut().unwrap().remove("eps");
    is(lion, &Lion { beta1, beta2, weight_decay, maximize, decay }, 0.2);
    let mut lamb = adopt.clone();
    lamb["name"] = json!("lamb");
    lamb.as_object_mut().unwrap().remove("decay");
    is(lamb, &Lamb { beta1, beta2, eps, weight_decay, maximize }, 0.2);
    adopt["nu"] = json!(0.6);
    adopt["name"] = json!("qhadamw");
    let moments = Moments::one(0.81, 0.6);
    is(adopt.clone(), &QhAdamW { moments, beta2, eps, weight_decay, decay, maximize }, 0.2);
    adopt["name"] = json!("qhadopt");
    is(adopt.clone(), &QhAdopt { moments, beta2, eps, weight_decay, decay, maximize }, 0.2);
    let moments = Moments::new(&[(0.7, 0.1), (0.8, 0.2)]).unwrap();
    let two = json!({"name": "qhadamw", "moments": [[0.7, 0.1], [0.8, 0.2]]});
    is(two, &QhAdamW { moments, ..QhAdamW::default() }, 1e-3);
}

#[test]
fn muon_has_variants_by_name_and_blocks() {
    let muon = |fields: Value| {
        let mut optimizer = json!({"name": "muon"});
        optimizer.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        optimizer
    };
    is(muon(json!({"variant": "torch"})), &Muon::default(), 1e-3);
    is(muon(json!({"variant": "keller_jordan", "lr": 0.02})), &Muon::keller_jordan(), 0.02);
    is(muon(json!({"variant": "moonshot"})), &Muon::moonshot(), 1e-3);
    let moonshot = json!({"variant": "moonshot", "weight_decay": 0.2, "add_eps": false, "maximize": true});
    let rule = Muon { weight_decay: 0.2, add_eps: false, maximize: true, ..Muon::moonshot() };
    is(muon(moonshot), &rule, 1e-3);
    let summed = Muon { decaying_sum: true, blocks: Blocks::Rows(3), ..Muon::default() };
    is(muon(json!({"decaying_sum": true, "blocks": 3})), &summed, 1e-3);
    is(muon(json!({"blocks": "batch"})), &Muon { blocks: Blocks::Batch, ..Muon::default() }, 1e-3);
}

#[test]
fn every_field_arrives_in_the_other_rules() {
    let rmsprop = json!({"name": "rmsprop", "alpha": 0.7, "eps": 0.1, "momentum": 0.2, "centered": true,
        "weight_decay": 0.3, "maximize": true});
    let rule = RmsProp {
        alpha: 0.7,
        eps: 0.1,
        momentum: 0.2,
        centered: true,
        weight_decay: 0.3,
        ..RmsProp::default()
    };
    is(rmsprop, &RmsProp { maximize: true, ..rule }, 1e-2);
    let adagrad = json!({"name": "adagrad", "lr_decay": 0.1, "eps": 0.2, "initial_accumulator_value": 0.3,
        "weight_decay": 0.4});
    let rule = Adagrad { lr_decay: 0.1, eps: 0.2, initial_accumulator_value: 0.3, ..Adagrad::default() };
    is(adagrad, &Adagrad { weight_decay: 0.4, ..rule }, 1e-2);
    let sgd = json!({"name": "sgd", "momentum": 0.8, "nesterov": true, "weight_decay": 0.1});
    is(sgd, &Sgd { momentum: 0.8, nesterov: true, weight_decay: 0.1, ..Sgd::default() }, 1e-3);
    let dampened = json!({"name": "sgd", "momentum": 0.8, "dampening": 0.5, "maximize": true});
    is(dampened, &Sgd { momentum: 0.8, dampening: 0.5, maximize: true, ..Sgd::default() }, 1e-3);
    let inside = json!({"name": "sgd", "momentum": 0.8, "lr_inside": true});
    is(inside, &Sgd { momentum: 0.8, form: Momentum::LrInside, ..Sgd::default() }, 1e-3);
    let average =
        json!({"name": "sgd_ema", "beta": 0.8, "debias": true, "weight_decay": 0.1, "decay": "decoupled"});
    let form = Momentum::Average { debias: true };
    let rule = Sgd { momentum: 0.8, form, weight_decay: 0.1, decay: Decay::Decoupled, ..Sgd::default() };
    is(average, &rule, 1e-3);
    let lars = json!({"name": "lars", "momentum": 0.8, "weight_decay": 0.1, "trust_coefficient": 0.2});
    let rule = Lars { momentum: 0.8, weight_decay: 0.1, trust_coefficient: 0.2, ..Lars::default() };
    is(lars, &rule, 1e-3);
    let free = json!({"name": "schedulefree_adamw", "lr": 0.1, "beta1": 0.8, "beta2": 0.9, "eps": 0.1, "warmup_steps": 7,
        "r": 0.5, "weight_lr_power": 1.5, "weight_decay": 0.2, "maximize": true});
    let rule = ScheduleFreeAdamW {
        beta1: 0.8,
        beta2: 0.9,
        eps: 0.1,
        warmup_steps: 7,
        ..ScheduleFreeAdamW::default()
    };
    is(
        free,
        &ScheduleFreeAdamW { r: 0.5, weight_lr_power: 1.5, weight_decay: 0.2, maximize: true, ..rule },
        0.1,
    );
    let muon = json!({"name": "muon", "momentum": 0.8, "nesterov": false, "weight_decay": 0.2, "ns_steps": 3,
        "ns_coefficients": [3.0, -4.0, 2.0], "eps": 0.1, "adjust_lr_fn": "match_rms_adamw"});
    let rule = Muon { momentum: 0.8, nesterov: false, weight_decay: 0.2, ns_steps: 3, ..Muon::default() };
    let rule = Muon { ns_coefficients: [3.0, -4.0, 2.0], eps: 0.1, adjust: Adjust::MatchRmsAdamW, ..rule };
    is(muon, &rule, 1e-3);
    let lbfgs = json!({"name": "lbfgs", "lr": 0.5, "max_iter": 3, "max_eval": 9, "tolerance_grad": 0.1,
        "tolerance_change": 0.2, "history_len": 7, "line_search": "strong_wolfe"});
    let rule = Lbfgs { lr: 0.5, max_iter: 3, max_eval: Some(9), tolerance_grad: 0.1, ..Lbfgs::default() };
    let rule = Lbfgs { tolerance_change: 0.2, history_len: 7, line_search: LineSearch::StrongWolfe, ..rule };
    assert!(matches!(read(lbfgs), Recipe::Lbfgs(read) if read == rule));
}

#[test]
fn rates_that_the_average_would_not_follow_are_refused() {
    let read = |lrs: &[f64], warmup_steps: u64| {
        let optimizer = json!({"name": "schedulefree_adamw", "warmup_steps": warmup_steps});
        let tolerance = json!({"rtol": 0.0, "atol": 0.0});
        let spec = json!({"optimizer": optimizer, "steps": lrs.len(), "lrs": lrs, "tolerance": tolerance});
        recipe(&Spec::parse(&spec.to_string()).unwrap())
    };
    for (lrs, warmup_steps) in [(&[0.1, 0.1, 0.05][..], 0), (&[0.1, 0.1, 0.05], 2), (&[0.1, 0.02, 0.05], 0)] {
        assert!(read(lrs, warmup_steps).is_ok(), "{lrs:?}, {warmup_steps}");
    }
    for (lrs, warmup_steps) in [(&[0.1, 0.2][..], 0), (&[0.1, 0.05, 0.11], 0), (&[0.1, 0.1, 0.05], 3)] {
        let why = read(lrs, warmup_steps).unwrap_err().to_string();
        assert!(why.contains("weighs updates by warmup_steps"), "{why}");
    }
}
