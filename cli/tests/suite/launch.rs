//! `launch` with ranks that fail, hang, ignore signals and print parts of lines: exit codes, messages, whole lines, no orphans.

use crate::launched::{marked, no_orphan, run, start};
use std::os::unix::process::ExitStatusExt;
use std::time::{Duration, Instant};

/// Time from the SIGTERM after a failure to SIGKILL.
const GRACE: Duration = Duration::from_secs(5);

#[test]
fn ranks_get_torchruns_variables_and_the_tokens_of_one_job() {
    let script = "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR ${#MESHSTEP_TOKEN} file=$MESHSTEP_TOKEN_FILE
                  echo all $MESHSTEP_TOKEN $MASTER_PORT $MESHSTEP_PORT $TORCHELASTIC_RUN_ID";
    let finished = run(3, script);
    assert!(finished.status.success(), "{}", finished.stderr);
    assert_eq!(finished.stderr, "");
    for rank in 0..3 {
        let expected = format!("[{rank}] {rank} 3 {rank} 3 127.0.0.1 64 file=");
        assert!(finished.stdout.contains(&expected), "{:?}", finished.stdout);
    }
    let shared = finished.stdout.iter().filter_map(|line| line.split_once("] all ")).map(|(_, rest)| rest);
    let shared: Vec<&str> = shared.collect();
    assert!(shared.len() == 3 && shared.iter().all(|line| *line == shared[0]), "{shared:?}");
    assert!(!run(1, "echo all $MESHSTEP_TOKEN $MASTER_PORT").stdout[0].contains(&shared[0][..64]));
}

#[test]
fn lines_of_ranks_that_print_at_once_stay_whole() {
    let script = "i=0; while [ $i -lt 60 ]; do printf a; printf \"b$RANK\"; echo \"-$i\"; i=$((i+1)); done; printf last";
    let finished = run(4, script);
    assert!(finished.status.success(), "{}", finished.stderr);
    assert_eq!(finished.stdout.len(), 4 * 61);
    for rank in 0..4 {
        let prefix = format!("[{rank}] ");
        let own = finished.stdout.iter().filter_map(|line| line.strip_prefix(&prefix));
        let expected: Vec<String> =
            (0..60).map(|i| format!("ab{rank}-{i}")).chain(["last".to_owned()]).collect();
        assert_eq!(own.collect::<Vec<_>>(), expected);
    }
}

#[test]
fn stderr_stays_stderr() {
    let finished = run(2, "echo out; echo err >&2");
    assert_eq!(finished.stdout.len(), 2);
    let mut lines: Vec<&str> = finished.stderr.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["[0] err", "[1] err"]);
}

#[test]
fn the_first_failure_ends_all_and_is_the_exit_code() {
    let begin = Instant::now();
    // The others have children of their own.
    let finished = run(3, "if [ $RANK = 1 ]; then sleep 0.2; exit 7; fi; sleep 600; echo never");
    assert_eq!(finished.status.code(), Some(7), "{}", finished.stderr);
    assert!(finished.stderr.starts_with("launch: rank 1 exited with 7\n"), "{}", finished.stderr);
    assert!(finished.stderr.contains("after that rank 2 was ended by signal 15 (SIGTERM)"));
    assert!(begin.elapsed() < GRACE && finished.stdout.is_empty());
    no_orphan(&finished.mark);
}

#[test]
fn ranks_that_fail_at_once_all_say_why() {
    let finished = run(3, "sleep 0.0$RANK; echo rank $RANK fails >&2; exit $((3 + RANK))");
    for rank in 0..3 {
        let said = format!("[{rank}] rank {rank} fails\n");
        assert!(finished.stderr.contains(&said), "{}", finished.stderr);
    }
    let code = finished.status.code().unwrap();
    assert!(
        (3..6).contains(&code)
            && finished.stderr.contains(&format!("launch: rank {} exited with {code}\n", code - 3))
    );
}

#[test]
fn a_killed_rank_is_a_failure_of_its_signal() {
    let finished = run(3, "if [ $RANK = 2 ]; then kill -9 $$; fi; exec sleep 600");
    assert_eq!(finished.status.code(), Some(128 + 9), "{}", finished.stderr);
    assert!(finished.stderr.starts_with("launch: rank 2 was ended by signal 9 (SIGKILL)\n"));
    no_orphan(&finished.mark);
}

#[test]
fn ranks_that_ignore_or_cannot_see_the_signal_are_killed_after_the_grace() {
    let begin = Instant::now();
    let script = "case $RANK in
        0) sleep 0.2; exit 3;;
        1) trap '' TERM; while :; do sleep 1; done;;
        2) kill -STOP $$;;
    esac";
    let finished = run(3, script);
    assert_eq!(finished.status.code(), Some(3), "{}", finished.stderr);
    for rank in [1, 2] {
        let expected = format!("after that rank {rank} was ended by signal 9 (SIGKILL)");
        assert!(finished.stderr.contains(&expected), "{}", finished.stderr);
    }
    assert!(begin.elapsed() >= GRACE, "{:?}", begin.elapsed());
    no_orphan(&finished.mark);
}

#[test]
fn children_of_ranks_that_end_well_do_not_stay() {
    let finished = run(2, "sleep 600 & echo started");
    assert!(finished.status.success() && finished.stdout.len() == 2, "{}", finished.stderr);
    no_orphan(&finished.mark);
}

#[test]
fn ctrl_c_goes_to_every_rank_once() {
    let script = "trap 'echo interrupted; exit 4' INT; echo ready; while :; do sleep 0.05; done";
    let mut launched = start(3, script);
    launched.all_say(3, "ready");
    launched.signal("-INT");
    let finished = launched.finish();
    let count = finished.stdout.iter().filter(|line| line.ends_with("interrupted")).count();
    assert_eq!(count, 3, "{:?}", finished.stdout);
    assert_eq!(finished.status.code(), Some(4), "{}", finished.stderr);
    no_orphan(&finished.mark);
    let mut well = start(3, "trap 'echo saved; exit 0' INT; echo ready; while :; do sleep 0.05; done");
    well.all_say(3, "ready");
    well.signal("-INT");
    let finished = well.finish();
    assert_eq!((finished.status.code(), finished.stdout.len()), (Some(0), 3), "{}", finished.stderr);
}

#[test]
fn a_second_ctrl_c_kills() {
    let script = "trap 'echo no' INT; trap '' TERM; echo ready; while :; do sleep 0.05; done";
    let mut launched = start(2, script);
    launched.all_say(2, "ready");
    launched.signal("-INT");
    launched.all_say(2, "no");
    let begin = Instant::now();
    launched.signal("-INT");
    let finished = launched.finish();
    assert_eq!(finished.status.code(), Some(128 + 2), "{}", finished.stderr);
    assert!(begin.elapsed() < GRACE, "{:?}", begin.elapsed());
    assert!(finished.stderr.starts_with("launch: signal 2 (SIGINT) ended the launch\n"));
    no_orphan(&finished.mark);
}

#[test]
fn a_terminated_launcher_ends_its_ranks() {
    let mut launched = start(2, "echo ready; sleep 600");
    launched.all_say(2, "ready");
    launched.signal("-TERM");
    let finished = launched.finish();
    assert_eq!(finished.status.code(), Some(128 + 15), "{}", finished.stderr);
    no_orphan(&finished.mark);
}

/// Rank 0 ends at once and rank 1 saves for longer than a failure would leave it.
#[test]
fn a_schedulers_signal_goes_to_every_rank_and_leaves_them_the_time_to_save() {
    let script = "save() { trap '' TERM USR1; [ $RANK = 0 ] || sleep 1.5; echo saved; exit 143; }
        trap save TERM USR1; echo ready; while :; do sleep 0.05; done";
    for signals in [&["-TERM"][..], &["-USR1"], &["-USR1", "-TERM", "-TERM"]] {
        let mut launched = start(2, script);
        launched.all_say(2, "ready");
        signals.iter().for_each(|signal| launched.signal(signal));
        let finished = launched.finish();
        let saved = finished.stdout.iter().filter(|line| line.ends_with("saved")).count();
        assert_eq!((finished.status.code(), saved), (Some(143), 2), "{signals:?}: {}", finished.stderr);
        no_orphan(&finished.mark);
    }
}

#[test]
fn ranks_that_end_on_request_without_a_signal_to_the_launcher_are_not_hurried() {
    let finished = run(2, "trap 'echo hurried' TERM; [ $RANK = 0 ] || sleep 1.5; exit 143");
    assert_eq!(finished.status.code(), Some(143), "{}", finished.stderr);
    assert!(finished.stdout.is_empty(), "{:?}", finished.stdout);
    assert!(
        finished.stderr.starts_with("launch: rank 0 ended on request, with 143\n"),
        "{}",
        finished.stderr
    );
}

#[test]
fn a_launcher_that_is_killed_leaves_no_rank() {
    let mut launched = start(4, "trap '' TERM INT HUP; echo ready; exec sleep 600");
    launched.all_say(4, "ready");
    assert_eq!(marked(launched.mark(), Some(launched.id())).len(), 4);
    launched.signal("-KILL");
    let mark = launched.mark().to_owned();
    assert_eq!(launched.finish().status.signal(), Some(9));
    no_orphan(&mark);
}

/// A script in place of mpirun, so that the test needs no MPI.
#[test]
fn mpirun_gets_the_program_and_its_exit_code_is_passed_on() {
    use std::os::unix::fs::PermissionsExt;

    let folder = std::env::temp_dir().join(format!("launch-test-mpirun-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let script = folder.join("mpirun");
    std::fs::write(&script, "#!/bin/sh\necho mpirun $* rank=$RANK\nexit 6\n").unwrap();
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", folder.display(), std::env::var("PATH").unwrap());
    let launch = std::process::Command::new(env!("CARGO_BIN_EXE_meshstep"))
        .args(["launch", "-n", "3", "--backend", "mpi", "--", "/bin/bench", "train", "--steps", "2"])
        .env("PATH", path)
        .output()
        .unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    let said = String::from_utf8(launch.stderr).unwrap();
    assert_eq!((launch.status.code(), said.as_str()), (Some(6), "launch: mpirun exited with 6\n"));
    assert_eq!(String::from_utf8(launch.stdout).unwrap(), "mpirun -n 3 /bin/bench train --steps 2 rank=\n");
}

#[test]
fn a_program_that_does_not_exist_is_named() {
    let launch = std::process::Command::new(env!("CARGO_BIN_EXE_meshstep"))
        .args(["launch", "-n", "2", "--", "/no/such/program", "train"])
        .output()
        .unwrap();
    let said = String::from_utf8(launch.stderr).unwrap();
    assert_eq!(launch.status.code(), Some(2), "{said}");
    assert!(said.contains("cannot start /no/such/program"), "{said}");
}
