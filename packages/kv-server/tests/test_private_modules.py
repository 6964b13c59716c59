"""A private server has its engine's modules, and none of the directory that the engine happens to be in."""

import site
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from kv_core.errors import ConfigError
from kv_server import launch
from kv_server.process import environment, module_command
from kv_testing.cache_servers import join_at, settings_for

OURS = ["kv_core", "kv_eviction", "kv_tiers", "kv_remote"]
OTHERS = [*OURS, "xxhash", "msgspec", "numpy", "yaml", "zstandard", "sitecustomize", "usercustomize"]
# Somebody else's file: it leaves a mark beside itself, and does what a module of its name would not.
HOSTILE = "import pathlib; pathlib.Path(__file__ + '.ran').touch(); raise SystemExit('hostile')"
POLICY = """
from kv_eviction.simple import LruPolicy

def make(*args, **options):
    return LruPolicy()
"""


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a file for every module that anybody might import."""
    directory = tmp_path / "hostile"
    directory.mkdir()
    for name in {*sys.stdlib_module_names, *OTHERS}:
        (directory / f"{name}.py").write_text(HOSTILE)
    monkeypatch.chdir(directory)
    return directory


@pytest.mark.parametrize("python_path", [None, "", ".", ":/nowhere:"])
def test_files_in_the_current_directory_are_not_imported(
    hostile: Path, monkeypatch: pytest.MonkeyPatch, python_path: str | None
) -> None:
    if python_path is not None:
        monkeypatch.setenv("PYTHONPATH", python_path)
    for path in ("", str(hostile)):  # as in an interactive session, and under `python -m`
        monkeypatch.setattr(sys, "path", [path, *sys.path])
        server = launch(settings_for(hostile))
        join_at(server.socket).close()
        server.stop()
    assert not list(hostile.glob("*.ran"))


@pytest.mark.parametrize("how", ["zip", "site"])
def test_what_was_added_while_the_engine_ran_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    files = {
        "added_policy.py": POLICY,
        "added_policy-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: added-policy\nVersion: 1\n",
        "added_policy-1.dist-info/entry_points.txt": "[kv_eviction.policies]\nadded = added_policy:make\n",
    }
    settings = settings_for(tmp_path)
    settings["host"] = {**settings["host"], "policy": "added"}  # type: ignore[dict-item]
    with pytest.raises(ConfigError):
        launch(settings)
    monkeypatch.setattr(sys, "path", list(sys.path))
    if how == "zip":
        with zipfile.ZipFile(tmp_path / "added.zip", "w") as added:
            for name, text in files.items():
                added.writestr(name, text)
        sys.path.append(str(tmp_path / "added.zip"))
    else:
        for name, text in files.items():
            (tmp_path / "there" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "there" / name).write_text(text)
        (tmp_path / "links").mkdir()
        (tmp_path / "links" / "added.pth").write_text(f"{tmp_path / 'there'}\n")
        site.addsitedir(str(tmp_path / "links"))
    server = launch(settings)
    join_at(server.socket).close()
    server.stop()


def test_a_directory_that_the_environment_names_is_kept_where_it_is_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an image with `ENV PYTHONPATH=/app` and `WORKDIR /app`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "mine.py").write_text("import sys; print(sys.argv[1:])")
    command = [*module_command("mine"), "a", "-b"]
    assert subprocess.run(command, env=environment(), capture_output=True, timeout=60).returncode
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert subprocess.check_output(command, env=environment(), text=True, timeout=60) == "['a', '-b']\n"


def test_more_paths_than_one_argument_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Bazel has them: Linux limits an argument to 128 KiB."""
    (tmp_path / "mine.py").write_text("import sys; print(sys.path[-1])")
    added = [str(tmp_path), *(f"/nowhere/{number}/{'x' * 200}" for number in range(1000))]
    monkeypatch.setattr(sys, "path", [*sys.path, *added])
    assert subprocess.check_output(module_command("mine"), env=environment(), text=True, timeout=60) == f"{added[-1]}\n"


def test_no_command_of_ours_starts_python_with_the_current_directory() -> None:
    """Whoever starts another Python takes `module_command`, or leaves the directory out itself."""
    packages = Path(__file__).parents[2]
    assert packages.name == "packages"
    starts = [file for file in packages.glob("*/src/**/*.py") if "sys.executable" in file.read_text()]
    assert sorted(file.name for file in starts) == ["cufile.py", "doctor.py", "process.py", "programs.py"]
    assert all('sys.executable, "-P"' in file.read_text() for file in starts)
