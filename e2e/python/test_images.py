"""What the images are made of."""

import importlib.util

import pytest
from conftest import ROOT


@pytest.fixture
def images():
    spec = importlib.util.spec_from_file_location("images", ROOT / "scripts" / "images.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_one_build_serves_all_images(images):
    stages = {path.read_text().partition("FROM debian")[2].partition("\nFROM scratch")[0] for path in images.IMAGES.values()}
    assert len(stages) == 1, "the first stages differ, so that each image would compile everything anew"


def test_a_host_newer_than_the_images_is_told_to_build_from_source(images, monkeypatch, tmp_path):
    assert images.glibc(ROOT / "target" / "release" / "tandem-engine") <= images.GLIBC
    monkeypatch.setattr(images, "GLIBC", (2, 2))
    monkeypatch.setattr(images, "OUT", tmp_path)
    with pytest.raises(SystemExit, match="needs glibc .* build the images with --build source"):
        images.prebuilt()
