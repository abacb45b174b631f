"""The effect of clipping, AdamW and a falling learning rate on residuals of error feedback in DDP.

torchrun --standalone --nproc-per-node 2 results/controls/residuals.py > results/residuals.json

The digits task of gcbench, batch 64, 300 steps, 3 seeds. The ratio is the norm of rank 0's
residuals over the norm of its gradient before the exchange, for all parameters together; `end`: at
the last step, `middle`: the median of steps 100 to 200. `loss`: of all training examples at the
end. All are means over the seeds; `loss_sd` is a standard deviation. `warned`: number of seeds in
which the hook warned.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import statistics
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gcbench

STEPS, BATCH, SEEDS = 300, 64, (0, 1, 2)
SGD, ADAMW = {"optimizer": "sgd", "lr": 0.1}, {"optimizer": "adamw", "lr": 2e-3}
CASES: dict[str, dict[str, Any]] = {
    f"{base['optimizer']}, {name}": {**base, **case}
    for base in (SGD, ADAMW)
    for name, case in (
        ("constant rate", {}),
        ("clipped to 0.5", {"clip": 0.5}),
        ("cosine to 10 %", {"last": 0.1}),
        ("cosine to 0", {"last": 0.0}),
        ("cosine to 0, residuals do not follow", {"last": 0.0, "follow": False}),
    )
}


def train(method: str, seed: int, case: dict[str, Any]) -> dict[str, float]:
    """Train once; return the final loss and the ratios of norms."""
    torch.manual_seed(seed)
    task, rank, size = gcbench.get_task("digits"), dist.get_rank(), dist.get_world_size()
    data, _ = task.load(None)
    net = task.model_for(data)
    model = DistributedDataParallel(net)
    kind = torch.optim.AdamW if case["optimizer"] == "adamw" else torch.optim.SGD
    options = {} if case["optimizer"] == "adamw" else {"momentum": 0.9}
    optimizer = kind(net.parameters(), lr=case["lr"], **options)
    last = case.get("last", 1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: last + (1 - last) * 0.5 * (1 + math.cos(math.pi * step / (STEPS - 1))),
    )
    follow = {"optimizer": optimizer} if case.get("follow", True) else {}
    hook = gcbench.comm_hook(method, seed=seed, **follow).register(model)
    squares: list[float] = []
    for parameter in net.parameters():
        parameter.register_hook(lambda g: squares.append(float(g.double().square().sum())))
    ratios = []
    every = torch.arange(len(data))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(1000 * step + seed)
            mine = torch.randperm(len(data), generator=generator)[rank : BATCH * size : size]
            x, y = task.batch(data, mine, None)
            optimizer.zero_grad()
            squares.clear()
            task.loss(model(x), y).backward()
            tensors = hook.state_dict()["exchange"].get("tensors", {})
            residual = sum(float(value.double().square().sum()) for value in tensors.values())
            ratios.append(math.sqrt(residual / sum(squares)))
            if "clip" in case:
                torch.nn.utils.clip_grad_norm_(net.parameters(), case["clip"])
            optimizer.step()
            schedule.step()
    hook.close()
    with torch.no_grad():
        x, y = task.batch(data, every, None)
        loss = float(task.loss(net(x), y))
    warned = any("residual" in str(each.message) for each in caught)
    middle = statistics.median(ratios[100:200])
    return {"loss": loss, "middle": middle, "end": ratios[-1], "warned": warned}


def main() -> None:
    """Train each method in each case, and print the means over seeds as JSON."""
    if "RANK" not in os.environ or len(sys.argv) > 1:
        sys.exit(__doc__)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = []
    for name, case in CASES.items():
        for method in ("none", "efsignsgd", "topk"):
            if method == "none" and not case.get("follow", True):
                continue
            runs = [train(method, seed, case) for seed in SEEDS]
            row: dict[str, Any] = {"case": name, "method": method}
            row |= {
                key: statistics.fmean(r[key] for r in runs) for key in ("loss", "middle", "end")
            }
            row["loss_sd"] = statistics.stdev(r["loss"] for r in runs)
            row["warned"] = sum(r["warned"] for r in runs)
            rows.append(row)
            if dist.get_rank() == 0:
                print(row, file=sys.stderr, flush=True)
    if dist.get_rank() == 0:
        about = {
            "command": "torchrun --standalone --nproc-per-node 2 results/controls/residuals.py",
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
            "torch": torch.__version__,
            "gcbench": gcbench.__version__,
            "steps": STEPS,
            "batch": BATCH * dist.get_world_size(),
            "seeds": len(SEEDS),
        }
        print(json.dumps({**about, "rows": rows}, indent=1))
    dist.destroy_process_group()


main()
