"""Every command and every Python example in the README runs, in the order in which it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"^```(sh|python)\n(.*?)^```", (ROOT / "README.md").read_text(), re.S | re.M)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the demo's network, weights, data and an ONNX file of it."""
    import numpy as np
    import onnx
    import torch

    folder = tmp_path_factory.mktemp("readme")
    script = ROOT / "scripts" / "demo_digits.py"
    subprocess.run([sys.executable, script, folder], check=True, capture_output=True)
    (folder / "compress.toml").unlink()
    (folder / "net.py").write_text(script.read_text())
    sys.path.insert(0, str(folder))
    try:
        from net import Digits
    finally:
        sys.path.remove(str(folder))
    net = Digits().eval()
    net.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
    x = torch.from_numpy(np.load(folder / "digits.npz")["x"][:2])
    program = torch.onnx.export(net, (x,), dynamo=True, dynamic_shapes=({0: "batch"},), input_names=["image"])
    assert program is not None
    onnx.save(program.model_proto, folder / "model.onnx")
    return folder


def test_the_readme_has_examples() -> None:
    assert {kind for kind, _ in BLOCKS} == {"sh", "python"}


@pytest.mark.parametrize(("kind", "text"), BLOCKS, ids=[text.splitlines()[0][:60] for _, text in BLOCKS])
def test_a_block_runs(place: Path, kind: str, text: str) -> None:
    bin_folder = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", "-euc", text] if kind == "sh" else [sys.executable, "-c", text]
    result = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
