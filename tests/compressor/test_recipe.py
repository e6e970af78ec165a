import json
from datetime import date
from inspect import Parameter
from pathlib import Path

import pytest

from compressor import plugins
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
        ('{"version": "1", "steps": []}', 'version "1" is not known'),
        ('{"version": true, "steps": []}', "version true is not known"),
        ('{"version": 1.0, "steps": []}', "version 1.0 is not known"),
        ('{"step": [], "steps": []}', "unknown key 'step'"),
        ('{"name": null, "steps": []}', "'name' must be text, not null"),
        ('{"what": ["x"], "steps": []}', "'what' must be text, not [\"x\"]"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_what_is_wrong_in_a_recipe_is_named(tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(UsageError, match=r"r\.json") as caught:
        Recipe.read(tmp_path / "r.json")
    assert named in str(caught.value)


WRONG = [
    ("quantize", {"exclude": 3}, "'exclude' must be a list of texts or null, not 3"),
    ("quantize", {"exclude": "g1"}, 'not "g1"'),
    ("quantize", {"exclude": ["g", 1]}, 'not ["g", 1]'),
    ("quantize", {"observer": 5}, "'observer' must be text, not 5"),
    ("quantize", {"observer": ["mse"]}, "'observer' must be text"),
    ("quantize", {"scheme": date(1979, 5, 27)}, "'scheme' must be text, not \"1979-05-27\""),
    ("quantize", {"rounding": None}, "'rounding' must be text, not null"),
    ("quantize", {"bias_correction": False}, "'bias_correction' must be text or null, not false"),
    ("quantize", {"data": {}}, "takes no 'data'; it takes scheme"),
    ("quantize", {"Observer": "mse"}, "takes no 'Observer'"),
    ("quantize", {}, "needs 'scheme', text"),
    ("equalize", {"alpha": "0.5"}, "'alpha' must be a number or null"),
    ("equalize", {"alpha": [1]}, "'alpha' must be a number or null, not [1]"),
    ("equalize", {"alpha": True}, "not true"),
    ("equalize", {"alpha": float("nan")}, "not NaN"),
    ("equalize", {"alpha": 10**400}, "not 1000000"),
    ("weight_only", {"wide": "a"}, "'wide' must be a number"),
    ("weight_only", {"bits": 4.0}, "'bits' must be a whole number, not 4.0"),
    ("weight_only", {"bits": True}, "'bits' must be a whole number, not true"),
    ("cast", {"to": ["float16"]}, "'to' must be text"),
]


@pytest.mark.parametrize(("stage", "parameters", "said"), WRONG)
def test_parameters_are_held_against_the_stages_signature(stage: str, parameters: dict, said: str) -> None:
    with pytest.raises(UsageError, match=f"recipe mine: stage {stage}") as caught:
        Step(
            stage, {**({"scheme": "ort-arm"} if parameters and stage == "quantize" else {}), **parameters}
        ).check("mine")
    assert said in str(caught.value)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("stage", plugins.names("stages"))
def test_every_stages_own_defaults_fit_its_signature(stage: str) -> None:
    takes = Step(stage).takes
    assert takes
    given = {
        name: "ort-arm" if value.default is Parameter.empty else value.default
        for name, value in takes.items()
    }
    Step(stage, given).check("mine")


def test_whole_numbers_are_numbers() -> None:
    Step("equalize", {"alpha": 1, "scheme": None}).check("mine")


def test_a_missing_recipe_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        Recipe.read(tmp_path / "none.json")
