"""The user's own code: found where a user expects it, and its mistakes in one line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from compressor import user_code
from compressor.errors import DataError, UsageError


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_the_working_directory_comes_first_and_then_last(tmp_path: Path) -> None:
    (tmp_path / "colorsys.py").write_text("import helper_of_mine\nvalue = helper_of_mine.value\n")
    (tmp_path / "helper_of_mine.py").write_text("value = 3\n")
    known = sys.modules.pop("colorsys", None)
    try:
        assert user_code.load("colorsys:value") == 3
    finally:
        sys.modules.pop("colorsys", None)
        if known:
            sys.modules["colorsys"] = known
    assert sys.path[0] != str(tmp_path)
    assert sys.path.count(str(tmp_path)) == 1
    assert sys.path[-1] == str(tmp_path)


def test_dots_on_both_sides(tmp_path: Path) -> None:
    (tmp_path / "mine_package").mkdir()
    (tmp_path / "mine_package" / "__init__.py").write_text("")
    (tmp_path / "mine_package" / "data.py").write_text("class Loader:\n    batches = [1]\n")
    assert user_code.load("mine_package.data:Loader.batches") == [1]
    assert user_code.load("os.path:join") is __import__("os").path.join


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("not_there_at_all:f", "there is no module 'not_there_at_all' here"),
        ("json.nowhere:f", "there is no module 'json.nowhere' here"),
        ("json:nothing", "module 'json' has no 'nothing'"),
    ],
)
def test_what_is_not_there(reference: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        user_code.load(reference)


def test_a_module_that_fails_names_its_line(tmp_path: Path) -> None:
    (tmp_path / "fails_on_import.py").write_text("import json\n\nx = json.loads('{')\n")
    with pytest.raises(DataError, match=r"failed with JSONDecodeError: .* \(fails_on_import\.py, line 3\)"):
        user_code.load("fails_on_import:x")
    (tmp_path / "wrong_inside.py").write_text("import json\njson.nowhere\n")
    with pytest.raises(DataError, match=r"failed with AttributeError.*\(wrong_inside\.py, line 2\)"):
        user_code.load("wrong_inside:x")


def test_our_own_errors_pass_and_the_users_become_one_line() -> None:
    with pytest.raises(UsageError, match="as it is"), user_code.running("a:b"):
        raise UsageError("as it is")
    said = r"a:b failed with ValueError: one two \(test_user_code\.py, line"
    with pytest.raises(DataError, match=said), user_code.running("a:b"):
        raise ValueError("one\n  two")
    with pytest.raises(KeyboardInterrupt), user_code.running("a:b"):
        raise KeyboardInterrupt


def test_a_file_is_code_too(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "scores_of_file.py").write_text(
        "import helper_of_file\ndef score(): return helper_of_file.N\n"
    )
    (tmp_path / "deep" / "helper_of_file.py").write_text("N = 7\n")
    for name in ("deep/scores_of_file.py", f"{tmp_path}/deep/scores_of_file.py"):
        assert user_code.load(f"{name}:score")() == 7
    assert user_code.load("deep/scores_of_file.py:score") is user_code.load("deep/scores_of_file.py:score")
    with pytest.raises(UsageError, match=r"scores_of_file\.py' has no 'none'"):
        user_code.load("deep/scores_of_file.py:none")
    for missing in ("none.py", "a" * 300 + ".py", "deep/helper_of_file"):
        with pytest.raises(UsageError, match="there is no file"):
            user_code.load(f"{missing}:x")
    paths = [each["path"] for each in user_code.files()]
    assert str((tmp_path / "deep" / "helper_of_file.py").resolve()) in paths


def test_a_file_that_fails_is_not_kept(tmp_path: Path) -> None:
    (tmp_path / "fails_once.py").write_text("1 / 0\n")
    with pytest.raises(DataError, match=r"ZeroDivisionError.*fails_once\.py, line 1"):
        user_code.load("fails_once.py:x")
    (tmp_path / "fails_once.py").write_text("x = 2  # mended\n")
    assert user_code.load("fails_once.py:x") == 2
