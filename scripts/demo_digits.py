"""Train a small convolutional network on scikit-learn's 8x8 digits and save what `compress` takes.

    python scripts/demo_digits.py FOLDER

writes FOLDER/model.pt (a state_dict), FOLDER/digits.npz (held-out images and labels) and
FOLDER/compress.toml (the options, so that `compress --target int8 model.pt` is enough in FOLDER).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn


class Digits(nn.Module):
    """1x8x8 images in 0..1 to ten logits."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
        self.tail = nn.Sequential(
            nn.Conv2d(32, 64, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()
        )
        self.head = nn.Linear(64, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        features = self.stem(image)
        features = self.tail(features + self.body(features))
        return self.head(features.mean((2, 3)))


def train(images: torch.Tensor, labels: torch.Tensor, epochs: int = 20) -> Digits:
    """Train from scratch; a few seconds on a CPU."""
    torch.manual_seed(0)
    model = Digits()
    batches = len(images) // 64
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=epochs * batches)
    for _ in range(epochs):
        order = torch.randperm(len(images))
        for batch in order[: batches * 64].split(64):
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return model.eval()


def main(folder: Path) -> None:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = (digits.images[:, None] / 16).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(images))
    train_on, held_out = order[:1000], order[1000:]
    model = train(torch.from_numpy(images[train_on]), torch.from_numpy(digits.target[train_on]))
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), folder / "model.pt")
    np.savez(folder / "digits.npz", x=images[held_out], y=digits.target[held_out])
    here = os.path.relpath(__file__, folder)
    (folder / "compress.toml").write_text(
        f'data = "digits.npz"\narch = "{here}:Digits"\nout = "compressed"\n'
    )
    print(f"trained on {len(train_on)} digits, {len(held_out)} held out: {folder / 'model.pt'}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
