"""Trace files: recorded training runs, which `cargo xtask parity` replays. bench/traces/README.md describes the format.

A `Trace` is a spec and named numpy arrays (`BFloat16` for bfloat16, which numpy lacks). `save` first checks the whole
trace, and writes the same bytes for the same trace on every machine. The only dependency is numpy.
"""

import json
import pathlib
import re
import struct
from dataclasses import dataclass, field

import numpy as np

FORMAT = {"format": "meshstep-trace", "version": "1"}
SPEC_FIELDS = {"optimizer", "steps", "ranks", "reduce", "clip", "lrs", "groups", "problem", "tolerance", "source"}
KINDS = ["grad", "weight", "expect", "expect_eval", "expect_state", "expect_norm", "expect_loss", "expect_evals"]
PROBLEM_DATA = {"rosenbrock": set(), "least_squares": {"A", "b"}, "logistic": {"A", "y"}}
NUMPY_NAMES = {"float32": "F32", "float64": "F64", "float16": "F16"}
NUMPY_TYPES = {"F32": "<f4", "F64": "<f8", "F16": "<f2", "BF16": "<u2"}


class TraceError(ValueError):
    """An invalid trace."""


@dataclass(frozen=True)
class BFloat16:
    """Array of bfloat16, stored as bits."""

    bits: np.ndarray

    @classmethod
    def round(cls, values):
        """Rounds `values`, which must be finite, to the nearest bfloat16, ties to even."""
        bits = np.asarray(values, np.float32).view(np.uint32).astype(np.uint64)
        return cls(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16))

    @property
    def shape(self):
        return self.bits.shape

    def to_float32(self):
        return (self.bits.astype(np.uint32) << 16).view(np.float32)


def dtype_of(array):
    if isinstance(array, BFloat16):
        return "BF16"
    name = NUMPY_NAMES.get(array.dtype.name)
    if name is None:
        raise TraceError(f"a trace cannot have the type {array.dtype}; use {', '.join(NUMPY_TYPES)}")
    return name


def as_dtype(values, dtype):
    """Returns `values` rounded to one of the types of a trace."""
    if dtype == "BF16":
        return BFloat16.round(values)
    return np.asarray(values).astype(NUMPY_TYPES[dtype])


def to_float64(array):
    return (array.to_float32() if isinstance(array, BFloat16) else array).astype(np.float64)


@dataclass
class Trace:
    spec: dict
    tensors: dict = field(default_factory=dict)

    def params(self):
        """Returns the initial values of the parameters by name."""
        return {key.removeprefix("param/"): array for key, array in self.tensors.items() if key.startswith("param/")}

    def scalar(self, key, value):
        self.tensors[key] = np.array(float(value))

    def save(self, path):
        self.check()
        header, blobs, offset = {"__metadata__": {**FORMAT, "spec": json.dumps(self.spec, allow_nan=False)}}, [], 0
        for key, array in sorted(self.tensors.items()):
            dtype = dtype_of(array)
            bits = array.bits if dtype == "BF16" else array
            blobs.append(np.ascontiguousarray(bits, NUMPY_TYPES[dtype]).tobytes())
            end = offset + len(blobs[-1])
            header[key] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        pathlib.Path(path).write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))

    @classmethod
    def load(cls, path):
        data = pathlib.Path(path).read_bytes()
        start = 8 + struct.unpack_from("<Q", data)[0]
        header = json.loads(data[8:start])
        metadata = header.pop("__metadata__", {})
        if any(metadata.get(key) != value for key, value in FORMAT.items()):
            raise TraceError(f"{path} is not a trace of version {FORMAT['version']}")
        trace = cls(json.loads(metadata["spec"]))
        for key, entry in header.items():
            begin, end = (start + offset for offset in entry["data_offsets"])
            array = np.frombuffer(data[begin:end], NUMPY_TYPES[entry["dtype"]]).reshape(entry["shape"])
            trace.tensors[key] = BFloat16(array) if entry["dtype"] == "BF16" else array
        trace.check()
        return trace

    def check(self):
        """Raises `TraceError` if the trace is invalid or incomplete."""
        spec, params = self.spec, self.params()
        unknown = spec.keys() - SPEC_FIELDS
        if unknown:
            raise TraceError(f"unknown fields of the spec: {', '.join(sorted(unknown))}")
        for required in ["optimizer", "steps", "ranks", "tolerance", "source"]:
            if required not in spec:
                raise TraceError(f"the spec has no {required}")
        if spec.get("lrs") and len(spec["lrs"]) != spec["steps"]:
            raise TraceError(f"{len(spec['lrs'])} lrs for {spec['steps']} steps")
        if not params:
            raise TraceError("no param/<name>")
        for group in spec.get("groups") or []:
            strangers = set(group["params"]) - params.keys()
            if strangers:
                raise TraceError(f"a group names unknown parameters: {', '.join(sorted(strangers))}")
            nulls = [name for name, value in group.items() if value is None]
            if nulls:
                raise TraceError(f"a group has no value for {', '.join(nulls)}; leave these fields out to use the optimizer's values")
        if not any(key.startswith("expect") for key in self.tensors):
            raise TraceError("it has no tensor expect..., so there is nothing to compare")
        for key, array in self.tensors.items():
            self._check_tensor(key, array, params)
        self._check_whole()

    def _check_tensor(self, key, array, params):
        spec, ranks = self.spec, self.spec["ranks"]
        if not np.isfinite(to_float64(array)).all():
            raise TraceError(f"{key} is not finite")
        kind, _, rest = key.partition("/")
        step = re.match(r"([1-9][0-9]*)(?:/|$)", rest)
        if kind in ["param", "data"]:
            problem = spec.get("problem")
            if kind == "data" and not (problem and rest in PROBLEM_DATA[problem["name"]]):
                raise TraceError(f"{key}: the problem has no such data")
            return
        if kind not in KINDS:
            raise TraceError(f"a trace has no tensor named {key}")
        if not step or int(step[1]) > spec["steps"]:
            raise TraceError(f"{key}: its step is not between 1 and {spec['steps']}")
        if kind in ["weight", "expect_norm", "expect_loss", "expect_evals"]:
            shape = (ranks,) if kind == "weight" else ()
            if dtype_of(array) != "F64" or array.shape != shape:
                raise TraceError(f"{key} must be F64 of shape {shape}")
            return
        name = rest[step.end() :]
        if kind == "expect_state":
            name = name.rpartition("/")[0]
        elif kind == "grad" and name not in params:
            rank, _, name = name.partition("/")
            if not (rank.isdecimal() and int(rank) < ranks):
                raise TraceError(f"{key}: its third part is neither a parameter nor a rank below {ranks}")
        if name not in params:
            raise TraceError(f"{key}: there is no param/{name}")
        if array.shape != params[name].shape:
            raise TraceError(f"{key} has shape {array.shape}, but its parameter has {params[name].shape}")
        if kind in ["expect", "expect_eval"] and dtype_of(array) != dtype_of(params[name]):
            raise TraceError(f"{key} has type {dtype_of(array)}, but its parameter has {dtype_of(params[name])}")

    def _check_whole(self):
        spec = self.spec
        steps = range(1, spec["steps"] + 1)
        problem = spec.get("problem")
        if problem:
            missing = [f"data/{key}" for key in PROBLEM_DATA[problem["name"]] if f"data/{key}" not in self.tensors]
        else:
            with_grads = {int(key.split("/")[1]) for key in self.tensors if key.startswith("grad/")}
            missing = [f"grad/{t}/<name>" for t in steps if t not in with_grads]
        if spec.get("reduce") == "weighted":
            missing += [f"weight/{t}" for t in steps if f"weight/{t}" not in self.tensors]
        if missing:
            raise TraceError(f"missing: {', '.join(missing)}")
