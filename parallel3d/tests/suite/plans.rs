//! Plans of well-known models: reviewed as text, checked against published numbers, fast for many ranks.

use meshstep_optim::AdamW;
use meshstep_parallel3d::models::{Gpt2, Llama3};
use meshstep_parallel3d::{Axis, Error, Gradient, Mesh, Model, Placement, Plan};
use meshstep_shard::{Clip, Combine, Groups, Master, Memory, Options, Owners, Precision, Stage};
use meshstep_tensor::DType::{BF16, F32};
use std::path::Path;
use std::time::Instant;

/// Compares with `tests/snapshots/NAME.txt`. With `UPDATE_SNAPSHOTS=1` writes that file, for review.
fn snapshot(name: &str, text: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/snapshots").join(name).with_extension("txt");
    if std::env::var_os("UPDATE_SNAPSHOTS").is_some_and(|value| value == "1") {
        std::fs::write(&path, text).unwrap();
    }
    let reviewed = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(text == reviewed, "{} differs; UPDATE_SNAPSHOTS=1 writes it:\n{text}", path.display());
}

/// Returns options with bf16 parameters and gradients and f32 masters.
fn mixed(stage: Stage) -> Options {
    let precision = Precision { master: Master::F32, ..Precision::default() };
    Options { stage, precision, ..Options::default() }
}

fn full(stage: Stage) -> Options {
    Options { stage, ..Options::default() }
}

fn plan(mesh: &str, model: &Model, options: &Options) -> Plan {
    Plan::new(&mesh.parse().unwrap(), model, AdamW::default(), options).unwrap()
}

#[test]
fn gpt2_124m() {
    let model = Gpt2::SMALL.model(F32).build().unwrap();
    snapshot("gpt2_124m", &plan("dp=8", &model, &full(Stage::Zero1)).to_string());
}

#[test]
fn llama3_8b() {
    let model = Llama3::B8.model(BF16, 1).build().unwrap();
    let plan = plan("dp_replicate=4,dp_shard=8,tp=2", &model, &mixed(Stage::Zero2));
    snapshot("llama3_8b", &plan.to_string());
}

#[test]
fn llama3_70b() {
    let model = Llama3::B70.model(BF16, 4).build().unwrap();
    snapshot("llama3_70b", &plan("pp=4,dp=8,tp=8", &model, &mixed(Stage::Zero2)).to_string());
    let model = Llama3::B70.model(BF16, 1).build().unwrap();
    snapshot("llama3_70b_fsdp", &plan("dp=256", &model, &mixed(Stage::Zero3)).to_string());
}

#[test]
fn llama3_405b() {
    let model = Llama3::B405.model(BF16, 16).build().unwrap();
    snapshot("llama3_405b", &plan("pp=16,dp=128,tp=8", &model, &mixed(Stage::Zero1)).to_string());
}

/// One rank in detail: blocks, chunks that begin and end within rows, groups.
#[test]
fn one_rank() {
    let whole = Placement::whole();
    let model = Model::builder()
        .param("wte", &[48, 3], F32, whole.clone().cut(Axis::Tp, 0))
        .param("qkv", &[96, 3], F32, whole.clone().cut_in_blocks(Axis::Tp, 0, [48, 24, 24]))
        .param("out", &[3, 96], F32, whole.clone().cut(Axis::Tp, 1))
        .param("ln", &[70], F32, whole.gradient(Gradient::PartialSum))
        .build()
        .unwrap();
    let plan = plan("tp=2,cp=2,dp=2", &model, &Options { bucket_len: Some(200), ..full(Stage::Zero1) });
    snapshot("one_rank", &plan.rank(3).unwrap().to_string());
}

/// A model with 405 billion parameters on 16,384 ranks, with the `cp` degree of its long-context training: totals, and one rank in
/// detail.
#[test]
fn the_largest_plan_takes_less_than_a_second() {
    let begun = Instant::now();
    let model = Llama3::B405.model(BF16, 16).build().unwrap();
    for mesh in ["pp=16,dp=128,tp=8", "pp=16,dp=8,cp=16,tp=8"] {
        let begun = Instant::now();
        let plan = plan(mesh, &model, &mixed(Stage::Zero1));
        let totals = plan.totals();
        let rank = plan.rank(16_383).unwrap();
        let owned: usize = rank.holds().map(|holds| holds.owned.len()).sum();
        let took = begun.elapsed();
        assert!(owned > 0 && totals.ranks == 16_384);
        assert!(took.as_secs_f64() < 1.0, "{mesh} took {took:?}");
        // Master and moments of every element once, plus padding.
        let (elements, state) = (model.len(), totals.memory.master + totals.memory.state);
        assert!(state >= 12 * elements && state < 12 * elements * 10_001 / 10_000, "{mesh}: {totals:?}");
    }
    println!("{:?}", begun.elapsed());
}

/// Bytes per rank of Rajbhandari et al. (2020), figure 1: 7.5 billion parameters of 2 bytes, gradients of 2 bytes, and 12 bytes of master
/// and moments each, over 64 ranks. The figure includes neither buckets nor gathered units.
#[test]
fn the_zero_papers_table() {
    let layer = |model: meshstep_parallel3d::ModelBuilder, i: usize| {
        model.param(format!("layer{i}"), &[7500, 10_000], BF16, Placement::whole())
    };
    let model = (0..100).fold(Model::builder(), layer).build().unwrap();
    assert_eq!(model.len(), 7_500_000_000);
    // Stage by stage, in GB.
    let table = [(Stage::Replicated, 120.0), (Stage::Zero1, 31.4), (Stage::Zero2, 16.6), (Stage::Zero3, 1.9)];
    for (stage, gb) in table {
        let Memory { params, grads, state, master, .. } =
            plan("dp=64", &model, &mixed(stage)).totals().most_held.1;
        let bytes = (params + grads + state + master) as f64;
        assert_eq!((bytes / 1e8).round() / 10.0, gb, "{stage:?}: {bytes}");
    }
}

/// Without ZeRO, f32 parameters and Adam's two moments are three times the model's bytes. Tensor-parallel ranks divide them, except for
/// norms, which are whole on every rank.
#[test]
fn without_zero_three_times_the_model_over_tp() {
    for (tp, mesh) in [(1, "tp=1,dp=8"), (2, "tp=2,dp=4"), (4, "tp=4,cp=2"), (8, "tp=8,dp=2")] {
        let model = Llama3::B8.model(F32, 1).build().unwrap();
        let memory = plan(mesh, &model, &full(Stage::Replicated)).totals().most_held.1;
        let norms = 65 * 4096 * 4;
        let cut = model.len() * 4 - norms;
        assert_eq!(memory.params + memory.state, 3 * (cut / tp + norms), "{mesh}");
        assert_eq!(memory.state, 2 * memory.params);
    }
}

/// Whole parameters are balanced over the ranks that divide them, across families.
#[test]
fn whole_parameters_of_several_families_are_balanced_together() {
    let whole = Placement::whole();
    let model = Model::builder()
        .param("cut", &[128], F32, whole.clone().cut(Axis::Tp, 0))
        .param("partial", &[64], F32, whole.clone().gradient(Gradient::PartialSum))
        .param("same", &[128], F32, whole)
        .build()
        .unwrap();
    for owners in [Owners::SortedGreedy, Owners::RoundRobin] {
        let plan = plan("tp=2,dp=2", &model, &full(Stage::WholeParams(owners)));
        let owned = |rank| plan.rank(rank).unwrap().memory().state / 8;
        // 64 to the first rank, then 64 to the other, then 128 to the first of both.
        assert_eq!([0, 1, 2, 3].map(owned), [192, 192, 64, 64], "{owners:?}");
    }
}

/// JSON and table output have the same numbers.
#[test]
fn json_says_the_same() {
    let model = Gpt2 { vocab: 50_304, ..Gpt2::SMALL }.model(F32).build().unwrap();
    let plan = plan("tp=2,cp=2,dp=2", &model, &full(Stage::Zero2));
    let json: serde_json::Value = serde_json::from_str(&plan.json()).unwrap();
    let totals = plan.totals();
    assert_eq!(json["totals"]["memory"]["total"], totals.memory.total());
    assert_eq!(json["totals"]["most_sent"]["wire"]["reduce"], totals.most_sent.1.reduce);
    assert_eq!(json["mesh"], serde_json::json!([["dp", 2], ["cp", 2], ["tp", 2]]));
    assert_eq!(json["model"]["elements"], model.len());
    let families = json["pipeline"][0]["families"].as_array().unwrap();
    let names: Vec<&str> = families
        .iter()
        .flat_map(|family| family["buckets"].as_array().unwrap())
        .flat_map(|bucket| bucket["params"].as_array().unwrap())
        .map(|param| param["name"].as_str().unwrap())
        .collect();
    assert_eq!(names.len(), model.parameters().len());
    assert_eq!(families[1]["further"], serde_json::json!([["tp"]]));
    let rank = plan.rank(5).unwrap();
    let json: serde_json::Value = serde_json::from_str(&rank.json().unwrap()).unwrap();
    assert_eq!(json["memory"]["total"], rank.memory().total());
    assert_eq!(json["holds"].as_array().unwrap().len(), names.len());
    assert_eq!(json["sends"][0]["ranks"], serde_json::json!([1, 3, 5, 7]));
}

/// Norms are also reduced over `tp` and have buckets of their own between those of matrices. The pool holds the longest two consecutive
/// buckets of each family, in bf16; a bucket has 40 million elements unless a parameter is longer.
#[test]
fn a_backward_pass_takes_two_buckets_of_each_family() {
    let llama = Llama3::B8.model(BF16, 1).build().unwrap();
    let gpt2 = Gpt2 { vocab: 50_304, ..Gpt2::SMALL }.model(BF16).build().unwrap();
    // Half of the head, and half of the last block's down projection, which does not fit into the bucket before it.
    let matrices = 128_256 * 4096 / 2 + 14_336 * 4096 / 2;
    // All norms in one bucket, or with units one bucket for each unit; a block has two norms.
    let norms = [65 * 4096, 2 * 2 * 4096];
    // GPT-2 has at most two buckets of a family, so the pool holds everything a rank has, plus padding; with units it holds the
    // embedding's and the first block's buckets of each family.
    let gpt2_is = [
        50_304 * 768 / 2 + 12 * 3_541_632 + 843_264 + 3072,
        50_304 * 768 / 2 + 3_541_632 + 786_432 + 4608 + 2944,
    ];
    let expected = [matrices + norms[0], matrices + norms[1], gpt2_is[0], gpt2_is[1]].map(|len| 2 * len);
    let models =
        [(&llama, Stage::Zero2), (&llama, Stage::Zero3), (&gpt2, Stage::Zero2), (&gpt2, Stage::Zero3)];
    let pools = models.map(|(model, stage)| {
        // Bucket length for which two buckets of a family are not a small share.
        let options = Options { bucket_len: Some(40_000_000), ..mixed(stage) };
        let plan = plan("tp=2,dp=32", model, &options);
        let [pipeline] = plan.pipeline() else { panic!("one stage") };
        let layouts = pipeline.families().flat_map(|(_, part)| part.layout().params());
        let names: Vec<&str> = layouts.map(|param| param.name()).collect();
        let index = |name: &str| names.iter().position(|other| *other == name).unwrap();
        let backward = model.parameters().iter().rev().map(|p| index(&p.name));
        assert_eq!(pipeline.plan().pool_bytes(backward), pipeline.plan().pool_bytes([]), "{stage:?}");
        pipeline.plan().pool_bytes([])
    });
    assert_eq!(pools, expected);
}

/// A plan refuses the same input as an optimizer, before any rank starts.
#[test]
fn what_contradicts_itself_is_refused() {
    let mesh: Mesh = "tp=2,dp=2".parse().unwrap();
    let cut = Placement::whole().cut(Axis::Tp, 0);
    let model = Model::builder().param("w", &[4, 3], F32, cut).build().unwrap();
    let refused = |rules: Groups, options: Options| Plan::new(&mesh, &model, rules, &options).unwrap_err();
    let adam = || Groups::new(AdamW::default());
    let error = refused(adam().with(AdamW::default(), ["v"]), full(Stage::Zero1));
    assert!(matches!(error, Error::UnknownParam { name } if name == "v"));
    let shard = |error: Error| match error {
        Error::Shard(error) => error,
        other => panic!("{other}"),
    };
    let error = shard(refused(adam(), mixed(Stage::Zero1)));
    assert!(matches!(error, meshstep_shard::Error::UnusedPrecision { .. }), "{error}");
    let error = shard(refused(adam(), Options { clip: Clip::BeforeReduce, ..full(Stage::Zero1) }));
    assert!(matches!(error, meshstep_shard::Error::Shared { .. }), "{error}");
    let error = shard(refused(meshstep_optim::Lamb::default().into(), full(Stage::Replicated)));
    assert!(matches!(error, meshstep_shard::Error::Shared { .. }), "{error}");
    let own = Placement::whole().reduced_over(Axis::Cp);
    let own = Model::builder().param("w", &[4], F32, own).build().unwrap();
    let mean = Plan::new(&mesh, &own, AdamW::default(), &full(Stage::Zero1)).unwrap_err();
    assert!(matches!(mean, Error::Unequal { ranks: 1, data: 2, .. }), "{mean}");
    let sum = Options { combine: Combine::Sum, ..full(Stage::Zero1) };
    assert!(Plan::new(&mesh, &own, AdamW::default(), &sum).is_ok());
    let plan = plan("tp=2,dp=2", &model, &full(Stage::Zero1));
    assert!(plan.rank(4).unwrap_err().to_string().contains("rank 4 of a mesh of 4"));
    // Other pipeline stages may have no parameters.
    let empty = Plan::new(&"pp=2,dp=2".parse().unwrap(), &model, AdamW::default(), &full(Stage::Zero2));
    assert_eq!(empty.unwrap().rank(3).unwrap().holds().count(), 0);
}
