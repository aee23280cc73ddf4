"""Records the scales of torch.amp.GradScaler, which optim/tests/suite/loss_scale.rs replays.

    pip install torch==2.11.0
    python bench/python/record_loss_scale.py > optim/tests/suite/data/loss_scale.txt

Each case is a line `init growth backoff interval pattern = scale scale ...`: the scale of every step of the pattern, in which
1 is an overflow, and the scale after the last step.
"""

import torch


def scales(init, growth, backoff, interval, pattern):
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=init, growth_factor=growth, backoff_factor=backoff, growth_interval=interval
    )
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([param], lr=0.0)
    for overflow in pattern:
        param.grad = torch.tensor([float("inf") if overflow == "1" else 1.0])
        scaler.scale(torch.ones(1))
        yield scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
    yield scaler.get_scale()


print(f"# torch {torch.__version__.split('+')[0]}")
for case in [
    (65536.0, 2.0, 0.5, 2, "110001000001110000"),
    (65536.0, 2.0, 0.5, 2000, "0000100001000010"),
    (4.0, 2.0, 0.5, 1, "0000001000"),
    (1024.0, 4.0, 0.25, 3, "0001000000101000000000"),
    (256.0, 2.0, 0.125, 4, "0000000010000010000000"),
]:
    print(*case, "=", *scales(*case))
