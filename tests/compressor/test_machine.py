"""Facts about this machine, and the doctor, on the real installation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from compressor import machine, plugins


def test_facts_are_json_and_the_same_again() -> None:
    found = machine.facts()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert machine.facts() == found
    assert found["cpu"]
    assert found["cores"] == os.cpu_count()
    assert 0 < found["usable_cores"] <= found["cores"]
    assert 2**28 < found["memory_bytes"] < 2**46
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))


def test_packages_are_those_installed() -> None:
    found = machine.packages()
    assert found["numpy"] == metadata.version("numpy")
    assert found["onnx"] == metadata.version("onnx")
    assert "no-such-package" not in found


def test_the_import_brings_no_framework() -> None:
    code = (
        "import sys, compressor.machine, compressor.report.html, compressor.report.terminal; "
        "compressor.machine.facts(); "
        "print([name for name in ('numpy', 'torch', 'onnx', 'onnxruntime', 'rich') if name in sys.modules])"
    )
    root = str(Path(machine.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.strip() == "[]"


CPUINFO = "processor\t: 0\nmodel name\t: Some CPU @ 2.0GHz\nflags\t\t: fpu sse2 {flags}\nbugs\t: x\n"


@pytest.mark.parametrize(
    ("architecture", "flags", "said"),
    [
        ("x86_64", "avx2 avx512f avx512_vnni", "vnni"),
        ("x86_64", "avx2 avx_vnni", "vnni"),
        ("x86_64", "avx2 avx512f avx512bw", "avx512"),
        ("x86_64", "avx2 fma", "avx2"),
        ("x86_64", "", "sse"),
        ("aarch64", "asimd asimddp i8mm", "arm-dotprod"),
        ("aarch64", "asimd", "arm-neon"),
    ],
)
def test_instruction_sets(monkeypatch: pytest.MonkeyPatch, architecture: str, flags: str, said: str) -> None:
    text = CPUINFO.format(flags=flags)
    if architecture == "aarch64":
        text = f"processor\t: 0\nFeatures\t: fp {flags}\n"
    monkeypatch.setattr(machine, "_read", lambda path: text if path == "/proc/cpuinfo" else "")
    monkeypatch.setattr(machine.platform, "machine", lambda: architecture)
    assert machine.instruction_set() == said
    assert set(flags.split()) <= machine.cpu_flags()


def test_an_unknown_system_is_said_to_be_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_read", lambda path: "")
    monkeypatch.setattr(machine.platform, "machine", lambda: "riscv64")
    monkeypatch.setattr(machine.sys, "platform", "linux")
    assert machine.cpu_flags() == set()
    assert machine.instruction_set() == "unknown"
    assert machine.facts()["cpu"]


def test_limits_of_a_container_count(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"/sys/fs/cgroup/cpu.max": "50000 100000\n", "/sys/fs/cgroup/memory.max": "1000000000\n"}
    monkeypatch.setattr(machine, "_read", lambda path: files.get(path, ""))
    found = machine.facts()
    assert found["usable_cores"] == 0.5
    assert found["memory_bytes"] == 1_000_000_000


def script(folder: Path, name: str, body: str) -> None:
    file = folder / name
    file.write_text(f"#!/bin/sh\n{body}\n")
    file.chmod(0o755)


def test_gpus_are_what_nvidia_smi_tells(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    script(tmp_path, "nvidia-smi", "echo 'NVIDIA T4, 15360 MiB, 550.54, 7.5'")
    assert machine.gpus() == [
        {"name": "NVIDIA T4", "memory": "15360 MiB", "driver": "550.54", "compute_capability": "7.5"}
    ]
    script(tmp_path, "nvidia-smi", "echo 'NVIDIA-SMI has failed'; exit 9")
    assert machine.gpus() == []


def test_a_command_that_hangs_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    script(tmp_path, "sleeper", "exec sleep 30")
    assert machine._output(["sleeper"], timeout=0.2) == ""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return machine.doctor()


def test_the_doctor_finds_what_is_installed(found: dict[str, Any]) -> None:
    assert json.loads(json.dumps(found)) == found
    by_module = {entry["module"]: entry for entry in found["frameworks"]}
    for module in ("torch", "onnx", "onnxruntime"):
        assert by_module[module]["status"] == "ok"
        assert by_module[module]["required"]
    assert by_module["torch"]["version"] == metadata.version("torch")
    assert "CPUExecutionProvider" in found["providers"]


def framework(module: str) -> machine._Framework:
    return next(item for item in machine._FRAMEWORKS if item.module == module)


def test_what_is_absent_names_the_extra_and_is_no_problem(
    monkeypatch: pytest.MonkeyPatch, found: dict[str, Any]
) -> None:
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    entry = machine._try(framework("openvino"), 1)
    assert entry["status"] == "missing"
    assert not entry["required"]
    for words in ("pip install '.[openvino]' in a clone", "'modelpress[openvino]' from a package index"):
        assert words in entry["install"]
    absent = [entry["module"] for entry in found["frameworks"] if entry["status"] == "missing"]
    assert not any(problem.startswith(f"{module}:") for module in absent for problem in found["problems"])


def test_a_framework_is_used_where_a_loader_exporter_or_runtime_needs_it(
    monkeypatch: pytest.MonkeyPatch, found: dict[str, Any]
) -> None:
    known = {name for kind in ("loaders", "exporters", "runtimes") for name in plugins.names(kind)}
    status = {entry["module"]: entry["status"] for entry in found["frameworks"]}
    assert status["openvino"] != "unused"
    for item in machine._FRAMEWORKS:
        assert (status[item.module] == "unused") == (item.plugin is not None and item.plugin not in known)
    monkeypatch.setattr(machine.plugins, "names", lambda kind: ("tflite",) if kind == "exporters" else ())
    assert framework("ai_edge_litert").used
    assert framework("torch").used
    assert not framework("openvino").used


def tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, timeout: float = 300) -> dict[str, Any]:
    """The entry of a framework, which nothing else brings, whose module holds `body`."""
    (tmp_path / "framework_of_this_test.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return machine._try(machine._Framework("framework_of_this_test", "tests", ""), timeout)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("import no_such_module", "the import fails: ModuleNotFoundError: No module named 'no_such_module'"),
        ("import os; os.abort()", "the import crashes (signal 6)"),
        ("raise SystemExit(3)", "the import fails without a word"),
    ],
)
def test_a_broken_framework_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, reason: str
) -> None:
    entry = tried(tmp_path, monkeypatch, body)
    assert entry["status"] == "broken"
    assert entry["reason"] == reason


def test_a_framework_that_hangs_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = tried(tmp_path, monkeypatch, "import time; time.sleep(60)", timeout=1)
    assert entry["reason"] == "the import did not end within 1 s"


def test_chatter_of_a_framework_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = tried(
        tmp_path,
        monkeypatch,
        "print('hello'); __version__ = '9.1'\nimport atexit; atexit.register(print, 'bye')",
    )
    assert (entry["status"], entry["version"]) == ("ok", "9.1")


def distribution(folder: Path, name: str, version: str, *lines: str) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "\n".join(["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *lines])
    )


def test_two_builds_of_onnxruntime_clash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    none = {"torch": {"version": None}, "torchvision": {"version": None}}
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    distribution(tmp_path, "onnxruntime-gpu", "1.31.1")
    assert machine._clashes(none) == []
    distribution(tmp_path, "onnxruntime", "1.30.0")
    (problem,) = machine._clashes(none)
    assert "both installed" in problem
    assert "pip uninstall" in problem


def test_a_torchvision_for_another_torch_clashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    distribution(tmp_path, "torchvision", "0.29.1", "Requires-Dist: numpy", "Requires-Dist: torch==2.14.1")
    versions = {"torchvision": {"version": "0.29.1"}, "torch": {"version": "2.13.0+cpu"}}
    (problem,) = machine._clashes(versions)
    assert problem.startswith(
        "torchvision 0.29.1 is built for torch 2.14.1, but torch 2.13.0+cpu is installed"
    )
    versions["torch"]["version"] = "2.14.1+cu130"
    assert machine._clashes(versions) == []


def test_a_gpu_that_nobody_can_use_is_a_problem() -> None:
    gpu = {"gpus": [{"name": "NVIDIA T4"}]}
    cpu_only = {
        "torch": {"status": "ok", "also": False},
        "onnxruntime": {"status": "ok", "also": ["CPUExecutionProvider"]},
    }
    torch, runtime = machine._gpu_problems(gpu, cpu_only)
    assert torch.startswith("torch cannot use the NVIDIA T4")
    assert runtime.startswith("onnxruntime has no CUDA provider for the NVIDIA T4")
    assert machine._gpu_problems({"gpus": []}, cpu_only) == []
