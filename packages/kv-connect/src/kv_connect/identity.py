"""The identity of a model: two different models never share a key space, and two engines with the same model do.

A model's name is not enough: a local directory is overwritten by the next training run, a name on a hub moves with its
branch, and a changed rope or dtype changes every byte of KV. A key space therefore contains the hub's name and commit,
or a digest of all bytes of the weights; a digest of the model's `config.json`; and whatever the engine was configured
to override in it. None of this depends on the engine's version or on the library that reads configurations. If neither
commit nor files are found, and after weights were updated in place, the identity is unique to this engine, and what is
stored under it is found for as long as this engine lives.

Two engines may store different numbers for the same model (another order of rotary halves, say), and no configuration
reveals it. Chunks are therefore shared between engines only for architectures for which a test has shown that both
engines store the same. For any other, the engine's name is part of the key space.
"""

import hashlib
import json
import re
import secrets
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from kv_core.keys import KeySpace
from kv_core.log import limited_logger
from kv_tiers.threads import start_thread

from kv_connect.file_digests import (
    DigestMemory,
    FileState,
    HashingStoppedError,
    content_digest,
    content_files,
    default_memory,
)

_log = limited_logger(__name__)

SHARED_ARCHITECTURES: Final = frozenset({"LlamaForCausalLM"})
"""Architectures for which `tests/engine_sglang` shows that vLLM and SGLang store the same KV, byte for byte up to
rounding."""

_ADAPTER: Final = "adapter_config.json"
"""The adapter's configuration: its scaling, and the layers that it changes."""
_TRANSIENT = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype"})
_SNAPSHOT = re.compile(r"[/\\]models--([^/\\]+)[/\\]snapshots[/\\]([0-9a-f]{40})(?=[/\\]|$)")
_BY_LENGTH: Final = ("longrope", "long_factor", "dynamic")
"""Words in configurations of rotations that depend on the longest sequence the engine accepts. longrope was formerly
called "su"; then only its factors reveal it."""

_QUANTISED: Final = ("quantization_", "quant_method", "compression_config")
"""Words in configurations of quantised weights."""


@dataclass(frozen=True, slots=True)
class Beside:
    """Weights besides the model's that determine the KV: a draft's, or an adapter's.

    source: a directory, or a hub's name.
    revision: the hub's, None for its default.
    downloads: as of `ServedModel`.
    """

    name: str
    source: str
    revision: str | None = None
    downloads: str = ""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as an engine was configured to serve it.

    source: a directory, a file or a hub's name, as given.
    revision: the hub's, None for its default.
    computed_in: the dtype of the layers, as torch spells it.
    dummy_seed: of weights that the engine generates; None if it loads them.
    overrides: the user's changes of the model's configuration, quantisation included; nothing else.
    read_config: the configuration as the engine read it. It counts only if the model's own file is not found.
    beside: other weights that determine the KV: a draft's, and those of adapters that the engine's own prefix hashes
        identify only by name.
    downloads: the directory in which the engine was told to keep the hub's weights, where it looks first. Empty: the
        hub's cache, which always has the configuration.
    """

    engine: str
    source: str
    revision: str | None
    computed_in: str
    dummy_seed: int | None = None
    overrides: Mapping[str, object] = field(default_factory=dict)
    max_tokens: int = 0
    read_config: Mapping[str, object] = field(default_factory=dict)
    beside: Sequence[Beside] = ()
    downloads: str = ""


_UNIQUE: Final = "engine-"
"""Begins the revisions that are unique to an engine."""


@dataclass(frozen=True, slots=True)
class Weights:
    """The identity of a model's weights.

    revision: a commit, a digest of the weights, or a name that is unique to this engine.
    beside: a digest of the other weights that count, "" for none.
    """

    model: str
    revision: str
    beside: str = ""


@dataclass(frozen=True, slots=True)
class Configuration:
    """Everything besides the weights on which the bytes of KV depend.

    digest: 32 hex digits over it, the same for every engine.
    is_shared: engines that have all of it in common are known to compute the same KV.
    """

    digest: str
    is_shared: bool


def key_space(
    model: ServedModel,
    weights: Weights,
    *,
    kv_dtype: str,
    format_fingerprint: str,
    world: int,
    chain: str,
    configuration: Configuration | None = None,
    further_tags: Sequence[tuple[str, str]] = (),
) -> KeySpace:
    """The key space of an engine: all that must match for KV bytes to be interchangeable, besides the tokens.

    configuration: as it was read when the engine started; None: it is read now.
    """
    configuration = _configuration(model) if configuration is None else configuration
    tags = [("computed-in", model.computed_in), ("config", configuration.digest)]
    if weights.beside:
        tags.append(("beside", weights.beside))
    if not configuration.is_shared:
        tags.append(("engine", model.engine))
    return KeySpace(
        model=weights.model,
        revision=weights.revision,
        dtype=kv_dtype,
        format=format_fingerprint,
        world=world,
        chain=chain,
        tags=(*tags, *further_tags),
    )


@dataclass(frozen=True, slots=True)
class Origin:
    """The place that weights come from, as it is at one time.

    name, commit: of a hub; empty for files elsewhere.
    files: that count, by name: those of the weights, and `config.json`. Empty without weights.
    config: the state of `config.json`.
    """

    name: str = ""
    commit: str = ""
    files: tuple[tuple[str, FileState], ...] = ()
    config: FileState | None = None


Source = tuple[str, str | None, str]
"""A directory, a file or a hub's name; its revision; and where it is downloaded to, as of `ServedModel`."""
Origins = Mapping[Source, Origin]


def origins_of(sources: Iterable[Source]) -> Origins:
    """The places of these sources. Reads no content.

    Raises:
        OSError: a file cannot be examined.
    """
    return {source: _origin_of(*source) for source in sources}


def source_of(weights: ServedModel | Beside) -> Source:
    return weights.source, weights.revision, weights.downloads


def sources_of(model: ServedModel) -> list[Source]:
    """All weights that determine the KV."""
    return [source_of(model), *map(source_of, model.beside)]


class LiveWeights:
    """The identity of a running engine's weights: known at once or after their files have been read, and a new one when
    they are updated in place. Thread-safe; reading `now` costs nothing."""

    def __init__(
        self,
        model: ServedModel,
        *,
        before: Origins | None = None,
        engine: str = "",
        memory: DigestMemory | None = None,
        patience_s: float = 1.0,
    ) -> None:
        """Files that are not in `memory` are read by a thread.

        before: the origins of its weights before the engine began to load them. If any is another one now, or they
            are not known (None), it is not known which weights the engine has.
        engine: a text shared by this engine's processes only, if several of them must agree on the identity.
        memory: of digests of files; None for the user's own.
        patience_s: how long to wait for the thread here: it is enough for a small model.
        """
        self.model = model
        self._engine = engine or secrets.token_hex(8)
        self._memory = default_memory() if memory is None else memory
        self._lock = threading.Lock()
        self._settled = threading.Event()
        self._stopped = threading.Event()
        self.changes = 0
        """How often the weights may have changed since the start."""
        self.now: Weights | None = None
        """None while it is not known: then nothing may be loaded or stored."""
        self.configuration = _configuration(model)
        try:
            self._origins = origins_of(sources_of(model))  # after the configuration was read
            why = why_unsure(before, self._origins) if model.dummy_seed is None or model.beside else ""
        except OSError as error:
            self._origins, why = {}, str(error)
        if why:
            self._take(f"{_UNIQUE}{self._engine}-0")
            _log.warning("%s: stored chunks live no longer than this engine", why)
            return
        if _known_at_once(self._origins.values(), self._memory):
            self._identify()
            return
        refused = start_thread(threading.Thread(target=self._identify, name="kv-weights", daemon=True))
        if refused:
            self._take(f"{_UNIQUE}{self._engine}-0")
            _log.warning(
                "the files of %s are not read, because there can be no thread for that (%s): stored chunks live no "
                "longer than this engine",
                model.source,
                refused,
            )
        elif not self._settled.wait(patience_s):
            _log.info(
                "the files of %s are being read, once, to identify its weights: nothing is loaded or stored until "
                "that is done",
                model.source,
            )

    def wait(self, timeout_s: float) -> bool:
        """Wait until the identity is known."""
        return self._settled.wait(timeout_s)

    def changed(self, why: str) -> None:
        """Give the engine's weights a unique identity from now on: they have changed in an unknown way."""
        with self._lock:
            self.changes += 1
            self._take(f"{_UNIQUE}{self._engine}-{self.changes}")
        _log.warning(
            "%s: the weights of %s may have changed, so chunks stored before are no longer found, and chunks stored "
            "from now on live no longer than this engine",
            why,
            self.model.source,
        )

    def close(self) -> None:
        """Stop reading files."""
        self._stopped.set()

    def _identify(self) -> None:
        began = time.monotonic()
        try:
            weights = identify(self.model, self._memory, origins=self._origins, stopped=self._stopped)
        except HashingStoppedError:
            return
        except Exception as error:  # noqa: BLE001  # our own thread: the weights are then unknown, which is logged
            _log.warning("the files of %s cannot be read: %s", self.model.source, error)
            weights = None
        with self._lock:
            if self.changes:
                return  # they have changed meanwhile
            if weights is not None:
                self.now = weights
                self._settled.set()
            else:
                self._take(f"{_UNIQUE}{self._engine}-0")
        if weights is None:
            _log.warning(
                "the weights of %s are identified neither by a commit nor by files on this machine: stored chunks "
                "live no longer than this engine",
                self.model.source,
            )
        else:
            _log.info("the weights of %s are %s (%.1f s)", weights.model, weights.revision, time.monotonic() - began)

    def _take(self, revision: str) -> None:
        self.now = Weights("local" if _is_local(self.model) else self.model.source, revision)
        self._settled.set()


class LiveKeySpace:
    """The key space of a running engine. Thread-safe; reading `now` costs next to nothing."""

    def __init__(
        self,
        weights: LiveWeights,
        *,
        kv_dtype: str,
        format_fingerprint: str,
        world: int,
        chain: str,
        tags: tuple[tuple[str, str], ...] = (),
    ) -> None:
        """tags: further ones, by name."""
        self.weights = weights
        self._build_space = partial(
            key_space,
            weights.model,
            kv_dtype=kv_dtype,
            format_fingerprint=format_fingerprint,
            world=world,
            chain=chain,
            configuration=weights.configuration,
            further_tags=tags,
        )
        self._last: tuple[Weights | None, KeySpace | None] = (None, None)
        self._of_another: tuple[Weights, KeySpace] | None = None

    @property
    def now(self) -> KeySpace | None:
        """The same object as long as the weights are the same; None while they are not known."""
        weights = self.weights.now
        known_weights, space = self._last
        if weights is not known_weights:
            space = self._build_space(weights) if weights is not None else None
            self._last = (weights, space)
            if space is not None:  # `kv keys --space` needs it
                _log.info("the key space is %s, of %d shards", space.fingerprint.hex(), space.world)
        return space

    def handed_over(self, revision: str) -> KeySpace | None:
        """The key space of what another engine of this model hands over to this one.

        revision: of the other engine's weights. If neither commit nor files identify the weights of both, the other's
        name for them counts, because only the user can know that they are the same. Otherwise it is this engine's own
        key space.
        """
        own_weights = self.weights.now
        if own_weights is None or not (own_weights.revision.startswith(_UNIQUE) and revision.startswith(_UNIQUE)):
            return self.now
        weights, cached = replace(own_weights, revision=revision), self._of_another
        if cached is None or cached[0] != weights:
            cached = self._of_another = weights, self._build_space(weights)
        return cached[1]


def identify(
    model: ServedModel,
    memory: DigestMemory,
    *,
    origins: Origins | None = None,
    stopped: threading.Event | None = None,
) -> Weights | None:
    """The identity of these weights: a hub's name and commit, or a digest of all files. None: it cannot be determined.

    The hub's name is used even if an engine was given the directory in which the hub's cache has it. Any other
    directory is identified by its content alone, not by its path or name.

    origins: of its sources; None: the current ones.

    Raises:
        OSError: a file cannot be read.
        FilesChangedError: one is not as in `origins` any more, or changes meanwhile.
        HashingStoppedError: `stopped` was set.
    """
    origins = origins_of(sources_of(model)) if origins is None else origins
    origin = origins[source_of(model)]
    if model.dummy_seed is not None:
        name, revision = model.source, f"dummy-{model.dummy_seed}"
    elif origin.commit:
        name, revision = origin.name, f"commit-{origin.commit}"
    elif origin.files:
        name, revision = "local", "weights-" + content_digest(origin.files, memory, stopped=stopped)
    else:
        return None
    extra_contents = []
    for extra in model.beside:
        content = _content_of(extra.source, origins[source_of(extra)], memory, stopped)
        if content is None:
            return None
        extra_contents.append(f"{extra.name}@{content}")
    return Weights(name, revision, _digest({"beside": sorted(extra_contents)}) if extra_contents else "")


def why_unsure(before: Origins | None, now: Origins) -> str:
    """Why it is not known which weights an engine has that loaded them in between; empty: it is."""
    if before is None:
        return "nothing was known of the model's files before the engine loaded them"
    for source, origin in now.items():
        earlier = before.get(source)
        if earlier is None:
            return f"nothing was known of the files of {source[0]} before the engine loaded them"
        if earlier != origin:
            return f"the files of {source[0]} changed while the engine loaded them"
    return ""


def content_of(path: str, memory: DigestMemory, *, stopped: threading.Event | None = None) -> str | None:
    """The identity of a LoRA adapter: a digest of all bytes of its files, or its commit on the hub;
    None if neither is found.

    Its name alone would serve the KV of whatever had that name before. Raises as `identify` does.
    """
    return _content_of(path, _origin_of(path, None), memory, stopped)


def _content_of(path: str, origin: Origin, memory: DigestMemory, stopped: threading.Event | None) -> str | None:
    if origin.commit:
        return f"{path}@{origin.commit}"
    return content_digest(origin.files, memory, stopped=stopped) if origin.files else None


def _origin_of(source: str, revision: str | None, downloads: str = "") -> Origin:
    path = Path(source)
    if source and path.exists():
        if (snapshot := _SNAPSHOT.search(source)) is not None:
            # A commit may hold several models, each in a directory or a file of its own.
            within = Path(source[snapshot.end() :].strip("/\\")).as_posix()
            name = snapshot[1].replace("--", "/", 1)
            return Origin(name if within == "." else f"{name}/{within}", snapshot[2])
        config = path / "config.json"
        return Origin(
            files=tuple((name, FileState.of(file)) for name, file in content_files(path)),
            config=FileState.of(config) if config.is_file() else None,
        )
    if not source:
        return Origin()
    found = _downloaded(source, revision, downloads) if downloads else None
    found = found or _hub_file(source, revision) or _hub_file(source, revision, _ADAPTER)
    snapshot = _SNAPSHOT.search(str(found))
    return Origin(source, snapshot[2]) if snapshot else Origin()


def _known_at_once(origins: Iterable[Origin], memory: DigestMemory) -> bool:
    """Whether the identity is known without reading a file."""
    states = {state for origin in origins for _, state in origin.files}
    return len(memory.recall(states)) == len(states)


def _is_local(model: ServedModel) -> bool:
    return Path(model.source).exists()


def described(model: ServedModel) -> str:
    """32 hex digits over what determines the bytes of KV besides the weights; the same for every engine."""
    return _configuration(model).digest


def _configuration(model: ServedModel) -> Configuration:
    raw = _own_config(model)
    described: dict[str, object] = {**(raw or model.read_config)}
    for name in _TRANSIENT:
        described.pop(name, None)
    architectures = raw.get("architectures") if raw else None
    # The user's settings, not the engine's defaults.
    overrides = {key: value for key, value in model.overrides.items() if value not in (None, {}, "")}
    # Each engine applies what the user changes in its own way, and has its own kernels for quantised weights.
    is_plain = (
        not overrides
        and model.dummy_seed is None
        and not any(word in json.dumps(described, default=str) for word in _QUANTISED)
    )
    is_known = (
        isinstance(architectures, list) and bool(architectures) and all(isinstance(n, str) for n in architectures)
    )
    text = json.dumps([described, overrides], default=str)
    if any(word in text for word in _BY_LENGTH):
        overrides["most_tokens"] = model.max_tokens  # its name in existing key spaces
    whole: dict[str, object] = {"config": described, "overrides": overrides, "own": raw is not None}
    is_shared = is_plain and is_known and set(architectures or ()) <= SHARED_ARCHITECTURES
    return Configuration(_digest(whole), is_shared)


def _own_config(model: ServedModel) -> dict[str, Any] | None:
    """The model's `config.json` on this machine."""
    path = Path(model.source)
    file = path / "config.json" if path.is_dir() else _hub_file(model.source, model.revision)
    try:
        config = json.loads(file.read_text(encoding="utf-8")) if file is not None else None
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def _hub_file(name: str, revision: str | None, file: str = "config.json") -> Path | None:
    """A file of the snapshot that was loaded, in the hub's cache on this machine; None if not there."""
    try:
        from huggingface_hub import try_to_load_from_cache

        path = try_to_load_from_cache(name, file, revision=revision)
    except (ImportError, ValueError):  # not installed; or not a name that a hub has
        return None
    return Path(path) if isinstance(path, str) else None


def _downloaded(name: str, revision: str | None, directory: str) -> Path | None:
    """The snapshot in this directory; None if not there."""
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, revision=revision, cache_dir=directory, local_files_only=True))
    except (ImportError, OSError, ValueError):  # not installed; not there; or not a name that a hub has
        return None


def _digest(described: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest()[:32]
