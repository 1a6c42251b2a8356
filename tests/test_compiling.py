"""What is compiled on first use: where it lies, when it is made anew, and what happens where it cannot be."""

from pathlib import Path

import pytest

from serving.compiling import cache_root, load_library

SOURCE = 'extern "C" int answer() { return %d; }'


@pytest.mark.parametrize(
    ("environ", "root"),
    [
        ({"DRAFTHOUSE_CACHE": "/big/disk"}, Path("/big/disk")),
        ({"DRAFTHOUSE_CACHE": ""}, Path.home() / ".cache/drafthouse"),
        ({}, Path.home() / ".cache/drafthouse"),
        ({"DRAFTHOUSE_CACHE": "relative"}, Path.cwd() / "relative"),
    ],
)
def test_the_cache_root(environ, root):
    assert cache_root(environ) == root


def test_a_changed_source_is_compiled_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTHOUSE_CACHE", str(tmp_path / "cache"))
    for folder, value in (("a", 41), ("b", 42)):
        source = tmp_path / folder / "one.cpp"
        source.parent.mkdir()
        source.write_text(SOURCE % value)
        library = load_library(source, otherwise="nothing works")
        assert library is not None
        assert library.answer() == value
    assert len(list((tmp_path / "cache" / "native").iterdir())) == 2


def test_what_cannot_be_built_is_said_once_and_is_none(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("DRAFTHOUSE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "broken.cpp").write_text("this is no C++")
    assert load_library(tmp_path / "broken.cpp", otherwise="something slower runs") is None
    assert load_library(tmp_path / "broken.cpp", otherwise="something slower runs") is None
    assert ["something slower runs" in record.getMessage() for record in caplog.records] == [True]


def test_native_code_can_be_turned_off(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTHOUSE_NATIVE", "0")
    assert load_library(tmp_path / "none.cpp", otherwise="something slower runs") is None
