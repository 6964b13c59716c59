"""Weights are all bytes of their files, read once and off the threads that serve; what cannot be known ends with us."""

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from kv_connect import adapters as adapters_module
from kv_connect import file_digests, identity
from kv_connect.adapters import Adapters, Unsure
from kv_connect.file_digests import (
    DigestMemory,
    FilesChangedError,
    FileState,
    HashingStoppedError,
    content_digest,
    content_files,
    default_memory,
)
from kv_connect.identity import (
    Beside,
    LiveKeySpace,
    LiveWeights,
    ServedModel,
    Weights,
    identify,
    origins_of,
    sources_of,
)
from kv_core.clock import HandClock
from kv_testing.threads import threads_left

NOWHERE = DigestMemory(None)
LATER_NS = 10**12


def write(directory: Path, name: str = "model.safetensors", byte: int = 1, size: int = 3_000_000) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / name).write_bytes(bytes([byte]) * size)
    return directory


def patch(file: Path, at: int) -> None:
    """Change one byte in place."""
    with file.open("r+b") as stream:
        stream.seek(at)
        stream.write(b"\x07")


def digest(source: Path, memory: DigestMemory = NOWHERE) -> str:
    return content_digest(states_of(source), memory)


def states_of(source: Path) -> list[tuple[str, FileState]]:
    return [(name, FileState.of(path)) for name, path in content_files(source)]


def live_of(model: ServedModel, **options: Any) -> LiveWeights:
    """Of an engine that has just loaded them."""
    return LiveWeights(model, before=origins_of(sources_of(model)), **({"memory": NOWHERE} | options))


def served(source: Path | str, beside: list[tuple[str, ...]] | None = None) -> ServedModel:
    return ServedModel("vllm", str(source), None, "float32", beside=[Beside(*each) for each in beside or []])


@pytest.fixture
def reads() -> Iterator[list[str]]:
    """The files that are read, a segment at a time."""
    seen: list[str] = []
    real = file_digests._hash_segment

    def counted(state: file_digests.FileState, *rest: object) -> bytes:
        seen.append(Path(state.path).name)
        return real(state, *rest)  # type: ignore[arg-type]

    with mock.patch.object(file_digests, "_hash_segment", counted):
        yield seen


@pytest.fixture
def memory(tmp_path: Path) -> Callable[[], DigestMemory]:
    """The same memory as the next process finds it; for it, all files are old."""
    return lambda: DigestMemory(tmp_path / "cache" / "digests.json", now_ns=lambda: time.time_ns() + LATER_NS)


@pytest.mark.parametrize("at", [0, 65_537, 150_000, 1_499_999, 2_999_999])
def test_one_byte_anywhere_makes_other_weights(tmp_path: Path, at: int) -> None:
    same = digest(write(tmp_path / "a"))
    assert digest(write(tmp_path / "b")) == same
    patch(write(tmp_path / "c") / "model.safetensors", at)
    assert digest(tmp_path / "c") != same


def test_bytes_in_every_segment_count_and_their_order_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments are hashed by several threads."""
    monkeypatch.setattr(file_digests, "_SEGMENT_BYTES", 1000)
    digests = set()
    for at in range(0, 10_000, 500):
        patch(write(tmp_path / str(at), size=10_000) / "model.safetensors", at)
        digests |= {content_digest(states_of(tmp_path / str(at)), NOWHERE, threads=4) for _ in range(3)}
    assert len(digests) == 20


def test_names_sizes_quantisation_code_and_preparation_count_and_readmes_do_not(tmp_path: Path) -> None:
    same = digest(write(tmp_path / "a"))
    others = {
        digest(write(tmp_path / "size", size=3_000_001)),
        digest(write(tmp_path / "name", name="model-1.safetensors")),
    }
    beside = [
        "quantize_config.json",
        "hf_quant_config.json",
        "model.safetensors.index.json",
        "modeling.py",
        "params.json",
    ]
    beside += ["preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"]
    for name in beside:
        write(tmp_path / name)
        (tmp_path / name / name).write_text("{}")
        others.add(digest(tmp_path / name))
    assert len(others - {same}) == 2 + len(beside)
    (write(tmp_path / "b") / "README.md").write_text("hello")
    assert digest(tmp_path / "b") == same
    (tmp_path / "empty").mkdir()
    assert content_files(tmp_path / "empty") == []


def test_a_file_of_split_weights_stands_for_all_its_parts(tmp_path: Path) -> None:
    for number in (1, 2):
        write(tmp_path, f"model-0000{number}-of-00002.gguf", byte=number, size=100)
    write(tmp_path, "another.gguf", byte=9, size=100)
    first = tmp_path / "model-00001-of-00002.gguf"
    same = digest(first)
    patch(tmp_path / "another.gguf", 5)
    assert digest(first) == same
    patch(tmp_path / "model-00002-of-00002.gguf", 5)
    assert digest(first) != same


def test_what_was_read_once_is_known_to_the_next_process(
    tmp_path: Path, memory: Callable[[], DigestMemory], reads: list[str]
) -> None:
    write(tmp_path / "m"), write(tmp_path / "m", "second.safetensors", 2)
    first = digest(tmp_path / "m", memory())
    assert sorted(reads) == ["model.safetensors", "second.safetensors"]
    reads.clear()
    assert digest(tmp_path / "m", memory()) == first
    assert reads == []
    os.utime(tmp_path / "m" / "model.safetensors")  # touched: read again, and it is as it was
    assert digest(tmp_path / "m", memory()) == first
    assert reads == ["model.safetensors"]
    patch(tmp_path / "m" / "second.safetensors", 1_000_000)
    assert digest(tmp_path / "m", memory()) != first
    file = tmp_path / "cache" / "digests.json"
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert [path.name for path in file.parent.iterdir()] == ["digests.json"]


def test_a_change_that_keeps_size_and_modification_time_is_seen(
    tmp_path: Path, memory: Callable[[], DigestMemory]
) -> None:
    """Whoever sets a file's time back changes the time of its status."""
    file = write(tmp_path / "m") / "model.safetensors"
    first = digest(tmp_path / "m", memory())
    times = file.stat()
    patch(file, 1_000_000)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert digest(tmp_path / "m", memory()) != first


def test_a_file_changed_just_now_is_not_remembered(tmp_path: Path, reads: list[str]) -> None:
    """A slow clock could give another change the same time."""
    store = DigestMemory(tmp_path / "digests.json")
    write(tmp_path / "m")
    digest(tmp_path / "m", store), digest(tmp_path / "m", store)
    assert len(reads) == 2


@pytest.mark.parametrize(
    "how", ["cut", "junk", "digest", "not-entries", "huge", "deep", "mode", "link", "directory", "binary"]
)
def test_a_damaged_memory_is_as_if_empty(
    tmp_path: Path, memory: Callable[[], DigestMemory], reads: list[str], how: str
) -> None:
    right = digest(write(tmp_path / "m"), memory())
    file = tmp_path / "cache" / "digests.json"
    text = file.read_text()
    known = json.loads(text)["content"][0][-1]
    damaged = {
        "cut": text[: len(text) // 2],
        "junk": "{" * 50,
        "digest": text.replace(known, "0" * 64),
        "not-entries": json.dumps({"content": [[1, 2], 3], "checksum": file_digests._checksum([[1, 2], 3])}),
        "huge": text + " " * (5 << 20),
        "deep": "[" * 100_000,
    }
    if how in damaged:
        file.write_text(damaged[how])
    elif how == "binary":
        file.write_bytes(b"\xff\x00" * 1000)
    elif how == "mode":
        file.chmod(0o622)
    else:
        file.unlink()
        if how == "link":
            file.symlink_to(tmp_path / "elsewhere")
            (tmp_path / "elsewhere").write_text(text)
        else:
            file.mkdir()
    reads.clear()
    assert digest(tmp_path / "m", memory()) == right
    assert reads == ["model.safetensors"]


def test_a_memory_that_cannot_be_written_costs_another_reading_and_no_more(tmp_path: Path, reads: list[str]) -> None:
    (tmp_path / "file").write_text("")
    blocked = DigestMemory(tmp_path / "file" / "digests.json", now_ns=lambda: time.time_ns() + LATER_NS)
    write(tmp_path / "m")
    assert digest(tmp_path / "m", blocked) == digest(tmp_path / "m", blocked)
    assert len(reads) == 2


def test_the_memory_is_in_the_users_cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_memory()._path == tmp_path / "kv-tiers" / "file-digests.json"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_memory()._path == Path.home() / ".cache" / "kv-tiers" / "file-digests.json"


def test_a_file_that_changes_while_it_is_read_has_no_digest(tmp_path: Path) -> None:
    file = write(tmp_path / "m") / "model.safetensors"
    real = file_digests._hash_segment

    def changing(*task: object) -> bytes:
        hashed = real(*task)  # type: ignore[arg-type]
        patch(file, 5)
        return hashed

    with mock.patch.object(file_digests, "_hash_segment", changing), pytest.raises(FilesChangedError):
        digest(tmp_path / "m")


class Gate:
    """Lets files be read when the test says so."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        self._real = file_digests._hash_segment

    def __call__(self, *task: object) -> bytes:
        self.reached.set()
        assert self.open.wait(30)
        return self._real(*task)  # type: ignore[arg-type]


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    with mock.patch.object(file_digests, "_hash_segment", made):
        yield made
        made.open.set()


def test_weights_that_take_long_to_read_are_named_in_the_background_and_it_says_so_once(
    tmp_path: Path, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    live = live_of(served(write(tmp_path / "m")), patience_s=0)
    assert gate.reached.wait(30)
    assert live.now is None
    said = [
        record.getMessage()
        for record in caplog.records
        if "nothing is loaded or stored until that is done" in record.message
    ]
    assert len(said) == 1
    gate.open.set()
    assert live.wait(30)
    assert live.now == identify(served(tmp_path / "m"), NOWHERE)


def test_weights_that_change_while_they_are_read_are_not_what_was_read(tmp_path: Path, gate: Gate) -> None:
    live = live_of(served(write(tmp_path / "m")), patience_s=0)
    assert gate.reached.wait(30)
    live.changed("a test")
    changed = live.now
    gate.open.set()
    for thread in threading.enumerate():
        if thread.name == "kv-weights":
            thread.join(30)
    assert changed is not None and live.now is changed


def in_place(files: Path, _other: Path) -> None:
    patch(files / "model.safetensors", 1000)


def in_place_with_its_old_time(files: Path, _other: Path) -> None:
    status = (files / "model.safetensors").stat()
    patch(files / "model.safetensors", 1000)
    os.utime(files / "model.safetensors", ns=(status.st_atime_ns, status.st_mtime_ns))


def renamed_over(files: Path, other: Path) -> None:
    (other / "model.safetensors").replace(files / "model.safetensors")


def link_of_a_file_turned(files: Path, other: Path) -> None:
    (files / "model.safetensors").unlink()
    (files / "model.safetensors").symlink_to(other / "model.safetensors")


def link_of_the_directory_turned(files: Path, other: Path) -> None:
    link = files.parent / "current"
    link.unlink()
    link.symlink_to(other)


def directory_renamed(files: Path, other: Path) -> None:
    files.rename(files.parent / "retired")
    other.rename(files)


def one_more(files: Path, _other: Path) -> None:
    write(files, "model-2.safetensors", byte=9)


def one_less(files: Path, _other: Path) -> None:
    (files / "quantize_config.json").unlink()


def configuration(files: Path, _other: Path) -> None:
    (files / "config.json").write_text('{"rope_theta": 77.0}')


REPLACEMENTS = (
    in_place,
    in_place_with_its_old_time,
    renamed_over,
    link_of_a_file_turned,
    link_of_the_directory_turned,
    directory_renamed,
    one_more,
    one_less,
    configuration,
)


@pytest.mark.parametrize("is_draft", [False, True])
@pytest.mark.parametrize("replace", REPLACEMENTS)
def test_files_that_were_replaced_since_the_engine_loaded_them_name_nothing(
    replace: Callable[[Path, Path], None], is_draft: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine hashes minutes after it loaded; the old weights' KV must not get the new ones' name."""
    files, other = (write(tmp_path / name, byte=byte) for byte, name in enumerate(("m", "other")))
    for directory in (files, other):
        (directory / "config.json").write_text("{}")
        (directory / "quantize_config.json").write_text("{}")
    (tmp_path / "current").symlink_to(files)
    source = tmp_path / "current"
    model = served(write(tmp_path / "main"), [("draft", str(source))]) if is_draft else served(source)
    before = origins_of(sources_of(model))
    first = LiveWeights(model, before=before, memory=NOWHERE, patience_s=30)
    assert first.now == identify(model, NOWHERE), "nothing was replaced yet"
    replace(files, other)
    live = LiveWeights(model, before=before, memory=NOWHERE, patience_s=30)
    assert live.now is not None and live.now.revision.startswith("engine-")
    assert "changed while the engine loaded them: stored chunks live no longer" in caplog.text
    restarted = live_of(model, patience_s=30)
    assert restarted.now == identify(model, NOWHERE) != live.now, "which has loaded the new ones"


def test_files_that_are_replaced_before_they_were_read_name_nothing(tmp_path: Path, gate: Gate) -> None:
    """After the engine has looked at them, and while they are being hashed."""
    model = served(write(tmp_path / "m"))
    live = live_of(model, patience_s=0)
    assert gate.reached.wait(30)
    write(tmp_path / "m", byte=2)
    gate.open.set()
    assert live.wait(30)
    assert live.now is not None and live.now.revision.startswith("engine-")


def test_files_of_which_nothing_was_known_before_name_nothing(tmp_path: Path) -> None:
    live = LiveWeights(served(write(tmp_path / "m")), memory=NOWHERE, patience_s=30)
    assert live.now is not None and live.now.revision.startswith("engine-")


def test_a_configuration_that_is_replaced_later_does_not_name_what_was_computed_before(tmp_path: Path) -> None:
    write(tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text("{}")
    spaces = []
    for _ in range(2):
        live = live_of(served(tmp_path / "m"), patience_s=30)
        (tmp_path / "m" / "config.json").write_text('{"rope_theta": 77.0}')
        spaces.append(LiveKeySpace(live, kv_dtype="f", format_fingerprint="f", world=1, chain="c").now)
    assert None not in spaces and spaces[0] != spaces[1]


def test_a_branch_that_moved_while_the_engine_loaded_it_names_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = ["a" * 40, "b" * 40]
    here = commits[:1]
    monkeypatch.setattr(
        identity, "_hub_file", lambda name, revision, file="": tmp_path / f"models--org--m/snapshots/{here[0]}/c.json"
    )
    model = served("org/m")
    before = origins_of(sources_of(model))
    named = LiveWeights(model, before=before, memory=NOWHERE).now
    assert named is not None and named.revision == f"commit-{commits[0]}"
    here[0] = commits[1]
    moved = LiveWeights(model, before=before, memory=NOWHERE).now
    assert moved is not None and moved.revision.startswith("engine-")


def test_weights_in_a_directory_for_downloads_are_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's cache gets the configuration of a later commit at each start."""
    in_cache, in_directory = "b" * 40, "a" * 40
    monkeypatch.setattr(
        identity, "_hub_file", lambda *_: tmp_path / f"cache/models--org--m/snapshots/{in_cache}/config.json"
    )
    repository = tmp_path / "downloads" / "models--org--m"
    write(repository / "snapshots" / in_directory)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(in_directory)
    for downloads, commit in (("downloads", in_directory), ("nothing here", in_cache)):
        given = replace(served("org/m"), downloads=str(tmp_path / downloads))
        draft = replace(served(tmp_path), dummy_seed=1, beside=[Beside("draft", "org/m", None, given.downloads)])
        found, beside = identify(given, NOWHERE), identify(draft, NOWHERE)
        assert found == Weights("org/m", f"commit-{commit}")
        named = identify(replace(draft, beside=[Beside("draft", "org/m")]), NOWHERE)
        assert (beside == named) == (commit == in_cache)


def test_whoever_stops_waiting_stops_the_reading(tmp_path: Path, gate: Gate) -> None:
    stopped = threading.Event()
    stopped.set()
    gate.open.set()
    with pytest.raises(HashingStoppedError):
        identify(served(write(tmp_path / "m")), NOWHERE, stopped=stopped)


@pytest.mark.parametrize("source", ["org/name", "empty"])
def test_weights_that_cannot_be_known_have_a_name_of_this_engine_alone_and_it_says_so(
    tmp_path: Path, source: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A hub's name without a commit, which was the branch's name before; and a directory without weights."""
    if source == "empty":
        (tmp_path / "empty").mkdir()
        source = str(tmp_path / "empty")
    first, second = (live_of(served(source)) for _ in range(2))
    assert first.now is not None and second.now is not None
    assert first.now.revision != second.now.revision
    assert "live no longer than this engine" in caplog.text
    ranks = [live_of(served(source), engine="both ranks'").now for _ in range(2)]
    assert ranks[0] == ranks[1] != first.now


def test_an_engine_on_a_system_without_threads_starts_and_its_weights_have_a_name_of_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with threads_left():
        live = live_of(served(write(tmp_path / "m")))
    assert live.now is not None and live.now != identify(served(tmp_path / "m"), NOWHERE)
    assert "live no longer than this engine" in caplog.text


def test_each_change_is_another_name_and_the_same_on_every_rank(tmp_path: Path) -> None:
    write(tmp_path / "m")
    ranks = [live_of(served(tmp_path / "m"), engine="e", patience_s=30) for _ in range(2)]
    other = live_of(served(tmp_path / "m"), patience_s=30)
    assert ranks[0].now == ranks[1].now == other.now
    names = {ranks[0].now}
    for _ in range(3):
        for live in (*ranks, other):
            live.changed("a test")
        assert ranks[0].now == ranks[1].now
        names |= {ranks[0].now, other.now}
    assert len(names) == 7


def test_drafts_and_adapters_that_the_engine_starts_with_are_part_of_it(tmp_path: Path) -> None:
    write(tmp_path / "m"), write(tmp_path / "a", "adapter_model.safetensors")
    with_one = identify(served(tmp_path / "m", [("one", str(tmp_path / "a"))]), NOWHERE)
    assert with_one != identify(served(tmp_path / "m"), NOWHERE)
    patch(tmp_path / "a" / "adapter_model.safetensors", 1_234_567)
    assert identify(served(tmp_path / "m", [("one", str(tmp_path / "a"))]), NOWHERE) != with_one
    assert identify(served(tmp_path / "m", [("one", "hub/unknown")]), NOWHERE) is None


def test_a_draft_of_the_hub_is_the_commit_that_the_engine_was_told_to_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be the only one on this machine, and another than that of the hub's default branch if both are."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    write(tmp_path / "m")
    repository = tmp_path / "hub" / "models--org--draft"
    for branch, commit in (("tuned", "a" * 40), ("main", "b" * 40)):
        write(repository / "snapshots" / commit, "config.json")
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / branch).write_text(commit)
        if branch == "tuned":
            tuned = identify(served(tmp_path / "m", [("draft", "org/draft", "tuned")]), NOWHERE)
            assert tuned is not None
            assert identify(served(tmp_path / "m", [("draft", "org/draft", "a" * 40)]), NOWHERE) == tuned
    assert identify(served(tmp_path / "m", [("draft", "org/draft", "tuned")]), NOWHERE) == tuned
    assert identify(served(tmp_path / "m", [("draft", "org/draft")]), NOWHERE) not in (None, tuned)


class TestAdapters:
    @pytest.fixture
    def clock(self) -> HandClock:
        return HandClock()

    @pytest.fixture
    def adapters(self, clock: HandClock) -> Iterator[Adapters]:
        made = Adapters(NOWHERE, clock=clock)
        yield made
        made.close()

    @staticmethod
    def known(adapters: Adapters, number: int, name: str, path: Path | str) -> str | None:
        adapters.identity(number, name, str(path))
        assert adapters.wait(30)
        found = adapters.identity(number, name, str(path))
        assert not isinstance(found, Unsure)
        return found

    def test_files_are_read_by_a_thread_and_the_first_request_is_not_cached(
        self, adapters: Adapters, tmp_path: Path, gate: Gate
    ) -> None:
        write(tmp_path / "a")
        assert adapters.identity(1, "one", str(tmp_path / "a")) is None
        assert gate.reached.wait(30)  # while the thread is reading, nobody waits for it
        assert adapters.identity(1, "one", str(tmp_path / "a")) is None
        gate.open.set()
        assert adapters.wait(30)
        assert adapters.identity(1, "one", str(tmp_path / "a")) is not None

    @pytest.mark.parametrize("threads", [0, 1])
    def test_without_threads_it_is_known_later_and_nothing_is_raised(
        self, adapters: Adapters, tmp_path: Path, threads: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One thread reads what several would."""
        monkeypatch.setattr(file_digests, "_threads", lambda: 4)
        path = str(write(tmp_path / "a", "adapter_model.safetensors"))
        with threads_left(threads):
            assert adapters.identity(1, "a", path) is None
            assert adapters.wait(30)
        assert (adapters.identity(1, "a", path) is not None) == (threads == 1)
        assert adapters.wait(30)
        assert adapters.identity(1, "a", path) is not None

    def test_no_file_is_looked_at_on_the_callers_thread(self, adapters: Adapters, tmp_path: Path) -> None:
        """A network file system that hangs would stop the engine."""
        write(tmp_path / "a")
        callers = threading.get_ident()
        stats = os.stat

        def stat(*args: object, **kwargs: object) -> os.stat_result:
            assert threading.get_ident() != callers, "a file was looked at"
            return stats(*args, **kwargs)  # type: ignore[arg-type,call-overload,no-any-return]

        with mock.patch.object(os, "stat", stat):
            assert self.known(adapters, 1, "one", tmp_path / "a") is not None

    def test_an_adapter_is_its_bytes_its_scale_and_its_name(self, adapters: Adapters, tmp_path: Path) -> None:
        same = self.known(adapters, 1, "one", write(tmp_path / "a"))
        assert self.known(adapters, 2, "one", write(tmp_path / "b")) == same
        assert self.known(adapters, 3, "two", tmp_path / "b") != same
        patch(write(tmp_path / "c") / "model.safetensors", 150_000)
        (write(tmp_path / "d") / "adapter_config.json").write_text('{"lora_alpha": 8}')
        (write(tmp_path / "e") / "adapter_config.json").write_text('{"lora_alpha": 16}')
        others = {self.known(adapters, number, "one", tmp_path / name) for number, name in enumerate("cde", 4)}
        assert len(others | {same, None}) == 5

    def test_two_with_one_number_are_not_told_apart(
        self, adapters: Adapters, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The engine has one of them in its memory under that number, and takes it for both."""
        assert self.known(adapters, 1, "one", write(tmp_path / "a")) is not None
        assert self.known(adapters, 1, "two", write(tmp_path / "b")) is None
        assert adapters.identity(1, "one", str(tmp_path / "a")) is None
        assert "has the same number" in caplog.text
        assert self.known(adapters, 2, "two", tmp_path / "b") is not None

    def test_files_that_change_while_it_is_served_leave_it_without_a_name(
        self, adapters: Adapters, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The engine may compute with either: it reads them again whenever it has put the adapter away."""
        first = self.known(adapters, 1, "one", write(tmp_path / "a"))
        patch(tmp_path / "a" / "model.safetensors", 150_000)
        adapters.identity(1, "one", str(tmp_path / "a"))  # the answer of before, and another look
        assert adapters.wait(30)
        assert adapters.identity(1, "one", str(tmp_path / "a")) is None
        assert "changed while it was served" in caplog.text
        assert self.known(adapters, 2, "one", tmp_path / "a") not in (None, first)  # loaded anew

    def test_a_later_request_waits_for_a_look_at_the_files(
        self, adapters: Adapters, clock: HandClock, tmp_path: Path
    ) -> None:
        """The engine may have put the adapter away meanwhile, and be about to read it again."""
        path = str(write(tmp_path / "a"))
        first = self.known(adapters, 1, "one", path)
        clock.advance(0.9)
        assert adapters.identity(1, "one", path, "at once") == first
        assert adapters.wait(30)
        clock.advance(3600.0)
        assert adapters.identity(1, "one", path, "later") == Unsure()
        assert adapters.wait(30)
        clock.advance(60.0)  # a step that takes long
        assert adapters.identity(1, "one", path, "later") == first
        assert adapters.wait(30)
        clock.advance(3600.0)
        patch(tmp_path / "a" / "model.safetensors", 150_000)
        assert adapters.identity(1, "one", path, "after the change") == Unsure()  # before the look ends
        assert adapters.wait(30)
        assert adapters.identity(1, "one", path, "after the change") is None

    def test_a_look_that_takes_too_long_is_not_waited_for(
        self, adapters: Adapters, clock: HandClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = str(write(tmp_path / "a"))
        first = self.known(adapters, 1, "one", path)
        assert adapters.wait(30)
        go_on, look = threading.Event(), content_files

        def looking(source: Path) -> list[tuple[str, Path]]:
            assert go_on.wait(30)
            return look(source)

        monkeypatch.setattr(adapters_module, "content_files", looking)
        clock.advance(3600.0)
        assert adapters.identity(1, "one", path, "a") == Unsure()
        clock.advance(0.9)
        assert adapters.identity(1, "one", path, "a") == Unsure()
        clock.advance(0.2)
        assert adapters.identity(1, "one", path, "a") is None
        go_on.set()
        assert adapters.wait(30)
        assert adapters.identity(1, "one", path, "a") == first

    def test_an_engine_may_see_any_number_of_adapters_in_its_life(
        self, adapters: Adapters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A trainer serves each of its steps as another adapter. What was used longest ago is read anew."""
        monkeypatch.setattr(adapters_module, "_MAX_ADAPTERS", 4)
        paths = [write(tmp_path / str(number), byte=number) for number in range(10)]
        names = [self.known(adapters, number, "step", path) for number, path in enumerate(paths)]
        assert None not in names and len(set(names)) == len(names)
        assert [adapters.identity(number, "step", str(paths[number])) for number in (6, 7, 8, 9)] == names[6:]
        assert self.known(adapters, 10, "step", paths[0]) == names[0]
        assert adapters.identity(6, "step", str(paths[6])) is None  # it had to go, and is being read
        assert adapters.identity(8, "step", str(paths[8])) == names[8]

    def test_loaded_again_in_its_place_it_is_read_again(self, adapters: Adapters, tmp_path: Path) -> None:
        first = self.known(adapters, 1, "one", write(tmp_path / "a"))
        patch(tmp_path / "a" / "model.safetensors", 150_000)
        adapters.loaded_again(1, "one", str(tmp_path / "a"))
        assert adapters.wait(30)
        assert adapters.identity(1, "one", str(tmp_path / "a")) not in (None, first)

    def test_files_written_after_it_was_first_seen_may_not_be_what_was_loaded(
        self, adapters: Adapters, tmp_path: Path, gate: Gate
    ) -> None:
        write(tmp_path / "a")
        adapters.identity(1, "one", str(tmp_path / "a"))
        assert gate.reached.wait(30)
        patch(tmp_path / "a" / "model.safetensors", 150_000)
        gate.open.set()
        assert adapters.wait(30)
        assert adapters.identity(1, "one", str(tmp_path / "a")) is None

    def test_one_of_the_hub_is_its_commit_and_one_that_is_nowhere_this_engines(
        self, adapters: Adapters, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        def at(number: int, commit: str) -> str | None:
            file = tmp_path / "models--org--helper" / "snapshots" / commit / "adapter_config.json"
            with mock.patch.object(identity, "_hub_file", return_value=file):
                return self.known(adapters, number, "one", "org/helper")

        assert at(1, "a" * 40) == at(2, "a" * 40) != at(3, "b" * 40)
        assert at(1, "b" * 40) is None, "the engine may have loaded the newer commit since"
        here = self.known(adapters, 4, "one", "org/unknown")
        other = Adapters(NOWHERE)
        assert None not in (here, there := self.known(other, 4, "one", "org/unknown")) and here != there
        other.close()
        assert "live no longer than this engine" in caplog.text
