//! Refusals of the operating system: a limit on the size of files, a folder without permission to write, a full disk, a read-only disk.
//! This binary starts itself as a separate process for each of them.

use crate::common::{Run, alone};
use crate::failures::failed;
use crate::layouts::train;
use crate::whole::part;
use meshstep_cases::{Effort, effort};
use meshstep_checkpoint::{self as checkpoint, CheckpointError, Failed, Load, Save, Store};
use meshstep_checkpoint_cases::Sim;
use meshstep_comm::loopback;
use meshstep_shard::Stage;
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

/// Refusal that the process must find, and its folder; set if this binary runs as such a process.
const FINDS: &str = "MESHSTEP_TEST_DISK_FINDS";
const DIR: &str = "MESHSTEP_TEST_DISK";

/// User id of `nobody`.
const NOBODY: u32 = 65534;

/// Returns a run with 15000 numbers or with thirty small vectors: a rank's file is longer than the manifest, or shorter.
fn run(long: bool) -> Run {
    let lens = if long { vec![15_000, 30] } else { vec![2; 30] };
    Run { lens, ranks: 2, ..Run::default() }.stage(Stage::Zero1)
}

/// Takes the next step from `dir` and saves it as `step`; returns the error, or `None` if it was saved. An error changes nothing.
fn next_step(dir: &Path, run: &Run, step: u64) -> Option<Failed> {
    let store = Store::new(dir);
    let elsewhere = Store::on(Arc::new(Sim::new("/good")), "/good");
    let ranks = loopback::spawn(run.ranks, |comm| {
        let mut opt = run.build(comm).unwrap();
        let newest = checkpoint::load(&mut opt, &store, Load::default()).unwrap().saved.manifest().step;
        let loaded = part(&opt);
        let t = opt.steps() + 1;
        train(run, &mut opt, t..t + 1);
        let before = part(&opt);
        let told =
            checkpoint::save(&mut opt, &store, Save { step: Some(step), keep: Some(1), ..Save::default() });
        assert!(part(&opt) == before, "nothing has changed");
        let told = told.err().map(failed)?;
        // Another store takes the step, and the old checkpoint is intact.
        checkpoint::save(&mut opt, &elsewhere, Save::default()).unwrap();
        let again = checkpoint::load(&mut opt, &store, Load::default()).unwrap();
        assert_eq!(again.saved.verify().map(|_| again.saved.manifest().step), Ok(newest));
        assert!(part(&opt) == loaded, "what was saved before is as it was");
        checkpoint::load(&mut opt, &elsewhere, Load::default()).unwrap();
        assert!(part(&opt) == before, "what was saved elsewhere is whole");
        Some(told)
    });
    let ranks = ranks.unwrap();
    assert!(ranks.iter().all(|told| *told == ranks[0]), "{ranks:?}");
    let told = ranks[0].clone()?;
    let CheckpointError::Io { path, .. } = &told.error else { panic!("{told}") };
    assert!(path.starts_with(dir), "{told} names {}", dir.display());
    let names = dir.read_dir().unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let stale: Vec<String> = names.filter(|name| name.starts_with("tmp-")).collect();
    assert!(stale.is_empty(), "{stale:?} take room after {told}");
    Some(told)
}

fn kind(told: &Failed) -> ErrorKind {
    match told.error {
        CheckpointError::Io { kind, .. } => kind,
        ref other => panic!("{other}"),
    }
}

/// Runs the test in a process of its own. In a run of tests it does nothing.
#[test]
fn child() {
    let (Ok(finds), Some(dir)) = (std::env::var(FINDS), std::env::var_os(DIR)) else { return };
    let dir = Path::new(&dir);
    let told = match &*finds {
        "a long file refused" => kind(&next_step(dir, &run(true), 2).unwrap()) == ErrorKind::FileTooLarge,
        "the manifest refused" => {
            let told = next_step(dir, &run(false), 2).unwrap();
            kind(&told) == ErrorKind::FileTooLarge && told.to_string().contains("manifest.json")
        }
        "no permission" => kind(&next_step(dir, &run(true), 2).unwrap()) == ErrorKind::PermissionDenied,
        _ => mounted(dir),
    };
    assert!(told, "{finds}");
    println!("\nfound {finds}");
}

/// Returns a folder with step 1 that other users can read too.
fn saved(run: &Run) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::new(dir.path());
    let saved = loopback::spawn(run.ranks, |comm| {
        let mut opt = run.build(comm).unwrap();
        train(run, &mut opt, 1..2);
        checkpoint::save(&mut opt, &store, Save::default()).unwrap();
    });
    saved.unwrap();
    dir
}

/// Runs this binary as `child`, started by `job`.
fn finds(finds: &str, dir: &Path, mut job: Command) {
    let told = alone("disks::child", job.env(FINDS, finds).env(DIR, dir));
    assert!(told.contains(&format!("\nfound {finds}")), "{told}");
}

/// Returns a shell that runs `first` and then becomes this binary.
fn shell(first: &str) -> Command {
    let mut shell = Command::new("sh");
    shell.arg("-c").arg(format!("{first} && exec \"$@\"")).arg("sh").arg(std::env::current_exe().unwrap());
    shell
}

/// The process has a limit on the size of files. Shells count it in blocks of 512 or 1024 bytes.
#[test]
fn files_that_may_not_grow_leave_the_step_before() {
    for (what, long, blocks) in [("a long file refused", true, 40), ("the manifest refused", false, 11)] {
        let run = run(long);
        let dir = saved(&run);
        finds(what, dir.path(), shell(&format!("trap '' XFSZ && ulimit -f {blocks}")));
        assert_eq!(next_step(dir.path(), &run, 2), None);
        assert_eq!(Store::new(dir.path()).steps(), Ok(vec![2]));
    }
}

#[test]
fn a_folder_that_may_not_be_written_is_one_error_on_all_ranks() {
    let dir = saved(&run(true));
    let mode = |mode| std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(mode)).unwrap();
    mode(0o555);
    let mut job = Command::new(std::env::current_exe().unwrap());
    let probe = dir.path().join("probe");
    if std::fs::write(&probe, "").is_ok() {
        // Permissions do not stop this user; another user may be unable to enter this binary's folders.
        std::fs::remove_file(&probe).unwrap();
        job = Command::new("/proc/self/exe");
        job.uid(NOBODY).gid(NOBODY).current_dir("/");
    }
    finds("no permission", dir.path(), job);
    mode(0o755);
    assert_eq!(next_step(dir.path(), &run(true), 2), None);
}

/// If the system allows mounts of one's own: disks with few pages or few names, and a read-only disk.
#[test]
fn a_small_disk_is_full_at_every_place() {
    let dir = tempfile::tempdir().unwrap();
    let own = || {
        let mut unshare = Command::new("unshare");
        unshare.args(["-rm", "sh", "-c", "mount -t tmpfs none \"$0\" && exec \"$@\""]).arg(dir.path());
        unshare
    };
    let mut probe = own();
    if !probe.arg("true").output().is_ok_and(|ran| ran.status.success()) {
        println!(
            "skipped: no mounts of one's own; limits of files and errors of the system's are tested above"
        );
        return;
    }
    let mut job = own();
    job.arg(std::env::current_exe().unwrap());
    finds("a disk without room", dir.path(), job);
}

/// Remounts `dir` with an option; returns true on success.
fn remount(dir: &Path, option: &str) -> bool {
    let ran = Command::new("mount").args(["-o", &format!("remount,{option}")]).arg(dir).output();
    ran.unwrap().status.success()
}

/// Uses a disk in memory, with each size from that of one step to that of two, in pages in a long run, else each second one, or each fifth
/// in a tenth.
fn mounted(dir: &Path) -> bool {
    let apart = match effort() {
        Effort::Tenth => 20,
        Effort::Normal => 8,
        Effort::Long => 4,
    };
    let run = run(true);
    let first = saved(&run);
    let copied = Command::new("cp").arg("-r").arg(first.path().join(".")).arg(dir).status().unwrap();
    assert!(copied.success());
    let (mut step, mut doings) = (2, Vec::new());
    for (option, unit, most) in [("size", "k", 4000), ("nr_inodes", "", 40)] {
        let mut refused = 0;
        for size in 1..most {
            // The disk cannot become smaller than its contents.
            if (unit == "k" && size % apart > 0) || !remount(dir, &format!("{option}={size}{unit}")) {
                continue;
            }
            let Some(told) = next_step(dir, &run, step) else { break };
            assert_eq!(kind(&told), ErrorKind::StorageFull, "{told}");
            if let CheckpointError::Io { doing, .. } = told.error {
                doings.push(doing);
            }
            refused += 1;
        }
        assert!(refused > 3, "{option}");
        assert!(remount(dir, &format!("{option}={most}{unit}")));
        assert_eq!(Store::new(dir).steps(), Ok(vec![step]));
        step += 1;
    }
    assert!(["creating", "writing"].iter().all(|doing| doings.contains(doing)), "{doings:?}");
    assert!(remount(dir, "ro"));
    let told = next_step(dir, &run, step).unwrap();
    assert_eq!(kind(&told), ErrorKind::ReadOnlyFilesystem, "{told}");
    assert!(remount(dir, "rw"));
    next_step(dir, &run, step).is_none()
}
