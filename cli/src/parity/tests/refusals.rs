//! Tests of rejected files and contradictory options, with the reasons.

use safetensors::tensor::Dtype;
use serde_json::{Value, json};

use super::made::Made;
use super::*;

/// Returns the reason for which a modified trace cannot be replayed.
fn refusal(spoil: impl FnOnce(&mut Made)) -> String {
    let mut made = Made::adamw(Dtype::F32);
    spoil(&mut made);
    match replay(&made.bytes(), Asked::default()) {
        Ok(difference) => panic!("the trace was replayed: {difference:?}"),
        Err(reason) => reason.to_string(),
    }
}

/// Modifications of the file, and a part of the expected reason.
type Cases = [(&'static str, fn(&mut Made))];

fn all_refused(cases: &Cases) {
    for (hint, spoil) in cases {
        let reason = refusal(spoil);
        assert!(reason.contains(hint), "{hint:?} is not in {reason:?}");
    }
}

fn values<'m>(made: &'m mut Made, name: &str) -> &'m mut Vec<f64> {
    &mut made.tensors.get_mut(name).unwrap().2
}

fn rename(made: &mut Made, from: &str, to: &str) {
    let tensor = made.tensors.remove(from).unwrap();
    made.tensors.insert(to.to_owned(), tensor);
}

#[test]
fn tensors() {
    all_refused(&[
        ("expect/3/w has NaN at 2", |made| values(made, "expect/3/w")[2] = f64::NAN),
        ("grad/1/bias has inf at 0", |made| values(made, "grad/1/bias")[0] = f64::INFINITY),
        ("param/<name>", |made| {
            made.tensors.clear();
            made.put("expect_norm/1", Dtype::F64, &[], &[1.0]);
        }),
        ("no such parameter", |made| drop(made.tensors.remove("param/w"))),
        ("\"grad/2/<name>\" is missing", |made| made.tensors.retain(|name, _| !name.starts_with("grad/2"))),
        ("nothing to compare", |made| made.tensors.retain(|name, _| !name.starts_with("expect"))),
        ("\"moment/w\"", |made| rename(made, "expect/1/w", "moment/w")),
        ("step 7 is not between 1 and 6", |made| rename(made, "expect/1/w", "expect/7/w")),
        ("step 0 is not between 1 and 6", |made| rename(made, "grad/1/w", "grad/0/w")),
        ("rank 1 is not between 0 and 0", |made| rename(made, "grad/1/w", "grad/1/1/w")),
        ("grad/1/w exists too", |made| {
            let tensor = made.tensors["grad/1/w"].clone();
            made.tensors.insert("grad/1/0/w".to_owned(), tensor);
        }),
        ("grad/1/w has the shape [5, 3] instead of [3, 5]", |made| {
            made.tensors.get_mut("grad/1/w").unwrap().1 = vec![5, 3];
        }),
        ("expect/1/w has the type f64 instead of f32", |made| {
            made.tensors.get_mut("expect/1/w").unwrap().0 = Dtype::F64
        }),
        ("has the type I64", |made| made.tensors.get_mut("grad/1/w").unwrap().0 = Dtype::I64),
        ("without leading zeros or signs: grad/1/w", |made| {
            let tensor = made.tensors["grad/2/w"].clone();
            made.tensors.insert("grad/01/w".to_owned(), tensor);
        }),
        ("it keeps m, v", |made| rename(made, "expect_state/6/w/m", "expect_state/6/w/momentum")),
        ("expect_norm/1 has the type f32 instead of f64", |made| {
            made.put("expect_norm/1", Dtype::F32, &[], &[1.0])
        }),
        ("expect_norm/1 has the shape [1] instead of []", |made| {
            made.put("expect_norm/1", Dtype::F64, &[1], &[1.0]);
        }),
        ("expect_loss/1: this replay does not produce it", |made| {
            made.put("expect_loss/1", Dtype::F64, &[], &[1.0]);
        }),
        ("weight/1\" does not belong", |made| made.put("weight/1", Dtype::F64, &[1], &[1.0])),
        ("data/A\" does not belong", |made| made.put("data/A", Dtype::F64, &[1], &[1.0])),
    ]);
}

#[test]
fn metadata() {
    all_refused(&[
        ("`version` of \"1\" but \"2\"", |made| drop(made.metadata.insert("version".into(), "2".into()))),
        ("`format` of \"meshstep-trace\"", |made| drop(made.metadata.remove("format"))),
        ("expected ident", |made| drop(made.metadata.insert("spec".into(), "no json".into()))),
    ]);
    let bytes = Made::adamw(Dtype::F32).bytes();
    for len in [0, 7, 8, 100, bytes.len() / 2, bytes.len() - 1] {
        let reason = replay(&bytes[..len], Asked::default()).unwrap_err();
        assert!(matches!(reason, Reason::NotSafetensors(_)), "{len}: {reason}");
    }
}

#[test]
fn specs() {
    fn set(made: &mut Made, field: &str, value: Value) {
        made.spec[field] = value;
    }
    fn optimizer(made: &mut Made, value: Value) {
        set(made, "optimizer", value);
    }
    all_refused(&[
        ("unknown field `clipping`", |made| set(made, "clipping", json!(1.0))),
        ("missing field `tolerance`", |made| drop(made.spec.as_object_mut().unwrap().remove("tolerance"))),
        ("steps = 0; use 1 to 1000000", |made| set(made, "steps", json!(0))),
        ("ranks = 65; use 1 to 64", |made| set(made, "ranks", json!(65))),
        ("the length of lrs = 2", |made| set(made, "lrs", json!([0.1, 0.2]))),
        ("tolerance = -1, 0", |made| set(made, "tolerance", json!({"rtol": -1.0, "atol": 0.0}))),
        ("unknown variant `max`", |made| set(made, "reduce", json!("max"))),
        ("unknown field `norm`", |made| set(made, "clip", json!({"max_norm": 1.0, "norm": 2}))),
        ("norm_type is \"infinite\"; use a number", |made| {
            set(made, "clip", json!({"max_norm": 1.0, "norm_type": "infinite"}))
        }),
        ("max_norm is out of range", |made| set(made, "clip", json!({"max_norm": 0.0}))),
        ("\"weight/1\" is missing", |made| {
            set(made, "ranks", json!(2));
            set(made, "reduce", json!("weighted"));
        }),
        ("the known rules are adam, adamw,", |made| optimizer(made, json!({"name": "adamx"}))),
        ("the known rules are adam, adamw,", |made| optimizer(made, json!({}))),
        ("adamw has no field \"beta3\"; it takes lr, beta1,", |made| {
            optimizer(made, json!({"name": "adamw", "beta3": 1}))
        }),
        ("field \"eps\" of its rule adamw: invalid type", |made| {
            optimizer(made, json!({"name": "adamw", "eps": "small"}));
        }),
        ("beta1", |made| optimizer(made, json!({"name": "adamw", "beta1": 1.5}))),
        ("needs the field \"lr_max\"", |made| {
            optimizer(made, json!({"name": "adamw", "decay": "fully_decoupled"}));
        }),
        ("lr_max", |made| optimizer(made, json!({"name": "adamw", "lr_max": 1.0}))),
        ("moments and beta1 or nu", |made| {
            optimizer(made, json!({"name": "qhadamw", "nu": 0.7, "moments": [[0.9, 0.7]]}));
        }),
        ("no field \"momentum\"", |made| set(made, "groups", json!([{"params": ["w"], "momentum": 1}]))),
        ("a group of its rule adamw has \"weight_decay\" = null; leave it out", |made| {
            set(made, "groups", json!([{"params": ["w"], "weight_decay": null}]));
        }),
        ("a group of its rule adamw has \"lr\" = null", |made| {
            set(made, "groups", json!([{"params": ["w"]}, {"params": ["bias"], "eps": 0.1, "lr": null}]));
        }),
        ("no parameter \"v\"", |made| set(made, "groups", json!([{"params": ["v"], "eps": 1e-3}]))),
        ("in two groups", |made| set(made, "groups", json!([{"params": ["w"]}, {"params": ["w"]}]))),
        ("one rule for all groups", |made| {
            set(made, "groups", json!([{"params": ["w"], "name": "adam"}]));
        }),
        ("unknown variant `quadratic`", |made| set(made, "problem", json!({"name": "quadratic"}))),
        ("for which gradients are computed", |made| set(made, "problem", json!({"name": "rosenbrock"}))),
        ("needs a problem", |made| {
            optimizer(made, json!({"name": "lbfgs"}));
            made.tensors.retain(|name, _| !name.starts_with("expect_state"));
        }),
        ("shape", |made| {
            optimizer(made, json!({"name": "muon"}));
            made.tensors.retain(|name, _| !name.starts_with("expect_state"));
        }),
    ]);
}

#[test]
fn options() {
    let replayed =
        |made: &Made, asked| replay(&made.bytes(), asked).map(|_| ()).map_err(|why| why.to_string());
    let adamw = Made::adamw(Dtype::F32);
    let mut muon = adamw.clone();
    muon.spec["optimizer"] = json!({"name": "muon"});
    muon.tensors.retain(|name, _| !name.contains("bias") && !name.starts_with("expect_state"));
    let mut two = adamw.clone();
    two.spec["ranks"] = json!(2);
    let asked = |stage, partition, ranks| Asked { stage, partition, ranks, bucket: None };
    let (flat, whole) = (Some(Partition::Flat), Some(Partition::Whole));
    for (what, made, asked, hint) in [
        ("stage 2, whole", &adamw, asked(Some(2), whole, None), "partition of stage 1 only"),
        ("stage 0, whole", &adamw, asked(Some(0), whole, None), "partition of stage 1 only"),
        ("muon, flat", &muon, asked(None, flat, None), "needs whole matrices: use --partition whole"),
        ("muon, stage 2", &muon, asked(Some(2), None, None), "use --stage 1 or 0"),
        ("three ranks of two", &two, asked(None, None, Some(3)), "its own gradients"),
    ] {
        let reason = replayed(made, asked).unwrap_err();
        assert!(reason.contains(hint), "{what}: {reason}");
    }
    for asked in [asked(None, None, None), asked(Some(1), whole, Some(3)), asked(Some(0), None, Some(2))] {
        assert_eq!(replayed(&muon, asked), Ok(()));
    }
}
