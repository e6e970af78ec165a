"""What a pickle would import, read from its opcodes; nothing is unpickled."""

from __future__ import annotations

import io
import pickletools
import zipfile
from pathlib import Path
from typing import IO

__all__ = ["LEGACY_MAGIC", "globals_of", "globals_of_bytes", "globals_of_file"]

LEGACY_MAGIC = bytes.fromhex("80028a0a6cfc9c46f920")
"""How a file begins that torch.save wrote before 1.6 (or with `_use_new_zipfile_serialization=False`)."""

_LEGACY_PICKLES = 5
"""Magic number, protocol version, system, the object, storage keys."""


def globals_of(stream: IO[bytes]) -> list[str]:
    """The `module.name` of every global that one pickle imports, in order; reads to its STOP.

    A name that is not a constant of the pickle comes out as `?`. A damaged pickle gives what it imports
    before the damage, for that is what unpickling it would run.
    """
    found: dict[str, None] = {}
    strings: list[str] = []
    memo: dict[int, str] = {}
    try:
        for opcode, argument, _ in pickletools.genops(stream):
            name = _imported(opcode.name, argument, strings)
            if name:
                found[name] = None
            _follow(opcode.name, argument, strings, memo)
    except (ValueError, IndexError, EOFError, UnicodeDecodeError):
        pass
    return list(found)


def globals_of_bytes(data: bytes) -> list[str]:
    """The globals of what torch.save wrote, held in memory."""
    if not data.startswith(b"PK\x03\x04"):
        stream = io.BytesIO(data)
        return list(dict.fromkeys(name for _ in range(_LEGACY_PICKLES) for name in globals_of(stream)))
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        parts = [archive.read(entry) for entry in archive.infolist() if entry.filename.endswith("data.pkl")]
    return list(dict.fromkeys(name for part in parts for name in globals_of(io.BytesIO(part))))


def globals_of_file(path: Path) -> list[str]:
    """The globals of a file written by torch.save, of either format."""
    with path.open("rb") as file:
        if file.read(4) != b"PK\x03\x04":
            file.seek(0)
            return list(dict.fromkeys(name for _ in range(_LEGACY_PICKLES) for name in globals_of(file)))
    with zipfile.ZipFile(path) as archive:
        parts = [archive.read(entry) for entry in archive.infolist() if entry.filename.endswith("data.pkl")]
    return list(dict.fromkeys(name for part in parts for name in globals_of(io.BytesIO(part))))


def _imported(opcode: str, argument: object, strings: list[str]) -> str | None:
    if opcode in ("GLOBAL", "INST"):
        return str(argument).replace(" ", ".", 1)
    if opcode == "STACK_GLOBAL":
        return ".".join(strings[-2:]) if len(strings) >= 2 else "?"
    if opcode in ("EXT1", "EXT2", "EXT4"):
        return "?"
    return None


def _follow(opcode: str, argument: object, strings: list[str], memo: dict[int, str]) -> None:
    """Keep the constant strings pushed last: STACK_GLOBAL takes its names from there."""
    if (isinstance(argument, str) and "UNICODE" in opcode) or opcode.endswith("STRING"):
        strings.append(str(argument))
    elif opcode == "MEMOIZE":
        memo[len(memo)] = strings[-1] if strings else "?"
    elif opcode in ("BINPUT", "LONG_BINPUT", "PUT"):
        memo[int(str(argument))] = strings[-1] if strings else "?"
    elif opcode in ("BINGET", "LONG_BINGET", "GET"):
        strings.append(memo.get(int(str(argument)), "?"))
