"""Makes the traces in bench/traces: every rule with its main options.

    python bench/python/make_traces.py                 # writes them
    python bench/python/make_traces.py --check         # says which would be others, beyond the last digits

torch 2.11.0 and numpy are all it needs.
"""

import argparse
import json
import math
import struct
import sys
import tempfile
from pathlib import Path

import numpy as np

import record_lbfgs
import record_reference
import record_trace

FOLDER = Path(__file__).parent.parent / "traces"


def cosine(peak, steps, warm_up=5):
    """A warm-up and half a cosine, one rate a step."""
    ramp = [peak * (t + 1) / warm_up for t in range(warm_up)]
    way = steps - warm_up
    return ramp + [peak * 0.5 * (1 + math.cos(math.pi * t / way)) for t in range(way)]


def sometimes(t, rank, name):
    """Gradients that are missing on some ranks, and one that is missing on all in every third step."""
    return not (name == "2.bias" and t % 3 == 0) and not (name == "0.bias" and rank % 2 == 1)


ADAM = {"lr": 0.01, "beta1": 0.85, "beta2": 0.97, "weight_decay": 0.1}
SGD = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}
RMS = {"lr": 0.01, "alpha": 0.95, "weight_decay": 0.01}
ADAGRAD = {"lr": 0.05, "lr_decay": 0.01, "weight_decay": 0.01}
FOUR = {"ranks": 4, "max_norm": 0.5}
# Name of the file, rule, its settings, and how it is run.
TORCH = [
    ("adamw", "adamw", ADAM, {}),
    ("adamw-f32", "adamw", ADAM, {"dtype": "f32"}),
    ("adamw-defaults", "adamw", {}, {}),
    ("adamw-amsgrad", "adamw", {**ADAM, "amsgrad": True}, {}),
    ("adamw-amsgrad-f32", "adamw", {**ADAM, "amsgrad": True}, {"dtype": "f32", "max_norm": 0.5}),
    ("adamw-maximize", "adamw", {**ADAM, "maximize": True}, {"max_norm": 1.0}),
    ("adamw-clip-l2", "adamw", ADAM, {"max_norm": 0.5}),
    ("adamw-clip-l1", "adamw", ADAM, {"max_norm": 2.0, "norm_type": 1.0}),
    ("adamw-clip-l3", "adamw", ADAM, {"max_norm": 0.5, "norm_type": 3.0}),
    ("adamw-clip-inf", "adamw", ADAM, {"max_norm": 0.2, "norm_type": "inf"}),
    ("adamw-clip-f32", "adamw", ADAM, {"max_norm": 0.5, "dtype": "f32"}),
    ("adamw-groups", "adamw", ADAM, {"no_decay": True, "max_norm": 1.0}),
    ("adamw-groups-4-ranks", "adamw", ADAM, {**FOUR, "no_decay": True}),
    ("adamw-cosine", "adamw", ADAM, {"lrs": cosine(0.02, 60), "steps": 60}),
    ("adamw-4-ranks-mean", "adamw", ADAM, FOUR),
    ("adamw-4-ranks-sum", "adamw", ADAM, {**FOUR, "reduce": "sum"}),
    ("adamw-4-ranks-weighted", "adamw", ADAM, {**FOUR, "reduce": "weighted"}),
    ("adamw-4-ranks-f32", "adamw", ADAM, {**FOUR, "dtype": "f32"}),
    ("adamw-missing", "adamw", ADAM, {"ranks": 4, "has": sometimes}),
    ("adam", "adam", ADAM, {}),
    ("adam-f32", "adam", ADAM, {"dtype": "f32", "max_norm": 0.5}),
    ("adam-amsgrad", "adam", {**ADAM, "amsgrad": True}, {"max_norm": 0.5}),
    ("sgd", "sgd", {"lr": 0.1}, {}),
    ("sgd-decay-clip", "sgd", {"lr": 0.1, "weight_decay": 0.1}, {"max_norm": 0.5}),
    ("sgd-momentum", "sgd", SGD, {}),
    ("sgd-momentum-f32", "sgd", SGD, {"dtype": "f32", "max_norm": 0.5}),
    ("sgd-dampening", "sgd", {**SGD, "dampening": 0.3}, {}),
    ("sgd-nesterov", "sgd", {**SGD, "nesterov": True}, {"max_norm": 1.0}),
    ("sgd-maximize", "sgd", {**SGD, "maximize": True, "lr": 0.0005}, {}),
    ("sgd-4-ranks", "sgd", {"lr": 0.1}, {"ranks": 4}),
    ("sgd-4-ranks-weighted", "sgd", SGD, {**FOUR, "reduce": "weighted"}),
    ("sgd-missing", "sgd", SGD, {"ranks": 4, "has": sometimes, "max_norm": 0.5}),
    ("sgd-groups-cosine", "sgd", SGD, {"no_decay": True, "lrs": cosine(0.1, 50), "steps": 50}),
    ("rmsprop", "rmsprop", RMS, {}),
    ("rmsprop-f32", "rmsprop", RMS, {"dtype": "f32", "max_norm": 0.5}),
    ("rmsprop-momentum", "rmsprop", {**RMS, "momentum": 0.8}, {}),
    ("rmsprop-centered", "rmsprop", {**RMS, "centered": True}, {}),
    ("rmsprop-centered-momentum-4-ranks", "rmsprop", {**RMS, "centered": True, "momentum": 0.8}, FOUR),
    ("adagrad", "adagrad", ADAGRAD, {}),
    ("adagrad-initial", "adagrad", {**ADAGRAD, "initial_accumulator_value": 0.1}, {"max_norm": 0.5}),
    ("adagrad-f32-4-ranks", "adagrad", ADAGRAD, {**FOUR, "dtype": "f32"}),
]

QH = {"lr": 0.01, "beta1": 0.98, "beta2": 0.97, "nu": 0.7, "weight_decay": 0.1}
ADOPT = {"lr": 0.01, "beta2": 0.98, "weight_decay": 0.1}
FULLY = {"decay": "fully_decoupled", "lr_max": 0.02}
TWO = {"moments": [[0.9, 0.3], [0.99, 0.5]]}
REFERENCE = [
    ("lion", "lion", {"weight_decay": 0.1}, {}),
    ("lion-f32", "lion", {"weight_decay": 0.1}, {"dtype": "f32"}),
    ("lion-fully-decoupled", "lion", {"weight_decay": 0.1, **FULLY}, {"lrs": cosine(0.02, 40)}),
    ("qhadamw", "qhadamw", QH, {}),
    ("qhadamw-f32", "qhadamw", QH, {"dtype": "f32"}),
    ("qhadamw-coupled", "qhadamw", {**QH, "decay": "coupled"}, {}),
    ("qhadamw-maximize", "qhadamw", {**QH, "maximize": True}, {}),
    ("qhadamw-two-moments", "qhadamw", {"lr": 0.01, **TWO}, {}),
    ("qhadamw-fully-decoupled", "qhadamw", {**QH, **FULLY}, {"lrs": cosine(0.02, 60), "steps": 60}),
    ("adopt", "adopt", ADOPT, {}),
    ("adopt-f32", "adopt", ADOPT, {"dtype": "f32"}),
    ("adopt-coupled", "adopt", {**ADOPT, "decay": "coupled"}, {}),
    ("qhadopt", "qhadopt", {**ADOPT, "beta1": 0.99, "nu": 0.8}, {}),
    ("qhadopt-f32", "qhadopt", {**ADOPT, "beta1": 0.99, "nu": 0.8}, {"dtype": "f32"}),
    ("qhadopt-two-moments", "qhadopt", {**ADOPT, **TWO}, {"lrs": cosine(0.02, 40)}),
    ("sgd-ema", "sgd_ema", {"lr": 0.05, "weight_decay": 0.01, "decay": "coupled"}, {}),
    ("sgd-ema-debias", "sgd_ema", {"lr": 0.05, "debias": True}, {}),
    ("sgd-ema-f32", "sgd_ema", {"lr": 0.05, "debias": True}, {"dtype": "f32"}),
    ("sgd-lr-inside", "sgd", {"lr": 0.05, "weight_decay": 0.01, "decay": "coupled"}, {"lrs": cosine(0.05, 40)}),
    ("sgd-lr-inside-f32", "sgd", {"lr": 0.05}, {"dtype": "f32"}),
    ("lamb", "lamb", {"lr": 0.01, "weight_decay": 0.1}, {}),
    ("lamb-f32", "lamb", {"lr": 0.01, "weight_decay": 0.1}, {"dtype": "f32"}),
    ("lamb-no-decay", "lamb", {"lr": 0.01, "weight_decay": 0.0}, {"lrs": cosine(0.02, 40)}),
    ("lars", "lars", {"lr": 0.5, "trust_coefficient": 0.02}, {}),
    ("lars-f32", "lars", {"lr": 0.5, "trust_coefficient": 0.02}, {"dtype": "f32"}),
    ("muon", "muon", {"lr": 0.02}, {}),
    ("muon-f32", "muon", {"lr": 0.02}, {"dtype": "f32"}),
    ("muon-match-rms", "muon", {"lr": 0.02, "adjust_lr_fn": "match_rms_adamw", "nesterov": False}, {}),
]

WOLFE = {"line_search": "strong_wolfe"}
FIXED = {"rtol": 1e-9, "atol": 1e-11}
LBFGS = [
    ("lbfgs-rosenbrock", "rosenbrock", {"max_iter": 1}, FIXED),
    ("lbfgs-rosenbrock-history", "rosenbrock", {"max_iter": 1, "history_len": 3}, FIXED),
    ("lbfgs-rosenbrock-wolfe", "rosenbrock", {"max_iter": 1, "max_eval": 25, **WOLFE}, {}),
    ("lbfgs-rosenbrock-wolfe-end", "rosenbrock", {"max_iter": 100, **WOLFE}, {"steps": 3, "points": 0}),
    ("lbfgs-least-squares", "least_squares", {"max_iter": 1}, FIXED),
    ("lbfgs-least-squares-wolfe", "least_squares", {"max_iter": 1, "max_eval": 25, **WOLFE}, {}),
    ("lbfgs-least-squares-end", "least_squares", {"max_iter": 30}, {**FIXED, "steps": 3}),
    ("lbfgs-logistic", "logistic", {"max_iter": 1}, FIXED),
    ("lbfgs-logistic-wolfe", "logistic", {"max_iter": 1, "max_eval": 25, **WOLFE}, {}),
    ("lbfgs-logistic-end", "logistic", {"max_iter": 30, "history_len": 5, **WOLFE}, {"steps": 3}),
]


def make(folder):
    folder.mkdir(exist_ok=True)
    path = lambda name: folder / f"{name}.safetensors"
    for seed, (name, rule, settings, run) in enumerate(TORCH, 1):
        record_trace.record(path(name), rule, settings, seed=seed, **run)
    for seed, (name, rule, settings, run) in enumerate(REFERENCE, 100):
        record_reference.record(path(name), rule, settings, seed=seed, **run)
    for name, problem, settings, run in LBFGS:
        record_lbfgs.record(path(name), problem, settings, **run)


def read(path):
    """Spec and tensors of a trace, as lists of numbers."""
    data = path.read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:end])
    kinds = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
    spec = json.loads(header.pop("__metadata__")["spec"])
    part = lambda info: data[end + info["data_offsets"][0] : end + info["data_offsets"][1]]
    return spec, {name: np.frombuffer(part(info), kinds[info["dtype"]]) for name, info in header.items()}


def differs(old, new):
    """Why the old trace is another than the new one, if it is: more than what libraries' last digits make."""
    (spec, tensors), (wanted, fresh) = read(old), read(new)
    if spec != wanted:
        return "its spec"
    if tensors.keys() != fresh.keys():
        return "the names of its tensors"
    bound = lambda x: 1e-6 if x.dtype == np.float32 or spec["problem"] else 1e-10
    close = lambda x, y: x.shape == y.shape and np.allclose(x, y, bound(x), bound(x))
    return next((name for name, x in tensors.items() if not close(x, fresh[name])), None)


def check():
    with tempfile.TemporaryDirectory() as made:
        make(Path(made))
        old, new = ({p.name for p in Path(f).glob("*.safetensors")} for f in (FOLDER, made))
        wrong = {name: "there is no such file" for name in new - old}
        wrong.update({name: "no longer made" for name in old - new})
        for name in sorted(old & new):
            wrong[name] = differs(FOLDER / name, Path(made) / name)
    wrong = {name: why for name, why in wrong.items() if why}
    for name, why in sorted(wrong.items()):
        print(f"{name}: {why}")
    return 1 if wrong else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    sys.exit(check() if parser.parse_args().check else make(FOLDER))
