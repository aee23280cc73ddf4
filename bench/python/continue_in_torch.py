"""Training that starts in one program and continues in the other, Meshstep and PyTorch, with the same gradients.

    pip install torch==2.11.0 numpy safetensors
    python bench/python/continue_in_torch.py            # both directions, every rule; prints a table
    python bench/python/continue_in_torch.py --fixtures # writes shard/checkpoint/examples/with_torch/recorded, from which a test continues

One program takes twenty steps and saves parameters and state in a safetensors file, then both programs take ten more steps.
Afterwards the relative difference of each vector, by norms, must be at most 2e-6. Parameters have the shapes of a small
transformer; gradients are those of parabolas, with noise, which both programs compute to the same bits. Meshstep's half is
shard/checkpoint/examples/with_torch/main.rs, which this script builds and runs with cargo.
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

ROOT = pathlib.Path(__file__).parent.parent.parent
FIXTURES = ROOT / "shard/checkpoint/examples/with_torch/recorded"
BEFORE, AFTER, APART = 20, 10, 2e-6
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)

SMALL = {"wte.weight": (5, 3), "h.0.bias": (7,), "scale": (1,), "h.0.weight": (2, 2, 3)}
LAYER = {
    "ln_1.weight": (64,),
    "ln_1.bias": (64,),
    "attn.weight": (192, 64),
    "attn.bias": (192,),
    "proj.weight": (64, 64),
    "ln_2.weight": (64,),
    "ln_2.bias": (64,),
    "mlp_in.weight": (256, 64),
    "mlp_in.bias": (256,),
    "mlp_out.weight": (64, 256),
}
LARGE = {
    "wte.weight": (256, 64),
    "wpe.weight": (32, 64),
    **{f"h.{i}.{name}": shape for i in range(2) for name, shape in LAYER.items()},
    "ln_f.weight": (64,),
    "ln_f.bias": (64,),
}

SGD = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}
ADAMW = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1}
# The rule, its hyperparameters, and the maximum norm of the gradients.
CASES = {
    "adamw": (torch.optim.AdamW, ADAMW, 1.0),
    "amsgrad": (torch.optim.AdamW, {**ADAMW, "amsgrad": True}, None),
    "adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1}, 1.0),
    "nesterov": (torch.optim.SGD, {**SGD, "nesterov": True}, 1.0),
    "dampening": (torch.optim.SGD, {**SGD, "dampening": 0.3}, None),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.001, "alpha": 0.9, "momentum": 0.9, "centered": True}, None),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05, "lr_decay": 0.01}, None),
}
FIRST, MINIMUM, STEEP, NOISE = 0, 1, 2, 3


class Model(torch.nn.Module):
    """A model whose parameters have the given names and shapes."""

    def __init__(self, shapes):
        super().__init__()
        self.shapes = shapes
        for i, (name, shape) in enumerate(shapes.items()):
            *path, last = name.split(".")
            module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, torch.nn.Module())
                module = module._modules[part]
            module.register_parameter(last, torch.nn.Parameter(numbers(i, shape, FIRST)))

    def named(self):
        """Returns the parameters with their indices in `shapes`; `numbers` takes the index."""
        params = dict(self.named_parameters())
        return [(i, params[name]) for i, name in enumerate(self.shapes)]


def numbers(param, shape, salt):
    """Returns f32 numbers in [-1, 1): SplitMix64 of the parameter, the salt and the index of the element."""
    word = np.uint64(param << 40 | salt) | np.arange(np.prod(shape), dtype=np.uint64) << np.uint64(8)
    z = word + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    z = z ^ z >> np.uint64(31)
    values = (z >> np.uint64(40)).astype(np.float32) / np.float32(8388608.0) - np.float32(1.0)
    return torch.from_numpy(values.reshape(shape))


class Run:
    """PyTorch's run of a case."""

    def __init__(self, case, shapes):
        rule, self.fields, self.max_norm = CASES[case]
        self.model = Model(shapes)
        self.optimizer = rule(self.model.parameters(), **self.fields, foreach=False)

    def train(self, first, last):
        for t in range(first, last + 1):
            for i, param in self.model.named():
                minimum, steep, noise = (numbers(i, param.shape, salt) for salt in [MINIMUM, STEEP, NOISE + t])
                param.grad = (param.detach() - minimum) * (steep + 1.5) + noise * 0.25
            if self.max_norm:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
            for group in self.optimizer.param_groups:
                group["lr"] = self.fields["lr"] * 8.0 / (8.0 + t)
            self.optimizer.step()

    def load(self, path):
        tensors = load_file(path)
        state = {key: value for key, value in tensors.items() if key.startswith("state.")}
        self.model.load_state_dict({key: value for key, value in tensors.items() if key not in state})
        ours = get_optimizer_state_dict(self.model, self.optimizer, options=FLAT)
        set_optimizer_state_dict(self.model, self.optimizer, optim_state_dict=ours | state, options=FLAT)

    def tensors(self):
        state = get_optimizer_state_dict(self.model, self.optimizer, options=FLAT)
        state = {key: value for key, value in state.items() if key.startswith("state.")}
        return {key: value.clone() for key, value in {**self.model.state_dict(), **state}.items()}

    def save(self, path):
        save_file(self.tensors(), path)


def meshstep(action, case, folder):
    """Runs Meshstep's half and returns its output; ends the script if it fails."""
    cargo = ["cargo", "run", "--quiet", "-p", "meshstep-checkpoint", "--example", "with_torch"]
    done = subprocess.run([*cargo, "--", action, case, folder], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{case}: {action} failed. {done.stdout}")
    return done.stdout.strip()


def there_then_here(case, folder):
    meshstep("export", case, folder)
    run = Run(case, LARGE)
    run.load(f"{folder}/{case}.safetensors")
    run.train(BEFORE + 1, BEFORE + AFTER)
    ours, theirs = run.tensors(), load_file(f"{folder}/{case}-end.safetensors")
    if ours.keys() != theirs.keys():
        sys.exit(f"{case}: the files have different vectors: {ours.keys() ^ theirs.keys()}")
    apart = {key: difference(ours[key], theirs[key]) for key in ours}
    key = max(apart, key=apart.get)
    if not apart[key] <= APART:
        sys.exit(f"{case}: {key} differs by {apart[key]:.1e}")
    return f"{len(apart)} vectors, largest difference {apart[key]:.1e}, of {key}"


def here_then_there(case, folder):
    write(case, LARGE, folder)
    return meshstep("import", case, folder)


def write(case, shapes, folder):
    run = Run(case, shapes)
    run.train(1, BEFORE)
    run.save(f"{folder}/{case}.safetensors")
    run.train(BEFORE + 1, BEFORE + AFTER)
    run.save(f"{folder}/{case}-end.safetensors")


def difference(a, b):
    """Returns the norm of the difference of two vectors, relative to the norm of the second."""
    a, b = a.double(), b.double()
    apart = torch.linalg.vector_norm(a - b)
    return 0.0 if apart == 0 else float(apart / torch.linalg.vector_norm(b))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--fixtures", action="store_true", help="write the files from which a test continues")
    if parser.parse_args().fixtures:
        FIXTURES.mkdir(exist_ok=True)
        for case in CASES:
            write(case, SMALL, FIXTURES)
        return
    for case in CASES:
        for title, way in [("Meshstep, then PyTorch", there_then_here), ("PyTorch, then Meshstep", here_then_there)]:
            with tempfile.TemporaryDirectory() as folder:
                print(f"{case:10} {title}: {way(case, folder)}", flush=True)


if __name__ == "__main__":
    main()
