//! `plan` as a program: tables, JSON, files, refusals.

use std::process::{Command, Output};

use serde_json::Value;

fn plan(args: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_meshstep")).arg("plan").args(args.split(' ')).output().unwrap()
}

fn text(args: &str) -> String {
    let output = plan(args);
    assert!(output.status.success(), "{args}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn json(args: &str) -> Value {
    serde_json::from_str(&text(&format!("{args} --json"))).unwrap()
}

fn held(plan: &Value, stage: usize, category: &str) -> u64 {
    plan["stages"][stage]["held"]["by_category"][category].as_u64().unwrap()
}

/// Bytes that ZeRO's paper (Rajbhandari et al. 2020, section 5) counts for mixed precision with Adam: 16 per parameter, of which
/// stages 1, 2 and 3 divide 12, 14 and all among the ranks.
#[test]
fn mixed_precision_takes_the_bytes_of_zeros_paper() {
    let (params, ranks) = (7_500_000_000u64, 64u64);
    let plan = json("7.5e9 --ranks 64 --dtype bf16 --master f32");
    assert_eq!(plan["parameters"], params);
    for stage in 0..4 {
        let of = |category| held(&plan, stage, category);
        let shares = [
            (stage >= 3, "params", 2),
            (stage >= 2, "grads", 2),
            (stage >= 1, "master", 4),
            (stage >= 1, "state", 8),
        ];
        for (divided, category, bytes) in shares {
            let expected = params * bytes / if divided { ranks } else { 1 };
            let found = of(category);
            assert!(
                found >= expected && found < expected + expected / 100 + 32 * 64 * 64 * 8,
                "stage {stage} {category}: {found}"
            );
        }
    }
}

#[test]
fn a_table_has_a_line_for_each_stage() {
    let table = text("gpt2 --ranks 4");
    let head = "124,439,808 parameters in 148 tensors, bf16 with f32 masters, bf16 gradients \
                (assumed; see --dtype); adamw on dp=4, 4 ranks\n";
    assert!(table.starts_with(head), "{table}");
    let rows: Vec<&str> =
        table.lines().skip(2).take(5).map(|line| line.trim().split("  ").next().unwrap()).collect();
    assert_eq!(rows, ["stage", "0", "1", "2", "3"]);
    // On one rank nothing is divided and nothing is sent.
    let alone = json("gpt2 --ranks 1");
    assert!((0..4).all(|stage| alone["stages"][stage]["sent"]["total"] == 0), "{alone}");
}

/// Muon keeps one moment of hidden matrices, AdamW two of embeddings, biases and norms.
#[test]
fn muon_is_planned_beside_adamw_at_every_stage() {
    let args = "gpt2 --ranks 4 --optimizer muon";
    let planned = json(args);
    assert_eq!(planned["rule"], "adamw + muon");
    let (all, hidden) = (124_439_808u64, 12 * 12 * 768 * 768);
    let least = 4 * (2 * (all - hidden) + hidden);
    for (stage, ranks) in [(0, 1), (1, 4), (2, 4), (3, 4)] {
        let state = held(&planned, stage, "state");
        assert!((least / ranks..least / ranks * 11 / 10).contains(&state), "stage {stage}: {state}");
    }
    assert_eq!(planned["refused"].as_array().map(Vec::len), Some(0));
    // Steps of matrices travel at stage 3 alone.
    let matrices = |stage: usize| planned["stages"][stage]["sent"]["matrices"].as_u64().unwrap();
    assert!((0..3).all(|stage| matrices(stage) == 0) && matrices(3) > 0, "{planned}");
    let table = text(args);
    assert!(table.contains("adamw + muon on dp=4"), "{table}");
    let detail = text(&format!("{args} --stage 1"));
    let rules: Vec<&str> = detail.lines().filter_map(|line| line.split("  ").last()).map(str::trim).collect();
    assert!(["rule", "adamw", "muon"].iter().all(|cell| rules.contains(cell)), "{detail}");
    // Where tensor parallelism cuts matrices, they travel at every stage.
    let planned = json("llama3-8b --mesh tp=2,dp=2 --optimizer muon");
    let matrices = |stage: usize| planned["stages"][stage]["sent"]["matrices"].as_u64().unwrap();
    assert!((0..4).all(|stage| matrices(stage) > 0), "{planned}");
}

/// Without an option, models are planned as most are trained, and a file as it is.
#[test]
fn the_first_line_has_the_types() {
    for (args, types) in [
        ("1e6", "bf16 with f32 masters, bf16 gradients (assumed; see --dtype)"),
        (
            "1e6 --master remainder --grads f32",
            "bf16 with 16-bit remainders, f32 gradients (assumed; see --dtype)",
        ),
        ("1e6 --dtype f32", "f32, f32 gradients"),
        ("1e6 --master none", "f32, f32 gradients (assumed; see --dtype)"),
        ("1e6 --dtype f32 --grads bf16", "f32, bf16 gradients"),
    ] {
        let head = format!("1,000,000 parameters in 32 tensors, {types}; adamw on dp=8, 8 ranks\n");
        let table = text(args);
        assert!(table.starts_with(&head), "{args}: {table}");
        let detail = text(&format!("{args} --stage 2"));
        assert!(detail.starts_with(&format!("{types}\n")), "{args}: {detail}");
        assert_eq!(json(args)["types"], types);
    }
    assert_eq!(json("1e6")["stages"], json("1e6 --dtype bf16 --master f32")["stages"]);
}

#[test]
fn a_mesh_is_planned_in_detail() {
    let detail = text("llama3-8b --mesh dp=4,tp=2 --dtype bf16 --master remainder --stage 2");
    assert!(detail.contains("on dp=4,tp=2: 8 ranks, Zero2, adamw"), "{detail}");
    let plan = json("llama3-8b --mesh pp=2,dp=2 --dtype bf16 --stage 1");
    assert_eq!(plan["pipeline"].as_array().unwrap().len(), 2);
}

#[test]
fn only_the_header_of_a_file_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    let header = r#"{"h.0.w":{"dtype":"BF16","shape":[1000,1000],"data_offsets":[0,2000000]},
        "h.1.w":{"dtype":"BF16","shape":[1000,1000],"data_offsets":[2000000,4000000]}}"#;
    let write = |len: u64, header: &str| {
        std::fs::write(&path, [&len.to_le_bytes(), header.as_bytes()].concat()).unwrap()
    };
    // The tensors' bytes are missing.
    write(header.len() as u64, header);
    let file = path.to_str().unwrap();
    let plan = json(&format!("{file} --ranks 2"));
    assert_eq!((plan["parameters"].as_u64(), plan["tensors"].as_u64()), (Some(2_000_000), Some(2)));
    assert_eq!(plan["types"], "bf16 with f32 masters, bf16 gradients");
    assert!(held(&plan, 0, "params") >= 4_000_000 && held(&plan, 0, "params") < 4_100_000);
    // With a type, tensors that are no floats are left out.
    let mixed = r#"{"ids":{"dtype":"I64","shape":[10],"data_offsets":[0,80]},"w":{"dtype":"F32","shape":[10],"data_offsets":[80,120]}}"#;
    write(mixed.len() as u64, mixed);
    assert_eq!(json(&format!("{file} --ranks 2 --dtype bf16"))["parameters"], 10);
    for (len, header, said) in [
        (u64::MAX, header, "is it a safetensors file?"),
        (header.len() as u64 + 1, header, "ends within its header"),
        (5, "{\"a\":", "EOF"),
        (68, r#"{"ids":{"dtype":"I64","shape":[1000],"data_offsets":[0,8000]}}      "#, "--dtype leaves"),
    ] {
        write(len, header);
        let output = plan_of(file);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.contains(said), "{error}");
    }
}

fn plan_of(file: &str) -> Output {
    plan(&format!("{file} --ranks 2"))
}

#[test]
fn what_cannot_be_planned_is_refused() {
    for (args, said) in [
        ("gpt5", "no model has this name"),
        ("1.5", "whole"),
        ("gpt2 --ranks 0", "from 1 to 65536"),
        ("gpt2 --mesh pp=2,dp=2", "leave out pp"),
        ("gpt2 --dtype bf16 --master none", "stage 0 cannot be planned: parameter"),
        ("gpt2 --mesh dp=2 --ranks 2", "cannot be used with"),
        ("7e9 --mesh dp=2,tp=4", "divided along tp"),
        ("gpt2 --mesh dp=1000000000000", "plan at most 65536"),
    ] {
        let output = plan(args);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(2) && error.contains(said), "{args}: {error}");
        assert!(output.stdout.is_empty());
    }
}
