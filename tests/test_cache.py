import pytest

from torchecho.cache import cache_folder, read_json, replacing, write_json


def test_environment_names_the_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHECHO_CACHE", str(tmp_path / "kept"))
    assert cache_folder() == tmp_path / "kept"


def test_folder_without_environment_is_in_the_home(monkeypatch, tmp_path):
    monkeypatch.delenv("TORCHECHO_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "torchecho"


def test_json_comes_back(tmp_path):
    path = tmp_path / "new" / "a.json"
    write_json(path, "thing/1", {"n": [1, 2.5, None]})
    assert read_json(path, "thing/1") == {"n": [1, 2.5, None]}
    assert [file.name for file in path.parent.iterdir()] == ["a.json"]


def test_missing_file_is_none_without_a_word(tmp_path, caplog):
    assert read_json(tmp_path / "none.json", "thing/1") is None
    assert not caplog.records


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe\x00", b"[1]", b"3", b"{}", b'{"torchecho": "thing/2"}', b"[" * 100_000],
    ids=["empty", "cut", "binary", "list", "number", "nameless", "other version", "deep"],
)
def test_damaged_or_foreign_file_is_ignored_with_one_warning(tmp_path, caplog, content):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    assert read_json(path, "thing/1") is None
    assert [(record.levelname, str(path) in record.getMessage()) for record in caplog.records] == [("WARNING", True)]


def test_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, "thing/1", {"n": 1})

    def write_half():
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert read_json(path, "thing/1") == {"n": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]
