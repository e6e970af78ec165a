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

__all__ = ["check", "records"]

_NAMESPACES = (
    "aten",
    "prims",
    "higher_order",
    "quantized_decomposed",
    "torchao",
    "torchvision",
    "_c10d_functional",
)
_OPERATOR = re.compile(
    rf"torch\.ops\.(?:{'|'.join(_NAMESPACES)})\.\w+(?:\.\w+)?|torch\.sym_\w+|torch\.\w*sym_\w+"
)
_FORBIDDEN_OPERATORS = re.compile(r"torch\.ops\.aten\.(?:from_file|_from_file|save|load)\b")
_ARITHMETIC = re.compile(
    r"(?:_operator|math)\.(?:getitem|add|sub|mul|truediv|floordiv|mod|neg|pos|pow|abs|eq|ne|lt|le|gt|ge|and_|or_|"
    r"not_|xor|lshift|rshift|floor|ceil|trunc|sqrt|index|round)"
)
_NAME = re.compile(r"[\w.]*")
_SYMBOL = re.compile(r"[a-z]+\d+")
_FUNCTIONS = frozenset(
    {
        *(
            "Max",
            "Min",
            "Mod",
            "PythonMod",
            "FloorDiv",
            "CeilDiv",
            "CleanDiv",
            "ModularIndexing",
            "IntTrueDiv",
        ),
        *("FloatTrueDiv", "TruncToInt", "CeilToInt", "FloorToInt", "RoundToInt", "RoundDecimal", "ToFloat"),
        *(
            "PowByNatural",
            "FloatPow",
            "Where",
            "Eq",
            "Ne",
            "Ge",
            "Gt",
            "Le",
            "Lt",
            "And",
            "Or",
            "Not",
            "LShift",
        ),
        *("RShift", "Integer", "Float", "Rational", "Identity", "Abs", "Pow", "Mul", "Add", "oo", "int_oo"),
    }
)
_TREES = {None, "builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict"}


def records(path: Path) -> list[str]:
    """Names of the members, without the archive's own root folder."""
    import torch

    return [str(name) for name in torch._C.PyTorchFileReader(str(path)).get_all_records()]


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
    if isinstance(value, Mapping):
        for inner, entry in value.items():
            yield from _problems(entry, str(inner))
    elif isinstance(value, list):
        for entry in value:
            yield from _problems(entry, key)
    elif isinstance(value, str):
        problem = _problem(key, value)
        if problem:
            yield f"{problem} '{value[:80]}'"
    elif key == "as_custom_obj" and value is not None:
        yield "a custom object"


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
        return node.id in _FUNCTIONS or bool(_SYMBOL.fullmatch(node.id))
    if isinstance(node, ast.Call):
        parts: list[ast.AST] = [*node.args, *(keyword.value for keyword in node.keywords)]
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name == "Symbol" and parts and isinstance(parts[0], ast.Constant):
            return bool(_SYMBOL.fullmatch(str(parts.pop(0).value))) and all(map(_is_number, parts))
        return name in _FUNCTIONS and all(map(_is_number, parts))
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
