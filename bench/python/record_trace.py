"""Records a run of a PyTorch optimizer as a trace, which `cargo xtask parity` replays.

In a training loop, with this folder on the path:

    from record_trace import Recorder
    recorder = Recorder(model, optimizer, expect=[1, 2, 10, 100], clip={"max_norm": 1.0})
    ...                                   # zero_grad, backward, clip_grad_norm_, step as usual
    recorder.save("run.safetensors")

or `record(model, optimizer, batches, loss)`, which runs that loop. Give `clip` if the loop clips, so that gradients are
recorded before clipping, and not as passed to the optimizer. Every step adds the size of the model to the file.

As a program it records seeded runs, and L-BFGS on the built-in problems of the replay:

    pip install torch==2.11.0 numpy schedulefree==1.4.1    # the last one only for schedulefree_adamw
    python bench/python/record_trace.py adamw --set beta2=0.99 --clip 1 --ranks 4 -o run.safetensors
    python bench/python/record_trace.py lbfgs --problem logistic --set line_search=strong_wolfe -o run.safetensors
"""

import contextlib

import numpy as np
import torch

try:
    import schedulefree
except ImportError:
    schedulefree = None

import problems
from synthetic import TOLERANCES, arguments, field_values, reduced, run_of
from trace_file import BFloat16, Trace, TraceError, as_dtype, dtype_of, to_float64

SOURCE = f"torch {torch.__version__.split('+')[0]}"
RULES = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "muon": torch.optim.Muon,
    **({"schedulefree_adamw": schedulefree.AdamWScheduleFree} if schedulefree else {}),
}
FIELDS = {
    "adam": ["lr", "beta1", "beta2", "eps", "weight_decay", "amsgrad", "maximize"],
    "adamw": ["lr", "beta1", "beta2", "eps", "weight_decay", "amsgrad", "maximize"],
    "sgd": ["lr", "momentum", "dampening", "nesterov", "weight_decay", "maximize"],
    "rmsprop": ["lr", "alpha", "eps", "momentum", "centered", "weight_decay", "maximize"],
    "adagrad": ["lr", "lr_decay", "eps", "initial_accumulator_value", "weight_decay", "maximize"],
    "muon": ["lr", "momentum", "nesterov", "ns_coefficients", "ns_steps", "eps", "weight_decay", "adjust_lr_fn"],
    "schedulefree_adamw": ["lr", "beta1", "beta2", "eps", "weight_decay", "warmup_steps", "r", "weight_lr_power"],
}
SLOTS = {
    "exp_avg": "m",
    "exp_avg_sq": "v",
    "max_exp_avg_sq": "vmax",
    "momentum_buffer": "momentum",
    "square_avg": "square_avg",
    "grad_avg": "grad_avg",
    "sum": "sum",
    "z": "z",
}
DTYPES = {"F32": torch.float32, "F64": torch.float64, "BF16": torch.bfloat16, "F16": torch.float16}


def to_array(tensor):
    """Returns a copy of a tensor's values as an array for a trace."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return BFloat16(tensor.view(torch.int16).numpy().view(np.uint16).copy())
    return tensor.numpy().copy()


def to_tensor(array):
    if isinstance(array, BFloat16):
        return torch.from_numpy(array.to_float32()).to(torch.bfloat16)
    return torch.from_numpy(array.copy())


def fields_of(rule, group):
    """Returns the fields of a parameter group under the names that a trace uses."""
    fields = {}
    for name in FIELDS[rule]:
        if name in ["beta1", "beta2"]:
            value = group["betas"][name == "beta2"]
        else:
            value = group.get(name)
        value = value.item() if isinstance(value, torch.Tensor) else value
        fields[name] = list(value) if isinstance(value, tuple) else value
    return {name: value for name, value in fields.items() if value is not None}


def torch_fields(fields):
    """Returns the fields of a trace under PyTorch's names."""
    fields = {name: value for name, value in fields.items() if name != "name"}
    if "beta1" in fields or "beta2" in fields:
        fields["betas"] = (fields.pop("beta1", 0.9), fields.pop("beta2", 0.999))
    return fields


class Recorder:
    """Records every step of `optimizer` on `model`'s parameters, starting now.

    `expect` lists the steps, in addition to the last, whose results are recorded. `clip` is `{"max_norm": ..., "norm_type": ...}`
    if the loop calls `clip_grad_norm_` with these values before every step.
    """

    def __init__(self, model, optimizer, expect=(1, 2, 3, 10, 20), clip=None, tolerance=None):
        self.optimizer, self.expect = optimizer, set(expect)
        self.rule, self.t, self.rates, self.given = rule_of(optimizer), 0, [], {}
        # Adagrad has state before its first step, with a step count of 0.
        if any(state.get("step", 1) > 0 for state in optimizer.state.values() if state):
            raise TraceError("the optimizer has taken steps already; record from the first")
        ours = {id(param) for group in optimizer.param_groups for param in group["params"]}
        self.params = {name: param for name, param in model.named_parameters() if id(param) in ours}
        if len(self.params) != len(ours):
            raise TraceError("the optimizer has parameters that the model does not name")
        if any(param.dtype in [torch.bfloat16, torch.float16] for param in self.params.values()):
            raise TraceError("PyTorch updates 16-bit parameters in 16 bits, but a replay in f32; train in f32, under autocast")
        bases = [base_rate(group) for group in optimizer.param_groups]
        if bases[0] == 0 and any(bases):
            raise TraceError("the first group's learning rate is 0, and another group's rate cannot be a multiple of it")
        self.ratios = [base / (bases[0] or 1.0) if base != bases[0] else 1.0 for base in bases]
        if clip and clip.get("norm_type") == float("inf"):
            clip = {**clip, "norm_type": "inf"}  # JSON has no infinity
        self.clip = clip
        self.trace = Trace({
            "optimizer": {"name": self.rule, **self._fields(optimizer.param_groups[0])},
            "steps": 0,
            "ranks": 1,
            "reduce": "mean",
            "clip": clip,
            "lrs": None,
            "groups": self._groups(),
            "problem": None,
            "tolerance": tolerance or self._tolerance(),
            "source": SOURCE,
        })
        for name, param in self.params.items():
            self.trace.tensors[f"param/{name}"] = to_array(param)
        self.hooks = [optimizer.register_step_pre_hook(self._before), optimizer.register_step_post_hook(self._after)]
        if clip:
            self.hooks += [
                param.register_post_accumulate_grad_hook(lambda param, name=name: self.grad(name, param.grad))
                for name, param in self.params.items()
            ]

    def grad(self, name, grad):
        """Records a gradient before it is clipped. Backward calls it; code that sets gradients itself must call it."""
        self.given[name] = to_array(grad)

    def close(self):
        """Stops recording."""
        while self.hooks:
            self.hooks.pop().remove()

    def finish(self):
        """Stops recording and returns the trace."""
        self.close()
        if self.t == 0:
            raise TraceError("no step was recorded")
        self._expect(self.t, state=True)
        self.trace.spec["steps"] = self.t
        if len(set(self.rates)) > 1 or self.rates[0] != self.trace.spec["optimizer"]["lr"]:
            self.trace.spec["lrs"] = self.rates
        return self.trace

    def save(self, path):
        """Stops recording and writes the trace."""
        self.finish().save(path)

    def _fields(self, group):
        return {**fields_of(self.rule, group), "lr": base_rate(group)}

    def _groups(self):
        first, *others = [self._fields(group) for group in self.optimizer.param_groups]
        names = {id(param): name for name, param in self.params.items()}
        groups = []
        for fields, group in zip(others, self.optimizer.param_groups[1:]):
            changed = {key: value for key, value in fields.items() if value != first[key]}
            if changed:
                groups.append({"params": [names[id(param)] for param in group["params"]], **changed})
        return groups or None

    def _tolerance(self):
        dtypes = {dtype_of(to_array(param)) for param in self.params.values()}
        return next(TOLERANCES[dtype] for dtype in ["F32", "F64"] if dtype in dtypes)

    def _before(self, optimizer, args, kwargs):
        self.t += 1
        if any(arg is not None for arg in [*args[1:], kwargs.get("closure")]):
            raise TraceError(f"step {self.t}: a closure computes its gradients too late for recording; call backward before `step()`")
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        if any(abs(rate - ratio * rates[0]) > 1e-12 * abs(rate) for rate, ratio in zip(rates, self.ratios)):
            raise TraceError(f"step {self.t}: the ratios of the groups' learning rates changed; a trace has one schedule")
        self.rates.append(rates[0])
        grads = {name: param.grad for name, param in self.params.items() if param.grad is not None}
        if any(grad.is_sparse for grad in grads.values()):
            raise TraceError(f"step {self.t}: a gradient is sparse")
        if not self.clip:
            self.given = {name: to_array(grad) for name, grad in grads.items()}
        elif grads.keys() - self.given.keys():
            raise TraceError(f"step {self.t}: some gradients do not come from backward; pass them to `grad`")
        else:
            self.given = {name: self.given[name] for name in grads}
            self._check_clipped(grads)
        for name, grad in self.given.items():
            self.trace.tensors[f"grad/{self.t}/{name}"] = grad
        self.given = {}

    def _check_clipped(self, grads):
        p, max_norm = float(self.clip.get("norm_type", 2.0)), self.clip["max_norm"]
        parts = [np.linalg.norm(to_float64(self.given[name]).ravel(), p) for name in grads]
        norm = float(np.linalg.norm(parts, p))
        factor = min(1.0, max_norm / (norm + 1e-6))
        for name, grad in grads.items():
            want, got = factor * to_float64(self.given[name]), to_float64(to_array(grad))
            if not np.allclose(got, want, rtol=1e-4, atol=1e-12):
                raise TraceError(f"step {self.t}: {name}'s gradient was not clipped to {self.clip}")
        self.norm = norm

    def _after(self, optimizer, args, kwargs):
        if self.t in self.expect:
            self._expect(self.t)

    def _expect(self, t, state=False):
        for name, param in self.params.items():
            self.trace.tensors[f"expect/{t}/{name}"] = to_array(param)
            for key, value in self.optimizer.state[param].items() if state else []:
                if key in SLOTS and value is not None:
                    self.trace.tensors[f"expect_state/{t}/{name}/{SLOTS[key]}"] = to_array(value)
        if self.clip:
            self.trace.scalar(f"expect_norm/{t}", self.norm)


def base_rate(group):
    """Returns a group's learning rate before any scheduler's factor, which may start at 0."""
    return float(group.get("initial_lr", group["lr"]))


def rule_of(optimizer):
    """Returns the name of an optimizer in a trace."""
    if type(optimizer) is torch.optim.Adam and optimizer.defaults.get("decoupled_weight_decay"):
        return "adamw"
    for name, kind in RULES.items():
        if type(optimizer) is kind:
            return name
    raise TraceError(f"cannot record {type(optimizer).__name__}; the known optimizers are {', '.join(RULES)}")


def record(model, optimizer, batches, loss, **options):
    """Takes a step on each of `batches` with the gradient of `loss(model, batch)`; returns the trace. `options`: of `Recorder`."""
    recorder = Recorder(model, optimizer, **options)
    for batch in batches:
        optimizer.zero_grad()
        loss(model, batch).backward()
        if recorder.clip:
            clip = recorder.clip
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip["max_norm"], float(clip.get("norm_type", 2.0)))
        optimizer.step()
    return recorder.finish()


@contextlib.contextmanager
def muon_without_bfloat16():
    """Lets `torch.optim.Muon` orthogonalise in the type of its gradients. Its program rounds them to bfloat16 by the method that this
    replaces; a copy it must be, because the next operation is in place."""
    rounds = torch.Tensor.bfloat16
    torch.Tensor.bfloat16 = torch.Tensor.clone
    try:
        yield
    finally:
        torch.Tensor.bfloat16 = rounds


def record_run(run, bfloat16=False):
    """Returns the trace of a seeded run. Muon orthogonalises in the type of the run unless `bfloat16` is true."""
    if run.optimizer["name"] == "muon" and not bfloat16:
        with muon_without_bfloat16():
            return recorded_run(run, f"{SOURCE}, Newton-Schulz in {run.dtype} instead of BF16")
    return recorded_run(run, SOURCE)


def recorded_run(run, source):
    trace = run.trace(source)
    narrow = run.dtype in ["BF16", "F16"]
    dtype = torch.float32 if narrow else DTYPES[run.dtype]
    params = {name: torch.nn.Parameter(to_tensor(array).to(dtype)) for name, array in trace.params().items()}
    optimizer = RULES[run.optimizer["name"]](groups_of(run, params), **torch_fields(run.optimizer))
    if hasattr(optimizer, "train"):
        optimizer.train()
    ratios = [group["lr"] / run.optimizer["lr"] for group in optimizer.param_groups]
    lrs = run.lrs() or [run.optimizer["lr"]] * run.steps
    for t in range(1, run.steps + 1):
        for group, ratio in zip(optimizer.param_groups, ratios):
            group["lr"] = lrs[t - 1] * ratio
        grads = reduced(trace, t)
        for name, param in params.items():
            param.grad = torch.from_numpy(grads[name]).to(dtype) if name in grads else None
        norm = None
        if run.clip:
            max_norm, norm_type = run.clip["max_norm"], float(run.clip["norm_type"])
            norm = torch.nn.utils.clip_grad_norm_(params.values(), max_norm, norm_type)
        optimizer.step()
        if t in run.expected_steps():
            expect(trace, t, run.dtype, params, norm)
            expect_evaluation(trace, t, run.dtype, params, optimizer)
    expect_state(trace, run.steps, narrow, params, optimizer)
    return trace


def groups_of(run, params):
    grouped = {name for group in run.groups or [] for name in group["params"]}
    groups = [{"params": [param for name, param in params.items() if name not in grouped]}]
    for group in run.groups or []:
        fields = torch_fields({key: value for key, value in group.items() if key != "params"})
        groups.append({"params": [params[name] for name in group["params"]], **fields})
    return groups


def expect(trace, t, dtype, params, norm):
    for name, param in params.items():
        trace.tensors[f"expect/{t}/{name}"] = as_dtype(to_array(param), dtype)
    if norm is not None:
        trace.scalar(f"expect_norm/{t}", norm)


def expect_evaluation(trace, t, dtype, params, optimizer):
    """Expects the parameters that the optimizer evaluates, if these are others than it trains. The way back rounds, so it is a copy."""
    if not hasattr(optimizer, "eval"):
        return
    trained = {name: param.detach().clone() for name, param in params.items()}
    optimizer.eval()
    for name, param in params.items():
        trace.tensors[f"expect_eval/{t}/{name}"] = as_dtype(to_array(param), dtype)
    optimizer.train()
    with torch.no_grad():
        for name, param in params.items():
            param.copy_(trained[name])


def expect_state(trace, t, narrow, params, optimizer):
    for name, param in params.items():
        if narrow:
            trace.tensors[f"expect_state/{t}/{name}/master"] = to_array(param)
        for key, value in optimizer.state[param].items():
            if key in SLOTS and value is not None:
                trace.tensors[f"expect_state/{t}/{name}/{SLOTS[key]}"] = to_array(value)


def defaults_of(rule):
    """Returns PyTorch's defaults under the names that a trace uses."""
    defaults = RULES[rule]([torch.nn.Parameter(torch.zeros(1, 1))]).defaults
    return fields_of(rule, defaults)


def problem_optimizer(fields, x):
    if fields["name"] != "lbfgs":
        return RULES[fields["name"]]([x], **torch_fields(fields))
    words = {"line_search": "line_search_fn", "history_len": "history_size"}
    return torch.optim.LBFGS([x], **{words.get(key, key): value for key, value in fields.items() if key != "name"})


def record_problem(problem, fields, steps, rtol, follow=None):
    """Records `steps` calls of an optimizer's `step` on one of the problems of problems.py, in float64.

    After step `follow`, only the loss and the parameter of the last step are expected, and for L-BFGS the gradient norm.
    """
    trace, evaluations = problem.trace(fields, steps, rtol, SOURCE), 0
    x = torch.nn.Parameter(to_tensor(trace.tensors["param/x"]))
    optimizer = problem_optimizer(fields, x)

    def evaluate():
        optimizer.zero_grad()
        loss = problem.loss(torch, x)
        loss.backward()
        return loss

    def closure():
        nonlocal evaluations
        evaluations += 1
        return evaluate()

    for t in range(1, steps + 1):
        loss = optimizer.step(closure).detach()
        followed = t <= (follow or steps)
        if followed or t == steps:
            trace.scalar(f"expect_loss/{t}", loss)
            trace.tensors[f"expect/{t}/x"] = to_array(x)
            if fields.get("line_search"):
                evaluate()  # Until here the gradient is that of the last trial; the step may have accepted another one.
            if fields["name"] == "lbfgs":
                trace.scalar(f"expect_norm/{t}", torch.linalg.vector_norm(x.grad))
        if followed:
            trace.scalar(f"expect_evals/{t}", evaluations)
    return trace


def main():
    parser = arguments(__doc__.partition("\n")[0], [*RULES, "lbfgs"])
    parser.add_argument("--problem", choices=list(problems.PROBLEMS), default="rosenbrock", help="problem for lbfgs")
    args = parser.parse_args()
    if not (args.rule and args.out):
        parser.error("give a rule and --out")
    if args.rule == "lbfgs":
        others = ["dtype", "ranks", "reduce", "clip", "norm_type", "no_decay", "schedule", "missing", "seed"]
        given = [name for name in others if getattr(args, name) != parser.get_default(name)]
        if given:
            parser.error(f"lbfgs runs on a problem, in float64 and on one rank; it does not accept {', '.join(given)}")
        fields = {"name": "lbfgs", **field_values(args.set)}
        rtol = 1e-6 if fields.get("line_search") else 1e-9
        trace = record_problem(problems.PROBLEMS[args.problem](), fields, args.steps, rtol)
    else:
        unknown = field_values(args.set).keys() - set(FIELDS[args.rule])
        if unknown:
            parser.error(f"{args.rule} has no {', '.join(sorted(unknown))}; its fields are {', '.join(FIELDS[args.rule])}")
        trace = record_run(run_of(args, defaults_of(args.rule)))
    trace.save(args.out)


if __name__ == "__main__":
    main()
