"""What a TorchScript archive could do besides calculating: looked for before it is loaded and after.

Loading runs code of the file: `__setstate__`, default values of arguments, and constants of classes. So the
text is read first, in the plain form in which torch writes it, where Python's grammar and TorchScript's
cannot differ. After loading, before anything is called, every compiled function is walked.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compressor.errors import ModelFileError
from compressor.pickles import globals_of

__all__ = ["check_functions", "check_text"]

_NAMESPACES = {"aten", "prim", "quantized", "torchvision"}
_FILES = {"save", "load", "from_file"}
"""Operators of `aten` that read or write files."""
_FOREIGN_CODE = {"PythonOp", "IgnoredPythonOp", "rpc_async", "rpc_sync", "rpc_remote"}
_CLASSES = re.compile(r"__torch__\.torch\.classes\.(\w+)")
_CLASS_NAMESPACES = {"quantized", "xnnpack", "mkldnn"}
_PLAIN_CALLS = {"float", "int", "bool", "complex", "annotate", "torch.device"}
"""What may be called outside of functions, where loading already runs it: values that no literal writes."""
_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"|' + r"'(?:[^'\\\n]|\\.)*'")
_SKIPPED = {tokenize.ENCODING, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


def check_text(path: Path) -> None:
    """Raise `ModelFileError` that names what in the archive's text loading would run, or calls for files."""
    import torch

    reader = torch._C.PyTorchFileReader(str(path))
    for name in map(str, reader.get_all_records()):
        problem = None
        if name.lower().endswith(".py"):
            problem = _in_code(reader.get_record(name))
        elif name.endswith(".pkl") and not name.startswith(("code/", "extra/")):
            problem = next(
                filter(None, map(_class_problem, globals_of(io.BytesIO(reader.get_record(name))))), None
            )
        elif name == "model.json":
            problem = "the form that torch wrote before 1.1, whose code cannot be checked"
        if problem:
            raise _refusal(path, f"{problem} ({name})")


def check_functions(path: Path, functions: Any) -> None:
    """Raise `ModelFileError` that names the first operator in `functions` that does not only calculate."""
    for function in functions:
        for node in _nodes(function.graph):
            problem = _operator_problem(node.kind()) or _type_problem(node)
            if problem:
                raise _refusal(path, f"{problem} (in {function.name})")


def _refusal(path: Path, problem: str) -> ModelFileError:
    return ModelFileError(
        f"{path} is refused, because its code could do more than calculate: {problem}; "
        "pass --trust if you trust the file"
    )


def _nodes(block: Any) -> Iterator[Any]:
    """All nodes, also of inner blocks and of graphs that are attributes."""
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _nodes(inner)
        for name in node.attributeNames():
            if node.kindOf(name) == "g":
                yield from _nodes(node.g(name))
            elif node.kindOf(name) == "gs":
                for graph in node.gs(name):
                    yield from _nodes(graph)


def _operator_problem(kind: str) -> str | None:
    space, _, name = kind.partition("::")
    if space not in _NAMESPACES:
        return f"it calls '{kind}', which is none of torch's own operators"
    if space == "aten" and name in _FILES:
        return f"it reads or writes files by '{kind}'"
    return f"it calls foreign code by '{kind}'" if name in _FOREIGN_CODE else None


def _type_problem(node: Any) -> str | None:
    types = (value.type().annotation_str for value in (*node.inputs(), *node.outputs()))
    return next(filter(None, map(_class_problem, types)), None)


def _class_problem(text: str) -> str | None:
    """Why a type may not be used: objects of native code can do whatever they were written for."""
    if text == "?":
        return "it holds objects of a class that is not named plainly"
    foreign = [space for space in _CLASSES.findall(text) if space not in _CLASS_NAMESPACES]
    return f"it uses native objects of '{foreign[0]}'" if foreign else None


# --------------------------------------------------------------------------- text


def _in_code(data: bytes) -> str | None:
    """The first problem in one file of code."""
    if b"__setstate__" in data:
        return "it defines __setstate__, which runs while the file is loaded"
    try:
        text = data.decode("ascii")
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
        tree = ast.parse(text)
    except (UnicodeDecodeError, tokenize.TokenError, SyntaxError, ValueError, RecursionError):
        return "its code is not written as torch writes it, and cannot be checked"
    if not _is_plain(text, tokens):
        return "its code is not written as torch writes it, and cannot be checked"
    return _in_tokens(tokens) or _while_loading(tree)


def _is_plain(text: str, tokens: list[tokenize.TokenInfo]) -> bool:
    """Whether TorchScript's lexer sees the same tokens: no comments, joined lines, odd blanks or strings."""
    if any(not char.isprintable() and char != "\n" for char in text):
        return False
    for token in tokens:
        if token.type in (tokenize.COMMENT, tokenize.ERRORTOKEN):
            return False
        if token.type == tokenize.STRING and not _STRING.fullmatch(token.string):
            return False
    return "\\" not in _STRING.sub('""', text)


def _in_tokens(tokens: list[tokenize.TokenInfo]) -> str | None:
    """A call by its dotted name, whatever blanks and line breaks stand in it."""
    words = [token.string for token in tokens if token.type not in _SKIPPED]
    for name in re.findall(r"\w+(?: \. \w+)+", " ".join(words)):
        parts = name.split(" . ")
        if parts[0] == "torch" and parts[1] in _FILES:
            return f"it reads or writes files by '{'.'.join(parts)}'"
        if parts[0] == "ops" and len(parts) > 2:
            problem = _operator_problem(f"{parts[1]}::{parts[2]}")
            if problem:
                return problem
        problem = _class_problem(".".join(parts))
        if problem:
            return problem
    return None


def _while_loading(tree: ast.AST) -> str | None:
    """A call in a default value or a class constant: loading runs those."""
    for node in ast.walk(tree):
        outside: list[ast.AST] = []
        if isinstance(node, ast.FunctionDef):
            outside = [node.args, *node.decorator_list]
        elif isinstance(node, ast.ClassDef | ast.Module):
            outside = [each for each in node.body if not isinstance(each, ast.FunctionDef | ast.ClassDef)]
        for part in outside:
            for call in ast.walk(part):
                if isinstance(call, ast.Call) and ast.unparse(call.func) not in _PLAIN_CALLS:
                    return f"it calls '{ast.unparse(call.func)[:60]}' while it is loaded"
    return None
