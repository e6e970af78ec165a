from pathlib import Path

import pytest

from compressor.errors import StoreError
from compressor.store import Store, digest, write_json


def test_a_step_is_found_only_when_it_is_finished(tmp_path: Path) -> None:
    store = Store(tmp_path / "steps")
    assert not store.root.exists()
    folder = store.begin("quantize", "k" * 64)
    (folder / "model.onnx").write_text("half")
    assert store.find("quantize", "k" * 64) is None
    assert store.begin("quantize", "k" * 64) == folder
    assert (folder / "model.onnx").read_text() == "half"  # what a killed step left is there to go on from
    done = store.finish("quantize", "k" * 64, {"value": 1})
    assert not folder.exists()
    found = store.find("quantize", "k" * 64)
    assert found == done
    assert (done.folder / "model.onnx").read_text() == "half"


def test_a_second_run_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    with (
        Store(tmp_path).locked(),
        pytest.raises(StoreError, match="another run"),
        Store(tmp_path).locked(),
    ):
        pass


def test_a_file_in_the_way_is_said(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(StoreError, match="file is in the way"), Store(tmp_path / "out" / "steps").locked():
        pass


def test_digest_does_not_depend_on_the_order_of_keys() -> None:
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1}) != digest({"a": 2, "b": 1})


def test_json_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"x": 1})
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"x": float("nan")})
    assert path.read_text() == '{\n "x": 1\n}\n'


def test_scratch_keeps_the_root_untouched(tmp_path: Path) -> None:
    root = Store(tmp_path / "root")
    root.begin("load", "a")
    root.finish("load", "a", {"value": 1})
    planning = Store(tmp_path / "root", scratch=tmp_path / "scratch")
    assert planning.find("load", "a") is not None
    planning.begin("load", "b")
    planning.finish("load", "b", {"value": 2})
    assert root.find("load", "b") is None
    assert planning.find("load", "b") is not None
