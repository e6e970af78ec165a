"""What this machine is, and which frameworks work on it.

`facts` is cheap and imports no framework; it goes into every report. `doctor` tries each framework in
a child process and says what is wrong and how to mend it.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from compressor import plugins

__all__ = ["cpu_flags", "doctor", "facts", "gpus", "instruction_set", "packages"]

_FLAGS = (
    *("sse4_2", "avx", "avx2", "fma", "f16c", "avx_vnni", "amx_int8", "amx_bf16"),
    *("avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("asimd", "asimddp", "i8mm", "bf16", "sve", "sve2"),
)
_PACKAGES = (
    *("modelpress", "torch", "torchvision", "timm", "onnx", "onnxruntime", "onnxruntime-gpu", "onnxscript"),
    *("numpy", "tensorflow", "tf-keras", "tensorflow-model-optimization", "litert-torch", "ai-edge-litert"),
    *("ai-edge-quantizer", "tensorrt", "tensorrt-rtx", "openvino", "protobuf", "safetensors", "pillow"),
)


def facts() -> dict[str, Any]:
    """The machine as the report keeps it; the same on every call while nothing is installed or removed."""
    return {
        "cpu": _cpu_model(),
        "architecture": platform.machine(),
        "cores": os.cpu_count() or 1,
        "usable_cores": _usable_cores(),
        "instruction_set": instruction_set(),
        "flags": [flag for flag in _FLAGS if flag in cpu_flags()],
        "memory_bytes": _memory(),
        "gpus": gpus(),
        "os": _system(),
        "python": platform.python_version(),
        "packages": packages(),
    }


def packages() -> dict[str, str]:
    """Versions of the installed packages that can change a result, by distribution name."""
    found = {name: _version((name,)) for name in _PACKAGES}
    return {name: version for name, version in found.items() if version}


def cpu_flags() -> set[str]:
    """The CPU's feature flags by their Linux names; empty where the system does not tell."""
    cpuinfo = _read("/proc/cpuinfo")
    found = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    if found:
        return set(found[1].split())
    return _darwin_flags() if sys.platform == "darwin" else set()


def instruction_set() -> str:
    """What multiplies int8 here: "vnni", "avx512", "avx2", "sse", "arm-dotprod", "arm-neon" or "unknown".

    Without VNNI an x86 CPU adds pairs of int8 products in 16 bits, which saturates (VPMADDUBSW,
    Intel SDM volume 2); "avx512" means AVX-512 without VNNI.
    """
    flags = cpu_flags()
    if platform.machine().lower() in ("aarch64", "arm64"):
        return "arm-dotprod" if "asimddp" in flags else "arm-neon"
    if flags & {"avx512_vnni", "avx_vnni", "amx_int8"}:
        return "vnni"
    for flag, name in (("avx512f", "avx512"), ("avx2", "avx2"), ("sse2", "sse")):
        if flag in flags:
            return name
    return "unknown"


def gpus() -> list[dict[str, str]]:
    """NVIDIA GPUs as nvidia-smi tells: name, memory, driver, compute capability; [] where there is none."""
    keys = ("name", "memory", "driver", "compute_capability")
    query = "--query-gpu=name,memory.total,driver_version,compute_cap"
    lines = _output(["nvidia-smi", query, "--format=csv,noheader"]).splitlines()
    rows = [[cell.strip() for cell in line.split(",")] for line in lines]
    return [dict(zip(keys, row, strict=True)) for row in rows if len(row) == len(keys)]


def _output(command: list[str], timeout: float = 10) -> str:
    """What a command of the system prints; nothing where it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _cpu_model() -> str:
    if sys.platform == "darwin":
        return _output(["sysctl", "-n", "machdep.cpu.brand_string"]).strip() or platform.processor()
    cpuinfo = _read("/proc/cpuinfo")
    for key in ("model name", "Model", "Hardware"):
        if found := re.search(rf"^{key}\s*:\s*(.+)$", cpuinfo, re.MULTILINE):
            return found[1].strip()
    return platform.processor() or platform.machine()


def _darwin_flags() -> set[str]:
    names = {
        "AVX2": "avx2",
        "AVX1.0": "avx",
        "AVX512F": "avx512f",
        "AVX512VNNI": "avx512_vnni",
        "SSE2": "sse2",
    }
    said = _output(["sysctl", "-a"])
    flags = {ours for theirs, ours in names.items() if re.search(rf"\b{re.escape(theirs)}\b", said)}
    arm = {"FEAT_DotProd": "asimddp", "FEAT_I8MM": "i8mm", "FEAT_BF16": "bf16", "AdvSIMD": "asimd"}
    return flags | {
        ours for theirs, ours in arm.items() if re.search(rf"hw\.optional\.(arm\.)?{theirs}: 1", said)
    }


def _usable_cores() -> float:
    """Cores that this process may use: affinity, and the control group's quota where there is one."""
    cores = (
        float(len(os.sched_getaffinity(0)))
        if hasattr(os, "sched_getaffinity")
        else float(os.cpu_count() or 1)
    )
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").strip().partition(" ")
    if quota.isdigit() and period.isdigit():
        cores = min(cores, int(quota) / int(period))
    return cores


def _memory() -> int:
    """Bytes of memory, or the control group's limit where that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    return min(total, int(limit)) if limit.isdigit() else total


def _system() -> str:
    if sys.platform == "linux":
        found = re.search(r'^PRETTY_NAME="?([^"\n]+)', _read("/etc/os-release"), re.MULTILINE)
        return f"{found[1] if found else 'Linux'}, kernel {platform.release()}"
    return platform.platform()


def _version(distributions: Iterable[str]) -> str | None:
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


@dataclass(frozen=True)
class _Framework:
    """A module to try. `extra` None: part of the base install; "": not ours, installed by its own name.

    `plugin`: the loader, exporter or runtime that needs it; without one of that name it is not tried.
    """

    module: str
    role: str
    extra: str | None = None
    distributions: tuple[str, ...] = ()
    also: str = "None"
    plugin: str | None = None

    @property
    def used(self) -> bool:
        """Whether anything in this version needs it."""
        kinds = ("loaders", "exporters", "runtimes")
        return self.plugin is None or any(self.plugin in plugins.names(kind) for kind in kinds)

    @property
    def names(self) -> tuple[str, ...]:
        return self.distributions or (self.module.replace("_", "-"),)

    @property
    def install(self) -> str:
        if self.extra is None:
            found = next((name for name in self.names if _version((name,))), self.names[-1])
            return f"pip install --force-reinstall {found}"
        if not self.extra:
            return f"pip install {self.names[0]}"
        return f"pip install '.[{self.extra}]' in a clone, 'modelpress[{self.extra}]' from a package index"


_FRAMEWORKS = (
    _Framework("torch", "PyTorch models, training", also="m.cuda.is_available()"),
    _Framework("torchvision", "image architectures, preprocessing"),
    _Framework("timm", "more image architectures", ""),
    _Framework("onnx", "ONNX models", also="[m.defs.onnx_opset_version(), m.IR_VERSION]"),
    _Framework("onnxscript", "PyTorch to ONNX"),
    _Framework(
        "onnxruntime",
        "runs ONNX engines",
        distributions=("onnxruntime-gpu", "onnxruntime"),
        also="m.get_available_providers()",
    ),
    _Framework("tensorflow", "Keras models, SavedModel", "tensorflow", plugin="keras"),
    _Framework("tf_keras", "Keras 2 models", "tensorflow", plugin="keras"),
    _Framework(
        "tensorflow_model_optimization", "Keras quantization-aware training", "tensorflow", plugin="keras"
    ),
    _Framework("litert_torch", "PyTorch to TFLite", "tflite", plugin="tflite"),
    _Framework("ai_edge_litert", "runs TFLite engines", "tflite", plugin="tflite"),
    _Framework("ai_edge_quantizer", "TFLite quantization", "tflite", plugin="tflite"),
    _Framework("tensorrt", "TensorRT engines", "tensorrt", plugin="tensorrt"),
    _Framework("tensorrt_rtx", "TensorRT for RTX engines", "tensorrt-rtx", plugin="tensorrt_rtx"),
    _Framework("openvino", "OpenVINO engines", "openvino", plugin="openvino"),
)
_ONNX_IN_RUNTIME = """
import onnx, onnxruntime
from onnx import TensorProto, helper
x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [1]) for n in "xy")
graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
onnxruntime.InferenceSession(helper.make_model(graph).SerializeToString(), providers=["CPUExecutionProvider"])
print("answer:true")
"""


def doctor(timeout: float = 180) -> dict[str, Any]:
    """Try every framework that this version uses in a child process (two at a time, `timeout` seconds each).

    Gives `machine` (facts), `frameworks` (list of module, role, status "ok" | "missing" | "broken" |
    "unused", version, reason, install, required), `providers` that onnxruntime is built with, `problems`
    (lines that say what to do), `notes` (limits to know of) and `ok` (no problems; an optional framework
    that is absent is none). "ok" means that the module can be imported.
    """
    machine = facts()
    with ThreadPoolExecutor(2) as pool:
        tried = list(pool.map(lambda framework: _try(framework, timeout), _FRAMEWORKS))
    by_module = {entry["module"]: entry for entry in tried}
    problems = [
        f"{entry['module']}: {entry['reason']}; {entry['install']}"
        for entry in tried
        if entry["status"] == "broken" or (entry["required"] and entry["status"] == "missing")
    ]
    problems += _clashes(by_module) + _gpu_problems(machine, by_module)
    return {
        "machine": machine,
        "frameworks": [{key: value for key, value in entry.items() if key != "also"} for entry in tried],
        "providers": by_module["onnxruntime"]["also"] or [],
        "problems": problems,
        "notes": _onnx_in_runtime(by_module, timeout),
        "ok": not problems,
    }


def _try(framework: _Framework, timeout: float) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "module": framework.module,
        "role": framework.role,
        "required": framework.extra is None,
        "version": _version(framework.names),
        "status": "missing",
        "reason": "not installed",
        "install": framework.install,
        "also": None,
    }
    if not framework.used:
        return {**entry, "status": "unused", "reason": "nothing in this version uses it"}
    if find_spec(framework.module) is None:
        return entry
    code = (
        f"import json, importlib; m = importlib.import_module({framework.module!r}); "
        f"print('answer:' + json.dumps([getattr(m, '__version__', None), {framework.also}]))"
    )
    answer, reason = _ask(code, timeout)
    if answer is None:
        return {**entry, "status": "broken", "reason": reason}
    version, also = answer
    return {**entry, "status": "ok", "reason": "", "version": entry["version"] or version, "also": also}


def _ask(code: str, timeout: float) -> tuple[Any, str]:
    """Run code in a fresh interpreter; its answer, or None and why there is none."""
    environment = dict(os.environ, TF_CPP_MIN_LOG_LEVEL="3")
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", code],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            env=environment,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return None, f"the import did not end within {timeout:.0f} s"
    for line in reversed(done.stdout.splitlines()):
        if line.startswith("answer:"):
            return json.loads(line.removeprefix("answer:")), ""
    words = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    if done.returncode < 0:
        return None, f"the import crashes (signal {-done.returncode})"
    return None, f"the import fails: {words[-1][:200]}" if words else "the import fails without a word"


def _clashes(frameworks: dict[str, dict[str, Any]]) -> list[str]:
    """Installed versions that do not belong together."""
    problems = []
    if _version(("onnxruntime",)) and _version(("onnxruntime-gpu",)):
        problems.append(
            "onnxruntime and onnxruntime-gpu are both installed and overwrite each other's files; "
            "pip uninstall -y onnxruntime onnxruntime-gpu, then pip install the one you want"
        )
    torch, wanted = frameworks["torch"]["version"], _pinned("torchvision", "torch")
    if torch and wanted and torch.split("+")[0] != wanted.split("+")[0]:
        problems.append(
            f"torchvision {frameworks['torchvision']['version']} is built for torch {wanted}, "
            f"but torch {torch} is installed; pip install --upgrade torch torchvision"
        )
    return problems


def _pinned(distribution: str, dependency: str) -> str | None:
    """The exact version of `dependency` that an installed distribution asks for."""
    try:
        requirements = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        return None
    for requirement in requirements:
        if found := re.match(rf"{dependency}\s*\(?==\s*([\w.+]+)", requirement):
            return found[1]
    return None


def _gpu_problems(machine: dict[str, Any], frameworks: dict[str, dict[str, Any]]) -> list[str]:
    """There is a GPU, but a framework that works cannot use it."""
    if not machine["gpus"]:
        return []
    problems = []
    name = machine["gpus"][0]["name"]
    if frameworks["torch"]["status"] == "ok" and not frameworks["torch"]["also"]:
        problems.append(f"torch cannot use the {name}; install a CUDA build of torch that fits the driver")
    if "CUDAExecutionProvider" not in (frameworks["onnxruntime"]["also"] or ["CUDAExecutionProvider"]):
        problems.append(
            f"onnxruntime has no CUDA provider for the {name}; "
            "pip uninstall -y onnxruntime, then pip install onnxruntime-gpu"
        )
    return problems


def _onnx_in_runtime(frameworks: dict[str, dict[str, Any]], timeout: float) -> list[str]:
    """Whether the installed onnxruntime loads what the installed onnx writes where nobody sets an opset."""
    onnx, runtime = frameworks["onnx"], frameworks["onnxruntime"]
    if onnx["status"] != "ok" or runtime["status"] != "ok":
        return []
    if _ask(_ONNX_IN_RUNTIME, timeout)[0]:
        return []
    opset, ir_version = onnx["also"]
    return [
        f"onnxruntime {runtime['version']} does not load what onnx {onnx['version']} writes by default "
        f"(opset {opset}, IR {ir_version}); ask for a lower opset where you export a model yourself"
    ]
