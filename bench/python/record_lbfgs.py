"""Records torch's L-BFGS on the built-in problems of a trace.

    python bench/python/record_lbfgs.py rosenbrock out.safetensors --set max_iter=1 --steps 10
"""

import argparse
import json

import numpy as np
import torch

import trace_file

FIELDS = {"history_len": "history_size", "line_search": "line_search_fn"}


def rosenbrock(x):
    head, tail = x[:-1], x[1:]
    return (100 * (tail - head**2) ** 2 + (1 - head) ** 2).sum()


def least_squares(x, A, b):
    return (A @ x - b).square().sum() / (2 * len(b))


def logistic(x, A, y, l2):
    margins = y * (A @ x)
    return torch.nn.functional.softplus(-margins).mean() + l2 / 2 * x.square().sum()


def problem(name, seed):
    """The problem's spec, its first point, its data, and its loss."""
    random = np.random.default_rng(seed)
    if name == "rosenbrock":
        start = np.where(np.arange(10) % 2 == 0, -1.2, 1.0)
        return {"name": name}, start, {}, rosenbrock
    A, x = random.standard_normal((24, 6)) * np.geomspace(0.3, 3, 6), random.standard_normal(6)
    noise = random.standard_normal(24)
    if name == "least_squares":
        return {"name": name}, np.zeros(6), {"A": A, "b": A @ x + 0.1 * noise}, least_squares
    y = np.where(A @ x + noise > 0, 1.0, -1.0)
    loss = lambda x, A, y: logistic(x, A, y, 0.01)
    return {"name": name, "l2": 0.01}, np.zeros(6), {"A": A, "y": y}, loss


def record(path, name, settings=None, steps=10, points=10, seed=1, rtol=1e-6, atol=1e-9):
    """Writes the trace of `steps` steps; parameters are compared after the first `points` of them, losses after all."""
    settings = dict(settings or {})
    spec, start, data, loss = problem(name, seed)
    x = torch.nn.Parameter(torch.from_numpy(start.copy()))
    inputs = {key: torch.from_numpy(value) for key, value in data.items()}
    asked = {FIELDS.get(key, key): value for key, value in settings.items()}
    optimizer = torch.optim.LBFGS([x], **asked)
    tensors = {"param/x": start, **{f"data/{key}": value for key, value in data.items()}}

    def closure():
        optimizer.zero_grad()
        value = loss(x, **inputs)
        value.backward()
        return value

    for t in range(1, steps + 1):
        value = optimizer.step(closure)
        if t <= points:
            tensors[f"expect/{t}/x"] = x.detach().numpy().copy()
        tensors[f"expect_loss/{t}"] = np.float64(value.item())
        tensors[f"expect_evals/{t}"] = np.float64(optimizer.state[x]["func_evals"])
    trace = {
        "optimizer": {"name": "lbfgs", **settings}, "steps": steps, "ranks": 1, "reduce": "mean", "clip": None,
        "lrs": None, "groups": None, "problem": spec, "tolerance": {"rtol": rtol, "atol": atol},
        "source": f"torch {torch.__version__}",
    }  # fmt: skip
    trace_file.save(path, trace, tensors)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("problem", choices=["rosenbrock", "least_squares", "logistic"])
    parser.add_argument("out")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=JSON")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--points", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    settings = {key: json.loads(value) for key, value in (pair.split("=", 1) for pair in asked.set)}
    record(asked.out, asked.problem, settings, asked.steps, asked.points, asked.seed)


if __name__ == "__main__":
    main()
