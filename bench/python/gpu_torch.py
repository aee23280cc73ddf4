"""PyTorch's optimizers on the cases of bench/cases/src/gpu, for a comparison in one run on one GPU.

    python gpu_torch.py results           # after our benchmark, which writes results/gpu-bench.json
    python gpu_torch.py results --trial   # tries this program on the CPU, with few parameters

Each call adds a run to torch-bench.json in that folder, and replaces the file after every case. A case that fails is a row of
the run's `errors`, and the rest goes on; the exit status is then a failure. If our figures are there too, a table shows both:
ours, and the faster of PyTorch's runs. One flat tensor holds all parameters, which suits PyTorch best, unless a case names
its segments. PyTorch's norm is not exact, ours is. GPU_BENCH_LOG2, GPU_BENCH_ROUNDS, GPU_BENCH_SECONDS and GPU_BENCH_ONLY are
those of our benchmark. Without torch, or without a GPU that it can use, it says so and writes nothing.
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
# Powers of two of the smaller sizes, and the most rounds there, as in our benchmark.
SIZES = (16, 20, 24)
SIZED_ROUNDS = 21
SEGMENTS = (300, 10_000)


class Flat:
    """The tensors of a step: all parameters as one tensor or as views of it, and what a recipe adds."""

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
            if self.grads is not None:  # the optimizer wants gradients of the parameters' type
                self.grad.copy_(self.grads)
            if clips:
                self.torch.nn.utils.clip_grad_norm_(self.params, MAX_NORM)
            if optimizer is not None:
                optimizer.step()
            if self.copy is not None:
                self.copy.copy_(self.flat)

        return go


def cases(torch, device, n):
    """Each case's name, and the function that makes its work; cases that PyTorch does not have are not here."""

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


# Cases that are measured at smaller sizes too.
SIZED = ("adamw f32", "adamw f32, foreach", "adamw bf16 + remainder, bf16 gradients", "exact norm bf16")


LBFGS = "lbfgs direction, history of 10"
HISTORY = 10


def lbfgs(torch, device, n, rounds, clock):
    """Milliseconds of torch.optim.LBFGS from the end of an evaluation to the next, once the history is full."""
    params = torch.nn.Parameter(torch.empty(n, device=device).uniform_(-1, 1))
    params.grad = torch.empty_like(params)
    loss = torch.ones(())  # on the CPU, so that nothing waits for it
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
    """Milliseconds by the device's own clock, or by the host's on the CPU."""

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
    """The median of a case in milliseconds, in turns with a copy of n random numbers, whose times go to `copies`."""
    clock = Clock(torch, device)
    source, target = torch.empty(n, device=device).uniform_(-1, 1), torch.empty(n, device=device)
    go, times = make(), []
    for _ in range(WARM + rounds):
        target.copy_(source)  # meanwhile the rest is asked for
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
    """Each row's name, and a function that measures it; the order is one of importance."""
    n = 1 << log2
    measured = {}
    for name, make in cases(torch, device, n).items():
        measured[name] = lambda make=make: race(torch, device, n, rounds, make, copies)
    # A quarter of the parameters, as its vectors are many.
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
    """The largest power of two up to log2 whose AdamW step, with a copy beside it, has room."""
    while device == "cuda" and log2 > 0:
        try:
            torch.empty(9 << log2, device=device)
            break
        except torch.cuda.OutOfMemoryError:
            print(f"no room for 2^{log2} parameters", flush=True)
            log2 -= 1
    if device == "cuda":
        torch.cuda.empty_cache()
    return log2


def measure(torch, device, measured, run, copies, save):
    """Fills the run row by row. A row that fails has an error, and rows after the budget are not run."""
    seconds = float(os.environ.get("GPU_BENCH_SECONDS", "inf"))
    begun, longest = time.monotonic(), 0.0
    for name, row in measured.items():
        start = time.monotonic()
        if start - begun + longest > seconds:
            run["not_run"].append(name)
            continue
        try:
            run["ms"][name] = row()
        except Exception as error:  # whatever fails is the row's own
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
    """Writes a file under another name first, so that a reader sees the old text or the new one."""
    part = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.part")
    with open(part, "w") as file:
        json.dump(report, file, indent=2)
        file.write("\n")
    os.replace(part, path)


def table(ours, theirs):
    if ours["params"] != theirs["params"]:
        print(f"not compared: {ours['params']} parameters here, {theirs['params']} there")
        return
    print(f"{'case':46} {'ours ms':>9} {'torch ms':>9} {'torch / ours':>12}")
    for case in (case for case in ours["cases"] if "ms" in case):
        for name in (case["name"], case["name"] + ", foreach"):
            times = [run["ms"][name] for run in theirs["runs"] if name in run["ms"]]
            if times:
                print(f"{name:46} {case['ms']:9.3f} {min(times):9.3f} {min(times) / case['ms']:12.2f}")
    if ours["stand_in"] or theirs["trial"]:
        print("A trial: no figure here says anything about a GPU.")


def begin(torch, path, device, log2, rounds):
    """The report with a new run at its end. A report of another size or another torch is begun again."""
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
        print("skipped: the stand-in for a driver is no GPU for torch")
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
    print(f"run {len(report['runs'])} of torch {torch.__version__}: a copy at {run['copy_gb_per_s'] or 0:.1f} GB/s")
    ours = load(os.path.join(folder, "gpu-bench.json"))
    if ours is not None:
        table(ours, report)
    if run["not_run"]:
        print(f"not run, for GPU_BENCH_SECONDS is over: {'; '.join(run['not_run'])}")
    print(f"{len(run['ms'])} cases, {len(run['errors'])} failed, {len(run['not_run'])} not run")
    return 1 if run["errors"] else 0


if __name__ == "__main__":
    arguments = [argument for argument in sys.argv[1:] if argument != "--trial"]
    if len(arguments) != 1:
        sys.exit(__doc__)
    sys.exit(main(arguments[0], "--trial" in sys.argv))
