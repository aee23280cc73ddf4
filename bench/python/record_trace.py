"""Records what a torch optimizer does, so that Meshstep can do it again and compare.

In your own training loop, where `optimizer.step()` is:

    recorder = Recorder(model.named_parameters(), optimizer, max_norm=1.0)
    for batch in batches:
        optimizer.zero_grad()
        loss(model, batch).backward()
        recorder.step()                # clips, steps, and keeps what went in and what came out
    recorder.save("mine.safetensors")

then `cargo xtask parity mine.safetensors`. As a program it trains a small network on random data:

    python bench/python/record_trace.py adamw out.safetensors --set weight_decay=0.1 --ranks 4 --max-norm 1
"""

import argparse
import json

import numpy as np
import torch

import trace_file

# Torch's name of a hyperparameter or of a state, and ours.
FIELDS = {"max_exp_avg_sq": "vmax", "exp_avg_sq": "v", "exp_avg": "m", "momentum_buffer": "momentum"}
RULES = {
    "adam": (torch.optim.Adam, ["eps", "weight_decay", "amsgrad", "maximize"]),
    "adamw": (torch.optim.AdamW, ["eps", "weight_decay", "amsgrad", "maximize"]),
    "sgd": (torch.optim.SGD, ["momentum", "dampening", "nesterov", "weight_decay", "maximize"]),
    "rmsprop": (torch.optim.RMSprop, ["alpha", "eps", "momentum", "centered", "weight_decay", "maximize"]),
    "adagrad": (
        torch.optim.Adagrad,
        ["lr_decay", "eps", "initial_accumulator_value", "weight_decay", "maximize"],
    ),
}
SLOTS = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg", "sum"}
TOLERANCES = {
    torch.float64: {"rtol": 1e-11, "atol": 1e-13},
    torch.float32: {"rtol": 2e-5, "atol": 1e-7},
    torch.float16: {"rtol": 2e-3, "atol": 1e-5},
}


def hyperparameters(rule, group):
    """One of the optimizer's groups, in the fields of a trace."""
    fields = {key: group[key] for key in RULES[rule][1]}
    if "betas" in group:
        fields["beta1"], fields["beta2"] = group["betas"]
    return {"lr": float(group["lr"]), **fields}


class Recorder:
    """Keeps the gradients, parameters and states of an optimizer's steps.

    `named` are pairs of name and parameter. Parameters are compared after the first step, every `every`th and the last;
    states after the last. `ranks` of gradients are given to `step` where there are several.
    """

    def __init__(self, named, optimizer, max_norm=None, norm_type=2.0, every=1, ranks=1, reduce="mean"):
        self.named = {name: p for name, p in named if p.requires_grad}
        self.optimizer, self.every = optimizer, every
        self.clip = None if max_norm is None else {"max_norm": max_norm, "norm_type": norm_type}
        self.ranks, self.reduce = ranks, reduce
        self.rule = next((name for name, (kind, _) in RULES.items() if type(optimizer) is kind), None)
        if self.rule is None:
            raise ValueError(f"{type(optimizer).__name__} has no rule to replay it; {sorted(RULES)} have")
        self.first = hyperparameters(self.rule, optimizer.param_groups[0])
        self.others = self.groups()
        self.tensors = {f"param/{name}": array(p) for name, p in self.named.items()}
        self.lrs, self.last, self.t = [], {}, 0

    def groups(self):
        names = {id(p): name for name, p in self.named.items()}
        others = []
        for group in self.optimizer.param_groups[1:]:
            fields = hyperparameters(self.rule, group)
            changed = {key: value for key, value in fields.items() if value != self.first[key]}
            others.append({"params": [names[id(p)] for p in group["params"]], **changed})
        return others or None

    def step(self, by_rank=None, weights=None):
        """Clips, lets the optimizer step, and keeps what happened.

        `by_rank`: each rank's gradients by name, of which the parameters' `.grad` is the combination already.
        """
        self.t += 1
        for rank, grads in enumerate(by_rank or []):
            for name, grad in grads.items():
                self.tensors[f"grad/{self.t}/{rank}/{name}"] = array(grad)
        for name, p in self.named.items():
            if by_rank is None and p.grad is not None:
                self.tensors[f"grad/{self.t}/{name}"] = array(p.grad)
        if weights is not None:
            self.tensors[f"weight/{self.t}"] = np.asarray(weights, np.float64)
        if self.clip:
            kind = float(self.clip["norm_type"])
            norm = torch.nn.utils.clip_grad_norm_(self.named.values(), self.clip["max_norm"], kind)
            self.tensors[f"expect_norm/{self.t}"] = np.float64(norm.item())
        self.lrs.append(float(self.optimizer.param_groups[0]["lr"]))
        self.optimizer.step()
        self.last = {f"expect/{self.t}/{name}": array(p) for name, p in self.named.items()}
        if self.t == 1 or self.t % self.every == 0:
            self.tensors.update(self.last)

    def save(self, path, source=None):
        """Writes the trace."""
        self.tensors.update(self.last)
        for name, p in self.named.items():
            for slot, value in self.optimizer.state.get(p, {}).items():
                if slot in SLOTS and value is not None:
                    key = f"expect_state/{self.t}/{name}/{FIELDS.get(slot, slot)}"
                    self.tensors[key] = array(value)
        steady = all(lr == self.first["lr"] for lr in self.lrs)
        dtype = next(iter(self.named.values())).dtype
        spec = {
            "optimizer": {"name": self.rule, **self.first}, "steps": self.t, "ranks": self.ranks,
            "reduce": self.reduce, "clip": self.clip, "lrs": None if steady else self.lrs, "groups": self.others,
            "problem": None, "tolerance": TOLERANCES[dtype], "source": source or f"torch {torch.__version__}",
        }  # fmt: skip
        trace_file.save(path, spec, self.tensors)


def array(tensor):
    return tensor.detach().cpu().contiguous().numpy().copy()


def combine(by_rank, weights, reduce):
    """The gradient of every name that some rank has: summed in float64, missing ones as zeros."""
    combined = {}
    for name in dict.fromkeys(name for grads in by_rank for name in grads):
        some = next(grads[name] for grads in by_rank if name in grads)
        total = torch.zeros_like(some, dtype=torch.float64)
        for grads, weight in zip(by_rank, weights):
            if name in grads:
                total += weight * grads[name].double()
        divisor = {"mean": len(by_rank), "sum": 1, "weighted": sum(weights)}[reduce]
        combined[name] = (total / divisor).to(some.dtype)
    return combined


def network(dtype):
    """Matrices, vectors, and a scalar, 44 parameters."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    model.register_parameter("scale", torch.nn.Parameter(torch.ones(())))
    return model.to(dtype)


def gradients(model, dtype, rows):
    """One rank's gradients by name, on random data."""
    x, y = torch.randn(rows, 4, dtype=dtype), torch.randn(rows, 3, dtype=dtype)
    model.zero_grad()
    (model.scale * (model(x) - y)).square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def record(
    path, rule, settings=None, dtype="f64", steps=40, ranks=1, reduce="mean", max_norm=None, norm_type=2.0,
    no_decay=False, every=8, seed=1, lrs=None, has=lambda t, rank, name: True,
):  # fmt: skip
    """Writes the trace of a small network trained by `rule`; `has` says which gradients there are."""
    torch.manual_seed(seed)
    kind = {"f64": torch.float64, "f32": torch.float32}[dtype]
    model, settings = network(kind), dict(settings or {})
    if "beta1" in settings or "beta2" in settings:
        settings["betas"] = (settings.pop("beta1", 0.9), settings.pop("beta2", 0.999))
    params = list(model.named_parameters())
    groups = [{"params": [p for _, p in params]}]
    if no_decay:
        groups = [
            {"params": [p for name, p in params if p.dim() > 1]},
            {"params": [p for name, p in params if p.dim() < 2], "weight_decay": 0.0},
        ]
    optimizer = RULES[rule][0](groups, **settings)
    recorder = Recorder(params, optimizer, max_norm, norm_type, every, ranks, reduce)
    for t in range(1, steps + 1):
        rows = [2 + (rank + t) % 3 if reduce == "weighted" else 3 for rank in range(ranks)]
        by_rank = []
        for rank in range(ranks):
            grads = gradients(model, kind, rows[rank])
            by_rank.append({name: grad for name, grad in grads.items() if has(t, rank, name)})
        weights = rows if reduce == "weighted" else [1] * ranks
        combined = combine(by_rank, weights, reduce)
        for name, p in params:
            p.grad = combined.get(name)
        for group in optimizer.param_groups:
            group["lr"] = lrs[t - 1] if lrs else group["lr"]
        alone = ranks == 1
        recorder.step(None if alone else by_rank, weights if reduce == "weighted" else None)
    recorder.save(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rule", choices=sorted(RULES))
    parser.add_argument("out")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=JSON")
    parser.add_argument("--dtype", choices=["f32", "f64"], default="f64")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--reduce", choices=["mean", "sum", "weighted"], default="mean")
    parser.add_argument("--max-norm", type=float)
    parser.add_argument("--norm-type", default="2", help="a number, or inf")
    parser.add_argument("--no-decay", action="store_true", help="vectors in a group without weight decay")
    parser.add_argument("--every", type=int, default=8, help="steps between two that are compared")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    settings = {key: json.loads(value) for key, value in (pair.split("=", 1) for pair in asked.set)}
    norm_type = "inf" if asked.norm_type == "inf" else float(asked.norm_type)
    record(
        asked.out, asked.rule, settings, asked.dtype, asked.steps, asked.ranks, asked.reduce, asked.max_norm,
        norm_type, asked.no_decay, asked.every, asked.seed,
    )  # fmt: skip


if __name__ == "__main__":
    main()
