from pathlib import Path

import pytest

from compressor.errors import DataError
from compressor.steps import Steps
from compressor.store import Store

TASKS = """
VERSION = 1
from pathlib import Path
from compressor import events
from compressor.errors import DataError

def count(folder, n, where):
    events.warn(f"counted to {n}")
    tally = Path(where)
    tally.write_text(tally.read_text() + "x" if tally.exists() else "x")
    Path(folder, "result").write_text(str(n))
    return n

def refuse(folder):
    Path(folder, "half").write_text("")
    raise DataError("no")
"""


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Steps:
    (tmp_path / "step_tasks.py").write_text(TASKS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    return Steps(Store(tmp_path / "steps"))


def again(steps: Steps) -> Steps:
    return Steps(steps.store)


def test_a_step_runs_once_and_its_warnings_come_again(steps: Steps, tmp_path: Path) -> None:
    tally = tmp_path / "tally"
    for run in (steps, again(steps)):
        done = run.run("count", "step_tasks:count", {"n": 3}, unkeyed={"where": str(tally)})
        assert done.value == 3
        assert Path(done.path("result")).read_text() == "3"
        assert run.notes == ["counted to 3"]
    assert tally.read_text() == "x"
    assert run.records[0]["reused"] is True
    assert steps.records[0]["reused"] is False


def test_parameters_ancestors_and_version_decide(steps: Steps, tmp_path: Path) -> None:
    unkeyed = {"where": str(tmp_path / "tally")}
    keys = {
        steps.run("count", "step_tasks:count", {"n": 1}, unkeyed=unkeyed).key,
        steps.run("count", "step_tasks:count", {"n": 2}, unkeyed=unkeyed).key,
        steps.run("count", "step_tasks:count", {"n": 1}, unkeyed=unkeyed, after=["other"]).key,
    }
    file = tmp_path / "step_tasks.py"
    file.write_text(file.read_text().replace("VERSION = 1", "VERSION = 2"))
    keys.add(steps.run("count", "step_tasks:count", {"n": 1}, unkeyed=unkeyed).key)
    assert len(keys) == 4


def test_a_fresh_step_is_never_reused(steps: Steps, tmp_path: Path) -> None:
    tally = tmp_path / "tally"
    for _ in range(2):
        steps.run("count", "step_tasks:count", {"n": 1}, unkeyed={"where": str(tally)}, fresh=True)
    assert tally.read_text() == "xx"
    assert [path for path in steps.store.root.iterdir() if path.name != ".lock"] == []


def test_a_refused_step_leaves_nothing(steps: Steps) -> None:
    with pytest.raises(DataError):
        steps.run("refuse", "step_tasks:refuse", {})
    assert list(steps.store.root.iterdir()) == []


def test_a_plan_runs_nothing_and_knows_what_is_stored(steps: Steps, tmp_path: Path) -> None:
    unkeyed = {"where": str(tmp_path / "tally")}
    steps.run("count", "step_tasks:count", {"n": 1}, unkeyed=unkeyed)
    planning = Steps(steps.store, planning=True)
    planning.run("count", "step_tasks:count", {"n": 1}, unkeyed=unkeyed, estimate=9.0)
    later = planning.run("count", "step_tasks:count", {"n": 2}, unkeyed=unkeyed, estimate=9.0, expected=5)
    assert later.value == 5
    assert [(step.stored, step.seconds) for step in planning.plan] == [(True, 0.0), (False, 9.0)]
    assert (tmp_path / "tally").read_text() == "x"
