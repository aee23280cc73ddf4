"""Trajectories of two workers in local training, with which shard/local/tests/suite/trajectories.rs compares Meshstep's.

    python bench/python/local_reference.py > shard/local/tests/suite/data/trajectories.txt

Computed with Python's floats, without packages. Worker w minimizes curvature[w] / 2 * (x - centre[w])^2 from x = 5. Each case is
a line: its name, then x of both workers after each step, with enough digits to identify a float64. The formulas are those of the
papers.
"""

import math

CURVATURE = (0.5, 2.0)
CENTRE = (0.0, 1.0)
START = 5.0
STEPS = 40
LR = 0.05
BETA1, BETA2, EPS, LAMBDA = 0.9, 0.99, 1e-8, 1e-3


def gradient(w, x):
    return CURVATURE[w] * (x - CENTRE[w])


def mean(values):
    return sum(values) / len(values)


def uncorrected(kx, ku, kv, before, clip=math.inf):
    """DES-LOC. With `before`, the step uses averaged values, as in the algorithm; otherwise averages follow the step."""
    x, u, v = [START] * 2, [0.0] * 2, [0.0] * 2
    out = []
    for t in range(STEPS):
        grads = [max(-clip, min(clip, gradient(w, x[w]))) for w in range(2)]
        if before:
            u_from = [mean(u)] * 2 if t % ku == 0 else u
            v_from = [mean(v)] * 2 if t % kv == 0 else v
            x_from = [mean(x)] * 2 if t % kx == 0 else x
        else:
            u_from, v_from, x_from = u, v, x
        u = [BETA1 * u_from[w] + (1 - BETA1) * grads[w] for w in range(2)]
        v = [BETA2 * v_from[w] + (1 - BETA2) * grads[w] ** 2 for w in range(2)]
        x = [x_from[w] - LR * u[w] / math.sqrt(v[w] + LAMBDA**2) for w in range(2)]
        if not before:
            x = [mean(x)] * 2 if (t + 1) % kx == 0 else x
            u = [mean(u)] * 2 if (t + 1) % ku == 0 else u
            v = [mean(v)] * 2 if (t + 1) % kv == 0 else v
        out.append(list(x))
    return out


def corrected(kx, ku, kv, weights):
    """Bias-corrected Adam if `weights` is None; else QHAdamW with these pairs of beta and weight, one period for each moment."""
    pairs = weights or [(BETA1, None)]
    x, v = [START] * 2, [0.0] * 2
    moments = [[0.0] * 2 for _ in pairs]
    out = []
    for t in range(1, STEPS + 1):
        for w in range(2):
            g = gradient(w, x[w])
            v[w] = BETA2 * v[w] + (1 - BETA2) * g * g
            root = math.sqrt(v[w] / (1 - BETA2**t)) + EPS
            for m, (beta, _) in zip(moments, pairs):
                m[w] = beta * m[w] + (1 - beta) * g
            corrected_moments = [m[w] / (1 - beta**t) for m, (beta, _) in zip(moments, pairs)]
            if weights is None:
                step = corrected_moments[0]
            else:
                share = sum(weight for _, weight in pairs)
                mixed = (weight * m for (_, weight), m in zip(pairs, corrected_moments))
                step = (1 - share) * g + sum(mixed)
            x[w] -= LR * step / root
        if t % kx == 0:
            x = [mean(x)] * 2
        for j, (m, k) in enumerate(zip(moments, ku)):
            if t % k == 0:
                moments[j] = [mean(m)] * 2
        if t % kv == 0:
            v = [mean(v)] * 2
        out.append(list(x))
    return out


def qhadopt(kx, ku, kv, beta, weight):
    """QHADOPT: divides by the root of the previous second moment, clamps to (t - 1)^(1/4), then averages and mixes."""
    x, m, v = [START] * 2, [0.0] * 2, [0.0] * 2
    out = []
    for t in range(1, STEPS + 1):
        for w in range(2):
            g = gradient(w, x[w])
            if t == 1:
                v[w] = g * g
                continue
            bound = (t - 1) ** 0.25
            h = max(-bound, min(bound, g / max(math.sqrt(v[w]), 1e-6)))
            m[w] = beta * m[w] + (1 - beta) * h
            v[w] = BETA2 * v[w] + (1 - BETA2) * g * g
            x[w] -= LR * ((1 - weight) * h + weight * m[w])
        x = [mean(x)] * 2 if t % kx == 0 else x
        m = [mean(m)] * 2 if t % ku == 0 else m
        v = [mean(v)] * 2 if t % kv == 0 else v
        out.append(list(x))
    return out


def outer(h, lr, momentum, inner):
    """DiLoCo: PyTorch's Nesterov momentum, applied to the change of the workers' mean over `h` steps of SGD."""
    x, point, buffer = [START] * 2, START, None
    out = []
    for t in range(1, STEPS + 1):
        x = [x[w] - inner * gradient(w, x[w]) for w in range(2)]
        if t % h == 0:
            moved = point - mean(x)
            buffer = moved if buffer is None else momentum * buffer + moved
            point -= lr * (moved + momentum * buffer)
            x = [point] * 2
        out.append(list(x))
    return out


def constant_difference():
    """Three rounds in which both workers move by -1 from the outer optimizer's point."""
    point, buffer, out = 0.0, 0.0, []
    for _ in range(3):
        buffer = 0.9 * buffer + 1
        point -= 0.7 * (1 + 0.9 * buffer)
        out.append([point] * 2)
    return out


def delayed(k, tau):
    """DES-LOC(k, k, k) with averages after the step, which arrive `tau` steps later: s += beta^tau (mean - s0)."""
    state = {"x": [START] * 2, "u": [0.0] * 2, "v": [0.0] * 2}
    beta = {"x": 1.0, "u": BETA1, "v": BETA2}
    away, out = {}, []
    for t in range(1, STEPS + 1):
        for w in range(2):
            g = gradient(w, state["x"][w])
            state["u"][w] = BETA1 * state["u"][w] + (1 - BETA1) * g
            state["v"][w] = BETA2 * state["v"][w] + (1 - BETA2) * g * g
            state["x"][w] -= LR * state["u"][w] / math.sqrt(state["v"][w] + LAMBDA**2)
        if t % k == 0:
            away[t + tau] = {name: list(values) for name, values in state.items()}
        for name, sent in away.pop(t, {}).items():
            for w in range(2):
                state[name][w] += beta[name] ** tau * (mean(sent) - sent[w])
        out.append(list(state["x"]))
    return out


CASES = {
    "des-loc before": uncorrected(4, 12, 24, before=True),
    "des-loc before, clipped": uncorrected(2, 3, 5, before=True, clip=1.5),
    "des-loc after": uncorrected(4, 12, 24, before=False),
    "des-loc corrected": corrected(4, [12], 24, None),
    "local adam": corrected(5, [5], 5, None),
    "qhadamw": corrected(4, [8], 16, [(0.95, 0.7)]),
    "qhadamw, two moments": corrected(3, [6, 9], 12, [(0.9, 0.3), (0.99, 0.5)]),
    "qhadopt": qhadopt(4, 8, 16, 0.95, 0.9),
    "outer nesterov": outer(5, 0.7, 0.9, 0.02),
    "constant difference": constant_difference(),
    "delayed 0": delayed(5, 0),
    "delayed 1": delayed(5, 1),
    "delayed 3": delayed(5, 3),
}

for name, steps in CASES.items():
    print(name, "=", " ".join(f"{a!r},{b!r}" for a, b in steps))
