"""Records traces of rules that torch lacks, each computed in float64 from its paper's formula and nothing else.

    python bench/python/record_reference.py lion lion.safetensors --set weight_decay=0.1 --dtype f32

Gradients are random with a seed. Every rule sees its inputs in `--dtype` and computes in float64; what is expected is
rounded once, when it is written.
"""

import argparse
import json

import numpy as np

import trace_file

SHAPES = {"w": (5, 3), "b": (7,), "s": ()}
DECAYED = {"lion", "qhadamw", "qhadopt", "adopt", "sgd_ema", "sgd"}


def lion(p, g, s, h, lr, t):
    m = s.setdefault("m", np.zeros_like(p))
    s["m"] = h["beta2"] * m + (1 - h["beta2"]) * g
    return lr * np.sign(h["beta1"] * m + (1 - h["beta1"]) * g)


def moments(h):
    """Pairs of beta and weight, and the names of their state."""
    pairs = h.get("moments") or [[h["beta1"], h.get("nu", 1.0)]]
    return [(f"m{j}" if len(pairs) > 1 else "m", beta, weight) for j, (beta, weight) in enumerate(pairs)]


def qhadamw(p, g, s, h, lr, t):
    b2 = h["beta2"]
    v = s["v"] = b2 * s.get("v", 0 * p) + (1 - b2) * g * g
    step = (1 - sum(weight for _, _, weight in moments(h))) * g
    for name, beta, weight in moments(h):
        s[name] = beta * s.get(name, 0 * p) + (1 - beta) * g
        step = step + weight * s[name] / (1 - beta**t)
    return lr * step / (np.sqrt(v) / np.sqrt(1 - b2**t) + h["eps"])


def qhadopt(p, g, s, h, lr, t):
    """The first step stores v and moves nothing; the bound counts the steps before this one, as the authors' program."""
    b2 = h["beta2"]
    if t == 1:
        s.update({name: 0 * p for name, _, _ in moments(h)}, v=g * g)
        return None
    bound = (t - 1) ** 0.25
    u = np.clip(g / np.maximum(np.sqrt(s["v"]), h["eps"]), -bound, bound)
    step = (1 - sum(weight for _, _, weight in moments(h))) * u
    for name, beta, weight in moments(h):
        s[name] = beta * s[name] + (1 - beta) * u
        step = step + weight * s[name]
    s["v"] = b2 * s["v"] + (1 - b2) * g * g
    return lr * step


def sgd_inside(p, g, s, h, lr, t):
    s["momentum"] = h["momentum"] * s.get("momentum", 0 * p) + lr * g
    return s["momentum"]


def sgd_ema(p, g, s, h, lr, t):
    m = s["momentum"] = h["beta"] * s.get("momentum", 0 * p) + (1 - h["beta"]) * g
    return lr * (m / (1 - h["beta"] ** t) if h["debias"] else m)


def lamb(p, g, s, h, lr, t):
    b1, b2 = h["beta1"], h["beta2"]
    m = s["m"] = b1 * s.get("m", 0 * p) + (1 - b1) * g
    v = s["v"] = b2 * s.get("v", 0 * p) + (1 - b2) * g * g
    r = (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + h["eps"]) + h["weight_decay"] * p
    return lr * ratio(1.0, norm(p), norm(r)) * r


def lars(p, g, s, h, lr, t):
    wd = h["weight_decay"]
    local = ratio(h["trust_coefficient"], norm(p), norm(g), wd)
    s["momentum"] = h["momentum"] * s.get("momentum", 0 * p) + lr * local * (g + wd * p)
    return s["momentum"]


def muon(p, g, s, h, lr, t):
    mu = h["momentum"]
    b = s["momentum"] = mu * s.get("momentum", 0 * p) + (1 - mu) * g
    u = mu * b + (1 - mu) * g if h["nesterov"] else b
    rows, cols = p.shape
    original = h["adjust_lr_fn"] in (None, "original")
    adjust = np.sqrt(max(1, rows / cols)) if original else 0.2 * np.sqrt(max(rows, cols))
    return lr * adjust * orthogonal(u, h) + lr * h["weight_decay"] * p


def orthogonal(x, h):
    """Newton-Schulz of the fifth order, on the side on which the product is small."""
    a, b, c = h["ns_coefficients"]
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / max(norm(x), h["eps"])
    for _ in range(h["ns_steps"]):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


def norm(x):
    return np.sqrt(np.sum(x * x))


def ratio(eta, of_params, of_update, wd=0.0):
    """LARS and LAMB: how far the update may go, 1 where either norm is 0."""
    if of_params == 0 or of_update == 0:
        return 1.0
    return eta * of_params / (of_update + wd * of_params)


ADOPT = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.9999, "eps": 1e-6, "weight_decay": 0.0}
QH = {"lr": 1e-3, "beta1": 0.995, "beta2": 0.999, "nu": 0.7, "eps": 1e-8, "weight_decay": 0.01}
RULES = {
    "lion": (lion, {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0}),
    "qhadamw": (qhadamw, QH),
    "adopt": (qhadopt, ADOPT),
    "qhadopt": (qhadopt, {**ADOPT, "beta1": 0.999, "nu": 0.9}),
    "sgd_ema": (sgd_ema, {"lr": 1e-3, "beta": 0.9, "debias": False, "weight_decay": 0.0}),
    "sgd": (sgd_inside, {"lr": 1e-3, "momentum": 0.9, "lr_inside": True, "weight_decay": 0.0}),
    "lamb": (lamb, {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-6, "weight_decay": 0.01}),
    "lars": (lars, {"lr": 0.1, "momentum": 0.9, "trust_coefficient": 1e-3, "weight_decay": 5e-4}),
    "muon": (
        muon,
        {
            "lr": 1e-3, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True, "eps": 1e-7, "ns_steps": 5,
            "ns_coefficients": [3.4445, -4.7750, 2.0315], "adjust_lr_fn": None,
        },
    ),
}  # fmt: skip


def update(name, p, g, s, h, lr, t):
    """`p` after step `t`; weight decay goes where `h["decay"]` says, decoupled unless it says otherwise."""
    wd, decay = h.get("weight_decay", 0.0), h.get("decay", "decoupled")
    g = -g if h.get("maximize") else g
    if name not in DECAYED:
        return p - RULES[name][0](p, g, s, h, lr, t)
    g = g + wd * p if decay == "coupled" else g
    step = RULES[name][0](p, g, s, h, lr, t)
    if decay == "fully_decoupled":
        share = wd * lr / h["lr_max"]
    else:
        share = {"coupled": 0.0, "decoupled": lr * wd}[decay]
    return p if step is None else p - step - share * p


def record(path, name, settings=None, dtype="f64", steps=40, lrs=None, every=8, seed=1, shapes=None):
    """Writes the trace of `name` with its defaults but for `settings`, one rank, unclipped."""
    extra = {"decay", "lr_max", "maximize", "moments"} if name in DECAYED else set()
    unknown = set(settings or {}) - set(RULES[name][1]) - extra
    if unknown:
        raise ValueError(f"{name} has no {sorted(unknown)}; it takes {sorted(RULES[name][1])}")
    h = {**RULES[name][1], **(settings or {})}
    if "moments" in h:
        h = {key: value for key, value in h.items() if key not in ("beta1", "nu")}
    if h.get("decay") == "fully_decoupled" and "lr_max" not in h:
        raise ValueError("fully decoupled decay needs lr_max, the largest learning rate")
    if name in DECAYED and h["weight_decay"]:
        h.setdefault("decay", "decoupled")
    kind, random = {"f64": np.float64, "f32": np.float32}[dtype], np.random.default_rng(seed)
    draw = lambda shape: np.asarray(random.standard_normal(shape)).astype(kind)
    shapes = shapes or ({"w": (5, 3), "wide": (3, 6)} if name == "muon" else SHAPES)
    tensors = {f"param/{key}": draw(shape) for key, shape in shapes.items()}
    params = {key: tensors[f"param/{key}"].astype(np.float64) for key in shapes}
    state = {key: {} for key in shapes}
    for t in range(1, steps + 1):
        for key, shape in shapes.items():
            g = tensors[f"grad/{t}/{key}"] = draw(shape)
            lr = lrs[t - 1] if lrs else h["lr"]
            params[key] = update(name, params[key], g.astype(np.float64), state[key], h, lr, t)
            if t == 1 or t % every == 0 or t == steps:
                tensors[f"expect/{t}/{key}"] = np.asarray(params[key]).astype(kind)
            if t == steps:
                for slot, value in state[key].items():
                    tensors[f"expect_state/{t}/{key}/{slot}"] = np.asarray(value).astype(kind)
    tolerance = {"rtol": 1e-11, "atol": 1e-13} if dtype == "f64" else {"rtol": 2e-5, "atol": 1e-7}
    spec = {
        "optimizer": {"name": name, **h}, "steps": steps, "ranks": 1, "reduce": "mean", "clip": None, "lrs": lrs,
        "groups": None, "problem": None, "tolerance": tolerance, "source": "record_reference.py, float64",
    }  # fmt: skip
    trace_file.save(path, spec, tensors)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rule", choices=sorted(RULES))
    parser.add_argument("out")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=JSON")
    parser.add_argument("--dtype", choices=["f32", "f64"], default="f64")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=8, help="steps between two that are compared")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    settings = {key: json.loads(value) for key, value in (pair.split("=", 1) for pair in asked.set)}
    record(asked.out, asked.rule, settings, asked.dtype, asked.steps, None, asked.every, asked.seed)


if __name__ == "__main__":
    main()
