"""Records runs of rules that PyTorch lacks: formulas from the papers in float64, written independently of the crates.

    pip install numpy
    python bench/python/record_reference.py lion --set weight_decay=0.1 --clip 1 --ranks 4 -o run.safetensors
    python bench/python/record_reference.py --replay bench/traces/*.safetensors    # the difference of each trace from the formulas
    python bench/python/record_reference.py --self-test                            # compares with PyTorch, where it has the rule

All arithmetic is in float64, starting from the initial values and gradients of the trace; only the expected values are
rounded to the trace's type.
"""

import sys

import numpy as np

from synthetic import MATRICES, Run, arguments, field_values, reduced, run_of
from trace_file import Trace, TraceError, as_dtype, to_float64

SOURCE = "record_reference.py, float64"


def sum_of_powers(values, p):
    return np.abs(values).max(initial=0.0) if p == "inf" else (np.abs(values) ** p).sum()


def clip_factor(grads, clip):
    """Returns the norm of all gradients, and the factor by which clipping multiplies them."""
    p = clip.get("norm_type", 2.0)
    parts = [sum_of_powers(grad.astype(np.float64), p) for grad in grads.values()]
    norm = max(parts) if p == "inf" else sum(parts) ** (1 / p)
    return norm, min(1.0, clip["max_norm"] / (norm + 1e-6))


def moments_of(fields):
    return fields.get("moments") or [[fields["beta1"], fields["nu"]]]


def moment_names(fields):
    pairs = moments_of(fields)
    return ["m"] if len(pairs) == 1 else [f"m{j}" for j in range(len(pairs))]


def frobenius(x):
    return np.sqrt((x * x).sum())


# A rule takes its fields, the parameter, the gradient (with sign and coupled decay applied), the state, which it updates,
# and the step of this parameter, from 1. It returns the change to subtract, without decoupled decay.


def adam(f, p, g, s, t):
    s["m"] = f["beta1"] * s["m"] + (1 - f["beta1"]) * g
    s["v"] = f["beta2"] * s["v"] + (1 - f["beta2"]) * g * g
    v = s["v"]
    if f.get("amsgrad"):
        v = s["vmax"] = np.maximum(s["vmax"], v)
    m_hat, root = s["m"] / (1 - f["beta1"] ** t), np.sqrt(v) / np.sqrt(1 - f["beta2"] ** t)
    return f["lr"] * m_hat / (root + f["eps"])


def sgd(f, p, g, s, t):
    mu = f.get("momentum", 0.0)
    if mu == 0:
        return f["lr"] * g
    inside = f.get("lr_inside", False)
    entering = f["lr"] * g if inside else g
    keep = 1.0 if t == 1 else 1 - f.get("dampening", 0.0)
    s["momentum"] = keep * entering if t == 1 else mu * s["momentum"] + keep * entering
    if inside:
        return s["momentum"]
    return f["lr"] * (g + mu * s["momentum"] if f.get("nesterov") else s["momentum"])


def sgd_ema(f, p, g, s, t):
    s["momentum"] = f["beta"] * s["momentum"] + (1 - f["beta"]) * g
    return f["lr"] * s["momentum"] / (1 - f["beta"] ** t if f.get("debias") else 1.0)


def rmsprop(f, p, g, s, t):
    a, mu = f["alpha"], f.get("momentum", 0.0)
    s["square_avg"] = a * s["square_avg"] + (1 - a) * g * g
    variance = s["square_avg"]
    if f.get("centered"):
        s["grad_avg"] = a * s["grad_avg"] + (1 - a) * g
        variance = variance - s["grad_avg"] ** 2
    u = g / (np.sqrt(variance) + f["eps"])
    if mu > 0:
        u = s["momentum"] = mu * s["momentum"] + u
    return f["lr"] * u


def adagrad(f, p, g, s, t):
    if t == 1:
        s["sum"] = s["sum"] + f.get("initial_accumulator_value", 0.0)
    s["sum"] = s["sum"] + g * g
    return f["lr"] / (1 + (t - 1) * f.get("lr_decay", 0.0)) * g / (np.sqrt(s["sum"]) + f["eps"])


def lion(f, p, g, s, t):
    c = f["beta1"] * s["m"] + (1 - f["beta1"]) * g
    s["m"] = f["beta2"] * s["m"] + (1 - f["beta2"]) * g
    return f["lr"] * np.sign(c)


def mix(f, x, s, t, debias):
    """Updates the moments with x; returns (1 - sum of weights) x + sum of weight * moment."""
    u, rest = 0.0, 1.0
    for name, (beta, weight) in zip(moment_names(f), moments_of(f)):
        s[name] = s[name] + (1 - beta) * (x - s[name])
        u = u + weight * s[name] / (1 - beta**t if debias else 1.0)
        rest -= weight
    return u + rest * x


def qhadamw(f, p, g, s, t):
    u = mix(f, g, s, t, debias=True)
    s["v"] = f["beta2"] * s["v"] + (1 - f["beta2"]) * g * g
    return f["lr"] * u / (np.sqrt(s["v"]) / np.sqrt(1 - f["beta2"] ** t) + f["eps"])


def qhadopt(f, p, g, s, t):
    if t == 1:
        s["v"] = g * g
        return None
    bound = (t - 1) ** 0.25
    h = np.clip(g / np.maximum(np.sqrt(s["v"]), f["eps"]), -bound, bound)
    u = mix(f, h, s, t, debias=False)
    s["v"] = f["beta2"] * s["v"] + (1 - f["beta2"]) * g * g
    return f["lr"] * u


def adopt(f, p, g, s, t):
    return qhadopt({**f, "nu": 1.0}, p, g, s, t)


def lamb(f, p, g, s, t):
    wd = f["weight_decay"]
    s["m"] = f["beta1"] * s["m"] + (1 - f["beta1"]) * g
    s["v"] = f["beta2"] * s["v"] + (1 - f["beta2"]) * g * g
    root = np.sqrt(s["v"] / (1 - f["beta2"] ** t))
    r = s["m"] / (1 - f["beta1"] ** t) / (root + f["eps"]) + wd * p
    whole, step = frobenius(p), frobenius(r)
    return f["lr"] * (whole / step if whole > 0 and step > 0 else 1.0) * r


def lars(f, p, g, s, t):
    wd, whole = f["weight_decay"], frobenius(p)
    denominator = frobenius(g) + wd * whole
    ratio = f["trust_coefficient"] * whole / denominator if whole > 0 and denominator > 0 else 1.0
    s["momentum"] = f["momentum"] * s["momentum"] + f["lr"] * ratio * (g + wd * p)
    return s["momentum"]


def muon(f, p, g, s, t):
    mu, blocks = f["momentum"], f.get("blocks")
    if f.get("decaying_sum"):
        s["momentum"] = mu * s["momentum"] + g
        u = g + mu * s["momentum"] if f["nesterov"] else s["momentum"]
    else:
        s["momentum"] = s["momentum"] + (1 - mu) * (g - s["momentum"])
        u = g + mu * (s["momentum"] - g) if f["nesterov"] else s["momentum"]
    matrices = u if blocks == "batch" else np.split(u, blocks or 1)
    return f["lr"] * np.stack([adjusted(f, orthogonalized(f, x)) for x in matrices]).reshape(p.shape)


def orthogonalized(f, x):
    tall = x.shape[0] > x.shape[1]
    x = x / (frobenius(x) + f["eps"] if f.get("add_eps") else max(frobenius(x), f["eps"]))
    x = x.T if tall else x
    a, b, c = f["ns_coefficients"]
    for _ in range(f["ns_steps"]):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


def adjusted(f, x):
    rows, columns = x.shape
    match = f.get("adjust_lr_fn") == "match_rms_adamw"
    return float(0.2 * np.sqrt(max(rows, columns)) if match else np.sqrt(max(1.0, rows / columns))) * x


def schedulefree_adamw(f, p, g, s, t):
    """Keeps x, y = p and z by their definitions; the weights are those of a rate that never exceeds its first value."""
    y, b1, warm, power = p, f["beta1"], f["warmup_steps"], f["weight_lr_power"]
    z = y if t == 1 else s["z"]
    x = y if t == 1 else (y - (1 - b1) * z) / b1
    rises = [min(1.0, i / warm) if warm else 1.0 for i in range(1, t + 1)]
    weights = [i ** f["r"] * rise**power for i, rise in enumerate(rises, 1)]
    s["v"] = f["beta2"] * s["v"] + (1 - f["beta2"]) * g * g
    u = g / (np.sqrt(s["v"] / (1 - f["beta2"] ** t)) + f["eps"]) + f["weight_decay"] * y
    s["z"] = z - f["lr"] * rises[-1] * u
    share = weights[-1] / sum(weights)
    x = (1 - share) * x + share * s["z"]
    return y - (b1 * x + (1 - b1) * s["z"])


# The rule, its kind of decay unless the trace gives one (None: the rule itself handles decay), its fields with defaults.
RULES = {
    "adam": (adam, "coupled", {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}),
    "adamw": (adam, "decoupled", {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}),
    "sgd": (sgd, "coupled", {"lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0}),
    "sgd_ema": (sgd_ema, "coupled", {"lr": 1e-3, "beta": 0.9, "debias": False, "weight_decay": 0.0}),
    "rmsprop": (rmsprop, "coupled", {"lr": 1e-2, "alpha": 0.99, "eps": 1e-8, "weight_decay": 0.0}),
    "adagrad": (adagrad, "coupled", {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0}),
    "lion": (lion, "decoupled", {"lr": 1e-4, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0}),
    "qhadamw": (
        qhadamw,
        "decoupled",
        {"lr": 1e-3, "beta1": 0.995, "nu": 0.7, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01},
    ),
    "qhadopt": (
        qhadopt,
        "decoupled",
        {"lr": 1e-3, "beta1": 0.999, "nu": 0.9, "beta2": 0.9999, "eps": 1e-6, "weight_decay": 0.0},
    ),
    "adopt": (adopt, "decoupled", {"lr": 1e-3, "beta1": 0.9, "beta2": 0.9999, "eps": 1e-6, "weight_decay": 0.0}),
    "schedulefree_adamw": (
        schedulefree_adamw,
        None,
        {
            "lr": 0.0025,
            "beta1": 0.9,
            "beta2": 0.999,
            "eps": 1e-8,
            "weight_decay": 0.0,
            "warmup_steps": 0,
            "r": 0.0,
            "weight_lr_power": 2.0,
        },
    ),
    "lamb": (lamb, None, {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-6, "weight_decay": 0.01}),
    "lars": (lars, None, {"lr": 1e-3, "momentum": 0.9, "weight_decay": 5e-4, "trust_coefficient": 1e-3}),
    "muon": (
        muon,
        "decoupled",
        {
            "lr": 1e-3,
            "momentum": 0.95,
            "nesterov": True,
            "ns_coefficients": [3.4445, -4.775, 2.0315],
            "ns_steps": 5,
            "eps": 1e-7,
            "weight_decay": 0.1,
            "adjust_lr_fn": "original",
        },
    ),
}


# Defaults of Muon's published programs where they differ from PyTorch's.
VARIANTS = {
    "torch": {},
    "keller_jordan": {"weight_decay": 0.0, "add_eps": True},
    "moonshot": {"decaying_sum": True, "add_eps": True, "adjust_lr_fn": "match_rms_adamw"},
}


# Additional fields, off or 0 by default.
MORE = {
    "adam": ["amsgrad"],
    "adamw": ["amsgrad"],
    "sgd": ["dampening", "nesterov", "lr_inside"],
    "rmsprop": ["centered", "momentum"],
    "adagrad": ["lr_decay", "initial_accumulator_value"],
    "muon": ["variant", "decaying_sum", "add_eps", "blocks"],
    "qhadamw": ["moments"],
    "qhadopt": ["moments"],
}


def defaults_of(rule, fields):
    """Returns the defaults that `fields` extend or replace; raises an error if the rule does not know a field."""
    _, decay, defaults = RULES[rule]
    more = [*MORE.get(rule, []), "maximize", *(["decay", "lr_max"] if decay and rule != "muon" else [])]
    unknown = fields.keys() - defaults.keys() - set(more)
    if unknown:
        raise TraceError(f"{rule} has no {', '.join(sorted(unknown))}; its fields are {', '.join([*defaults, *more])}")
    replaced = ["beta1", "nu"] if "moments" in fields else []
    if "variant" in fields:
        return {"lr": defaults["lr"]}  # The trace names the variant, and the replay knows its defaults.
    return {key: value for key, value in defaults.items() if key not in replaced}


def slots(f):
    """Returns the names of a rule's state."""
    match f["name"]:
        case "adam" | "adamw":
            return ["m", "v", "vmax"] if f.get("amsgrad") else ["m", "v"]
        case "adopt" | "lamb":
            return ["m", "v"]
        case "schedulefree_adamw":
            return ["z", "v"]
        case "sgd":
            return ["momentum"] if f.get("momentum") else []
        case "sgd_ema" | "lars" | "muon":
            return ["momentum"]
        case "rmsprop":
            centered = ["grad_avg"] if f.get("centered") else []
            return ["square_avg", *centered, *(["momentum"] if f.get("momentum") else [])]
        case "adagrad":
            return ["sum"]
        case "lion":
            return ["m"]
        case "qhadamw" | "qhadopt":
            return [*moment_names(f), "v"]


def step(f, p, g, state, t):
    """Returns the parameter after one step of its rule."""
    rule, decay, _ = RULES[f["name"]]
    decay, wd = f.get("decay", decay), f.get("weight_decay", 0.0)
    g = -g if f.get("maximize") else g
    if decay == "coupled":
        g = g + wd * p
    change = rule(f, p, g, state, t)
    if change is None:
        return p
    rate = f["lr"] / (1 + (t - 1) * f.get("lr_decay", 0.0))
    share = {"decoupled": rate * wd, "fully_decoupled": wd * rate / f.get("lr_max", 1.0)}.get(decay, 0.0)
    return p - (change + share * p)


def fields_at(spec, t, name):
    """Returns the optimizer's fields for a parameter at step `t`."""
    fields = dict(spec["optimizer"])
    lr = fields.setdefault("lr", RULES[fields["name"]][2]["lr"])
    for group in spec.get("groups") or []:
        if name in group["params"]:
            fields.update({key: value for key, value in group.items() if key != "params"})
    if spec.get("lrs"):
        fields["lr"] = spec["lrs"][t - 1] if fields["lr"] == lr else spec["lrs"][t - 1] * (fields["lr"] / lr)
    return {**RULES[fields["name"]][2], **VARIANTS[fields.get("variant") or "torch"], **fields}


def replay(trace, computed=np.float64):
    """Replays a trace: yields `t`, the parameters, their state and the norm before clipping after every step.

    `computed` is the type of the arithmetic; float32 shows the effect of rounding.
    """
    spec = trace.spec
    params = {name: to_float64(array).astype(computed) for name, array in trace.params().items()}
    states = {
        name: {slot: np.zeros_like(p) for slot in slots(fields_at(spec, 1, name))} for name, p in params.items()
    }
    times = dict.fromkeys(params, 0)
    for t in range(1, spec["steps"] + 1):
        grads = {name: grad.astype(computed) for name, grad in reduced(trace, t).items()}
        norm, factor = clip_factor(grads, spec["clip"]) if spec.get("clip") else (None, 1.0)
        for name, grad in grads.items():
            times[name] += 1
            params[name] = step(fields_at(spec, t, name), params[name], factor * grad, states[name], times[name])
        yield t, params, states, norm


def record_run(run):
    """Returns the trace of a seeded run."""
    trace = run.trace(SOURCE)
    for t, params, states, norm in replay(trace):
        if t in run.expected_steps():
            for name, p in params.items():
                trace.tensors[f"expect/{t}/{name}"] = as_dtype(p, run.dtype)
            if norm is not None:
                trace.scalar(f"expect_norm/{t}", norm)
    narrow = run.dtype in ["BF16", "F16"]
    for name, state in states.items():
        state = {**state, "master": params[name]} if narrow else state
        for slot, values in state.items():
            trace.tensors[f"expect_state/{run.steps}/{name}/{slot}"] = as_dtype(values, "F32" if narrow else run.dtype)
    return trace


def distances(trace, computed=np.float64):
    """Returns the difference of each expected tensor from the formulas, as a multiple of the trace's tolerance."""
    rtol, atol = trace.spec["tolerance"]["rtol"], trace.spec["tolerance"]["atol"]
    far = {}

    def compare(key, got):
        if key in trace.tensors:
            want = to_float64(trace.tensors[key])
            far[key] = (np.abs(np.asarray(got, np.float64) - want) / (atol + rtol * np.abs(want))).max(initial=0.0)

    for t, params, states, norm in replay(trace, computed):
        for name, p in params.items():
            compare(f"expect/{t}/{name}", p)
            if "z" in states[name]:
                beta1 = fields_at(trace.spec, t, name)["beta1"]
                compare(f"expect_eval/{t}/{name}", p + (1 - 1 / beta1) * (states[name]["z"] - p))
            for slot, values in {**states[name], "master": p}.items():
                compare(f"expect_state/{t}/{name}/{slot}", values)
        if norm is not None:
            compare(f"expect_norm/{t}", norm)
    return far


def show(paths):
    """Prints the differences of traces from the formulas; returns True if one exceeds its tolerance."""
    beyond = False
    for path in paths:
        trace = Trace.load(path)
        if trace.spec["optimizer"]["name"] == "lbfgs":
            continue
        far = distances(trace)
        worst = max(far, key=far.get)
        beyond = beyond or bool(far[worst] > 1)
        print(f"{path}: {len(far)} tensors, largest difference {far[worst]:.2g} of the tolerance, of {worst}")
    return beyond


def self_test():
    """Compares the formulas with PyTorch: its rules in float64, a training loop, Muon in float64 and its first step in bfloat16."""
    import record_trace

    cases = [
        {"name": "adam", "weight_decay": 0.1},
        {"name": "adamw", "amsgrad": True},
        {"name": "sgd", "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"name": "sgd", "momentum": 0.9, "dampening": 0.5, "maximize": True},
        {"name": "rmsprop", "centered": True, "momentum": 0.9, "weight_decay": 0.1},
        {"name": "adagrad", "lr_decay": 0.1, "initial_accumulator_value": 0.5, "weight_decay": 0.1},
    ]
    hard = {"ranks": 3, "reduce": "weighted", "clip": {"max_norm": 1.0, "norm_type": 3.0}, "missing": "both"}
    for fields in cases:
        run = Run({"lr": 0.01, **fields}, "F64", **hard, schedule="cosine")
        run.groups = [{"params": ["b"], "weight_decay": 0.0, "lr": 0.02}]
        near(record_trace.record_run(run), str(fields), 1e-12)
    for rule in ["adam", "adamw", "sgd", "rmsprop", "adagrad"]:
        near(recorded_loop(rule), f"a loop with {rule}", 1e-12)
    for choice in ["original", "match_rms_adamw"]:
        fields = {"name": "muon", **RULES["muon"][2], "adjust_lr_fn": choice}
        run = Run(fields, "F64", shapes=dict(MATRICES))
        near(record_trace.record_run(run), f"muon, {choice}", 1e-12)
        run = Run(fields, steps=1, shapes=dict(MATRICES))
        # Elements are up to 1 times the learning rate; bfloat16 has two decimal digits.
        trace = record_trace.record_run(run, bfloat16=True)
        near(trace, f"the first step of muon, {choice}", 0.0, 0.03 * run.optimizer["lr"], state=False)
    for variant in ["keller_jordan", "moonshot"]:
        run = Run({"name": "muon", "variant": variant, "lr": 0.01}, "F64", shapes=dict(MATRICES))
        published(run, variant)


def published(run, variant):
    """Compares a variant of Muon with its published steps on tensors of float64; ends the program if they differ."""
    import torch

    trace, lr = run.trace(SOURCE), run.optimizer["lr"]
    ours = [{name: p.copy() for name, p in params.items()} for _, params, _, _ in replay(trace)]
    for name, array in trace.params().items():
        p = torch.tensor(array)
        buffer, (rows, columns) = torch.zeros_like(p), p.shape
        for t in range(1, run.steps + 1):
            g = torch.tensor(trace.tensors[f"grad/{t}/{name}"])
            if variant == "keller_jordan":
                buffer.lerp_(g, 1 - 0.95)
                o, decay, scale = newton_schulz(g.lerp(buffer, 0.95)), 0.0, max(1, rows / columns) ** 0.5
            else:
                buffer.mul_(0.95).add_(g)
                o, decay, scale = newton_schulz(g + 0.95 * buffer), 0.1, 0.2 * max(rows, columns) ** 0.5
            p = p * (1 - lr * decay) - lr * scale * o
            far = np.abs(ours[t - 1][name] - p.numpy()).max()
            if far > 1e-12:
                raise SystemExit(f"muon, {variant}: {name} differs by {far:.3g} after step {t}")
    print(f"muon, {variant}: {run.steps} steps equal to the published ones within 1e-12")


def newton_schulz(x):
    """Returns the published orthogonalization in the type of `x`; the programs convert to bfloat16 first."""
    turned = x.mT if x.size(0) > x.size(1) else x
    turned = turned / (turned.norm() + 1e-7)
    for _ in range(5):
        square = turned @ turned.mT
        turned = 3.4445 * turned + (-4.775 * square + 2.0315 * square @ square) @ turned
    return turned.mT if x.size(0) > x.size(1) else turned


def near(trace, what, rtol, atol=1e-14, state=True):
    """Prints the difference of a trace from the formulas; ends the program if it exceeds the tolerance."""
    trace.spec["tolerance"] = {"rtol": rtol, "atol": atol}
    trace.check()
    far = {key: value for key, value in distances(trace).items() if state or key.startswith("expect/")}
    worst = max(far, key=far.get)
    if far[worst] > 1:
        raise SystemExit(f"{what}: {worst} differs by {far[worst]:.3g} of rtol {rtol}, atol {atol}")
    print(f"{what}: {len(far)} tensors, largest difference {far[worst]:.2g} of the tolerance")


def recorded_loop(rule):
    """Returns the trace of a typical training loop: clipping, groups, a schedule, parameters that some steps do not use."""
    import torch

    import record_trace

    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2)).double()
    biases = [param for name, param in model.named_parameters() if "bias" in name]
    weights = [param for name, param in model.named_parameters() if "bias" not in name]
    groups = [{"params": weights}, {"params": biases, "weight_decay": 0.0, "lr": 0.05}]
    optimizer = record_trace.RULES[rule](groups, lr=0.02, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    clip = {"max_norm": 0.5, "norm_type": 2.0}
    recorder = record_trace.Recorder(model, optimizer, expect=[1, 2, 7], clip=clip)
    for t in range(12):
        optimizer.zero_grad()
        x = torch.randn(8, 4, dtype=torch.float64)
        hidden = model[:2](x)
        # Two backward passes, as when gradients are accumulated over micro-batches.
        loss = hidden.square().sum() if t % 4 == 3 else (model[2](hidden) - x[:, :2]).square().sum()
        loss.backward(retain_graph=True)
        hidden.sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip["max_norm"])
        optimizer.step()
        schedule.step()
    trace = recorder.finish()
    assert trace.spec["lrs"] and trace.spec["groups"] and "grad/4/2.weight" not in trace.tensors, trace.spec
    return trace


def main():
    parser = arguments(__doc__.partition("\n")[0], list(RULES))
    parser.add_argument("--self-test", action="store_true", help="compare the formulas with PyTorch's rules")
    parser.add_argument("--replay", nargs="+", metavar="FILE", help="print the differences of traces from the formulas")
    args = parser.parse_args()
    if args.self_test:
        return self_test()
    if args.replay:
        sys.exit(show(args.replay))
    if not (args.rule and args.out):
        parser.error("give a rule and --out, or --self-test, or --replay")
    record_run(run_of(args, defaults_of(args.rule, field_values(args.set)))).save(args.out)


if __name__ == "__main__":
    main()
