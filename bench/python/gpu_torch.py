"""Measures PyTorch's optimizers on the cases of bench/cases/src/gpu, to compare both in one run on one GPU.

    python gpu_torch.py results           # after Meshstep's benchmark, which writes results/gpu-bench.json
    python gpu_torch.py results --trial   # tests this program on the CPU, with few parameters

Each call adds a run to torch-bench.json in that folder, and replaces the file after every case. If a case fails, its error is
recorded in the run's `errors`, the other cases still run, and the exit status is 1. If gpu-bench.json exists too, a table
shows both times: Meshstep's, and the fastest of PyTorch's runs. All parameters are one flat tensor, which is fastest in
PyTorch, unless a case has segments. PyTorch's norm is not exact, Meshstep's is. GPU_BENCH_LOG2, GPU_BENCH_ROUNDS,
GPU_BENCH_SECONDS and GPU_BENCH_ONLY have the same meaning as in Meshstep's benchmark. Without torch, or without a GPU that
torch can use, the program prints a message and writes nothing.
"""

import datetime
import json
import os
import statistics
import sys
import time

WARM = 3
LR = 1e-3
MAX_NORM = 0.125
# Smaller sizes as powers of two, and the maximum number of rounds for them, as in Meshstep's benchmark.
SIZES = (16, 20, 24)
SIZED_ROUNDS = 21
SEGMENTS = (300, 10_000)


class Flat:
    """Tensors of a step: all parameters as one tensor or as views of it, and the extra tensors of a recipe."""

    def __init__(self, torch, device, n, grads=False, copy=False, segments=1):
        self.torch = torch
        bounds = [i * n // segments for i in range(segments + 1)]
        params = torch.empty(n, device=device).uniform_(-0.1, 0.1)
        self.grad = torch.empty(n, device=device).uniform_(-0.01, 0.01)
        self.params = []
        for begin, end in zip(bounds, bounds[1:]):
            if begin < end:
                param = torch.nn.Parameter(params[begin:end])
                param.grad = self.grad[begin:end]
                self.params.append(param)
        self.flat = params
        low = {"dtype": torch.bfloat16, "device": device}
        self.grads = torch.empty(n, **low).uniform_(-0.01, 0.01) if grads else None
        self.copy = torch.empty(n, **low) if copy else None

    def step(self, optimizer, clips):
        def go():
            if self.grads is not None:  # the optimizer needs gradients of the parameters' type
                self.grad.copy_(self.grads)
            if clips:
                self.torch.nn.utils.clip_grad_norm_(self.params, MAX_NORM)
            if optimizer is not None:
                optimizer.step()
            if self.copy is not None:
                self.copy.copy_(self.flat)

        return go


def cases(torch, device, n):
    """Returns the names of the cases that PyTorch supports, each with a function that creates its work."""

    def adamw(clips=False, kind="fused", **recipe):
        def make():
            flat = Flat(torch, device, n, **recipe)
            return flat.step(torch.optim.AdamW(flat.params, lr=LR, **{kind: True}), clips)

        return make

    def sgd(kind):
        def make():
            flat = Flat(torch, device, n)
            return flat.step(torch.optim.SGD(flat.params, lr=LR, momentum=0.9, **{kind: True}), False)

        return make

    def clip(**recipe):
        return lambda: Flat(torch, device, n, **recipe).step(None, True)

    def norm(dtype):
        def make():
            grads = torch.empty(n, dtype=dtype, device=device).uniform_(-0.01, 0.01)
            return lambda: torch.linalg.vector_norm(grads, dtype=torch.float32)

        return make

    named = {
        "adamw f32": adamw(),
        "adamw f32, foreach": adamw(kind="foreach"),
        "adamw f32, bf16 copy": adamw(copy=True),
        "adamw f32, bf16 gradients": adamw(grads=True),
        "adamw bf16 + remainder, bf16 gradients": adamw(grads=True, copy=True),
        "sgd momentum f32": sgd("fused"),
        "sgd momentum f32, foreach": sgd("foreach"),
        "exact norm f32": norm(torch.float32),
        "exact norm bf16": norm(torch.bfloat16),
        "clip_grad_norm_ f32": clip(),
        "step f32": adamw(clips=True),
        "step f32, foreach": adamw(clips=True, kind="foreach"),
        "step f32, bf16 copy": adamw(copy=True, clips=True),
        "step f32, bf16 gradients": adamw(grads=True, clips=True),
        "step f32, bf16 gradients and copy": adamw(grads=True, copy=True, clips=True),
        "step bf16 + remainder, bf16 gradients": adamw(grads=True, copy=True, clips=True),
    }
    for segments in SEGMENTS:
        named[f"adamw f32, {segments} segments"] = adamw(segments=segments)
        named[f"adamw f32, {segments} segments, foreach"] = adamw(segments=segments, kind="foreach")
    named["clip_grad_norm_ f32, 300 segments"] = clip(segments=300)
    return named


# Cases that are also measured at smaller sizes.
SIZED = ("adamw f32", "adamw f32, foreach", "adamw bf16 + remainder, bf16 gradients", "exact norm bf16")


LBFGS = "lbfgs direction, history of 10"
HISTORY = 10


def lbfgs(torch, device, n, rounds, clock):
    """Returns the milliseconds of torch.optim.LBFGS between two evaluations, once the history is full."""
    params = torch.nn.Parameter(torch.empty(n, device=device).uniform_(-1, 1))
    params.grad = torch.empty_like(params)
    loss = torch.ones(())  # on the CPU, so that reading it does not wait for the device
    iterations = HISTORY + 2 + rounds
    optimizer = torch.optim.LBFGS(
        [params], lr=0.1, max_iter=iterations, max_eval=2 * iterations, tolerance_grad=0, tolerance_change=0,
        history_size=HISTORY,
    )
    moments = []

    @torch.no_grad()
    def closure():
        begins = clock.moment()
        torch.mul(params[: n // 2], 1.0, out=params.grad[: n // 2])
        torch.mul(params[n // 2 :], 3.0, out=params.grad[n // 2 :])
        moments.append((begins, clock.moment()))
        return loss

    optimizer.step(closure)
    spans = [clock.between(ends, begins) for (_, ends), (begins, _) in zip(moments, moments[1:])]
    return statistics.median(spans[HISTORY + 1 :])


class Clock:
    """Timer in milliseconds: CUDA events on a GPU, the host's clock on the CPU."""

    def __init__(self, torch, device):
        self.cuda = torch.cuda if device == "cuda" else None

    def moment(self):
        if self.cuda is None:
            return time.perf_counter()
        event = self.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start, end):
        if self.cuda is None:
            return (end - start) * 1e3
        end.synchronize()
        return start.elapsed_time(end)


def race(torch, device, n, rounds, make, copies=None):
    """Returns the median time of a case in milliseconds. Alternates with a copy of n numbers, and adds its times to `copies`."""
    clock = Clock(torch, device)
    source, target = torch.empty(n, device=device).uniform_(-1, 1), torch.empty(n, device=device)
    go, times = make(), []
    for _ in range(WARM + rounds):
        target.copy_(source)  # keeps the device busy while the host enqueues the rest
        begun = clock.moment()
        target.copy_(source)
        between = clock.moment()
        go()
        ended = clock.moment()
        times.append(clock.between(between, ended))
        if copies is not None:
            copies.append(clock.between(begun, between))
    return statistics.median(times[WARM:])


def rows(torch, device, log2, rounds, copies):
    """Returns the names of the rows, each with a function that measures it; important rows first."""
    n = 1 << log2
    measured = {}
    for name, make in cases(torch, device, n).items():
        measured[name] = lambda make=make: race(torch, device, n, rounds, make, copies)
    # A quarter of the parameters, because L-BFGS needs many vectors.
    measured[LBFGS] = lambda: lbfgs(torch, device, -(-n // 4), rounds, Clock(torch, device))
    for size in (size for size in SIZES if size < log2):
        small = cases(torch, device, 1 << size)
        for name in SIZED:
            make = small[name]
            few = min(rounds, SIZED_ROUNDS)
            measured[f"{name}, 2^{size}"] = lambda make=make, size=size, few=few: race(
                torch, device, 1 << size, few, make
            )
    return measured


def room(torch, device, log2):
    """Returns the largest log2 up to the given one for which memory suffices: an AdamW step and a copy."""
    while device == "cuda" and log2 > 0:
        try:
            torch.empty(9 << log2, device=device)
            break
        except torch.cuda.OutOfMemoryError:
            print(f"not enough memory for 2^{log2} parameters", flush=True)
            log2 -= 1
    if device == "cuda":
        torch.cuda.empty_cache()
    return log2


def measure(torch, device, measured, run, copies, save):
    """Measures the rows one after the other. The errors of failed rows are recorded; rows beyond the budget are not run."""
    seconds = float(os.environ.get("GPU_BENCH_SECONDS", "inf"))
    begun, longest = time.monotonic(), 0.0
    for name, row in measured.items():
        start = time.monotonic()
        if start - begun + longest > seconds:
            run["not_run"].append(name)
            continue
        try:
            run["ms"][name] = row()
        except Exception as error:  # an error of any kind fails only this row
            run["errors"][name] = f"{type(error).__name__}: {error}".splitlines()[0]
            print(f"{name}: {run['errors'][name]}", flush=True)
        if device == "cuda":
            torch.cuda.empty_cache()
        longest = max(longest, time.monotonic() - start)
        if copies:
            run["copy_gb_per_s"] = run["copied"] * 1e-6 / statistics.median(copies)
        save()
    save()


def load(path):
    try:
        with open(path) as file:
            return json.load(file)
    except FileNotFoundError:
        return None


def replace(path, report):
    """Writes the file under a temporary name and renames it, so that readers see either the old or the new text."""
    part = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.part")
    with open(part, "w") as file:
        json.dump(report, file, indent=2)
        file.write("\n")
    os.replace(part, path)


def table(ours, theirs):
    if ours["params"] != theirs["params"]:
        print(f"not compared: Meshstep has {ours['params']} parameters, torch {theirs['params']}")
        return
    print(f"{'case':46} {'ours ms':>9} {'torch ms':>9} {'torch / ours':>12}")
    for case in (case for case in ours["cases"] if "ms" in case):
        for name in (case["name"], case["name"] + ", foreach"):
            times = [run["ms"][name] for run in theirs["runs"] if name in run["ms"]]
            if times:
                print(f"{name:46} {case['ms']:9.3f} {min(times):9.3f} {min(times) / case['ms']:12.2f}")
    if ours["stand_in"] or theirs["trial"]:
        print("A trial: these numbers are not measurements of a GPU.")


def begin(torch, path, device, log2, rounds):
    """Returns the report with a new run appended. A report with a different size, torch or device is replaced by a new one."""
    report = load(path)
    head = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "trial": device == "cpu",
        "params": 1 << log2,
        "rounds": rounds,
    }
    if report is None or any(report.get(key) != value for key, value in head.items()):
        date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
        report = {**head, "date": date, "runs": []}
    run = {"copy_gb_per_s": None, "copied": 8 << log2, "ms": {}, "errors": {}, "not_run": []}
    report["runs"].append(run)
    return report, run


def main(folder, trial):
    if os.environ.get("MESHSTEP_STANDIN") == "1" and not trial:
        print("skipped: torch cannot use the stand-in for a driver")
        return 0
    try:
        import torch
    except ImportError as missing:
        print(f"skipped: python3 has no torch ({missing})")
        return 0
    if not trial and not torch.cuda.is_available():
        print(f"skipped: torch {torch.__version__} finds no GPU")
        return 0
    device = "cpu" if trial else "cuda"
    log2 = room(torch, device, int(os.environ.get("GPU_BENCH_LOG2", "16" if trial else "30")))
    rounds = max(1, int(os.environ.get("GPU_BENCH_ROUNDS", "3" if trial else "51")))
    path = os.path.join(folder, "torch-bench.json")
    report, run = begin(torch, path, device, log2, rounds)
    copies, only = [], os.environ.get("GPU_BENCH_ONLY", "")
    measured = {name: row for name, row in rows(torch, device, log2, rounds, copies).items() if only in name}
    measure(torch, device, measured, run, copies, lambda: replace(path, report))
    print(f"run {len(report['runs'])} of torch {torch.__version__}: copy at {run['copy_gb_per_s'] or 0:.1f} GB/s")
    ours = load(os.path.join(folder, "gpu-bench.json"))
    if ours is not None:
        table(ours, report)
    if run["not_run"]:
        print(f"not run, because GPU_BENCH_SECONDS are over: {'; '.join(run['not_run'])}")
    print(f"{len(run['ms'])} cases, {len(run['errors'])} failed, {len(run['not_run'])} not run")
    return 1 if run["errors"] else 0


if __name__ == "__main__":
    arguments = [argument for argument in sys.argv[1:] if argument != "--trial"]
    if len(arguments) != 1:
        sys.exit(__doc__)
    sys.exit(main(arguments[0], "--trial" in sys.argv))
