"""ShuffleNetV2 x0.5 for images of 32x32, trained here: depthwise layers and shuffles of channels, little to compute."""

from __future__ import annotations

import sys

import numpy as np
import torch
from torch import nn
from torchvision.models import shufflenet_v2_x0_5

__all__ = ["build", "trained"]

EPOCHS, BATCH = 8, 64


def build() -> nn.Module:
    """Images [n, 3, 32, 32] in, logits of 10 classes out; the stem keeps the resolution."""
    model = shufflenet_v2_x0_5(num_classes=10)
    model.conv1[0].stride = (1, 1)
    model.maxpool = nn.Identity()
    return model


def trained(images: np.ndarray, labels: np.ndarray) -> dict[str, torch.Tensor]:
    """The state of `build()` after training on images [n, 3, 32, 32] and labels [n], the same in every run."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    x, y = torch.from_numpy(np.ascontiguousarray(images)), torch.from_numpy(labels.astype(np.int64))
    model = build().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, EPOCHS * (len(x) // BATCH) + 1)
    for epoch in range(EPOCHS):
        print(f"training, epoch {epoch + 1} of {EPOCHS}", file=sys.stderr, flush=True)
        for picked in torch.randperm(len(x)).split(BATCH)[: len(x) // BATCH]:
            loss = nn.functional.cross_entropy(model(_varied(x[picked])), y[picked], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rates.step()
    return model.state_dict()


def _varied(images: torch.Tensor) -> torch.Tensor:
    """A batch, mirrored by chance and shifted by up to 3 pixels."""
    if torch.rand(()) < 0.5:
        images = images.flip(3)
    down, right = torch.randint(-3, 4, (2,)).tolist()
    return images.roll((down, right), (2, 3))
