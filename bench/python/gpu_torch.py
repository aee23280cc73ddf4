"""PyTorch's fused optimizers on the cases of bench/cases/src/gpu, for a comparison in one run on one GPU.

    python gpu_torch.py results           # before and after our benchmark, which writes results/gpu-bench.json
    python gpu_torch.py results --trial   # tries this program on the CPU, with few parameters

Each call adds a run to torch-bench.json in that folder. If our figures are there too, a table shows both: ours, and the
faster of PyTorch's runs. One flat tensor holds all parameters, which suits PyTorch best. What is not exact there, such as
the norm, is compared with what is exact here. GPU_BENCH_LOG2 and GPU_BENCH_ROUNDS are those of our benchmark. Without
torch, or without a GPU that it can use, it says so and writes nothing.
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


class Flat:
    """What a step works on: all parameters as one tensor, and what a recipe adds."""

    def __init__(self, torch, device, n, grads, copy):
        self.torch = torch
        self.params = torch.nn.Parameter(torch.empty(n, device=device).uniform_(-0.1, 0.1))
        self.params.grad = torch.empty(n, device=device).uniform_(-0.01, 0.01)
        low = {"dtype": torch.bfloat16, "device": device}
        self.grads = torch.empty(n, **low).uniform_(-0.01, 0.01) if grads else None
        self.copy = torch.empty(n, **low) if copy else None

    def step(self, optimizer, clips):
        def go():
            if self.grads is not None:  # the optimizer wants gradients of the parameters' type
                self.params.grad.copy_(self.grads)
            if clips:
                self.torch.nn.utils.clip_grad_norm_([self.params], MAX_NORM)
            optimizer.step()
            if self.copy is not None:
                self.copy.copy_(self.params.detach())

        return go


def cases(torch, device, n):
    """Each case's name, and what makes its work; those that PyTorch does not have are not here."""

    def adamw(grads=False, copy=False, clips=False):
        def make():
            flat = Flat(torch, device, n, grads, copy)
            return flat.step(torch.optim.AdamW([flat.params], lr=LR, fused=True), clips)

        return make

    def sgd():
        flat = Flat(torch, device, n, False, False)
        return flat.step(torch.optim.SGD([flat.params], lr=LR, momentum=0.9, fused=True), False)

    def norm(dtype):
        def make():
            grads = torch.empty(n, dtype=dtype, device=device).uniform_(-0.01, 0.01)
            return lambda: torch.linalg.vector_norm(grads, dtype=torch.float32)

        return make

    return {
        "adamw f32": adamw(),
        "adamw f32, bf16 copy": adamw(copy=True),
        "adamw f32, bf16 gradients": adamw(grads=True),
        "adamw bf16 + remainder, bf16 gradients": adamw(grads=True, copy=True),
        "sgd momentum f32": sgd,
        "exact norm f32": norm(torch.float32),
        "exact norm bf16": norm(torch.bfloat16),
        "step f32": adamw(clips=True),
        "step f32, bf16 copy": adamw(copy=True, clips=True),
        "step f32, bf16 gradients": adamw(grads=True, clips=True),
        "step f32, bf16 gradients and copy": adamw(grads=True, copy=True, clips=True),
        "step bf16 + remainder, bf16 gradients": adamw(grads=True, copy=True, clips=True),
    }


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
    return spans[HISTORY + 1 :]


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


def measure(torch, device, n, rounds):
    """Medians of a copy and of each case, in turns, in milliseconds."""
    clock = Clock(torch, device)
    source, target = torch.zeros(n, device=device), torch.empty(n, device=device)
    copies, medians = [], {}
    for name, make in cases(torch, device, n).items():
        go, times = make(), []
        for _ in range(WARM + rounds):
            target.copy_(source)  # meanwhile the rest is asked for
            begun = clock.moment()
            target.copy_(source)
            between = clock.moment()
            go()
            ended = clock.moment()
            copies.append(clock.between(begun, between))
            times.append(clock.between(between, ended))
        medians[name] = statistics.median(times[WARM:])
        del go
    # A quarter of the parameters, as its vectors are many.
    medians[LBFGS] = statistics.median(lbfgs(torch, device, -(-n // 4), rounds, clock))
    return {"copy_gb_per_s": 8e-6 * n / statistics.median(copies), "ms": medians}


def measured(torch, device, log2, rounds):
    """With as many parameters as there is room for."""
    while True:
        try:
            return 1 << log2, measure(torch, device, 1 << log2, rounds)
        except torch.cuda.OutOfMemoryError:
            print(f"no room for 2^{log2} parameters", flush=True)
        torch.cuda.empty_cache()
        log2 -= 1


def load(path):
    try:
        with open(path) as file:
            return json.load(file)
    except FileNotFoundError:
        return None


def table(ours, theirs):
    if ours["params"] != theirs["params"]:
        print(f"not compared: {ours['params']} parameters here, {theirs['params']} there")
        return
    print(f"{'case':40} {'ours ms':>9} {'torch ms':>9} {'torch / ours':>12}")
    for case in ours["cases"]:
        times = [run["ms"][case["name"]] for run in theirs["runs"] if case["name"] in run["ms"]]
        if times:
            print(f"{case['name']:40} {case['ms']:9.3f} {min(times):9.3f} {min(times) / case['ms']:12.2f}")
    if ours["stand_in"] or theirs["trial"]:
        print("A trial: no figure here says anything about a GPU.")


def main(folder, trial):
    if os.environ.get("MESHSTEP_STANDIN") == "1" and not trial:
        print("skipped: the stand-in for a driver is no GPU for torch")
        return
    try:
        import torch
    except ImportError as missing:
        print(f"skipped: python3 has no torch ({missing})")
        return
    if not trial and not torch.cuda.is_available():
        print(f"skipped: torch {torch.__version__} finds no GPU")
        return
    device = "cpu" if trial else "cuda"
    log2 = int(os.environ.get("GPU_BENCH_LOG2", "16" if trial else "30"))
    rounds = max(1, int(os.environ.get("GPU_BENCH_ROUNDS", "3" if trial else "51")))
    path = os.path.join(folder, "torch-bench.json")
    report = load(path)
    params, run = measured(torch, device, log2, rounds)
    if report is None or report["params"] != params:
        report = {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "device": device if trial else torch.cuda.get_device_name(),
            "trial": trial,
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            "params": params,
            "rounds": rounds,
            "runs": [],
        }
    report["runs"].append(run)
    with open(path, "w") as file:
        json.dump(report, file, indent=2)
        file.write("\n")
    print(f"run {len(report['runs'])} of torch {torch.__version__}: a copy at {run['copy_gb_per_s']:.1f} GB/s")
    ours = load(os.path.join(folder, "gpu-bench.json"))
    if ours is not None:
        table(ours, report)


if __name__ == "__main__":
    arguments = [argument for argument in sys.argv[1:] if argument != "--trial"]
    if len(arguments) != 1:
        sys.exit(__doc__)
    main(arguments[0], "--trial" in sys.argv)
