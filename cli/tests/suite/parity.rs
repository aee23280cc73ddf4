//! Exit codes of `meshstep parity`, and its error messages.

use std::path::Path;
use std::process::Command;

use safetensors::SafeTensors;

/// Returns a recorded run of AdamW in f32: 32 tensors to compare, with 248 values.
fn recorded() -> Vec<u8> {
    std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("../bench/traces/adamw_f32.safetensors"))
        .unwrap()
}

/// Returns the recorded run with 1e-4 added to `expect/3/w[9]`.
fn altered() -> Vec<u8> {
    let mut bytes = recorded();
    let tensor =
        SafeTensors::deserialize(&bytes).unwrap().tensor("expect/3/w").unwrap().data().as_ptr_range();
    let at = tensor.start.addr() - bytes.as_ptr().addr() + 4 * 9;
    let value = bytes[at..].first_chunk_mut().unwrap();
    *value = (f32::from_le_bytes(*value) + 1e-4).to_le_bytes();
    bytes
}

/// Returns the exit code, stdout and stderr.
fn parity(args: &[&str]) -> (Option<i32>, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_meshstep")).arg("parity").args(args).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

fn write(folder: &Path, name: &str, bytes: &[u8]) -> String {
    let path = folder.join(name);
    std::fs::write(&path, bytes).unwrap();
    path.display().to_string()
}

#[test]
fn the_exit_code_is_the_worst_files() {
    let folder = tempfile::tempdir().unwrap();
    let good = write(folder.path(), "good", &recorded());
    let off = write(folder.path(), "off", &altered());
    let cut = write(folder.path(), "cut", &recorded()[..3000]);

    let (code, out, err) = parity(&[&good]);
    assert_eq!((code, err.as_str(), out.lines().count()), (Some(0), "", 1), "{out}");
    assert!(out.contains("good: agrees; 32 tensors (248 values)"), "{out}");
    let (code, out, _) = parity(&[&off, &good]);
    assert_eq!((code, out.lines().count()), (Some(1), 2), "{out}");
    assert!(out.contains("off: DIFFERS in 1 values, expect/3/w[9] is "), "{out}");
    // With a wider tolerance the file agrees.
    assert_eq!(parity(&[&off, "--atol", "1e-3"]).0, Some(0));
    let (code, out, _) = parity(&[&off, &cut, &good]);
    assert_eq!((code, out.lines().count()), (Some(2), 3), "{out}");
    assert!(out.contains("cut: cannot be replayed: not a whole safetensors file"), "{out}");
    assert_eq!(parity(&["no such file"]).0, Some(2));
}

#[test]
fn what_is_asked_for_is_done_or_refused() {
    let folder = tempfile::tempdir().unwrap();
    let good = write(folder.path(), "good", &recorded());
    let out = folder.path().join("report.json").display().to_string();
    let all = "--stage 2 --ranks 3 --partition flat --bucket 16 --device cpu --rtol 2e-5 --atol 1e-7 --json";
    let args: Vec<&str> = [good.as_str()].into_iter().chain(all.split(' ')).chain([out.as_str()]).collect();
    assert_eq!(parity(&args).0, Some(0));
    let report: serde_json::Value = serde_json::from_slice(&std::fs::read(&out).unwrap()).unwrap();
    let difference = &report["files"][0]["replayed"]["difference"];
    assert_eq!((difference["tensors"].as_u64(), difference["outside"].as_u64()), (Some(32), Some(0)));
    assert!(difference["absolute"]["value"].as_f64().unwrap() < 1e-5, "{report}");
    assert!(difference["ulps"]["where"].as_str().unwrap().starts_with("expect"), "{report}");

    for (args, hint) in [
        (vec![good.as_str(), "--device", "cuda"], "does not support it"),
        (vec![&good, "--json", "/no/such/folder/report"], "--json /no/such/folder/report"),
        (vec![&good, "--rtol", "-1"], "at least 0"),
        (vec![&good, "--ranks", "0"], "from 1 to 64"),
        (vec![], "<FILE>"),
    ] {
        let (code, _, err) = parity(&args);
        assert_eq!(code, Some(2), "{args:?}");
        assert!(err.contains(hint), "{args:?}: {err}");
    }
}
