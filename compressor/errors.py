"""Every error that a user can cause or must act on.

CompressError           exit status 1: the job failed
├── UsageError          exit status 2: the request itself is wrong (option, target, recipe, name)
├── ModelFileError      the model's file is missing, cut, of another kind, or needs code or trust
├── DataError           the data cannot be read or do not fit the model
├── UnsupportedError    the model, runtime or machine cannot do what was asked
├── StoreError          the output folder cannot be used (permission, full disk, in use)
└── WorkerError         a child process died (signal, out of memory)

A message is one line: what was asked, what is true, what to do. Anything that is not a
`CompressError` is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

__all__ = [
    "CompressError",
    "DataError",
    "ModelFileError",
    "StoreError",
    "UnsupportedError",
    "UsageError",
    "WorkerError",
    "error_named",
]


class CompressError(Exception):
    """Base of all errors that end in one line on stderr."""

    exit_status = 1


class UsageError(CompressError):
    """The request itself is wrong."""

    exit_status = 2


class ModelFileError(CompressError):
    """The model's file cannot be used."""


class DataError(CompressError):
    """The data cannot be read, or do not fit the model."""


class UnsupportedError(CompressError):
    """The model, the runtime or this machine cannot do what was asked."""


class StoreError(CompressError):
    """The output folder cannot be used."""


class WorkerError(CompressError):
    """A child process died without an answer."""


def error_named(name: str, message: str) -> CompressError:
    """The error of class `name`, as it comes back from a child process."""
    kinds: list[type[CompressError]] = CompressError.__subclasses__()
    return next((kind for kind in kinds if kind.__name__ == name), CompressError)(message)
