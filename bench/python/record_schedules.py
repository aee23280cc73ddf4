"""Records learning rates of transformers' and PyTorch's schedulers, which optim/tests/suite/schedules.rs replays.

    pip install torch==2.11.0 transformers==4.57.1
    python bench/python/record_schedules.py > optim/tests/suite/data/schedules.txt

Each case is a line `KIND NAME key=value ... = rate rate ...`, with the rates of steps 0, every, 2 every, ... KIND is the
source of the rates: `lambda` is transformers' factor times the base rate, `closed` PyTorch's closed form, `steps` the rates
that the scheduler sets when stepped. Rates have enough digits to identify a float64.
"""

import warnings

import torch
import transformers
from torch.optim import lr_scheduler
from transformers import optimization

warnings.filterwarnings("ignore")
VALUES = 28


def sgd(lr):
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)


def line(kind, name, settings, rates):
    def text(value):
        return ",".join(map(str, value)) if isinstance(value, list) else str(value)

    keys = " ".join(f"{key}={text(value)}" for key, value in settings.items())
    print(kind, name, keys, "=", " ".join(repr(float(rate)) for rate in rates))


def hugging_face(name, function, lr, every=1, **settings):
    scheduler = function(sgd(lr), **settings)
    (factor,) = scheduler.lr_lambdas
    rates = [scheduler.base_lrs[0] * factor(i * every) for i in range(VALUES)]
    line("lambda", name, {"lr": lr, "every": every, **settings}, rates)


def stepped(scheduler, optimizer, every):
    for step in range((VALUES - 1) * every + 1):
        if step % every == 0:
            yield optimizer.param_groups[0]["lr"]
        optimizer.step()
        try:
            scheduler.step()
        except ValueError:  # OneCycleLR fails after its last step
            return


def pytorch(name, lr, every=1, **settings):
    function = getattr(lr_scheduler, name)
    keys = {"lr": lr, "every": every, **settings}
    optimizer = sgd(lr)
    scheduler = function(optimizer, **settings)
    if hasattr(scheduler, "_get_closed_form_lr"):
        rates = []
        for i in range(VALUES):
            scheduler.last_epoch = i * every
            rates.append(scheduler._get_closed_form_lr()[0])
        line("closed", name, keys, rates)
        optimizer = sgd(lr)
        scheduler = function(optimizer, **settings)
    line("steps", name, keys, stepped(scheduler, optimizer, every))


def one_cycle(max_lr, total_steps, every=1, **settings):
    optimizer = sgd(max_lr)
    scheduler = lr_scheduler.OneCycleLR(
        optimizer, max_lr, total_steps=total_steps, cycle_momentum=False, **settings
    )
    # The scheduler accepts total_steps steps and fails at the next; rates after total_steps - 1 are outside the cycle.
    rates = list(stepped(scheduler, optimizer, every))[: (total_steps - 1) // every + 1]
    line("steps", "OneCycleLR", {"lr": max_lr, "every": every, "total_steps": total_steps, **settings}, rates)


def after_warmup(name, lr, warmup, start_factor, every=1, **settings):
    optimizer = sgd(lr)
    linear = lr_scheduler.LinearLR(optimizer, start_factor=start_factor, total_iters=warmup)
    then = getattr(lr_scheduler, name)(optimizer, **settings)
    both = lr_scheduler.SequentialLR(optimizer, [linear, then], milestones=[warmup])
    keys = {"lr": lr, "every": every, "warmup": warmup, "start_factor": start_factor, **settings}
    line("steps", name, keys, stepped(both, optimizer, every))


def record_hugging_face():
    short = {"num_warmup_steps": 5, "num_training_steps": 23}
    cold = {"num_warmup_steps": 0, "num_training_steps": 20}
    only = {"num_warmup_steps": 9, "num_training_steps": 9}
    real = {"num_warmup_steps": 2000, "num_training_steps": 100_000}
    runs = [(1e-3, 1, short), (0.3, 1, cold), (2.0, 1, only), (6e-4, 3917, real)]

    hugging_face("constant", optimization.get_constant_schedule, 0.1)
    for warmup in [0, 1, 7]:
        hugging_face(
            "constant_with_warmup", optimization.get_constant_schedule_with_warmup, 5e-5, num_warmup_steps=warmup
        )
    for lr, every, run in runs:
        hugging_face("linear", optimization.get_linear_schedule_with_warmup, lr, every, **run)
        for cycles in [0.5, 1.7]:
            hugging_face(
                "cosine", optimization.get_cosine_schedule_with_warmup, lr, every, **run, num_cycles=cycles
            )
        for cycles in [1, 3]:
            restarts = optimization.get_cosine_with_hard_restarts_schedule_with_warmup
            hugging_face("cosine_with_restarts", restarts, lr, every, **run, num_cycles=cycles)
        for floor in [{"min_lr": lr / 7}, {"min_lr_rate": 0.1}, {"min_lr_rate": 0.0, "num_cycles": 1.5}]:
            lowest = optimization.get_cosine_with_min_lr_schedule_with_warmup
            hugging_face("cosine_with_min_lr", lowest, lr, every, **run, **floor)
            ahead = optimization.get_cosine_with_min_lr_schedule_with_warmup_lr_rate
            for first in [{}, {"warmup_lr_rate": 0.25}]:
                hugging_face("cosine_warmup_with_min_lr", ahead, lr, every, **run, **floor, **first)
        if run is not only:
            for end, power in [(1e-7, 1.0), (lr / 9, 2.0), (0.0, 0.5)]:
                polynomial = optimization.get_polynomial_decay_schedule_with_warmup
                hugging_face("polynomial", polynomial, lr, every, **run, lr_end=end, power=power)
    for warmup, timescale, every in [(6, None, 1), (0, None, 997), (4, 100, 3), (8, 3, 1), (3000, None, 2500)]:
        settings = {"num_warmup_steps": warmup} | ({} if timescale is None else {"timescale": timescale})
        hugging_face("inverse_sqrt", optimization.get_inverse_sqrt_schedule, 0.02, every, **settings)
    for up in ["linear", "cosine", "1-sqrt"]:
        for down in ["linear", "cosine", "1-sqrt"]:
            phases = {"num_warmup_steps": 6, "num_stable_steps": 5, "num_decay_steps": 11}
            ways = {"warmup_type": up, "decay_type": down, "min_lr_ratio": 0.05, "num_cycles": 0.5}
            hugging_face("warmup_stable_decay", optimization.get_wsd_schedule, 0.01, **phases, **ways)
    phases = {"num_warmup_steps": 0, "num_stable_steps": 0, "num_decay_steps": 20, "num_cycles": 1.5}
    hugging_face("warmup_stable_decay", optimization.get_wsd_schedule, 0.01, **phases)
    # A full wave ends at its initial value, and the rate drops to the minimum one step later.
    hugging_face("warmup_stable_decay", optimization.get_wsd_schedule, 0.01, **phases | {"num_cycles": 1.0})


def record_pytorch():
    pytorch("StepLR", 0.1, step_size=4, gamma=0.1)
    pytorch("StepLR", 0.05, every=30, step_size=30, gamma=0.97)
    pytorch("MultiStepLR", 0.1, milestones=[3, 9, 20], gamma=0.1)
    pytorch("MultiStepLR", 0.2, milestones=[17, 5, 5], gamma=0.3)
    pytorch("ExponentialLR", 0.1, gamma=0.9)
    pytorch("ExponentialLR", 1.0, every=50, gamma=0.999)
    pytorch("ConstantLR", 0.05, factor=0.5, total_iters=4)
    pytorch("LinearLR", 0.05, start_factor=1 / 3, end_factor=1.0, total_iters=5)
    pytorch("LinearLR", 0.7, start_factor=1.0, end_factor=0.01, total_iters=19)
    pytorch("PolynomialLR", 0.001, total_iters=20, power=1.0)
    pytorch("PolynomialLR", 0.001, total_iters=25, power=2.5)
    pytorch("CosineAnnealingLR", 0.1, T_max=13, eta_min=0.0)
    pytorch("CosineAnnealingLR", 0.3, every=9, T_max=200, eta_min=0.01)
    pytorch("CosineAnnealingWarmRestarts", 0.1, T_0=5, T_mult=1, eta_min=0.0)
    pytorch("CosineAnnealingWarmRestarts", 0.1, T_0=3, T_mult=2, eta_min=0.001)
    for strategy in ["cos", "linear"]:
        for three in [False, True]:
            one_cycle(0.1, 20, pct_start=0.3, anneal_strategy=strategy, three_phase=three)
            one_cycle(0.1, 27, pct_start=0.45, anneal_strategy=strategy, three_phase=three, div_factor=10.0)
    one_cycle(1.0, 28, pct_start=0.0, final_div_factor=100.0)
    one_cycle(1.0, 28, pct_start=0.9)
    one_cycle(6e-4, 2000, every=79)
    after_warmup("StepLR", 0.1, 5, 0.2, step_size=6, gamma=0.5)
    after_warmup("MultiStepLR", 0.1, 8, 0.01, milestones=[4, 10], gamma=0.1)
    after_warmup("ExponentialLR", 0.1, 3, 1 / 3, gamma=0.9)
    after_warmup("CosineAnnealingLR", 0.1, 7, 0.1, T_max=20, eta_min=1e-3)
    after_warmup("CosineAnnealingWarmRestarts", 0.1, 4, 0.5, T_0=6, T_mult=2, eta_min=0.0)
    after_warmup("PolynomialLR", 0.1, 6, 0.1, total_iters=18, power=2.0)


print(f"# torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}")
record_hugging_face()
record_pytorch()
