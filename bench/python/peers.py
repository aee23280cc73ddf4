"""Runs PyTorch's optimizers and gloo's collectives, one round per request, so that another program can alternate with them.

Reads a JSON object per line. For {"case": NAME, ...} it prepares a case and answers {"ready": true}; for {"run": true} it runs
the case once and answers {"seconds": S}. The answer to a failed request is {"error": TEXT}. In a case of several ranks each rank
is a process with one thread; "seconds" ends when the last rank's work has returned, and the answer has "with_barrier" too, which
ends after a closing barrier.
"""

import json
import os
import shutil
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Shapes of the 148 tensors of GPT-2 small.
GPT2 = [(50257, 768), (1024, 768)] + 12 * [
    (768,), (768,), (768, 2304), (2304,), (768, 768), (768,), (768,), (768,), (768, 3072), (3072,), (3072, 768), (768,),
] + [(768,), (768,)]


def parameters(shapes):
    generator = torch.Generator().manual_seed(1)
    made = []
    for shape in shapes:
        param = torch.nn.Parameter(torch.rand(shape, generator=generator))
        param.grad = torch.rand(shape, generator=generator) - 0.5
        made.append(param)
    return made


def update(name, shapes, clip):
    """Returns the step of an optimizer on existing gradients, without closure; `clip` bounds their norm first."""
    params = parameters(shapes)
    optimizer = {
        "adamw fused": lambda: torch.optim.AdamW(params, lr=1e-9, fused=True),
        "adamw foreach": lambda: torch.optim.AdamW(params, lr=1e-9, foreach=True),
        "sgd fused": lambda: torch.optim.SGD(params, lr=1e-9, momentum=0.9, fused=True),
    }[name]()
    if not clip:
        return optimizer.step

    def clipped():
        torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
        optimizer.step()

    return clipped


def lbfgs(length, history):
    """Returns one iteration: a direction from a full history, one evaluation of a cheap loss that allocates nothing, one update."""
    x = torch.nn.Parameter(torch.zeros(length))
    target = torch.rand(length, generator=torch.Generator().manual_seed(1))
    weight = torch.linspace(1.0, 2.0, length)
    optimizer = torch.optim.LBFGS(
        [x], lr=0.1, max_iter=1, max_eval=2, history_size=history, tolerance_grad=0, tolerance_change=0)
    x.grad = torch.zeros(length)
    loss = torch.tensor(1.0)

    def closure():
        with torch.no_grad():
            torch.sub(x, target, out=x.grad)
            torch.mul(x.grad, weight, out=x.grad)
        return loss

    def one():
        optimizer.step(closure)

    for _ in range(history + 1):
        one()
    return one


def newton_schulz(rows, columns):
    """Returns the orthogonalization of `torch.optim.Muon`, in float32 instead of bfloat16."""
    matrix = torch.rand((rows, columns), generator=torch.Generator().manual_seed(1)) - 0.5

    def one():
        x = matrix / matrix.norm().clamp(min=1e-7)
        for _ in range(5):
            gram = x @ x.T
            update = torch.addmm(gram, gram, gram, beta=-4.775, alpha=2.0315)
            x = torch.addmm(x, update, x, beta=3.4445)
        return x

    return one


def by_hand(case, rank, world, folder):
    """A clipped step of stage 1 by hand: all ranks' gradients and the parameters in shared memory. Then each rank copies the parameters,
    or all of them use one copy."""
    length = case["count"] * case["length"]

    def shared(name, size):
        return torch.from_file(os.path.join(folder, name), shared=True, size=size)

    grads = [shared(f"grads{of}", length) for of in range(world)]
    grads[rank].copy_(torch.rand(length, generator=torch.Generator().manual_seed(1)) - 0.5)
    own = slice(rank * length // world, (rank + 1) * length // world)
    params = shared("params", length)
    param = torch.nn.Parameter(params[own])
    copy = None if case["case"] == "by hand, one copy" else torch.empty(length)
    total = torch.empty_like(param)
    param.grad = total
    optimizer = torch.optim.AdamW([param], lr=1e-9, fused=True)

    def step():
        dist.barrier()
        torch.add(grads[0][own], grads[1][own], out=total)
        for others in grads[2:]:
            total.add_(others[own])
        squares = torch.linalg.vector_norm(total).square().reshape(1)
        dist.all_reduce(squares)
        total.mul_(torch.clamp(world / (squares.sqrt() + 1e-6), max=1.0) / world)
        optimizer.step()
        dist.barrier()
        if copy is not None:
            copy.copy_(params)

    return step


def of_rank(case, rank, world, folder):
    """Returns the work of one rank in a round."""
    if case["case"].startswith("by hand"):
        return by_hand(case, rank, world, folder)
    if case["case"] == "collective":
        length = case["bytes"] // 4
        vector = torch.ones(length)
        part = torch.ones(length // world)
        one = {
            "all_reduce": lambda: dist.all_reduce(vector),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, vector),
            "all_gather": lambda: dist.all_gather_into_tensor(vector, part),
        }[case["operation"]]
        return repeated(one, case)
    shapes = [(case["length"],)] * case["count"]
    params = parameters(shapes)
    if case["case"] == "zero":
        from torch.distributed.optim import ZeroRedundancyOptimizer
        optimizer = ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=1e-9, fused=True)
    else:
        optimizer = torch.optim.AdamW(params, lr=1e-9, fused=True)
    # As in DDP: gradients are stored in buckets of 25 MiB, whose reductions overlap.
    flat = torch.cat([param.grad for param in params])
    offset = 0
    for param in params:
        param.grad = flat[offset:offset + param.numel()]
        offset += param.numel()
    bucket = (25 << 20) // 4

    def step():
        works = [dist.all_reduce(part, async_op=True) for part in flat.split(bucket)]
        for work in works:
            work.wait()
        flat.div_(world)
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()

    return repeated(step, case)


def repeated(one, case):
    """Returns the work of a round: `one` as often as the case says."""
    times = case.get("times", 1)

    def several():
        for _ in range(times):
            one()

    return several


def rank_main(rank, world, folder, case, pipe):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    try:
        work = of_rank(case, rank, world, folder)
        work()
        pipe.send({"ready": True})
        while pipe.recv():
            dist.barrier()
            start = time.perf_counter()
            work()
            seconds = time.perf_counter() - start
            dist.barrier()
            pipe.send({"seconds": seconds, "with_barrier": time.perf_counter() - start})
    except EOFError:
        pass
    except Exception as error:  # reported to the parent process
        pipe.send({"error": f"{type(error).__name__}: {error}"})
    finally:
        dist.destroy_process_group()


class Ranks:
    """Processes that run a case together; the time of a round is the maximum over the processes."""

    def __init__(self, case):
        # Memory, where the system has room for it there.
        memory = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
        needed = 8 * case.get("count", 0) * case.get("length", 0) * case["ranks"]
        self.folder = tempfile.TemporaryDirectory(dir="/dev/shm" if memory > needed else None)
        # A server imports the modules once; it has no threads, so that its forks are whole.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "torch.distributed.optim"])
        self.pipes, self.processes = [], []
        for rank in range(case["ranks"]):
            own, other = context.Pipe()
            args = (rank, case["ranks"], self.folder.name, case, other)
            process = context.Process(target=rank_main, args=args, daemon=True)
            process.start()
            other.close()
            self.pipes.append(own)
            self.processes.append(process)
        self.answers("ready")

    def answers(self, *keys):
        answers = [pipe.recv() for pipe in self.pipes]
        for answer in answers:
            if "error" in answer:
                raise RuntimeError(answer["error"])
        return [tuple(answer[key] for key in keys) for answer in answers]

    def run(self):
        for pipe in self.pipes:
            pipe.send(True)
        seconds, with_barrier = zip(*self.answers("seconds", "with_barrier"))
        return {"seconds": max(seconds), "with_barrier": max(with_barrier)}

    def end(self):
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(5)
            process.kill()


class Alone:
    """A case that runs in this process."""

    def __init__(self, case):
        if case["case"] == "lbfgs":
            self.work = lbfgs(case["length"], case["history"])
        elif case["case"] == "newton-schulz":
            self.work = newton_schulz(case["rows"], case["columns"])
        else:
            shapes = GPT2 if case.get("model") == "gpt2" else [(case["length"],)] * case.get("count", 1)
            self.work = update(case["case"], shapes, case.get("clip", False))
        self.times = case.get("times", 1)
        self.work()

    def run(self):
        start = time.perf_counter()
        for _ in range(self.times):
            self.work()
        return {"seconds": (time.perf_counter() - start) / self.times}

    def end(self):
        self.work = None


def main():
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    # Output of libraries goes to stderr, so that stdout has only answers.
    os.dup2(2, 1)
    prepared = None
    for line in sys.stdin:
        try:
            asked = json.loads(line)
            if "case" in asked:
                if prepared is not None:
                    prepared.end()
                    prepared = None
                if "threads" in asked:
                    torch.set_num_threads(asked["threads"])
                prepared = (Ranks if "ranks" in asked else Alone)(asked)
                answer = {"ready": True, "version": torch.__version__}
            else:
                answer = prepared.run()
        except Exception as error:  # reported to the caller
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)
    if prepared is not None:
        prepared.end()


if __name__ == "__main__":
    main()
