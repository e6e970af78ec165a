"""The command line: parse, compose, print. The only module that sees everything."""

from __future__ import annotations

import argparse
import errno
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from compressor.errors import CompressError, UsageError

__all__ = ["main"]

_OUTSIDE = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EIO,
    errno.ENAMETOOLONG,
    errno.EACCES,
    errno.ENOENT,
    errno.EROFS,
}
COMMANDS = ("run", "inspect", "lint", "bench", "report", "doctor")


def main(arguments: list[str] | None = None) -> int:
    """The console script `compress`; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 - it lives as long as the process
    try:
        return _dispatch(arguments)
    except CompressError as error:
        print(f"compress: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        goes_on = "; the same command goes on from here" if _command(arguments) == "run" else ""
        print(f"compress: interrupted{goes_on}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.errno not in _OUTSIDE:
            raise
        print(f"compress: {error.filename or 'the output'}: {error.strerror}", file=sys.stderr)
        return 1


def _dispatch(arguments: list[str]) -> int:
    rest = arguments[1:] if arguments and arguments[0] in COMMANDS else arguments
    commands: dict[str, Callable[[list[str]], int]] = {
        "run": _run,
        "inspect": _inspect,
        "lint": _lint,
        "bench": _bench,
        "report": _report,
        "doctor": _doctor,
    }
    signal.signal(signal.SIGTERM, _interrupt)
    return commands[_command(arguments)](rest)


def _command(arguments: list[str]) -> str:
    return arguments[0] if arguments and arguments[0] in COMMANDS else "run"


def _interrupt(number: int, frame: object) -> NoReturn:
    """A request to end is treated as Ctrl-C: a search delivers the best engine so far."""
    raise KeyboardInterrupt


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (compress --help lists the options)")


# -------------------------------------------------------------------------- run


def _run(arguments: list[str]) -> int:
    from compressor.options import Options, duration, from_toml

    given = {
        name: value for name, value in vars(_parser().parse_args(arguments)).items() if value is not None
    }
    if not given.get("target"):
        given.pop("target", None)
    if "budget" in given:
        given["budget"] = duration(given["budget"])
    table, path = from_toml(given["model"], trust="trust" in given, given=given)
    if path:
        print(f"options from {path}", file=sys.stderr)
    options = Options(**{**table, **given})
    from compressor import pipeline
    from compressor.progress import Progress

    interrupted: KeyboardInterrupt | None = None
    with Progress(sys.stderr) as progress:
        if options.plan:
            steps = pipeline.plan(options, progress.event)
        else:
            try:
                report = pipeline.run(options, progress.event)
            except pipeline.Interrupted as stop:
                report, interrupted = stop.report, stop
    if options.plan:
        _print_plan(steps, options)
        return 0
    print(report)
    print(f"report: {options.folder / 'report.html'}")
    if interrupted:
        raise interrupted
    return report.exit_status


def _parser() -> argparse.ArgumentParser:
    """All options; each stands for the field of `Options` of the same name, unset where not given."""
    parser = _Parser(
        prog="compress",
        usage="compress [run] MODEL [--target SPEC ...] [--data SRC] [...]\n"
        "       compress inspect FILE | lint FILE | bench ENGINE | report DIR | doctor",
        description="Compress a trained model into smaller, faster engines, and prove it.",
        epilog="exit status: 0 done, 1 failed, 2 wrong request, 3 the accuracy budget is broken, "
        "130 interrupted (the best engine so far is delivered)",
        argument_default=None,
    )
    add = parser.add_argument
    add("model", help=".pt .pth .pt2 .safetensors .onnx or TorchScript")
    add(
        "--target",
        action="append",
        metavar="SPEC",
        help="PRECISION[:RUNTIME[:DEVICE]], repeatable: int8, int8:onnx:cpu, fp32:onnx (default int8)",
    )
    add("--data", metavar="SRC", help="calibrate and evaluate from: image folder, .npz, module:callable")
    add("--calib-data", metavar="SRC", help="calibrate from this instead")
    add("--eval-data", metavar="SRC", help="evaluate on this instead")
    add(
        "--preprocess",
        metavar="SPEC",
        help="for images: resize=256,crop=224,mean=a/b/c,std=a/b/c,scale=1/255",
    )
    add("--calib", type=int, metavar="N", help="samples to calibrate from (default 300)")
    add("--arch", metavar="MODULE:CALLABLE", help="what builds the network for a bare state_dict")
    add("--input", action="append", metavar="NAME=SHAPE[:dtype]", help="an input; ? is a free dimension")
    add("--metric", metavar="NAME", help="top1, top5, mse, ... or module:callable")
    add("--max-drop", type=float, metavar="POINTS", help="accuracy budget, in points of the metric")
    add(
        "--budget", metavar="TIME", help="time for the search of each target: 600s, 10m, 1h (default: no end)"
    )
    add("--recipe", metavar="FILE", help="do exactly this (.json or .toml) instead of climbing the ladder")
    add("--scheme", metavar="NAME", help="quantize for another machine, e.g. ort-x86-avx2")
    add(
        "-o",
        "--out",
        metavar="DIR|FILE",
        help="where to write (default MODEL-compressed); FILE.onnx: one engine",
    )
    add("--work", metavar="DIR", help="where report and steps go if --out is a file (default FILE.work)")
    add("--seed", type=int, metavar="N", help="of everything random (default 0)")
    add("--batch", type=int, metavar="N", help="batch of calibration and evaluation (default 32)")
    add("--threads", type=int, metavar="N", help="threads of the measured engine (default 1)")
    add("--device", metavar="NAME", help="cpu or cuda (default: every one here)")
    add("--bench", type=float, metavar="SECONDS", help="time for each engine's latency (default 20; 0: none)")
    add("--trust", action="store_const", const=True, help="run code that the model's file brings")
    add("--plan", action="store_const", const=True, help="print what would be done and stop")
    return parser


def _print_plan(steps: list[Any], options: Any) -> None:
    known = [step.seconds for step in steps if step.seconds is not None]
    for step in steps:
        state = "stored" if step.stored else "to do" if step.seconds is None else f"~{step.seconds:.0f} s"
        print(f"{state:>8}  {step.name:<24} {step.what}")
    unknown = len(steps) - len(known)
    rest = f", and {unknown} steps of unknown length" if unknown else ""
    print(f"about {sum(known):.0f} s{rest}")
    if options.max_drop is not None and not options.recipe:
        print(_FURTHER.format(budget=f"{options.max_drop:g}"))


_FURTHER = """If the first engine of a target breaks the budget of {budget}, each of these until one keeps it:
  further rungs of the ladder, an engine and an evaluation each
  for static int8, layers in float: sensitivity, a profile of both engines, then mixes by bisection (about
  log2 of the number of layers, an engine and an evaluation each) and up to 3 exchanges
If it keeps the budget, one mix is tried where profiles say that some layers are faster in float."""


# -------------------------------------------------------------------------- the rest


def _inspect(arguments: list[str]) -> int:
    parser = _Parser(prog="compress inspect", description="Say what a file is, without running it.")
    parser.add_argument("file", help="a model file; with --layers, the folder of a run or an engine in it")
    parser.add_argument("--layers", action="store_true", help="which layers lose accuracy, and why")
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(arguments)
    if options.layers:
        return _layers(Path(options.file), as_json=options.json)
    from compressor import worker
    from compressor.report.terminal import render_inspection

    facts = worker.call("compressor.loading:inspect_task", {"path": options.file}).value
    print(json.dumps(facts, indent=1) if options.json else render_inspection(facts))
    return 0


def _layers(path: Path, *, as_json: bool) -> int:
    from compressor.report import Report, causes

    folder, target = causes.find(path)
    data = Report.load(folder).data
    text = causes.render_layers(data, target)
    found = {key: items for key, items in data["layers"].items() if target in (None, key)}
    print(json.dumps(found, indent=1) if as_json else text)
    return 0


def _lint(arguments: list[str]) -> int:
    parser = _Parser(prog="compress lint", description="Check a quantized ONNX file, without running it.")
    parser.add_argument("file", help="an ONNX file of any tool")
    parser.add_argument("--for", dest="target", required=True, metavar="NAME", help="tensorrt, ort, openvino")
    parser.add_argument("--fix", action="store_true", help="mend what is mechanical, into --out")
    parser.add_argument("--out", metavar="FILE", help="where the mended file goes")
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(arguments)
    if options.fix != bool(options.out):
        raise UsageError("--fix and --out FILE belong together: the file itself is never changed")
    from compressor import worker
    from compressor.report.findings import render_findings

    task = {"path": options.file, "target": options.target, "out": options.out}
    answer = worker.call("compressor.quantization.lint:lint_task", task).value
    print(json.dumps(answer, indent=1) if options.json else render_findings(answer))
    return int(any(found["severity"] == "error" for found in answer.get("rest", answer["findings"])))


def _bench(arguments: list[str]) -> int:
    parser = _Parser(prog="compress bench", description="Time engines on this machine, in one process each.")
    add = parser.add_argument
    add("engine", nargs="+", help="an engine's file or folder; several are compared with the first")
    add("--data", metavar="SRC", help="inputs to time on: image folder, .npz, module:callable")
    add("--preprocess", metavar="SPEC", help="for images, unless the engine's manifest says it")
    add("--made-up", action="store_true", help="time on made-up inputs instead of data")
    add("--requests", type=int, metavar="N", help="exactly so many calls of one engine")
    add("--seconds", type=float, metavar="S", help="time for each engine, in turns (default 10)")
    add("--threads", type=int, default=1, metavar="N", help="threads of the engine (default 1)")
    add("--batch", type=int, metavar="N", help="samples in a call (default: what the engine wants, or 1)")
    add("--seed", type=int, default=0, metavar="N", help="of made-up inputs and the order (default 0)")
    add("--json", metavar="FILE", help="write the figures there")
    options = parser.parse_args(arguments)
    if bool(options.data) == options.made_up:
        raise UsageError("latency needs inputs: pass --data SRC with real samples, or else --made-up")
    if options.requests is not None and options.seconds is not None:
        raise UsageError("--requests and --seconds exclude each other")
    from compressor import worker
    from compressor.data import parse_preprocess
    from compressor.report.timings import render_timings
    from compressor.store import spare, write_asked

    json_file = Path(options.json) if options.json else None
    if json_file:
        spare("--json", json_file, [*options.engine, options.data])
    with tempfile.TemporaryDirectory() as folder:
        task = {
            "engines": options.engine,
            "source": options.data,
            "preprocess": parse_preprocess(options.preprocess) if options.preprocess else None,
            "requests": options.requests,
            "seconds": 10.0 if options.seconds is None else options.seconds,
            **{name: getattr(options, name) for name in ("threads", "batch", "seed")},
            "folder": folder,
        }
        answer = worker.call("serving.bench:standalone", task, threads=options.threads).value
    if json_file:
        write_asked("--json", json_file, json.dumps(answer, indent=1, allow_nan=False) + "\n")
    print(render_timings(answer))
    return 0


def _report(arguments: list[str]) -> int:
    parser = _Parser(prog="compress report", description="Print a report and write its HTML anew.")
    parser.add_argument("folder", help="what --out named")
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(arguments)
    from compressor.report import Report

    report = Report.load(Path(options.folder))
    if options.json:
        print(json.dumps(report.data, indent=1))
        return report.exit_status
    report.save(Path(options.folder))
    print(report)
    print(f"report: {Path(options.folder) / 'report.html'}")
    return report.exit_status


def _doctor(arguments: list[str]) -> int:
    parser = _Parser(prog="compress doctor", description="Say what this machine and installation can do.")
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(arguments)
    from compressor import machine
    from compressor.report.terminal import render_doctor

    found = machine.doctor()
    print(json.dumps(found, indent=1) if options.json else render_doctor(found))
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
