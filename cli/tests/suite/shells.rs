//! Completions as shells read them.

use std::process::Command;

#[test]
fn completions_name_every_subcommand() {
    for shell in ["bash", "zsh", "fish"] {
        let output =
            Command::new(env!("CARGO_BIN_EXE_meshstep")).args(["completions", shell]).output().unwrap();
        let script = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success());
        for command in ["arbiter", "plan", "ckpt", "parity", "completions", "inspect", "verify", "export"] {
            assert!(script.contains(command), "{shell} lacks {command}");
        }
    }
}

/// bash accepts the script and completes a subcommand.
#[test]
fn bash_completes() {
    let script = "source <($0 completions bash) && COMP_WORDS=(meshstep par) COMP_CWORD=1 && _meshstep meshstep par meshstep && echo ${COMPREPLY[@]}";
    let output = Command::new("bash").args(["-c", script, env!("CARGO_BIN_EXE_meshstep")]).output().unwrap();
    assert_eq!(
        String::from_utf8_lossy(&output.stdout).trim(),
        "parity",
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}
