"""What comes in: the targets, the model and the data, checked against each other before any work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compressor import plugins, worker
from compressor.errors import UnsupportedError, UsageError
from compressor.model import Model, TensorSpec
from compressor.options import Options
from compressor.steps import Steps
from compressor.store import digest
from compressor.target import Target

__all__ = ["Data", "load_data", "load_model", "resolve"]


@dataclass(frozen=True)
class Data:
    """Calibration and evaluation data as references for tasks (docs/architecture.md).

    `keys` identify their content; `labelled` says whether the evaluation data have labels.
    """

    calibration: dict[str, Any] | None
    evaluation: dict[str, Any] | None
    labelled: bool
    disjoint: bool = False

    def key(self, role: str) -> list[str]:
        """What identifies the samples of a role, in their form for the model."""
        reference = getattr(self, role)
        return [digest(*(reference[name] for name in ("sha256", "picked", "preprocess", "binding")))]

    def facts(self) -> dict[str, Any]:
        """For the report."""
        roles = {"calibration": self.calibration, "evaluation": self.evaluation}
        shown = ("n", "sha256", "source", "preprocess", "preprocess_from")
        found: dict[str, Any] = {
            role: reference and {name: reference[name] for name in shown} for role, reference in roles.items()
        }
        return {**found, "disjoint": self.disjoint}


def resolve(
    options: Options, obstacle: Callable[[Target], str | None]
) -> tuple[list[Target], list[dict[str, str]]]:
    """The targets with runtime and device filled in, and those left out with the reason.

    `obstacle` says why a target cannot be made, or None. A runtime that is named and cannot serve the
    target is an error; one that is implied is left out and said.
    """
    asked = [Target.parse(text) for text in options.target]
    for target in asked:
        if target.runtime and target.runtime not in plugins.names("exporters"):
            there = ", ".join(plugins.names("exporters"))
            raise UsageError(f"target '{target}': unknown runtime '{target.runtime}'; there are: {there}")
    here = worker.call("serving.runtimes:availability", {"names": list(plugins.names("exporters"))}).value
    targets: list[Target] = []
    skipped: list[dict[str, str]] = []
    for target in asked:
        for runtime in [target.runtime] if target.runtime else plugins.names("exporters"):
            file = options.engine_file
            targets += _on_runtime(target, runtime, options.device, file, here[runtime], obstacle, skipped)
    if not targets:
        reasons = dict.fromkeys(left_out["reason"] for left_out in skipped)
        raise UnsupportedError(f"none of the targets can be made here: {'; '.join(reasons)}")
    return list(dict.fromkeys(targets)), skipped


def _on_runtime(
    asked: Target,
    runtime: str,
    device: str | None,
    file: Path | None,
    here: dict[str, Any],
    obstacle: Callable[[Target], str | None],
    skipped: list[dict[str, str]],
) -> list[Target]:
    wanted = asked.device or device
    reason = here["reason"]
    if not reason and wanted and wanted not in here["devices"]:
        reason = f"{runtime} has no device '{wanted}' here; there are: {', '.join(here['devices'])}"
    suffix = plugins.module("exporters", runtime).SUFFIX
    if file and file.suffix != suffix:
        reason = f"engines for {runtime} end in {suffix}, but --out is {file}"
    found = []
    for name in [wanted] if wanted or reason else here["devices"]:
        target = asked.on(runtime, name or "")
        why = reason or obstacle(target)
        if why and asked.runtime:
            raise UnsupportedError(f"target '{asked}': {why}")
        if why:
            skipped.append({"target": str(target), "reason": why})
        else:
            found.append(target)
    return found


# -------------------------------------------------------------------------- model


def load_model(options: Options, steps: Steps) -> Model:
    """The model in one of its two forms; raises `ModelFileError` that says what the file is or lacks."""
    path = Path(options.model)
    inputs = [asdict(TensorSpec.parse(text)) for text in options.input]
    samples = [] if inputs else _samples(options, steps)
    given = {"architecture": options.arch, "trust": options.trust, "inputs": inputs, "samples": samples}
    done = steps.run(
        "load",
        "compressor.loading:load_task",
        {"path": str(path.absolute()), "options": given},
        always=True,  # only what is loaded tells whether the files and the code behind it are the same
        light=True,
    )
    return Model.of(done.value, done.folder)


def _samples(options: Options, steps: Steps) -> list[dict[str, Any]]:
    """Shapes of one sample of the data, from which a network without input shapes is traced."""
    source = options.calib_data or options.data or options.eval_data
    if not source or options.model.endswith(".onnx"):
        return []
    facts = _describe(source, _preprocess(options, None), [], steps)
    if facts["kind"] == "image_folder" and not options.preprocess:
        return []  # the architecture's own size decides, not that of the files
    return list(facts["arrays"])


# -------------------------------------------------------------------------- data


def load_data(options: Options, model: Model, calibrates: bool, steps: Steps) -> Data:
    """Calibration and evaluation data, matched with the model's inputs.

    Raises `UsageError` if data to calibrate from are needed (`calibrates`) and missing, or if an accuracy
    budget is given without labels; `DataError` if the data do not fit the model.
    """
    calibration, evaluation = options.calib_data or options.data, options.eval_data or options.data
    if calibrates and not calibration:
        raise UsageError(
            "static int8 needs data to calibrate from, and none was given: pass --data SRC (evaluation and "
            "calibration) or --calib-data SRC, e.g. an .npz of a few hundred real samples"
        )
    if not evaluation and calibration:
        steps.note(
            "no evaluation data: agreement with the float model is measured on the calibration samples; "
            "accuracy is unknown (pass --data or --eval-data with labels)"
        )
    data = _referenced(options, model, calibration, evaluation, steps)
    if options.max_drop is not None and not data.labelled:
        raise UsageError("--max-drop needs an accuracy to hold: pass labelled data by --data or --eval-data")
    return data


def _referenced(
    options: Options, model: Model, calibration: str | None, evaluation: str | None, steps: Steps
) -> Data:
    if evaluation and evaluation == calibration:
        part = _part(options, model, evaluation, True, steps)
        return Data(part["calibration"], part["evaluation"], bool(part["labels"]), disjoint=True)
    picked = _part(options, model, calibration, False, steps) if calibration else {"calibration": None}
    if not evaluation:
        return Data(picked["calibration"], picked["calibration"], False)
    whole = _part(options, model, evaluation, False, steps)
    return Data(picked["calibration"], whole["evaluation"], bool(whole["labels"]))


def _part(options: Options, model: Model, source: str, held_out: bool, steps: Steps) -> dict[str, Any]:
    """References to the calibration and evaluation samples of one source, and its labels."""
    preprocess = _preprocess(options, model)
    inputs = [asdict(spec) for spec in model.inputs]
    facts = _describe(source, preprocess, inputs, steps)
    done = steps.run(
        "split",
        "compressor.data:split",
        {
            "source": source,
            "preprocess": preprocess,
            "inputs": inputs,
            "calibration": options.calib,
            "seed": options.seed,
            "held_out": held_out,
        },
        after=[facts["sha256"]],
        light=True,
    )
    common = {
        "source": source,
        "preprocess": preprocess if facts["kind"] == "image_folder" else None,
        "preprocess_from": _origin(options, model),
        "inputs": inputs,
        "binding": facts["binding"],
        "sha256": facts["sha256"],
        "batch": options.batch,
    }
    references = {
        role: {**common, "indices": done.path(item["file"]), "n": item["n"], "picked": item["sha256"]}
        for role, item in done.value.items()
        if role in ("calibration", "evaluation")
    }
    return {"labels": facts["labels"], **references}


def _describe(source: str, preprocess: Any, inputs: list[dict[str, Any]], steps: Steps) -> dict[str, Any]:
    """What a source holds; made anew in each run, since a path does not tell its content."""
    given = {"source": source, "preprocess": preprocess, "inputs": inputs}
    return dict(steps.run("describe", "compressor.data:describe_task", given, fresh=True, light=True).value)


def _preprocess(options: Options, model: Model | None) -> dict[str, Any] | None:
    """What --preprocess says, else what the architecture asks for."""
    if options.preprocess:
        from compressor.data import parse_preprocess

        return parse_preprocess(options.preprocess)
    return model.preprocess if model else None


def _origin(options: Options, model: Model) -> str:
    """Where the preprocessing comes from."""
    if options.preprocess:
        return "--preprocess"
    return "architecture" if model.preprocess else "default"
