//! Files of the operating system.

use crate::crash::{load, save};
use meshstep_checkpoint::{CheckpointError, Store};
use std::os::unix::fs::symlink;
use std::process::Command;

#[test]
fn steps_are_saved_to_folders_and_loaded() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::new(dir.path());
    for step in [7, 8, 9] {
        save(&store, step, 300_000).unwrap();
        assert_eq!(load(&store, 300_000), Ok(step));
    }
    store.keep(1).unwrap();
    let mut names: Vec<String> =
        dir.path().read_dir().unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names, ["LATEST", "LOCK", "step-000000000009"]);
}

#[test]
fn what_is_no_plain_file_is_not_opened() {
    let file = "step-000000000001/rank-0.safetensors";
    let elsewhere = tempfile::tempdir().unwrap();
    for kind in ["a link", "a pipe", "a folder", "a link to the manifest", "a link for LATEST"] {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path());
        save(&store, 1, 8).unwrap();
        let name = match kind {
            "a link to the manifest" => "step-000000000001/manifest.json",
            "a link for LATEST" => "LATEST",
            _ => file,
        };
        let path = dir.path().join(name);
        let moved = elsewhere.path().join(kind);
        std::fs::rename(&path, &moved).unwrap();
        match kind {
            "a pipe" => assert!(Command::new("mkfifo").arg(&path).status().unwrap().success()),
            "a folder" => std::fs::create_dir(&path).unwrap(),
            _ => symlink(&moved, &path).unwrap(),
        }
        let error = load(&store, 8).unwrap_err();
        assert!(matches!(error, CheckpointError::Io { doing: "opening", .. }), "{kind}: {error}");
    }
}

#[test]
fn a_folder_that_is_not_there_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let gone = Store::new(dir.path().join("gone"));
    let errors = [gone.latest().map(drop).unwrap_err(), gone.begin(1).map(drop).unwrap_err()];
    assert!(matches!(errors[0], CheckpointError::Nothing { .. }));
    assert!(errors.iter().all(|error| error.to_string().contains("gone")), "{errors:?}");
}
