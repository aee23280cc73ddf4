//! Compares rules with plain f64 loops, in every setting.

use meshstep_cases::tried;
use safetensors::tensor::Dtype;
use serde_json::json;

use super::made::Made;
use super::*;

/// Checks every stage, on one to four ranks, with small and large buckets.
fn agrees_everywhere(what: &str, made: &Made) {
    let trace = Trace::parse(&made.bytes()).unwrap_or_else(|why| panic!("{what}: {why}"));
    for ranks in 1..=4 {
        let all = [Some(4), None].into_iter().flat_map(|b| settings().map(move |a| (b, a)));
        for (_, (bucket, asked)) in all.enumerate().filter(|(i, _)| tried(8 * (ranks - 1) + i, 1)) {
            let asked = Asked { ranks: Some(ranks), bucket, ..asked };
            let difference =
                replay_trace(&trace, asked).unwrap_or_else(|why| panic!("{what}, {asked:?}: {why}"));
            assert_eq!(difference.worst, None, "{what}, {asked:?}");
            assert_eq!(
                difference.tensors,
                made.tensors.keys().filter(|key| key.starts_with("expect")).count()
            );
        }
    }
}

#[test]
fn adamw_is_the_loop_in_both_types() {
    agrees_everywhere("f32", &Made::adamw(Dtype::F32));
    let mut made = Made::adamw(Dtype::F64);
    made.spec["tolerance"] = json!({"rtol": 1e-13, "atol": 1e-16});
    agrees_everywhere("f64", &made);
}

#[test]
fn adam_is_the_loop() {
    let optimizer = json!({"name": "adam", "beta2": 0.9, "weight_decay": 0.1, "amsgrad": true});
    let made = Made::elementwise(optimizer, Dtype::F64, &["m", "v", "vmax"], |t, g, p, [m, v, vmax]| {
        let g = g + 0.1 * *p;
        *m = 0.9 * *m + 0.1 * g;
        *v = 0.9 * *v + 0.1 * g * g;
        *vmax = vmax.max(*v);
        let (m, v) = (*m / (1.0 - 0.9f64.powf(t)), *vmax / (1.0 - 0.9f64.powf(t)));
        *p -= 0.001 * m / (v.sqrt() + 1e-8);
    });
    agrees_everywhere("adam", &made);
}

#[test]
fn sgd_is_the_loop_in_its_forms() {
    let step = |optimizer, rule: fn(f64, f64, &mut f64)| {
        Made::elementwise(optimizer, Dtype::F64, &["momentum"], move |t, g, p, [b, ..]| {
            rule(t, g, b);
            *p -= 0.1 * *b;
        })
    };
    let torch = json!({"name": "sgd", "lr": 0.1, "momentum": 0.9, "dampening": 0.5});
    let first_whole: fn(f64, f64, &mut f64) = |t, g, b| *b = 0.9 * *b + if t == 1.0 { g } else { 0.5 * g };
    agrees_everywhere("torch", &step(torch, first_whole));
    let average = json!({"name": "sgd_ema", "lr": 0.1, "beta": 0.8});
    agrees_everywhere("average", &step(average, |_, g, b| *b = 0.8 * *b + 0.2 * g));
    let inside = json!({"name": "sgd", "lr": 0.1, "momentum": 0.9, "lr_inside": true});
    let keras = Made::elementwise(inside, Dtype::F64, &["momentum"], |_, g, p, [b, ..]| {
        *b = 0.9 * *b + 0.1 * g;
        *p -= *b;
    });
    agrees_everywhere("inside", &keras);
}
