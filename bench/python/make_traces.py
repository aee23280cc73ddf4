"""Makes the traces in bench/traces.

    pip install torch==2.11.0 numpy
    python bench/python/make_traces.py            # writes all of them
    python bench/python/make_traces.py --check    # makes them anew, compares, and replays each in float64 by another program
"""

import argparse
import pathlib

import problems
import record_trace
from synthetic import MATRICES, NO_DECAY, Run

FOLDER = pathlib.Path(__file__).parent.parent / "traces"
MAX_BYTES, MAX_FOLDER_BYTES = 150_000, 3_000_000
TWO, ONE, THREE, INF = 2.0, 1.0, 3.0, "inf"
UNDECAYED = [{"params": NO_DECAY, "weight_decay": 0.0}]


def clip(max_norm, norm_type=TWO):
    return {"max_norm": max_norm, "norm_type": norm_type}


def torch_run(rule, fields=None, **options):
    run = Run({"name": rule, **record_trace.defaults_of(rule), **(fields or {})}, **options)
    return lambda: record_trace.record_run(run)


def lbfgs(problem, steps, **fields):
    return lambda: record_trace.record_lbfgs(problems.PROBLEMS[problem](), fields, steps)


def of_torch():
    """Runs of PyTorch's rules by name."""
    return {
        "adam_f32": torch_run("adam", {"lr": 0.01}, seed=101),
        "adam_f64": torch_run("adam", {"lr": 0.01}, dtype="F64", seed=102),
        "adamw_f32": torch_run("adamw", {"lr": 0.01}, seed=111),
        "adamw_f64": torch_run("adamw", {"lr": 0.01}, dtype="F64", seed=112),
        "adamw_clip2_f32": torch_run("adamw", {"lr": 0.01}, clip=clip(1.0), seed=113),
        "adamw_groups_f32": torch_run("adamw", {"lr": 0.01, "weight_decay": 0.1}, groups=UNDECAYED, seed=114),
        "adamw_mean4_f32": torch_run("adamw", {"lr": 0.01}, ranks=4, clip=clip(1.0), seed=115),
        "sgd_f32": torch_run("sgd", {"lr": 0.05}, seed=131),
        "sgd_momentum_f64": torch_run("sgd", {"lr": 0.05, "momentum": 0.9}, dtype="F64", seed=132),
    }


def of_lbfgs():
    """Runs of L-BFGS by name."""
    wolfe = {"line_search": "strong_wolfe"}
    return {
        "lbfgs_rosenbrock_wolfe_single_f64": lbfgs("rosenbrock", 12, max_iter=1, max_eval=26, **wolfe),
        "lbfgs_least_squares_fixed_single_f64": lbfgs("least_squares", 12, max_iter=1),
        "lbfgs_logistic_fixed_single_f64": lbfgs("logistic", 12, max_iter=1),
    }


def make(folder, names):
    """Writes traces to `folder`, all of them if `names` is empty."""
    recipes = {**of_torch(), **of_lbfgs()}
    folder.mkdir(exist_ok=True)
    for name in names or recipes:
        path = folder / f"{name}.safetensors"
        recipes[name]().save(path)
        size = path.stat().st_size
        print(f"{size:7} {path.name}")
        assert size <= MAX_BYTES, f"{path.name} has {size} bytes; {MAX_BYTES} are allowed"


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="traces to make; all of them if none is named")
    make(FOLDER, parser.parse_args().names)


if __name__ == "__main__":
    main()
