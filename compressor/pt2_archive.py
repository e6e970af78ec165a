"""What a `.pt2` archive would run if torch loaded it: checked before it is loaded.

`torch.export.load` unpickles members of the archive, evaluates expressions for sizes, and builds
Python code out of names. So pickles must pass torch's own safe unpickler, expressions must be arithmetic,
names must be names, and operators must be those of torch. Whatever else stands in a file is refused.
"""

from __future__ import annotations

import ast
import io
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from compressor.errors import ModelFileError
from compressor.pickles import globals_of_bytes

__all__ = ["check", "on_cpu"]

_OPERATOR = re.compile(
    r"torch\.ops\.(?:aten|prims|quantized_decomposed|torchao|torchvision|_c10d_functional)\.\w+(?:\.\w+)?"
    r"|torch\.ops\.higher_order\.(?:cond|while_loop|map_impl|scan|associative_scan|invoke_subgraph|wrap_\w+)"
    r"|torch\.(?:_?sym_)\w+"
)
_FORBIDDEN_OPERATORS = re.compile(r"torch\.ops\.aten\.(?:_?from_file|save|load)\b")
_ARITHMETIC = re.compile(
    r"(?:_operator|math)\.(?:getitem|add|sub|mul|truediv|floordiv|mod|neg|pos|pow|abs|eq|ne|lt|le|gt|ge|and_|or_|"
    r"not_|xor|lshift|rshift|floor|ceil|trunc|sqrt|index|round)"
)
_NAME = re.compile(r"[\w.]*")
_SYMBOL = re.compile(r"[a-z]+\d+")
_FUNCTION = re.compile(
    "Max|Min|Mod|PythonMod|FloorDiv|CeilDiv|CleanDiv|ModularIndexing|IntTrueDiv|FloatTrueDiv|TruncToInt|"
    "CeilToInt|FloorToInt|RoundToInt|RoundDecimal|ToFloat|PowByNatural|FloatPow|Where|Eq|Ne|Ge|Gt|Le|Lt|And|"
    "Or|Not|LShift|RShift|Integer|Float|Rational|Identity|Abs|Pow|Mul|Add|oo|int_oo"
)
_TREES = {None, "builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict"}


def check(path: Path) -> None:
    """Raise `ModelFileError` that names the first thing in the archive that could run code of its own."""
    import torch

    reader = torch._C.PyTorchFileReader(str(path))
    names = [str(name) for name in reader.get_all_records()]
    if any("aotinductor" in name or name.endswith((".so", ".o")) for name in names):
        raise ModelFileError(
            f"{path} is an AOTInductor package: compiled native code, which cannot be compressed; "
            "save the exported program itself with torch.export.save"
        )
    pickles = {name for name in names if name.endswith(".pt")}
    for name in names:
        if name.endswith("_config.json"):
            pickles |= set(_pickled(path, name, json.loads(reader.get_record(name))))
        elif name.endswith(".json"):
            for problem in _problems(json.loads(reader.get_record(name))):
                raise ModelFileError(
                    f"{path} is refused, because loading it could run code: {problem} in {name}"
                )
    for name in sorted(pickles):
        _check_pickle(path, name, reader.get_record(name))


def on_cpu(path: Path, folder: Path) -> Path:
    """The archive, or a copy in `folder` in which every device is the CPU, if it was saved on another."""
    import torch

    reader = torch._C.PyTorchFileReader(str(path))
    names = [
        str(name) for name in reader.get_all_records() if not str(name).startswith((".data/", "version"))
    ]
    described = {name: json.loads(reader.get_record(name)) for name in names if name.endswith(".json")}
    if not any(map(_moves, described.values())):
        return path
    moved = folder / "on_cpu.pt2"
    writer = torch._C.PyTorchFileWriter(str(moved))
    for name in names:
        data = reader.get_record(name)
        if name in described:
            data = json.dumps(described[name]).encode()
        elif name.endswith(".pt"):
            data = _pickled_on_cpu(data)
        writer.write_record(name, data, len(data))
    writer.write_end_of_file()
    return moved


def _moves(value: Any) -> bool:
    """Put the CPU in place of every other device in a description; gives whether there was one."""
    if isinstance(value, list):
        return sum(map(_moves, value)) > 0
    if not isinstance(value, dict):
        return False
    if set(value) == {"type", "index"} and value["type"] != "cpu":
        value.update({"type": "cpu", "index": None})
        return True
    return sum(map(_moves, value.values())) > 0


def _pickled_on_cpu(data: bytes) -> bytes:
    import torch

    if not data:
        return data
    buffer = io.BytesIO()
    torch.save(torch.load(io.BytesIO(data), map_location="cpu", weights_only=True), buffer)
    return buffer.getvalue()


def _pickled(path: Path, name: str, config: Any) -> Iterator[str]:
    """The members that a list of weights or constants declares to be pickles."""
    folder = name.rpartition("/")[0]
    for key, entry in config.get("config", {}).items():
        member = str(entry.get("path_name"))
        if member.startswith(("custom_obj", "opaque_obj")):
            raise ModelFileError(
                f"{path} holds '{key}', an object that is no tensor; only tensors can be read safely"
            )
        if entry.get("use_pickle"):
            yield f"{folder}/{member}"


def _check_pickle(path: Path, name: str, data: bytes) -> None:
    import torch

    if not data:
        return
    try:
        torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # anything but a clean safe read makes torch unpickle it unsafely
        found = ", ".join(globals_of_bytes(data)) or type(error).__name__
        raise ModelFileError(
            f"{path} is refused, because loading it could run code: its member {name} is a pickle that "
            f"torch's safe reader does not take ({found})"
        ) from error


def _problems(value: Any, key: str = "") -> Iterator[str]:
    """What in the description of a program is more than a graph of torch's operators."""
    if key == "as_custom_obj" and value is not None:
        yield "a custom object"
    elif isinstance(value, Mapping):
        for inner, entry in value.items():
            yield from _problems(entry, str(inner))
    elif isinstance(value, list):
        for entry in value:
            yield from _problems(entry, key)
    elif isinstance(value, str):
        problem = _problem(key, value)
        if problem:
            yield f"{problem} '{value[:80]}'"


def _problem(key: str, text: str) -> str | None:
    if key == "expr_str" and not _is_arithmetic(text):
        return "the size"
    if key in ("target", "as_operator") and not _is_operator(text):
        return "the operator"
    if (key == "name" or key.endswith(("_name", "_names"))) and not _NAME.fullmatch(text):
        return "the name"
    if key in ("in_spec", "out_spec") and text and not _is_plain_tree(json.loads(text)):
        return "the structure"
    return None


def _is_arithmetic(text: str) -> bool:
    """Numbers, `Symbol('s0', ...)`, and known functions and operators of them."""
    try:
        return _is_number(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError):
        return False


def _is_number(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float)
    if isinstance(node, ast.Name):
        return bool(_FUNCTION.fullmatch(node.id) or _SYMBOL.fullmatch(node.id))
    if isinstance(node, ast.Call):
        parts: list[ast.AST] = [*node.args, *(keyword.value for keyword in node.keywords)]
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name == "Symbol" and parts:
            symbol = parts.pop(0)
            named = isinstance(symbol, ast.Constant) and _SYMBOL.fullmatch(str(symbol.value))
            return bool(named) and all(map(_is_number, parts))
        return bool(_FUNCTION.fullmatch(name)) and all(map(_is_number, parts))
    if isinstance(node, ast.BinOp | ast.UnaryOp | ast.BoolOp | ast.Compare):
        return all(
            map(_is_number, (each for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr)))
        )
    return False


def _is_operator(text: str) -> bool:
    allowed = _OPERATOR.fullmatch(text) or _ARITHMETIC.fullmatch(text)
    return bool(allowed) and not _FORBIDDEN_OPERATORS.match(text)


def _is_plain_tree(tree: Any) -> bool:
    """Tuples, lists and dictionaries only; the keys of the outer dictionaries become argument names."""
    if isinstance(tree, list):
        return all(_is_plain_tree(part) for part in tree if isinstance(part, dict | list))
    context = json.loads(tree.get("context") or "null") if isinstance(tree.get("context"), str) else None
    keys = context if isinstance(context, list) else []
    named = all(_NAME.fullmatch(key) for key in keys if isinstance(key, str))
    return tree.get("type") in _TREES and named and all(map(_is_plain_tree, tree.get("children_spec", ())))
