"""Makes the traces in bench/traces.

    pip install torch==2.11.0 numpy schedulefree==1.4.1
    python bench/python/make_traces.py            # writes all of them
    python bench/python/make_traces.py --check    # generates them in another folder and compares

A trace must show differences of the replay, not of rounding. Therefore its run in its own type and in float64, computed by
record_reference.py, must agree to half its tolerance, and a run of L-BFGS must not depend on the last bits of its initial
parameters and data.
"""

import argparse
import pathlib
import sys
import tempfile

import numpy as np

import problems
import record_reference
import record_trace
from synthetic import MATRICES, NO_DECAY, Run
from trace_file import Trace, dtype_of, to_float64

FOLDER = pathlib.Path(__file__).parent.parent / "traces"
MAX_BYTES, MAX_FOLDER_BYTES = 150_000, 3_000_000
UNDECAYED = [{"params": NO_DECAY, "weight_decay": 0.0}]
F64 = {"dtype": "F64"}
# Results of numerical libraries differ between machines in the last bits; (rtol, atol) by type.
SAME = {"F64": (1e-12, 1e-14), "F32": (1e-6, 1e-8), "BF16": (2.0**-7, 0.0), "F16": (2.0**-10, 0.0)}


def clip(max_norm, norm_type=2.0):
    return {"max_norm": max_norm, "norm_type": norm_type}


def of_torch():
    """Returns runs of PyTorch's rules, and of packages on it, by name: the rule, fields that differ from its defaults, and options of the run."""
    wd = {"weight_decay": 0.1}
    slow, both = {"lr": 0.01}, {"missing": "both"}
    return {
        "adam_f32": ("adam", slow, {}),
        "adam_f64": ("adam", slow, F64),
        "adam_coupled_f32": ("adam", {**slow, **wd}, {"clip": clip(1.0), "groups": UNDECAYED}),
        "adam_amsgrad_f64": ("adam", {**slow, **wd, "amsgrad": True, "maximize": True}, {**F64, "schedule": "cosine"}),
        "adamw_f32": ("adamw", slow, {}),
        "adamw_f64": ("adamw", slow, F64),
        "adamw_bf16": ("adamw", slow, {"dtype": "BF16"}),
        "adamw_f16": ("adamw", slow, {"dtype": "F16"}),
        "adamw_amsgrad_f32": ("adamw", {**slow, **wd, "beta2": 0.9, "amsgrad": True}, {"schedule": "cosine"}),
        "adamw_clip2_f32": ("adamw", slow, {"clip": clip(1.0)}),
        "adamw_clip1_f32": ("adamw", slow, {"clip": clip(5.0, 1.0)}),
        "adamw_clip3_f64": ("adamw", slow, {**F64, "clip": clip(0.7, 3.0)}),
        "adamw_clipinf_f32": ("adamw", slow, {"clip": clip(0.5, "inf")}),
        "adamw_groups_f32": ("adamw", {**slow, **wd}, {"groups": [{**UNDECAYED[0], "lr": 0.02}], "schedule": "cosine"}),
        "adamw_missing_f32": ("adamw", {**slow, **wd}, {"missing": "all"}),
        "adamw_mean4_f32": ("adamw", slow, {"ranks": 4, "clip": clip(1.0)}),
        "adamw_sum4_missing_f32": ("adamw", {**slow, **wd}, {"ranks": 4, "reduce": "sum", **both, "groups": UNDECAYED}),
        "adamw_weighted4_f64": ("adamw", slow, {**F64, "ranks": 4, "reduce": "weighted", "clip": clip(1.0)}),
        "sgd_f32": ("sgd", {"lr": 0.05}, {}),
        "sgd_maximize_f64": ("sgd", {"lr": 0.05, **wd, "maximize": True}, {**F64, "schedule": "cosine"}),
        "sgd_momentum_f32": ("sgd", {"lr": 0.05, "momentum": 0.9, **wd}, {"clip": clip(1.0), "groups": UNDECAYED}),
        "sgd_momentum_f64": ("sgd", {"lr": 0.05, "momentum": 0.9}, F64),
        "sgd_dampening_f32": ("sgd", {"lr": 0.05, "momentum": 0.9, "dampening": 0.3}, {"missing": "all"}),
        "sgd_nesterov_f64": (
            "sgd",
            {"lr": 0.05, "momentum": 0.9, "nesterov": True, **wd},
            {**F64, "clip": clip(1.0, 1.0)},
        ),
        "sgd_mean4_f32": ("sgd", {"lr": 0.05}, {"ranks": 4, **both}),
        "sgd_sum4_f64": ("sgd", {"lr": 0.02, "momentum": 0.9}, {**F64, "ranks": 4, "reduce": "sum"}),
        "sgd_weighted4_f32": ("sgd", {"lr": 0.05, "momentum": 0.9}, {"ranks": 4, "reduce": "weighted", **both}),
        "rmsprop_f32": ("rmsprop", {}, {"clip": clip(1.0)}),
        "rmsprop_f64": ("rmsprop", {"alpha": 0.9, "momentum": 0.9, **wd}, {**F64, "groups": UNDECAYED}),
        "rmsprop_centered_f64": ("rmsprop", {"centered": True, "maximize": True}, {**F64, "schedule": "cosine"}),
        "rmsprop_all_f32": ("rmsprop", {"lr": 1e-3, "centered": True, "momentum": 0.9, **wd}, {"missing": "all"}),
        "rmsprop_mean4_f32": ("rmsprop", {"alpha": 0.9}, {"ranks": 4, **both}),
        "adagrad_f32": ("adagrad", {}, {"clip": clip(1.0)}),
        "adagrad_f64": ("adagrad", {"maximize": True}, {**F64, "missing": "all"}),
        "adagrad_all_f32": (
            "adagrad",
            {"lr": 0.05, "lr_decay": 0.1, "initial_accumulator_value": 0.5, **wd, "eps": 1e-6},
            {"schedule": "cosine", "groups": UNDECAYED},
        ),
        "adagrad_weighted4_f32": ("adagrad", {"lr": 0.05}, {"ranks": 4, "reduce": "weighted", "clip": clip(1.0)}),
        "schedulefree_f32": ("schedulefree_adamw", {**slow, **wd}, {"clip": clip(1.0), "groups": UNDECAYED}),
        "schedulefree_f64": ("schedulefree_adamw", {**slow, **wd, "beta1": 0.8, "warmup_steps": 12}, F64),
        "schedulefree_drop_f64": (
            "schedulefree_adamw",
            {**slow, "beta1": 0.95, "warmup_steps": 7, "r": 0.75, "weight_lr_power": 1.5},
            {**F64, "schedule": "drop"},
        ),
        "schedulefree_bf16": ("schedulefree_adamw", {**slow, "warmup_steps": 5}, {"dtype": "BF16"}),
        "schedulefree_mean4_f32": ("schedulefree_adamw", {**slow, "r": 1.0}, {"ranks": 4}),
        "muon_torch_f64": ("muon", slow, {**F64, "shapes": dict(MATRICES), "schedule": "cosine"}),
        "muon_torch_match_f64": (
            "muon",
            {**slow, "adjust_lr_fn": "match_rms_adamw", "nesterov": False, "ns_coefficients": [2.0, -1.5, 0.5], "ns_steps": 8},
            {**F64, "shapes": dict(MATRICES), "clip": clip(1.0)},
        ),
    }


def of_reference():
    """Returns runs of the rules and decays that PyTorch lacks, in the same form."""
    wd, slow = {"weight_decay": 0.1}, {"lr": 0.01}
    full = {"decay": "fully_decoupled", "lr_max": 0.01, "weight_decay": 0.01}
    two, three = {"moments": [[0.9, 0.5], [0.999, 0.4]]}, {"moments": [[0.8, 0.2], [0.99, 0.3], [0.999, 0.45]]}
    matrices = {"shapes": dict(MATRICES)}
    return {
        "adamw_fully_decoupled_f32": ("adamw", {**slow, **full}, {"schedule": "cosine", "groups": UNDECAYED}),
        "sgd_fully_decoupled_f64": ("sgd", {**slow, "momentum": 0.9, **full}, {**F64, "schedule": "cosine"}),
        "sgd_decoupled_f32": ("sgd", {"lr": 0.05, "momentum": 0.9, **wd, "decay": "decoupled"}, {"clip": clip(1.0)}),
        "sgd_lr_inside_f32": ("sgd", {"lr": 0.05, "momentum": 0.9, "lr_inside": True, **wd}, {"schedule": "cosine"}),
        "sgd_lr_inside_f64": ("sgd", {"lr": 0.05, "momentum": 0.9, "lr_inside": True}, {**F64, "schedule": "cosine"}),
        "sgd_ema_f32": ("sgd_ema", {"lr": 0.05, **wd}, {"clip": clip(1.0)}),
        "sgd_ema_f64": ("sgd_ema", {"lr": 0.05}, F64),
        "sgd_ema_debias_f64": ("sgd_ema", {"lr": 0.05, "debias": True, **wd}, {**F64, "groups": UNDECAYED}),
        "sgd_ema_debias_mean4_f32": ("sgd_ema", {"lr": 0.05, "debias": True}, {"ranks": 4, "missing": "both"}),
        "lion_f32": ("lion", {"lr": 0.003, **wd}, {"clip": clip(1.0), "groups": UNDECAYED}),
        "lion_f64": ("lion", {"lr": 0.003}, {**F64, "schedule": "cosine"}),
        "lion_coupled_f64": ("lion", {"lr": 0.003, **wd, "decay": "coupled", "maximize": True}, F64),
        "lion_weighted4_f32": ("lion", {"lr": 0.003}, {"ranks": 4, "reduce": "weighted", "missing": "both"}),
        "qhadamw_f32": ("qhadamw", slow, {"clip": clip(1.0), "groups": UNDECAYED}),
        "qhadamw_f64": ("qhadamw", {**slow, "beta1": 0.9, "nu": 0.5}, {**F64, "schedule": "cosine"}),
        "qhadamw_two_f32": ("qhadamw", {**slow, **two}, {"missing": "all"}),
        "qhadamw_three_f64": ("qhadamw", {**slow, **three, **wd}, F64),
        "qhadamw_mean4_f32": ("qhadamw", slow, {"ranks": 4, "clip": clip(1.0)}),
        "qhadopt_f32": ("qhadopt", {**slow, **wd}, {"clip": clip(1.0), "groups": UNDECAYED}),
        "qhadopt_f64": ("qhadopt", {**slow, "beta1": 0.9, "nu": 0.5}, {**F64, "missing": "all"}),
        "qhadopt_three_f64": ("qhadopt", {**slow, **three}, F64),
        "qhadopt_two_mean4_f32": ("qhadopt", {**slow, **two}, {"ranks": 4, "missing": "both"}),
        "adopt_f32": ("adopt", {**slow, "beta2": 0.99}, {"clip": clip(1.0)}),
        "adopt_f64": ("adopt", {**slow, **wd}, {**F64, "schedule": "cosine"}),
        "adopt_coupled_f64": ("adopt", {**slow, **wd, "decay": "coupled", "maximize": True}, {**F64, "missing": "all"}),
        "adopt_sum4_f32": ("adopt", slow, {"ranks": 4, "reduce": "sum"}),
        "lamb_f32": ("lamb", slow, {"clip": clip(1.0), "groups": UNDECAYED}),
        "lamb_f64": ("lamb", {**slow, **wd}, {**F64, "schedule": "cosine"}),
        "lamb_weighted4_f32": ("lamb", slow, {"ranks": 4, "reduce": "weighted", "missing": "both"}),
        "lars_f32": ("lars", {"lr": 0.1, "trust_coefficient": 0.1}, {"schedule": "cosine", "groups": UNDECAYED}),
        "lars_f64": ("lars", {"lr": 0.1, "trust_coefficient": 0.1}, {**F64, "clip": clip(1.0)}),
        "lars_sum4_f32": (
            "lars",
            {"lr": 0.1, "trust_coefficient": 0.1},
            {"ranks": 4, "reduce": "sum", "missing": "both"},
        ),
        "muon_f32": ("muon", slow, {**matrices, "clip": clip(1.0)}),
        "muon_f64": ("muon", slow, {**matrices, **F64, "schedule": "cosine"}),
        "muon_plain_f64": ("muon", {**slow, "nesterov": False, "ns_steps": 4}, {**matrices, **F64, "missing": "all"}),
        "muon_match_f32": (
            "muon",
            {**slow, "adjust_lr_fn": "match_rms_adamw"},
            {**matrices, "groups": [{"params": ["square"], "weight_decay": 0.0}]},
        ),
        "muon_weighted4_f32": ("muon", slow, {**matrices, "ranks": 4, "reduce": "weighted", "missing": "some"}),
        "muon_keller_jordan_f64": ("muon", {"variant": "keller_jordan", "lr": 0.02}, {**matrices, **F64, "clip": clip(1.0)}),
        "muon_moonshot_f64": ("muon", {"variant": "moonshot", **slow}, {**matrices, **F64, "schedule": "cosine"}),
        "muon_moonshot_f32": ("muon", {"variant": "moonshot", **slow}, {**matrices, "missing": "all"}),
        "muon_blocks_f64": (
            "muon",
            {"variant": "moonshot", **slow},
            {
                **F64,
                "shapes": {"qkv": (9, 4), "heads": (4, 3), "experts": (3, 4, 2), "plain": (3, 5)},
                "groups": [
                    {"params": ["qkv"], "blocks": 3},
                    {"params": ["heads"], "blocks": 4},
                    {"params": ["experts"], "blocks": "batch", "adjust_lr_fn": "original"},
                ],
            },
        ),
    }


def of_problems():
    """Returns runs on problems by name: problem, rule, fields, steps, and the last step with all values recorded."""
    # Line searches whose first step is too short extend their interval; those whose first step is too long zoom.
    single, wolfe = {"max_iter": 1, "max_eval": 26}, {"line_search": "strong_wolfe"}
    to_the_end = {"max_iter": 20, "tolerance_grad": 1e-10, "tolerance_change": 1e-13}
    # At 1e-13 the last gradient norm would still depend on the path.
    further = {**to_the_end, "tolerance_change": 1e-18}
    return {
        "lbfgs_rosenbrock_fixed_single_f64": ("rosenbrock", "lbfgs", single, 12, 12),
        "lbfgs_rosenbrock_wolfe_single_f64": ("rosenbrock", "lbfgs", {**single, **wolfe}, 12, 12),
        "lbfgs_rosenbrock_fixed_f64": ("rosenbrock", "lbfgs", {**to_the_end, "lr": 0.3}, 8, 1),
        "lbfgs_rosenbrock_wolfe_f64": ("rosenbrock", "lbfgs", {**further, **wolfe}, 8, 1),
        "lbfgs_rosenbrock_short_f64": ("rosenbrock", "lbfgs", {"max_iter": 5, "history_len": 3, **wolfe}, 3, 3),
        "lbfgs_least_squares_fixed_single_f64": ("least_squares", "lbfgs", single, 12, 12),
        "lbfgs_least_squares_wolfe_single_f64": ("least_squares", "lbfgs", {**single, **wolfe, "lr": 0.05}, 12, 12),
        "lbfgs_least_squares_fixed_f64": ("least_squares", "lbfgs", {}, 3, 1),
        "lbfgs_least_squares_wolfe_f64": ("least_squares", "lbfgs", {**wolfe, "lr": 4.0}, 3, 1),
        "lbfgs_least_squares_short_f64": ("least_squares", "lbfgs", {"max_iter": 5, "history_len": 3}, 3, 3),
        "lbfgs_logistic_fixed_single_f64": ("logistic", "lbfgs", single, 12, 12),
        "lbfgs_logistic_wolfe_single_f64": ("logistic", "lbfgs", {**single, **wolfe, "lr": 4.0}, 12, 12),
        "lbfgs_logistic_fixed_f64": ("logistic", "lbfgs", {}, 3, 1),
        "lbfgs_logistic_wolfe_f64": ("logistic", "lbfgs", {**wolfe, "lr": 0.05}, 3, 1),
        "adamw_logistic_f64": ("logistic", "adamw", {"lr": 0.05}, 40, 40),
        "sgd_least_squares_f64": ("least_squares", "sgd", {"lr": 0.1, "momentum": 0.9}, 40, 40),
    }


def recipes():
    """Returns the names of all traces, each with a function that records it."""
    all_of_them = {}
    for seed, (name, (rule, fields, options)) in enumerate(of_torch().items(), 100):
        run = Run({"name": rule, **record_trace.defaults_of(rule), **fields}, seed=seed, **options)
        all_of_them[name] = lambda run=run: sound(record_trace.record_run(run))
    for seed, (name, (rule, fields, options)) in enumerate(of_reference().items(), 200):
        run = Run({"name": rule, **record_reference.defaults_of(rule, fields), **fields}, seed=seed, **options)
        all_of_them[name] = lambda run=run: sound(record_reference.record_run(run))
    for name, recipe in of_problems().items():
        all_of_them[name] = lambda recipe=recipe: sound_problem(*recipe)
    return all_of_them


def sound(trace):
    """Returns the trace if its run in its own type and in float64 by the formulas agree to half its tolerance (16 bits: to all of it)."""
    types = {dtype_of(array) for array in trace.params().values()}
    for computed in [np.float64, np.float64 if types == {"F64"} else np.float32]:
        far = record_reference.distances(trace, computed)
        worst = max(far, key=far.get)
        limit = 0.5 if types & {"F32", "F64"} else 1.0
        if far[worst] > limit:
            raise SystemExit(f"{worst} in {computed.__name__} differs by {far[worst]:.2g} of the tolerance")
    return trace


def sound_problem(problem, rule, fields, steps, follow):
    """Returns the trace if last bits of initial parameters and data change no value by a hundredth of its tolerance.

    Gradient norms may change by a tenth: near a minimum they are differences of larger terms.
    """
    kind = problems.PROBLEMS[problem]
    rtol = 1e-11 if rule != "lbfgs" else 1e-6 if fields.get("line_search") else 1e-9

    def record(problem):
        return record_trace.record_problem(problem, {"name": rule, **fields}, steps, rtol, follow)

    trace = record(kind())
    for seed in range(5):
        far = distances(trace, record(kind().nudged(seed)), {"F64": (rtol, rtol * 1e-3)})
        for key, by in far.items():
            if by > (0.1 if key.startswith("expect_norm/") else 0.01):
                raise SystemExit(f"{key} changes by {by:.2g} of the tolerance with the last bits of the problem")
    return trace


def distances(trace, other, tolerances):
    """Returns the difference of each tensor between two traces, as a multiple of (rtol, atol) by type."""
    if trace.tensors.keys() != other.tensors.keys():
        return {", ".join(sorted(trace.tensors.keys() ^ other.tensors.keys())): float("inf")}
    far = {}
    for key, array in trace.tensors.items():
        rtol, atol = tolerances[dtype_of(array)]
        want = to_float64(array)
        far[key] = (np.abs(to_float64(other.tensors[key]) - want) / (atol + rtol * np.abs(want))).max(initial=0.0)
    return far


def make(folder, names):
    """Writes the named traces to `folder`, or all if `names` is empty."""
    all_of_them = recipes()
    folder.mkdir(exist_ok=True)
    for name in names or all_of_them:
        path = folder / f"{name}.safetensors"
        print(f"{path.name} ", end="", flush=True)
        all_of_them[name]().save(path)
        print(path.stat().st_size)
        if path.stat().st_size > MAX_BYTES:
            raise SystemExit(f"{path.name} has more than {MAX_BYTES} bytes")


def check(folder):
    """Generates all traces again and compares them with those in `folder`; returns the number of wrong ones."""
    wrong, kept = 0, sorted(folder.glob("*.safetensors"))
    with tempfile.TemporaryDirectory() as anew:
        make(pathlib.Path(anew), [])
        names = {path.name for path in pathlib.Path(anew).iterdir()}
        for name in sorted(names ^ {path.name for path in kept}):
            print(f"{name}: {'not made by this script' if name not in names else 'not in the folder'}")
            wrong += 1
        for path in kept:
            if path.name in names:
                wrong += not same(path, Trace.load(path), Trace.load(pathlib.Path(anew) / path.name))
    size = sum(path.stat().st_size for path in kept)
    print(f"{len(kept)} traces, {size} bytes, {wrong} wrong")
    return wrong + (size > MAX_FOLDER_BYTES)


def same(path, trace, other):
    """Returns True if the traces agree. L-BFGS amplifies differences in last bits: its limit is half the trace's tolerance."""
    tolerances = SAME
    if trace.spec["problem"]:
        tolerance = trace.spec["tolerance"]
        tolerances = {"F64": (tolerance["rtol"] / 2, tolerance["atol"] / 2)}
    far = distances(trace, other, tolerances)
    worst = max(far, key=far.get)
    if trace.spec == other.spec and far[worst] <= 1:
        return True
    what = "different spec" if trace.spec != other.spec else f"{worst} differs by {far[worst]:.2g} of the tolerance"
    print(f"{path.name}: {what}")
    return False


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="traces to make [default: all]")
    parser.add_argument("--check", action="store_true", help="compare with the committed traces")
    args = parser.parse_args()
    if args.check:
        sys.exit(min(check(FOLDER), 1))
    make(FOLDER, args.names)


if __name__ == "__main__":
    main()
