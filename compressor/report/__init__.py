"""The result of a run: report.json (`schema`), report.html (`html`), the terminal's table (`terminal`)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from compressor.errors import StoreError, UsageError
from compressor.report.schema import validate
from compressor.report.verdict import Verdicts, judge, verdicts
from compressor.store import write_text

__all__ = ["Report", "Verdicts", "judge", "validate", "verdicts"]


class Report:
    """A validated report. `data` is what report.json holds (see `schema.ReportData`)."""

    def __init__(self, data: dict[str, Any]) -> None:
        """Wrap finished data; raises `ValueError` with the path of what is wrong."""
        validate(data)
        self.data = data

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Report:
        """Read a run's folder, or a report.json; raises `UsageError` that says what it is instead."""
        path = Path(folder)
        path = path / "report.json" if path.is_dir() else path
        try:
            return cls(json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise UsageError(
                f"{folder}: there is no report.json here; give the --out folder of a run"
            ) from None
        except OSError as error:
            raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise UsageError(f"{path} is not a report of this program: {error}") from error

    @property
    def engines(self) -> list[dict[str, Any]]:
        """All engines, baselines included."""
        return list(self.data["engines"])

    @property
    def recommended(self) -> dict[str, Any] | None:
        """The engine to use, or None."""
        return next((engine for engine in self.engines if engine["recommended"]), None)

    @property
    def verdict(self) -> str:
        """The headline: one line."""
        return str(self.data["headline"])

    @property
    def exit_status(self) -> int:
        """3 where `--max-drop` was given and every candidate breaks it, else 0 (undecided is not broken)."""
        drops = [engine["drop"] for engine in self.engines if engine["role"] == "candidate"]
        broken = [drop for drop in drops if drop and drop["verdict"] == "broken"]
        return 3 if self.data["max_drop"] is not None and drops and len(broken) == len(drops) else 0

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write report.json and report.html into `folder`; each is the old file or the whole new one.

        Raises `StoreError` where the folder cannot be written.
        """
        from compressor.report.html import render

        text = json.dumps(self.data, indent=1, allow_nan=False) + "\n"
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            write_text(Path(folder) / "report.json", text)
            write_text(Path(folder) / "report.html", render(self.data))
        except OSError as error:
            raise StoreError(
                f"{folder}: the report cannot be written ({error.strerror}); choose another --out"
            ) from error

    def _repr_html_(self) -> str:
        from compressor.report.html import notebook

        return notebook(self.data)

    def __str__(self) -> str:
        from compressor.report.terminal import render

        return render(self)

    __repr__ = __str__
