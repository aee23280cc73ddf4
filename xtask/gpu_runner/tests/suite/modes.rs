//! Modes of `run.sh`: their order, and the environment.

use crate::bundle::{Bundle, tests_with};
use std::fs;
use std::path::Path;
use std::process::Command;

const BENCH: &str = "meshstep-bench-cases-gpu";

/// A benchmark that prints its arguments and budget.
const MEASURES: &str = "echo \"measures $*, $GPU_BENCH_SECONDS s\"\n\
    case $1 in --smoke) echo 1 >\"$OUT/smoke.json\";; *) echo 2 >\"$OUT/gpu-bench.json\"; echo x >\"$OUT/.gpu-bench.json.part\";; esac";

#[test]
fn smoke_bench_measures_in_order() {
    let bundle = Bundle::new("smoke-bench", &[(&format!("bench/{BENCH}"), MEASURES), ("tests/a", "exit 9")]);
    let ran = bundle.run("smoke-bench", &[]);
    let python = ran.row("torch")["verdict"].as_str().unwrap();
    assert!(["ok", "skipped: no python3"].contains(&python), "{python}");
    assert_eq!(ran.code, Some(0), "{}", ran.printed);
    let smoke = format!("{BENCH} --smoke");
    assert_eq!(ran.verdicts()[..2], [(smoke.as_str(), "ok"), (BENCH, "ok")]);
    assert_eq!(ran.row(&smoke)["kind"], "smoke");
    assert!(ran.printed.contains("measures , 170 s"), "the budget must be below the limit: {}", ran.printed);
    if python == "ok" {
        let line = format!("torch writes into {}", bundle.path("out").display());
        assert!(ran.printed.contains(&line), "{}", ran.printed);
    }
    assert_eq!(fs::read_to_string(bundle.path("out/gpu-bench.json")).unwrap(), "2\n");
    assert_eq!((&ran.json["commit"], &ran.json["mode"]), (&"0123, changed".into(), &"smoke-bench".into()));
    // A run without measurements keeps earlier figures; a run with measurements replaces them.
    assert_eq!(bundle.run("cpu", &[]).verdicts(), []);
    assert!(bundle.path("out/gpu-bench.json").exists());
    fs::write(bundle.path("out/torch-bench.json"), "old").unwrap();
    bundle.run("smoke-bench", &[("PATH", "/usr/bin:/bin")]);
    assert!(!bundle.path("out/torch-bench.json").exists());
    // A failing benchmark does not stop the run.
    let fails = Bundle::new("bench-fails", &[(&format!("bench/{BENCH}"), "echo table; exit 3")]);
    let ran = fails.run("smoke-bench", &[("GPU_BENCH_SECONDS", "7")]);
    assert_eq!(
        (ran.code, &ran.row(BENCH)["exit"], &ran.row(BENCH)["verdict"]),
        (Some(1), &3.into(), &"failed".into())
    );
    assert_eq!(ran.verdicts().len(), 3);
}

/// NCCL is found only in python3's packages, and the `stages` benchmark gets that path.
#[test]
fn stages_are_measured_last_and_with_the_nccl_that_was_found() {
    let probe = with_nccl("found", "*) exit 9;;");
    let missing = "case $LD_LIBRARY_PATH in /packages*) ;; *) echo 'probed: Err(NoLibrary { tried: 1 })'; exit 0;; esac";
    let comm = format!("{missing}\n{probe}");
    let measures = "echo \"$GPU_BENCH_SECONDS s with $LD_LIBRARY_PATH\"; echo 3 >\"$OUT/stages.json\"";
    let stages = "meshstep-bench-cases-stages";
    let programs = [
        (&*format!("bench/{BENCH}"), MEASURES),
        (&*format!("stages/{stages}"), measures),
        ("nccl/meshstep-comm-suite", &*comm),
        (
            "tools/python3",
            "case \"$*\" in *nvidia.nccl*) echo /packages;; *) echo 1 >\"$OUT/torch-bench.json\";; esac",
        ),
    ];
    let bundle = Bundle::new("stages", &programs);
    let path = format!("{}:/usr/bin:/bin", bundle.path("tools").display());
    let ran = bundle.run("smoke-bench", &[("PATH", &path), ("LD_LIBRARY_PATH", "")]);
    assert_eq!((ran.code, ran.verdicts().last()), (Some(0), Some(&(stages, "ok"))), "{}", ran.printed);
    assert_eq!(ran.row(stages)["kind"], "stages");
    assert!(ran.printed.contains("170 s with /packages"), "{}", ran.printed);
    assert!(fs::exists(bundle.path("out/stages.json")).unwrap());
    // Other modes neither start `stages` nor remove its figures; the next run of this mode removes them.
    let ran = bundle.run("profile", &[("PATH", &path)]);
    assert!(ran.verdicts().iter().all(|(program, _)| !program.contains("stages")), "{:?}", ran.verdicts());
    assert!(fs::exists(bundle.path("out/stages.json")).unwrap());
    fs::remove_file(bundle.path("stages").join(stages)).unwrap();
    bundle.run("smoke-bench", &[("PATH", &path)]);
    assert!(!fs::exists(bundle.path("out/stages.json")).unwrap());
}

/// A CPU benchmark that prints its arguments and budget.
const ON_CPU: &str = "echo \"$GPU_BENCH_SECONDS s: $*\"\n\
    case $1 in --measure) echo 1 >\"$OUT/cpu-bench.json\";; --torch) cp \"$3\" \"$OUT/cpu-torch.json\";; esac";

#[test]
fn cpu_measures_alone_and_then_beside_torch() {
    let ranks = "meshstep-bench-cases-ranks";
    let bundle = Bundle::new("cpu", &[(&format!("cpu/{ranks}"), ON_CPU), ("tests/a", "exit 9")]);
    fs::write(bundle.path("peers.py"), "the script").unwrap();
    fs::create_dir_all(bundle.path("out")).unwrap();
    fs::write(bundle.path("out/gpu-bench.json"), "of a GPU").unwrap();
    let ran = bundle.run("cpu", &[]);
    assert_eq!(ran.code, Some(0), "{}", ran.printed);
    let [alone, beside] = ["--measure", "--torch"].map(|arg| format!("{ranks} {arg}"));
    assert_eq!(ran.verdicts()[0], (alone.as_str(), "ok"));
    assert_eq!((&ran.row(&alone)["kind"], ran.verdicts().len()), (&"cpu".into(), 2));
    assert!(ran.printed.contains("170 s: --measure"), "the budget must be below the limit: {}", ran.printed);
    assert_eq!(fs::read_to_string(bundle.path("out/cpu-bench.json")).unwrap(), "1\n");
    assert!(bundle.path("out/gpu-bench.json").exists(), "figures of the GPU must stay");
    if ran.row(&beside)["verdict"] == "ok" {
        assert_eq!(fs::read_to_string(bundle.path("out/cpu-torch.json")).unwrap(), "the script");
    }
    // Without an interpreter, the row reports that, and figures of an earlier run are removed.
    fs::write(bundle.path("out/cpu-torch.json"), "old").unwrap();
    let tools = bundle.path("tools");
    fs::create_dir_all(&tools).unwrap();
    for tool in ["sh", "dirname", "cp"] {
        std::os::unix::fs::symlink(Path::new("/bin").join(tool), tools.join(tool)).unwrap();
    }
    let ran = bundle.run("cpu", &[("PATH", &tools.display().to_string())]);
    assert_eq!(ran.row(&beside)["verdict"], "skipped: no python3");
    assert!(!bundle.path("out/cpu-torch.json").exists());
}

#[test]
fn a_packed_bundle_is_unpacked_once() {
    let passes = tests_with("");
    let bundle = Bundle::new("packed", &[("tests/a", passes.as_str())]);
    // Use a copy, because tar fails on a file that gains or loses a hard link while it is read.
    fs::copy(bundle.path("gpu-runner"), bundle.path("copy")).unwrap();
    fs::rename(bundle.path("copy"), bundle.path("gpu-runner")).unwrap();
    let tar = |args: &[&str]| Command::new("tar").args(args).current_dir(bundle.path("")).status().unwrap();
    assert!(tar(&["-czf", "programs.tar.gz", "tests/a", "gpu-runner"]).success());
    for program in ["tests/a", "gpu-runner"] {
        fs::remove_file(bundle.path(program)).unwrap();
    }
    assert_eq!(bundle.run("tests", &[]).verdicts(), [("a", "ok")]);
    fs::remove_file(bundle.path("programs.tar.gz")).unwrap();
    assert_eq!(bundle.run("tests", &[]).code, Some(0), "the second run must not need the archive");
}

#[test]
fn torch_that_says_skipped_is_skipped() {
    let bundle = Bundle::new("torch", &[(&format!("bench/{BENCH}"), "true")]);
    fs::write(bundle.path("gpu_torch.py"), "print('skipped: python3 has no torch')\n").unwrap();
    let ran = bundle.run("smoke-bench", &[]);
    assert!(ran.row("torch")["verdict"].as_str().unwrap().starts_with("skipped: "), "{}", ran.printed);
    assert_eq!(ran.code, Some(0), "{}", ran.printed);
}

/// Returns a test program that prints `probed` in answer to the NCCL probe, and otherwise behaves like `tests_with`.
fn with_nccl(probed: &str, case: &str) -> String {
    let probe = "*nccl::processes::what_is_probed_is_printed*";
    format!("case \"$*\" in {probe}) echo '{probed}'; exit 0;; esac\n{}", tests_with(case))
}

#[test]
fn tests_of_nccl_are_skipped_only_where_there_is_none() {
    let run = |name: &str, probed: &str, case: &str| {
        let program = with_nccl(probed, case);
        let passes = tests_with("");
        let programs =
            [("nccl/meshstep-comm-suite", program.as_str()), ("tests/z", &passes), ("nccl/z", &passes)];
        Bundle::new(name, &programs).run("tests", &[])
    };
    let missing = run("no-nccl", "probed: Err(NoLibrary { tried: \"libnccl.so.2\" })", "*) exit 9;;");
    let verdicts = missing.verdicts();
    assert_eq!(verdicts[0], ("z", "ok"), "programs of `tests` must run first");
    assert_eq!(verdicts[1], ("meshstep-comm-suite", "skipped: no libnccl.so.2"));
    assert_eq!((missing.code, missing.json["rows"][1]["exit"].clone()), (Some(0), serde_json::Value::Null));
    // A library that cannot be used is not skipped.
    let broken = run("old-nccl", "probed: Err(TooOld { library: \"libnccl.so.2\" })", "nccl::b) exit 9;;");
    assert_eq!((broken.code, broken.verdicts()[1].1), (Some(1), "crashed"));
    let found = run("nccl", "probed: Ok(Found { version: 22800 })", "");
    assert_eq!((found.code, found.verdicts()[2].1), (Some(0), "ok"));
}

#[test]
fn profile_skips_tools_that_are_not_installed() {
    let suite = tests_with("");
    let bench = format!("bench/{BENCH}");
    let bundle = Bundle::new("profile", &[(&bench, "true"), ("tests/meshstep-optim-suite", &suite)]);
    let path = [("PATH", "/usr/bin:/bin")];
    if ["/usr/bin/ncu", "/usr/local/cuda/bin/ncu"].iter().any(|ncu| fs::exists(ncu).unwrap_or(true)) {
        return;
    }
    let ran = bundle.run("profile", &path);
    assert_eq!(ran.verdicts().len(), 5);
    assert!(ran.verdicts().contains(&("ncu: adamw f32", "skipped: no ncu")), "{:?}", ran.verdicts());
    let memcheck = ran.row("memcheck: meshstep-optim-suite");
    assert_eq!(memcheck["verdict"], "skipped: no compute-sanitizer");
    assert_eq!(ran.code, Some(1), "a run in which no program passes must fail");
}

#[test]
fn profile_runs_the_tools_that_are_installed() {
    let list = "printf 'cuda::flat::a: test\\ncuda::update::b: test\\n'";
    let suite = format!(
        "case \"$*\" in *--list*) {list}; exit 0;; esac\nshift 4; for name; do echo \"test $name ... ok\"; done"
    );
    let bench = format!("bench/{BENCH}");
    let programs = [
        (bench.as_str(), "echo \"$GPU_BENCH_CASE at $GPU_BENCH_LOG2 into $1\""),
        ("tests/meshstep-optim-suite", suite.as_str()),
        ("tools/ncu", "while [ \"$1\" != 4 ]; do shift; done; shift; exec \"$@\""),
        ("tools/compute-sanitizer", "echo \"========= $4\"; shift 4; exec \"$@\""),
    ];
    let bundle = Bundle::new("tools", &programs);
    let path = format!("{}:/usr/bin:/bin", bundle.path("tools").display());
    let ran = bundle.run("profile", &[("PATH", &path)]);
    assert_eq!(ran.code, Some(0), "{}", ran.printed);
    assert_eq!(ran.verdicts().iter().filter(|(_, verdict)| *verdict == "ok").count(), 5);
    assert_eq!(ran.row("racecheck: meshstep-optim-suite")["passed"], 1, "only the selected tests must run");
    assert!(!bundle.path("out/gpu-bench.json").exists(), "a profiled run must leave no figures");
}

#[test]
fn what_is_asked_for_wrongly_is_refused_before_anything_runs() {
    let bundle = Bundle::new("refused", &[("tests/a", "touch \"$OUT/ran\"")]);
    for mode in ["", "fly", "tests cpu"] {
        let ran = bundle.run(mode, &[]);
        assert_eq!((ran.code, ran.printed.contains("usage: run.sh MODE")), (Some(2), true), "{mode}");
    }
    for (name, value, expected) in
        [("LIMIT", "soon", "LIMIT is \"soon\"; set it to a number of seconds"), ("OUT", "", "OUT is empty")]
    {
        let ran = bundle.run("tests", &[(name, value)]);
        assert_eq!((ran.code, ran.printed.contains(expected)), (Some(1), true), "{}", ran.printed);
    }
    assert!(!bundle.path("out").exists());
    // A mode without any program fails.
    let ran = bundle.run("cpu", &[]);
    assert_eq!((ran.code, ran.json["rows"].as_array().unwrap().len()), (Some(1), 0));
}
