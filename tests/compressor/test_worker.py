import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from compressor import worker
from compressor.errors import DataError, StoreError, WorkerError

TASKS = """
import os, signal, sys, time
from pathlib import Path
from compressor import events
from compressor.errors import DataError

def add(a, b):
    print("noise on stdout")
    events.progress("adding", 1, 2)
    events.warn("careful")
    return {"sum": a + b}

def refuse():
    raise DataError("no samples in here")

def bug():
    return 1 / 0

def full():
    raise OSError(28, "No space left on device", "/out/x")

def kill():
    os.kill(os.getpid(), signal.SIGKILL)

def crash():
    print("about to crash", file=sys.stderr)
    os.kill(os.getpid(), signal.SIGSEGV)

def shadow():
    import serving
    return serving.__file__

def sleep(pid_file):
    Path(pid_file).write_text(str(os.getpid()))
    time.sleep(60)
"""


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "some_tasks.py").write_text(TASKS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_result_events_and_cost_come_back(tasks: Path) -> None:
    heard: list[dict[str, object]] = []
    outcome = worker.call("some_tasks:add", {"a": 1, "b": 2}, on_event=heard.append)
    assert outcome.value == {"sum": 3}
    assert heard == [{"progress": {"label": "adding", "done": 1, "total": 2}}, {"warning": "careful"}]
    assert 0 < outcome.cpu_seconds < outcome.seconds + 1
    assert outcome.peak_rss_bytes > 2**20


def test_errors_keep_their_kind(tasks: Path) -> None:
    with pytest.raises(DataError, match=r"^no samples in here$"):
        worker.call("some_tasks:refuse", {})
    with pytest.raises(StoreError, match="disk is full"):
        worker.call("some_tasks:full", {})


def test_a_bug_keeps_its_traceback(tasks: Path) -> None:
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        worker.call("some_tasks:bug", {})


def test_a_kill_is_explained(tasks: Path) -> None:
    with pytest.raises(WorkerError, match="memory ran out"):
        worker.call("some_tasks:kill", {})


def test_a_crash_names_the_signal_and_the_last_words(tasks: Path) -> None:
    with pytest.raises(WorkerError, match=r"SIGSEGV.*about to crash"):
        worker.call("some_tasks:crash", {})


def test_a_folder_in_the_working_directory_does_not_shadow_ours(
    tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    (tasks / "serving").mkdir()
    (tasks / "serving" / "__init__.py").touch()
    monkeypatch.chdir(tasks)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(worker.__file__).parents[1]), str(tasks)]))
    assert not str(worker.call("some_tasks:shadow", {}).value).startswith(str(tasks))


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_the_child_ends_with_a_killed_parent(tasks: Path) -> None:
    pid_file = tasks / "pid"
    code = (
        f"from compressor import worker; worker.call('some_tasks:sleep', {{'pid_file': {str(pid_file)!r}}})"
    )
    root = str(Path(worker.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, str(tasks)])}
    parent = subprocess.Popen([sys.executable, "-c", code], env=environment)
    deadline = time.monotonic() + 20
    while not (pid_file.exists() and pid_file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    child = int(pid_file.read_text())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    while time.monotonic() < deadline and _alive(child):
        time.sleep(0.05)
    assert not _alive(child)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
