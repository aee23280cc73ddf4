//! `meshstep-bench bench --device cuda` on a GPU, or on the stand-in for its driver.

use std::process::Command;

/// Returns the exit code, stdout and stderr.
fn bench(args: &[&str]) -> (Option<i32>, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_meshstep-bench")).arg("bench").args(args).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

#[test]
fn every_case_is_measured_and_reported() {
    if let Err(missing) = meshstep_tensor::cuda::probe() {
        assert!(std::env::var_os("REQUIRE_GPU").is_none(), "REQUIRE_GPU is set: {missing}");
        println!("skipped: {missing}");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().display().to_string();
    let (code, said, wrong) = bench(&["--device", "cuda", "--quick", "--out", &out]);
    assert_eq!(code, Some(0), "{said}{wrong}");
    let report = std::fs::read(folder.path().join("report.json")).unwrap();
    let report: serde_json::Value = serde_json::from_slice(&report).unwrap();
    assert!(report["machine"]["gpu"].as_str().unwrap().contains("CUDA"), "{}", report["machine"]);
    let sections = report["sections"].as_array().unwrap();
    let rows = sections[0]["tables"][0]["rows"].as_array().unwrap();
    let names: Vec<_> = rows.iter().filter_map(|row| row["name"].as_str()).collect();
    assert_eq!((sections.len(), names.len()), (1, 31), "{names:?}");
    assert!(names.contains(&"step f32") && names.contains(&"lbfgs direction, history of 10"), "{names:?}");
    // A report of the same GPU can be a baseline, but not one of the CPU.
    let baseline = folder.path().join("report.json").display().to_string();
    let (code, said, wrong) = bench(&["--device", "cuda", "--quick", "--out", &out, "--baseline", &baseline]);
    assert!(code.is_some_and(|code| code < 2) && said.contains("== baseline =="), "{said}{wrong}");
    let (code, _, wrong) = bench(&["comm", "--quick", "--out", &out, "--baseline", &baseline]);
    assert!(code == Some(2) && wrong.contains("GPU: none here"), "{wrong}");
}

#[test]
fn what_is_measured_on_the_cpu_is_refused() {
    let (code, said, wrong) = bench(&["comm", "--device", "cuda"]);
    assert!(code == Some(2) && wrong.contains("comm is measured on the CPU"), "{said}{wrong}");
}
