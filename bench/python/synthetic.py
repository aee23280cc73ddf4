"""Seeded runs for the recorders: parameters, gradients, weights and learning rates, the same for every recorder.

A `Run` describes a run. `trace()` returns its trace without expected values; `reduced()` returns the gradients of a step
reduced over all ranks, in float64. The only dependency is numpy.
"""

import argparse
import json
import math
from dataclasses import dataclass, field

import numpy as np

from trace_file import Trace, as_dtype, to_float64

SHAPES = {"w": (5, 3), "b": (7,), "scale": (1,), "cube": (2, 2, 2)}
MATRICES = {"wide": (3, 5), "tall": (6, 2), "square": (4, 4)}
NO_DECAY = ["b", "scale"]
TOLERANCES = {
    "F64": {"rtol": 1e-11, "atol": 1e-14},
    "F32": {"rtol": 2e-5, "atol": 1e-7},
    # One unit in the last place: a value near the midpoint of two representable values may round to either.
    "BF16": {"rtol": 2.0**-7, "atol": 1e-7},
    "F16": {"rtol": 2.0**-10, "atol": 1e-7},
}
EXPECT = [1, 2, 3, 10, 20]


@dataclass
class Run:
    """One run. `missing`: in some steps a gradient is missing on one rank ("some"), on every rank ("all"), or "both"."""

    optimizer: dict
    dtype: str = "F32"
    steps: int = 40
    ranks: int = 1
    reduce: str = "mean"
    clip: dict | None = None
    groups: list | None = None
    schedule: str | None = None
    missing: str | None = None
    seed: int = 1
    shapes: dict = field(default_factory=lambda: dict(SHAPES))

    def lrs(self):
        """Returns the learning rate of every step, or None without a schedule.

        "cosine": a warm-up over a tenth of the steps, then a cosine down to a tenth. "drop": a tenth after half of the steps.
        """
        if self.schedule is None:
            return None
        if self.schedule == "drop":
            return [self.optimizer["lr"] * (1.0 if 2 * t <= self.steps else 0.1) for t in range(1, self.steps + 1)]
        peak, warm = self.optimizer["lr"], self.steps // 10
        rates = []
        for t in range(1, self.steps + 1):
            way = max(0, t - warm) / (self.steps - warm)
            rates.append(peak * (min(1.0, t / warm) if t <= warm else 0.1 + 0.45 * (1 + math.cos(math.pi * way))))
        return rates

    def expected_steps(self):
        return sorted({t for t in EXPECT if t < self.steps} | {self.steps})

    def _absent(self, t, rank, name):
        names = list(self.shapes)
        some = self.missing in ["some", "both"] and (t + rank + names.index(name)) % 5 == 0
        everywhere = self.missing in ["all", "both"] and (t + 2 * names.index(name)) % 7 == 0
        return some or everywhere

    def trace(self, source):
        """Returns the trace without expected values."""
        spec = {
            "optimizer": self.optimizer,
            "steps": self.steps,
            "ranks": self.ranks,
            "reduce": self.reduce,
            "clip": self.clip,
            "lrs": self.lrs(),
            "groups": self.groups,
            "problem": None,
            "tolerance": TOLERANCES[self.dtype],
            "source": source,
        }
        trace, random = Trace(spec), np.random.Generator(np.random.PCG64(self.seed))
        scales = {}
        for name, shape in self.shapes.items():
            trace.tensors[f"param/{name}"] = as_dtype(random.normal(size=shape), self.dtype)
            # Each element has its own scale of gradients, from 1e-3 to 1, and its own mean.
            scales[name] = 10.0 ** random.uniform(-3, 0, size=shape), random.normal(size=shape)
        for t in range(1, self.steps + 1):
            if self.reduce == "weighted":
                trace.tensors[f"weight/{t}"] = random.integers(1, 9, size=self.ranks).astype(np.float64)
            for rank in range(self.ranks):
                for name, (scale, mean) in scales.items():
                    values = scale * (mean + random.normal(size=mean.shape))
                    if not self._absent(t, rank, name):
                        key = f"grad/{t}/{name}" if self.ranks == 1 else f"grad/{t}/{rank}/{name}"
                        trace.tensors[key] = as_dtype(values, self.dtype)
        return trace


def reduced(trace, t):
    """Returns the gradients of step `t` reduced over all ranks, in float64, by name; without those missing on every rank."""
    spec, ranks = trace.spec, trace.spec["ranks"]
    weights = trace.tensors[f"weight/{t}"] if spec["reduce"] == "weighted" else np.ones(ranks)
    divisor = 1.0 if spec["reduce"] == "sum" else weights.sum()
    grads = {}
    for name in trace.params():
        alike = trace.tensors.get(f"grad/{t}/{name}")
        own = [trace.tensors.get(f"grad/{t}/{rank}/{name}", alike) for rank in range(ranks)]
        terms = [weight * to_float64(grad) for weight, grad in zip(weights, own) if grad is not None]
        if terms:
            grads[name] = sum(terms) / divisor
    return grads


def arguments(description, names):
    """Returns the command line parser of a recorder: the options of a run, and the output file."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("rule", nargs="?", choices=names)
    parser.add_argument("-o", "--out", help="output file of the trace")
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="fields of the optimizer, as JSON")
    parser.add_argument("--dtype", default="F32", choices=TOLERANCES)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--reduce", default="mean", choices=["mean", "sum", "weighted"])
    parser.add_argument("--clip", type=float, metavar="MAX_NORM")
    parser.add_argument("--norm-type", default="2", metavar="P", help="1, 2, 3, ... or inf")
    parser.add_argument("--no-decay", nargs="*", metavar="PARAM", help="parameters without weight decay")
    parser.add_argument("--schedule", choices=["cosine", "drop"])
    parser.add_argument("--missing", choices=["some", "all", "both"], help="ranks on which gradients are missing in some steps")
    parser.add_argument("--seed", type=int, default=1)
    return parser


def field_values(pairs):
    """Parses `FIELD=VALUE` pairs; a value that is not JSON is a string."""
    fields = {}
    for pair in pairs:
        name, _, text = pair.partition("=")
        try:
            fields[name] = json.loads(text)
        except json.JSONDecodeError:
            fields[name] = text
    return fields


def run_of(args, defaults):
    """Returns the run for parsed arguments."""
    norm_type = "inf" if args.norm_type == "inf" else float(args.norm_type)
    return Run(
        optimizer={"name": args.rule, **defaults, **field_values(args.set)},
        dtype=args.dtype,
        steps=args.steps,
        ranks=args.ranks,
        reduce=args.reduce,
        clip=None if args.clip is None else {"max_norm": args.clip, "norm_type": norm_type},
        groups=[{"params": args.no_decay, "weight_decay": 0.0}] if args.no_decay else None,
        schedule=args.schedule,
        missing=args.missing,
        seed=args.seed,
        shapes=dict(MATRICES if args.rule == "muon" else SHAPES),
    )
