"""What a source of data gives: batches of named arrays, with labels where they are known."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from compressor.model import TensorSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Batch", "DataOptions", "Dataset"]


@dataclass(frozen=True)
class Batch:
    """Some samples. Every array's first axis counts samples; `indices` are their positions in the source."""

    inputs: dict[str, NDArray[Any]]
    labels: NDArray[Any] | None
    indices: NDArray[Any]


@dataclass(frozen=True)
class DataOptions:
    """How a source is to be read: `preprocess` for pictures, and the model's inputs if they are known."""

    preprocess: dict[str, Any] | None = None
    inputs: tuple[TensorSpec, ...] = ()


class Dataset(Protocol):
    """An open source.

    `arrays` are the shapes of one sample, without a batch axis; sizes that vary have a name.
    `length` counts positions, `usable` are those that can be read (a picture may be broken), sorted.
    `labels` are of all positions. `sha256` is a digest of the content. `notes` say what was left aside
    or converted. `finite` is true where no value can be NaN or infinite.
    """

    kind: str
    finite: bool

    @property
    def arrays(self) -> tuple[TensorSpec, ...]: ...

    @property
    def length(self) -> int: ...

    @property
    def usable(self) -> NDArray[Any]: ...

    @property
    def labels(self) -> NDArray[Any] | None: ...

    @property
    def sha256(self) -> str: ...

    @property
    def notes(self) -> tuple[str, ...]: ...

    @property
    def warnings(self) -> tuple[str, ...]: ...

    def batches(self, indices: NDArray[Any] | None, size: int) -> Iterator[Batch]:
        """The samples at `indices` (sorted; None: all usable) in batches of at most `size`.

        Raises `DataError` if a sample cannot be read.
        """
        ...
