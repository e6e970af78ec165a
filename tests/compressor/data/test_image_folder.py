"""Folders of pictures as users have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from compressor.data import DataOptions, Dataset, open_dataset
from compressor.errors import DataError
from compressor.model import TensorSpec

INPUT = TensorSpec("image", "float32", ("n", 3, 32, 32))


def scene(width: int = 64, height: int = 48, seed: int = 0) -> Image.Image:
    """A picture without any symmetry, with a little noise."""
    y, x = np.mgrid[0:height, 0:width] / np.array([height, width])[:, None, None]
    pixels = np.stack([200 * x, 160 * y, np.full_like(x, 60)], -1)
    pixels[: height // 4, : width // 4] = 250
    pixels += np.random.default_rng(seed).normal(0, 3, pixels.shape)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def put(path: Path, picture: Image.Image | None = None, **how: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    (picture or scene()).save(path, **how)


def opened(source: object, preprocess: dict[str, Any] | None = None, spec: TensorSpec = INPUT) -> Dataset:
    return open_dataset(str(source), DataOptions(preprocess, (spec,)))


def first(source: object, preprocess: dict[str, Any] | None = None, spec: TensorSpec = INPUT) -> np.ndarray:
    return next(opened(source, preprocess, spec).batches(None, 1)).inputs["image"][0]


def reference(size: int = 32) -> np.ndarray:
    picture = scene().resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(picture).transpose(2, 0, 1).astype(np.float32) / 255


def _palette() -> Image.Image:
    return scene().convert("P", palette=Image.Palette.ADAPTIVE)


def _transparent() -> Image.Image:
    return Image.merge("RGBA", (*scene().split(), Image.new("L", (64, 48), 255)))


@pytest.mark.parametrize(
    ("name", "picture", "how"),
    [
        ("a.png", scene(), {}),
        ("A.JPG", scene(), {"format": "JPEG", "quality": 97}),
        ("a.jpeg", scene().convert("CMYK"), {"quality": 97}),
        ("a.gif", _palette(), {}),
        ("a.png", _palette(), {"transparency": 0}),
        ("a.png", _transparent(), {}),
        ("ünï cödé.bmp", scene(), {}),
        ("a.webp", scene(200, 150), {"quality": 95}),
        ("a.tif", scene(), {"compression": "tiff_lzw"}),
    ],
)
def test_every_mode_looks_the_same(tmp_path: Path, name: str, picture: Image.Image, how: Any) -> None:
    put(tmp_path / name, picture, **how)
    values = first(tmp_path)
    assert (values.shape, values.dtype) == ((3, 32, 32), np.float32)
    assert np.abs(values - reference()).mean() < 0.03


@pytest.mark.parametrize("wide", [False, True])
def test_grey_and_sixteen_bit_become_three_equal_channels(tmp_path: Path, wide: bool) -> None:
    grey = scene().convert("L")
    if wide:
        grey = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)
    put(tmp_path / "grey.png", grey)
    values = first(tmp_path)
    expected = np.asarray(scene().convert("L").resize((32, 32), Image.Resampling.BILINEAR)) / 255
    assert np.abs(values - expected).max() < 1e-6


@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_are_turned_as_exif_says(tmp_path: Path, orientation: int) -> None:
    """What is stored for each orientation is the scene turned the other way (EXIF 2.32, 4.6.4)."""
    stored = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    exif = Image.Exif()
    exif[0x0112] = orientation
    turned = scene().transpose(stored[orientation]) if orientation > 1 else scene()
    put(tmp_path / "a.png", turned, exif=exif)
    assert np.abs(first(tmp_path) - reference()).max() < 0.02


def test_a_broken_exif_block_does_not_spoil_the_picture(tmp_path: Path) -> None:
    put(tmp_path / "a.jpg", exif=b"Exif\0\0this is no TIFF header at all", quality=97)
    assert np.abs(first(tmp_path) - reference()).mean() < 0.03


def test_of_an_animation_the_first_frame_is_taken(tmp_path: Path) -> None:
    other = Image.new("P", (64, 48), 3)
    put(tmp_path / "a.gif", _palette(), save_all=True, append_images=[other])
    assert np.abs(first(tmp_path) - reference()).mean() < 0.03


def test_what_cannot_be_read_is_skipped_and_named(tmp_path: Path) -> None:
    put(tmp_path / "good.png")
    put(tmp_path / "z" / "fine.jpg")
    put(tmp_path / "whole.jpg", quality=97)
    whole = (tmp_path / "whole.jpg").read_bytes()
    (tmp_path / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "notes.jpg").write_text("this is not a picture")
    (tmp_path / "float.tiff").write_bytes(b"")
    Image.fromarray(np.ones((4, 4), np.float32)).save(tmp_path / "float.tiff")
    for name in ("labels.txt", "Thumbs.db", ".DS_Store", "._good.png"):
        (tmp_path / name).write_bytes(b"x")
    dataset = opened(tmp_path)
    assert dataset.length == 7
    assert len(dataset.usable) == 3
    (warning,) = dataset.warnings
    assert warning.startswith("4 unreadable picture(s) skipped: cut.jpg (image file is truncated")
    assert "empty.png (the file is empty)" in warning
    assert "notes.jpg (not a picture)" in warning
    assert "float.tiff (pixels are floating point numbers" in warning
    batches = list(dataset.batches(None, 2))
    assert [len(batch.inputs["image"]) for batch in batches] == [2, 1]
    assert np.array_equal(np.concatenate([batch.indices for batch in batches]), dataset.usable)


def test_a_folder_without_a_readable_picture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no samples in it"):
        opened(tmp_path)
    (tmp_path / "empty.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"no picture in it can be read \(empty.png: the file is empty\)"):
        _ = opened(tmp_path).usable


def test_sub_folders_are_classes_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("dog/1.png", "dog/deep/2.png", "cat/1.png", "emu/1.png"):
        put(tmp_path / name)
    (tmp_path / "ant").mkdir()
    dataset = opened(tmp_path)
    assert dataset.labels is not None
    assert dataset.labels.tolist() == [1, 2, 2, 3]
    assert any("labels from 4 sub-folders" in note and "ant, cat, dog, emu" in note for note in dataset.notes)
    batches = list(dataset.batches(np.array([1, 3]), 8))
    assert batches[0].labels is not None
    assert batches[0].labels.tolist() == [2, 3]


def test_numbered_classes_sort_as_text_and_that_is_said(tmp_path: Path) -> None:
    for name in ("0", "1", "2", "10"):
        put(tmp_path / name / "a.png")
    assert any("folder '10' is class 2" in warning for warning in opened(tmp_path).warnings)


@pytest.mark.parametrize("names", [["a.png", "sub folder/b.png"], ["only/a.png", "only/b.png"], ["a.png"]])
def test_flat_pictures_or_a_single_sub_folder_are_unlabelled(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        put(tmp_path / name)
    assert opened(tmp_path).labels is None


def test_a_folder_of_splits_wants_one_chosen(tmp_path: Path) -> None:
    for name in ("train/cat/a.png", "train/dog/b.png", "val/cat/c.png", "val/dog/d.png"):
        put(tmp_path / name)
    with pytest.raises(DataError, match=r"holds splits; choose one, e\.g\. .*:train"):
        opened(tmp_path)
    dataset = opened(f"{tmp_path}:val")
    assert dataset.labels is not None
    assert dataset.labels.tolist() == [0, 1]
    with pytest.raises(DataError, match=r"has no sub-folder 'test' \(it has train, val\)"):
        opened(f"{tmp_path}:test")


def _two(folder: Path) -> None:
    put(folder / "a.png")
    put(folder / "b.png")
    put(folder / "c" / "c.png")


@pytest.mark.parametrize(
    ("name", "text", "labels"),
    [
        ("labels.json", json.dumps({"a.png": 7, "b.png": 3, "c/c.png": 0, "gone.png": 1}), [7, 3, 0]),
        ("labels.json", json.dumps({"a.png": 0.5, "b.png": 3, "c.png": 1}), [0.5, 3.0, 1.0]),
        ("labels.json", json.dumps({"a.png": "dog", "b.png": "cat", "c.png": "dog"}), [1, 0, 1]),
        ("labels.csv", "file,label\na.png,7\nb.png,3\nc/c.png,0\n", [7, 3, 0]),
        ("labels.csv", "a.png, 7\n\nb.png, 3\nc.png, 0\n", [7, 3, 0]),
    ],
)
def test_labels_from_a_file(tmp_path: Path, name: str, text: str, labels: list[float]) -> None:
    _two(tmp_path)
    (tmp_path / name).write_text(text)
    dataset = opened(tmp_path)
    assert dataset.labels is not None
    assert dataset.labels.tolist() == labels
    assert dataset.labels.dtype.kind == ("f" if 0.5 in labels else "i")


def test_pictures_without_a_label_are_left_out_and_counted(tmp_path: Path) -> None:
    _two(tmp_path)
    (tmp_path / "labels.json").write_text('{"a.png": 1}')
    dataset = opened(tmp_path)
    assert dataset.length == 1
    assert "2 picture(s) without an entry in labels.json are left out" in dataset.notes


@pytest.mark.parametrize("text", ["[1, 2]", '{"a.png": [1, 2]}', '{"images": [], "annotations": []}'])
def test_annotations_of_another_kind_are_no_labels_and_that_is_said(tmp_path: Path, text: str) -> None:
    _two(tmp_path)
    (tmp_path / "labels.json").write_text(text)
    dataset = open_dataset(str(tmp_path), DataOptions())
    assert dataset.labels is None
    assert len(dataset.usable) == dataset.length > 0
    assert any("taken as unlabelled" in warning for warning in dataset.warnings)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("labels.json", "{", "cannot be read as labels"),
        ("labels.json", '{"z.png": 1}', r"none of its names is a picture here \(first picture: a.png\)"),
        ("labels.csv", "a.png\n", "row 1 is not 'file,label'"),
    ],
)
def test_broken_label_files_are_refused(tmp_path: Path, name: str, text: str, words: str) -> None:
    _two(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=words):
        opened(tmp_path)


@pytest.mark.parametrize("size", [(300, 200), (200, 300), (231, 517), (60, 80)])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_the_usual_preprocessing_is_that_of_torchvision_bit_for_bit(
    tmp_path: Path, size: tuple[int, int], interpolation: str
) -> None:
    transforms = pytest.importorskip("torchvision.transforms")
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    put(tmp_path / "a.png", scene(*size))
    theirs = transforms.Compose(
        [
            transforms.Resize(73, transforms.InterpolationMode(interpolation)),
            transforms.CenterCrop(64),
            transforms.ToTensor(),
            transforms.Normalize(mean, std),
        ]
    )(scene(*size))
    given = {"resize": 73, "crop": 64, "mean": mean, "std": std, "interpolation": interpolation}
    ours = first(tmp_path, given, TensorSpec("x", "float32", ("n", 3, 64, 64)))
    assert np.array_equal(ours, theirs.numpy())


def test_a_crop_larger_than_the_picture_is_padded_as_in_torchvision(tmp_path: Path) -> None:
    transforms = pytest.importorskip("torchvision.transforms")
    put(tmp_path / "a.png", scene(51, 90))
    theirs = transforms.Compose([transforms.CenterCrop(64), transforms.ToTensor()])(scene(51, 90))
    ours = first(tmp_path, {"crop": 64}, TensorSpec("x", "float32", ("n", 3, 64, 64)))
    assert np.array_equal(ours, theirs.numpy())


def test_layout_order_of_channels_and_units(tmp_path: Path) -> None:
    put(tmp_path / "a.png")
    last = TensorSpec("x", "float32", ("n", 32, 32, 3))
    plain = first(tmp_path)
    assert np.array_equal(first(tmp_path, None, last), plain.transpose(1, 2, 0))
    assert np.array_equal(first(tmp_path, {"channels": "bgr"}), plain[::-1])
    scaled = first(tmp_path, {"scale": 1, "mean": 127, "std": 128})
    assert np.abs(scaled - (plain * 255 - 127) / 128).max() < 1e-5
    whole = first(tmp_path, None, TensorSpec("x", "uint8", ("n", 32, 32, 3)))
    assert whole.dtype == np.uint8
    assert np.array_equal(whole, np.rint(plain.transpose(1, 2, 0) * 255))
    signed = first(tmp_path, {"scale": 1, "mean": 128, "std": 1}, TensorSpec("x", "int8", ("n", 32, 32, 3)))
    assert np.array_equal(signed.astype(int), whole.astype(int) - 128)
    with pytest.raises(DataError, match="does not fit int8"):
        first(tmp_path, {"scale": 1}, TensorSpec("x", "int8", ("n", 32, 32, 3)))


def test_grey_models_get_one_channel(tmp_path: Path) -> None:
    put(tmp_path / "a.png")
    expected = np.asarray(scene().convert("L").resize((28, 28), Image.Resampling.BILINEAR)) / np.float32(255)
    assert np.array_equal(first(tmp_path, None, TensorSpec("x", "float32", ("n", 1, 28, 28)))[0], expected)
    assert np.array_equal(first(tmp_path, None, TensorSpec("x", "float32", ("n", 28, 28))), expected)


def test_free_sizes_need_pictures_of_one_size(tmp_path: Path) -> None:
    put(tmp_path / "a.png", scene(30, 20))
    put(tmp_path / "b.png", scene(40, 20))
    dataset = open_dataset(str(tmp_path), DataOptions())
    assert dataset.arrays[0].shape == (3, "height", "width")
    assert [batch.inputs["image"].shape for batch in dataset.batches(None, 1)] == [
        (1, 3, 20, 30),
        (1, 3, 20, 40),
    ]
    with pytest.raises(DataError, match="pictures differ in size"):
        list(dataset.batches(None, 2))


def test_the_digest_covers_names_and_bytes_but_not_times(tmp_path: Path) -> None:
    put(tmp_path / "a" / "x.png")
    put(tmp_path / "b" / "y.png")
    before = opened(tmp_path).sha256
    (tmp_path / "a" / "x.png").touch()
    (tmp_path / "notes.txt").write_text("not part of the data")
    assert opened(tmp_path).sha256 == before
    (tmp_path / "b" / "y.png").rename(tmp_path / "a" / "y.png")
    moved = opened(tmp_path).sha256
    assert moved != before
    put(tmp_path / "a" / "y.png", scene(seed=1))
    assert opened(tmp_path).sha256 != moved


def test_linked_folders_are_followed_once(tmp_path: Path) -> None:
    put(tmp_path / "real" / "a.png")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "link").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "loop").symlink_to(tmp_path / "set")
    assert opened(tmp_path / "set").length == 1
