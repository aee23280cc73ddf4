//! Memory for a manifest: three times its text at most on the rank that reads it, whatever it holds, and a small part on the others.

use crate::allocator;
use crate::common::{alone, draws, long};
use meshstep_checkpoint::{self as checkpoint, CheckpointError, Error, Load, Store};
use meshstep_checkpoint_cases::Memory;
use meshstep_checkpoint_cases::fuzzed::sealed;
use meshstep_checkpoint_cases::greedy::{self, Greedy};
use meshstep_comm::loopback;
use meshstep_optim::Sgd;
use meshstep_shard::{Optimizer, Options};
use meshstep_tensor::{DType, Layout};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

const MIB: usize = 1 << 20;

/// Set if this binary runs as the child.
const CHILD: &str = "MESHSTEP_TEST_MANIFEST";

/// Returns a store whose step 1 has this manifest, and the length of the manifest.
fn store(body: &str) -> (Store, usize) {
    let text = sealed(body.as_bytes());
    let (mut memory, len) = (Memory::default(), text.len());
    memory.0.insert(Path::new("/run/step-000000000001/manifest.json").to_owned(), text.into());
    (Store::on(Arc::new(memory), "/run"), len)
}

#[test]
fn a_manifest_takes_three_times_its_text_at_most() {
    let len = if long() { 100 * MIB } else { MIB };
    let mut drawn = draws(1);
    for Greedy { shape, body, refused } in greedy::all(len).into_iter().filter(|_| drawn()) {
        let (store, len) = store(&body);
        drop(body);
        let (opened, most) = allocator::most(|| store.open(1).map(drop));
        let ratio = most as f64 / len as f64;
        println!("{shape}: {most} bytes for {len}, {ratio:.2}");
        match (opened, refused) {
            (Ok(()), None) => {}
            (Err(error), Some(part)) => {
                let text = error.to_string();
                assert!(text.contains(part) && text.len() < 5000, "{shape}: {text}");
            }
            (opened, _) => panic!("{shape}: {opened:?}"),
        }
        assert!(most < 3 * len + MIB, "{shape}: {most} bytes for {len}");
    }
}

#[test]
fn settings_within_their_limits_take_no_more_than_is_estimated() {
    for value in ["0", "\"\"", "[]", "{\"\":0}", "true"] {
        let cost = if value.starts_with('{') { 832 } else { 64 };
        let count = (32 * MIB - 4096) / cost;
        let settings = vec![value; count].join(",");
        let body = |settings: &str| {
            format!(
                r#"{{"format":1,"step":1,"mesh":"","files":[],"tensors":{{}},"settings":{{"x":[{settings}]}},"blobs":{{}}"#
            )
        };
        let (sound, len) = store(&body(&settings));
        let (opened, most) = allocator::most(|| sound.open(1));
        opened.map(drop).unwrap();
        println!("{value}: {most} bytes for {len}");
        assert!(most < 3 * len + 32 * MIB, "{value}: {most} bytes for {len}");
        let (large, _) = store(&body(&format!("{settings},{}", vec![value; 1 + 8192 / cost].join(","))));
        let error = large.open(1).map(drop).unwrap_err();
        let CheckpointError::Manifest { source, .. } = &error else { panic!("{error}") };
        let CheckpointError::Settings { what, most, found } = &**source else { panic!("{error}") };
        assert!(*most == 32 << 20 && found > most && what == "as values in memory", "{error}");
    }
    // A text that would be few values.
    let text = "x".repeat(17 * MIB);
    let body = format!(
        r#"{{"format":1,"step":1,"mesh":"","files":[],"tensors":{{}},"settings":{{"x":"{text}"}},"blobs":{{}}"#
    );
    let error = store(&body).0.open(1).map(drop).unwrap_err();
    let CheckpointError::Manifest { source, .. } = &error else { panic!("{error}") };
    let found = 17 * (1 << 20) + 8;
    let expected = CheckpointError::Settings { what: "as text".to_owned(), most: 16 << 20, found };
    assert_eq!(**source, expected);
}

/// Loads a large manifest on four ranks; does nothing in a run of tests.
#[test]
fn child() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let (ranks, len) = (4, if long() { 100_000_000 } else { 10_000_000 });
    let (store, len) = store(&greedy::tensors(len));
    let before = status("VmRSS");
    // The system counts its peak anew, if it can.
    drop(std::fs::write("/proc/self/clear_refs", "5"));
    for partial in [false, true] {
        let load = || {
            let loaded = loopback::spawn(ranks, |comm| {
                let layout = Layout::builder().param("w", &[8], DType::F32).build().unwrap();
                let mut opt =
                    Optimizer::new(comm, layout, Sgd::default(), |_, _| Ok(()), Options::default()).unwrap();
                checkpoint::load(&mut opt, &store, Load { step: Some(1), partial, ..Load::default() })
                    .map(|loaded| loaded.unexpected.len())
            });
            loaded.unwrap()
        };
        let (loaded, most) = allocator::most_of_all(load);
        for loaded in loaded {
            match loaded {
                Ok(unexpected) => assert!(partial && unexpected > 10_000, "{unexpected}"),
                Err(Error::Failed(failed)) => assert!(!partial && failed.error.to_string().contains("\"w\"")),
                Err(error) => panic!("{error}"),
            }
        }
        println!("{ranks} ranks: {most} bytes for {len}, {:.2}", most as f64 / len as f64);
        assert!(most < 3 * len, "{most} bytes for {len}");
    }
    println!("resident before: {before}; peak: {}", status("VmHWM"));
    println!("\nmeasured");
}

/// Returns a line of the process's status; the system need not have it.
fn status(line: &str) -> String {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    status.lines().find(|text| text.starts_with(line)).unwrap_or("unknown").to_owned()
}

#[test]
fn four_ranks_take_three_times_the_text_at_most() {
    let told =
        alone("manifest_memory::child", Command::new(std::env::current_exe().unwrap()).env(CHILD, "1"));
    println!("{told}");
    assert!(told.contains("\nmeasured"), "{told}");
}
