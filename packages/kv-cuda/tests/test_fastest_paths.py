"""Which path is the fastest for a copy or a file: measured, kept in tables, and read again."""

import argparse
import json
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kv_core.errors import ConfigError
from kv_core.tools.cli import main
from kv_cuda import doctor
from kv_cuda.copy.copy_paths import (
    CopyPaths,
    FileCopyPaths,
    fastest,
)
from kv_cuda.files.cufile import NoCuFile
from kv_cuda.files.host_files import HostFiles
from kv_cuda.tune import bench_cli, measure
from kv_cuda.tune.measure import Sizes, copy_paths_from, file_copy_paths_from, measure_copy_paths, measure_files


def test_the_table_follows_from_what_was_measured(tmp_path: Path) -> None:
    table = fastest({
        4096: {"direct": 9.0, "staged": 11.0, "driver": 2.0},
        65536: {"direct": 9.0, "staged": 11.0, "driver": 10.0},
        1 << 20: {"direct": 9.0, "staged": 11.0, "driver": 20.0},
    })  # fmt: skip
    assert table == ((0, "staged"), (1 << 20, "driver"))
    path = tmp_path / "deep" / "copy-paths.json"
    CopyPaths(load=table, store=((0, "direct"),)).write(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    copy_paths = CopyPaths.read(path)
    assert copy_paths == CopyPaths(load=table, store=((0, "direct"),))
    assert copy_paths.choose("load", 2 << 20, may_stage=True, can_drive=True) == "driver"
    assert copy_paths.choose("load", 2 << 20, may_stage=True, can_drive=False) == "staged"
    assert copy_paths.choose("load", 512, may_stage=False, can_drive=True) == "direct"
    assert copy_paths.choose("store", 2 << 20, may_stage=True, can_drive=True) == "direct"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"version": 2, "load": [[0, "direct"]], "store": [[0, "direct"]]}',
        '{"version": 1, "load": [[0, "direct"]]}',
        '{"version": 1, "load": [[0, "tunnel"]], "store": [[0, "direct"]]}',
        '{"version": 1, "load": [[5, "direct"]], "store": [[0, "direct"]]}',
        '{"version": 1, "load": [], "store": [[0, "direct"]]}',
        '{"version": 1, "load": [[0, "direct"], [0, "staged"]], "store": [[0, "direct"]]}',
        '{"version": 1, "load": [[true, "direct"]], "store": [[0, "direct"]]}',
    ],
)
def test_a_file_that_is_no_table_is_refused_with_what_to_do(tmp_path: Path, text: str) -> None:
    path = tmp_path / "copy-paths.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="remove it, or measure again: kv bench copy"):
        CopyPaths.read(path)


def test_without_a_file_the_built_in_table_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert CopyPaths.read(tmp_path / "none.json") == CopyPaths()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert CopyPaths.file("NVIDIA H200/../x") == tmp_path / "kv-cuda" / "copy-paths-nvidia-h200----x.json"


def test_a_user_without_a_home_has_the_built_in_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user is in no list of users: an engine would not have started."""

    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", home)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "NVIDIA H200")
    assert CopyPaths.of_device(torch.device("cuda", 0)) == CopyPaths()
    (finding,) = doctor.copy_paths("GPU 0, copy paths", "NVIDIA H200")
    assert finding.found.startswith("this user has no home directory for measurements: set XDG_CACHE_HOME")


def test_measuring_finds_every_path_in_both_directions() -> None:
    sizes = Sizes(layers=1, heads=1, chunk_tokens=4, chunks=1, block_tokens=(1, 4))
    measured = list(measure_copy_paths(torch.device("cpu"), sizes))
    assert {(one.direction, one.copy_path) for one in measured} == {
        (direction, copy_path) for direction in ("load", "store") for copy_path in ("direct", "staged")
    }
    assert {one.run_bytes for one in measured} == {256, 1024}
    assert all(one.gbps > 0 and one.limit_gbps > 0 for one in measured)
    table = copy_paths_from(measured)
    best = max((one for one in measured if one.run_bytes == 1024 and one.direction == "load"), key=lambda one: one.gbps)
    assert table.choose("load", 1024, may_stage=True, can_drive=False) == best.copy_path


@pytest.mark.parametrize("to_device", [True, False])
def test_a_plain_copy_is_waited_for_where_it_runs(monkeypatch: pytest.MonkeyPatch, to_device: bool) -> None:
    """With `--device cuda:1` the current device is another, whose queue is empty."""
    waited: list[torch.device] = []
    monkeypatch.setattr(
        torch.cuda,
        "current_stream",
        lambda device="the current device": SimpleNamespace(synchronize=lambda: waited.append(device)),
    )
    there: Any = SimpleNamespace(device=torch.device("cuda", 1), copy_=lambda *_origin, **_options: None)
    here: Any = SimpleNamespace(device=torch.device("cpu"), copy_=lambda *_origin, **_options: None)
    measure._copy(*(([there], [here]) if to_device else ([here], [there])))
    assert waited == [torch.device("cuda", 1)]


def test_measuring_files_finds_both_paths_and_which_is_faster(tmp_path: Path) -> None:
    sizes = Sizes(layers=1, heads=1, chunk_tokens=4, chunks=3, block_tokens=(4,))
    cpu, files = torch.device("cpu"), HostFiles()
    measured = list(measure_files(cpu, tmp_path, files, sizes))
    assert {one.copy_path for one in measured} == {"direct", "staged"}
    assert all(one.gbps > 0 and one.limit_gbps > 0 and one.directory == str(tmp_path) for one in measured)
    assert not list(tmp_path.iterdir()), "what was written is removed"
    copy_paths = file_copy_paths_from(measured)
    best = max(measured, key=lambda one: one.gbps)
    assert copy_paths.takes_direct(str(tmp_path / "kv-0" / "slab-0000")) == (best.copy_path == "direct")
    alone = list(measure_files(cpu, tmp_path, NoCuFile("none here", ""), sizes))
    assert {one.copy_path for one in alone} == {"staged"}
    assert file_copy_paths_from(alone) == FileCopyPaths(), "there is nothing to choose"
    with pytest.raises(ConfigError, match="cannot be measured: No such file"):
        list(measure_files(cpu, tmp_path / "none", NoCuFile("", ""), sizes))


@pytest.mark.slow
def test_the_command_keeps_which_path_is_faster_for_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `kv bench copy --file` does on a GPU, with small chunks, and the host's files where cuFile would be."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    small = Sizes(layers=1, heads=1, chunk_tokens=4, block_tokens=(4,))
    monkeypatch.setattr("kv_cuda.tune.measure.Sizes", lambda: small)
    monkeypatch.setattr("kv_cuda.files.cufile.find_cufile", lambda device, directory: HostFiles())
    for number, json_lines in (("1", False), ("2", True)):
        disk = tmp_path / number
        disk.mkdir()
        asked = argparse.Namespace(file=disk, json=json_lines, dry_run=False)
        kept = bench_cli._file_copy_paths(torch.device("cpu"), "test", asked)
        said = capsys.readouterr().out.splitlines()
        assert len(said) == 2
        assert all(json.loads(line)["directory"] == str(disk) if json_lines else str(disk) in line for line in said)
    assert kept is not None
    assert set(FileCopyPaths.read(kept).measured) == {str(tmp_path / "1"), str(tmp_path / "2")}
    monkeypatch.setattr("kv_cuda.files.cufile.find_cufile", lambda device, directory: NoCuFile("no driver", "get one"))
    assert bench_cli._file_copy_paths(torch.device("cpu"), "test", asked) is None
    assert "no direct path: no driver. get one" in capsys.readouterr().err
    asked.dry_run = True
    assert bench_cli._file_copy_paths(torch.device("cpu"), "test", asked) is None


def test_which_path_is_faster_is_kept_by_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = FileCopyPaths.file("NVIDIA H200")
    assert path == tmp_path / "kv-cuda" / "file-copy-paths-nvidia-h200.json"
    assert FileCopyPaths.read(path) == FileCopyPaths()
    copy_paths = FileCopyPaths({"/nvme": "direct"})
    copy_paths.write(path)
    assert FileCopyPaths.read(path) == copy_paths


@pytest.mark.parametrize(
    "directories",
    [
        "[]",
        '{"nvme": "direct"}',
        '{"/": "tunnel"}',
        '{"/": 5}',
    ],
)
def test_a_file_that_says_no_paths_of_files_is_refused(tmp_path: Path, directories: str) -> None:
    path = tmp_path / "file-copy-paths.json"
    path.write_text(f'{{"version": 1, "directories": {directories}}}')
    with pytest.raises(ConfigError, match="remove it, or measure again: kv bench copy"):
        FileCopyPaths.read(path)


def test_the_command_says_what_is_missing_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert main(["bench", "copy"]) == 2
    assert "there is no such GPU; `kv doctor` says what is missing" in capsys.readouterr().err
    assert main(["bench", "copy", "--device", "tape"]) == 2
    assert "write cuda" in capsys.readouterr().err


def test_the_command_says_which_gpu_is_not_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch would raise an AssertionError."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert main(["bench", "copy", "--device", "cuda:2"]) == 2
    assert "--device cuda:2: there is no such GPU" in capsys.readouterr().err
