"""The wheel holds exactly the three packages, and the base install names no optional framework."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_wheel_holds_the_three_packages_and_nothing_else(tmp_path: Path) -> None:
    source = tmp_path / "source"
    ignore = shutil.ignore_patterns(".*", "*.egg-info", "build", "demo", "tests", "__pycache__")
    shutil.copytree(ROOT, source, ignore=ignore)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-q",
        "-w",
        tmp_path,
        source,
    ]
    built = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        names = wheel.namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"compressor", "exporters", "serving"}
    sources = {
        str(path.relative_to(ROOT))
        for top in ("compressor", "exporters", "serving")
        for path in (ROOT / top).rglob("*.py")
    }
    assert sources <= set(names)


def test_the_base_install_needs_no_optional_framework() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    base = " ".join(project["dependencies"])
    for name in ("tensorflow", "openvino", "tensorrt", "litert"):
        assert name not in base
    assert {"tensorflow", "tflite", "tensorrt", "tensorrt-rtx", "openvino", "all", "test"} <= set(
        project["optional-dependencies"]
    )
