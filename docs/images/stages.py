"""Draws stages.svg from the train.json of `cargo xtask train`: the loss of each stage, and the bytes that a rank holds.

    cargo xtask train && python3 docs/images/stages.py target/train/train.json docs/images/stages.svg
"""

import json
import sys

WIDTH, HEIGHT, TOP, BOTTOM = 860, 300, 46, 250
DASHES = ["none", "9 9", "3 9"]
LINES = ["#1f77b4", "#ff7f0e", "#2ca02c"]
PARTS = [("params", "parameters", "#4c78a8"), ("grads", "gradients", "#f58518"), ("buckets", "in flight", "#eeca3b"),
         ("state", "optimizer state", "#54a24b")]


def text(x, y, words, size=12, anchor="middle", weight="normal"):
    return (f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}" '
            f'font-family="sans-serif" fill="#333">{words}</text>')


def losses(stages, left, right):
    all_losses = [loss for stage in stages for loss in stage["losses"]]
    high, low = max(all_losses), min(all_losses)
    steps = len(stages[0]["losses"])
    x = lambda i: left + (right - left) * i / (steps - 1)
    y = lambda loss: BOTTOM - (BOTTOM - TOP) * (loss - low) / (high - low)
    out = [text((left + right) / 2, 24, f"loss over {steps} steps, 4 ranks", 14, weight="bold")]
    for tick in range(5):
        value = low + (high - low) * tick / 4
        out.append(f'<line x1="{left}" x2="{right}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#ddd"/>')
        out.append(text(left - 8, y(value) + 4, f"{value:.2f}", 11, "end"))
    for i, stage in enumerate(stages):
        points = " ".join(f"{x(k):.1f},{y(loss):.1f}" for k, loss in enumerate(stage["losses"]))
        out.append(f'<polyline points="{points}" fill="none" stroke="{LINES[i]}" stroke-width="2" stroke-dasharray="{DASHES[i]}"/>')
        at = left + 30 + i * 110
        out.append(f'<line x1="{at}" x2="{at + 30}" y1="{HEIGHT - 22}" y2="{HEIGHT - 22}" stroke="{LINES[i]}" stroke-width="2" '
                   f'stroke-dasharray="{DASHES[i]}"/>')
        out.append(text(at + 36, HEIGHT - 18, f"stage {stage['stage']}", 12, "start"))
    equal = len({stage["digest"] for stage in stages}) == 1
    out.append(text((left + right) / 2, TOP + 22, "equal to the last bit" if equal else "NOT EQUAL", 12))
    return out


def memory(stages, left, right):
    total = lambda stage: sum(stage["peak"][part] for part, _, _ in PARTS)
    high = max(map(total, stages))
    width = (right - left) / len(stages)
    out = [text((left + right) / 2, 24, "bytes that a rank holds", 14, weight="bold")]
    for i, stage in enumerate(stages):
        base, x = BOTTOM, left + width * i + width * 0.2
        for part, _, colour in PARTS:
            height = (BOTTOM - TOP) * stage["peak"][part] / high
            out.append(f'<rect x="{x:.1f}" y="{base - height:.1f}" width="{width * 0.6:.1f}" height="{height:.1f}" fill="{colour}"/>')
            base -= height
        out.append(text(x + width * 0.3, base - 6, f"{total(stage) / 1e6:.1f} MB", 12))
        out.append(text(x + width * 0.3, BOTTOM + 16, f"stage {stage['stage']}", 12))
    for i, (_, name, colour) in enumerate(PARTS):
        x = left + [0, 96, 178, 248][i]
        out.append(f'<rect x="{x}" y="{HEIGHT - 28}" width="11" height="11" fill="{colour}"/>')
        out.append(text(x + 15, HEIGHT - 18, name, 12, "start"))
    return out


def main():
    report = json.load(open(sys.argv[1]))
    stages = report["stages"]
    body = losses(stages, 60, 400) + memory(stages, 450, 850)
    svg = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">'
           f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>\n' + "\n".join(body) + "\n</svg>\n")
    open(sys.argv[2], "w").write(svg)


main()
