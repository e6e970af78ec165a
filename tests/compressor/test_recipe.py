import json
from pathlib import Path

import pytest

from compressor.errors import UsageError
from compressor.recipe import Recipe, Step


def test_a_recipe_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    recipe = Recipe("mine", (Step("quantize", {"scheme": "ort-x86-avx2", "exclude": ["head"]}),), "why")
    (tmp_path / "r.json").write_text(json.dumps(recipe.json()))
    assert Recipe.read(tmp_path / "r.json") == recipe


def test_toml_works_too(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text('[[steps]]\nstage = "quantize"\nobserver = "mse"\n')
    assert Recipe.read(tmp_path / "r.toml") == Recipe("r", (Step("quantize", {"observer": "mse"}),))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "recipe"),
        ("[]", "steps"),
        ('{"steps": [{"stage": "fold"}]}', "fold"),
        ('{"steps": ["quantize"]}', "quantize"),
        ('{"version": 9, "steps": []}', "version 9"),
    ],
)
def test_what_is_wrong_in_a_recipe_is_named(tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(UsageError, match=r"r\.json") as caught:
        Recipe.read(tmp_path / "r.json")
    assert named in str(caught.value)


def test_a_missing_recipe_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        Recipe.read(tmp_path / "none.json")
