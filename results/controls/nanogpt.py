"""What nanoGPT's own code reaches: the anchor of suite nanogpt.

In a checkout of github.com/karpathy/nanoGPT at 3adf61e, with the suite's text as
data/shakespeare_char/input.txt, for seeds 1337 and 1338 (edited in train.py):

    python train.py config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20 \
        --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000 \
        --lr_decay_iters=2000 --dropout=0.0 --always_save_checkpoint=True --out_dir=out-1337

and then, in that checkout, `python nanogpt.py out-1337 out-1338 > nanogpt.json`.

nanoGPT prints the mean loss of 240 windows of 64 characters that it draws (`printed`). `whole` is
the loss on all windows of the validation text, as in suite nanogpt; `sd_240` is the standard
deviation of the mean of 240 windows.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

BLOCK, DRAWN, BATCH = 64, 240, 200


def evaluate(folder: str) -> dict[str, Any]:
    """Return the printed loss of a checkpoint and its loss on the whole validation text."""
    from model import GPT, GPTConfig  # type: ignore[import-not-found]  # of the checkout

    saved = torch.load(f"{folder}/ckpt.pt", weights_only=False)
    model = GPT(GPTConfig(**saved["model_args"]))
    model.load_state_dict(saved["model"])
    model.eval()
    text = np.fromfile("data/shakespeare_char/val.bin", dtype=np.uint16).astype(np.int64)
    windows = (len(text) - 1) // BLOCK
    x = torch.from_numpy(text[: windows * BLOCK]).view(windows, BLOCK)
    y = torch.from_numpy(text[1 : windows * BLOCK + 1]).view(windows, BLOCK)
    with torch.no_grad():
        losses = torch.cat(
            [
                cross_entropy(model(a, b)[0].transpose(1, 2), b, reduction="none").mean(1)
                for a, b in zip(torch.split(x, BATCH), torch.split(y, BATCH), strict=True)
            ]
        )
    return {
        "run": folder,
        "steps": saved["iter_num"],
        "printed": float(saved["best_val_loss"]),
        "whole": float(losses.mean()),
        "windows": windows,
        "sd_240": float(losses.std()) / DRAWN**0.5,
    }


def main() -> None:
    """Evaluate the checkpoints in the folders given as arguments, and print JSON."""
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    sys.path.insert(0, "")
    sys.stdout, printed = sys.stderr, sys.stdout  # nanoGPT prints to stdout
    rows = [evaluate(folder) for folder in sys.argv[1:]]
    means = {key: sum(row[key] for row in rows) / len(rows) for key in ("printed", "whole")}
    tables = [{"name": "runs", "rows": rows}, {"name": "means", "rows": [{"run": "mean", **means}]}]
    about = {
        "command": " ".join(["python nanogpt.py", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        "torch": torch.__version__,
        "code": "github.com/karpathy/nanoGPT at 3adf61e",
    }
    print(json.dumps({**about, "tables": tables}, indent=1), file=printed)


main()
