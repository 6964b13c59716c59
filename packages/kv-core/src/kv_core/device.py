"""The worker half's interface to the engine's memory."""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from kv_core.errors import KVError
from kv_core.outcome import LoadOutcome
from kv_core.transfer import FileExtent, HostExtent, TransferPlan


class CopyEvent(Protocol):
    """The completion of a copy. Query it through `kv_connect.halves.copies`, which interprets exceptions."""

    def done(self) -> bool:
        """True once the bytes have arrived.

        Raises:
            CopyFailed: they never will, and the copy reads and writes nothing any more.
        """

    def wait(self) -> None:
        """Return when the bytes have arrived.

        Raises:
            CopyFailed: as for `done`.
        """

    def hold_engine(self) -> None:
        """Make everything that the engine enqueues from now on run after the bytes have arrived. Returns at once,
        unless the engine has no queue: then this is `wait`.
        """


class DeviceCopier(Protocol):
    """Copies between host extents and the engine's paged cache. One for each group and worker.

    A call that raises has left no copy in flight.
    """

    @property
    def is_queued(self) -> bool:
        """Whether copies are enqueued on a device, and pools prepared for it."""

    @property
    def stores_behind(self) -> bool:
        """Whether a store may continue after the call that starts it, so that its blocks have to be held. False: it is
        complete when `store` returns."""

    def attach(self, pool: str, view: memoryview) -> None:
        """Register the host pool called `pool`, and pin it where the device requires that. The view is writable."""

    def load(self, plan: TransferPlan) -> CopyEvent:
        """Host to device: scatter every copy's bytes to its slots. Tokens that the plan does not name are untouched.

        Raises:
            InputError: the plan names a slot or a byte outside the cache, the pool or the chunk; nothing was copied.
        """

    def store(self, plan: TransferPlan) -> CopyEvent:
        """Device to host: gather every copy's slots into its extent.

        Raises:
            InputError: as for `load`.
        """


class LayerwiseStore(Protocol):
    """A store whose layers are gathered as the engine computes them. It keeps the memory at both ends alive."""

    @property
    def layers(self) -> int:
        """Number of layers."""

    def gather(self, layers: Sequence[int]) -> CopyEvent:
        """Gather these layers of every chunk of the plan, each computed by what the engine has enqueued so far."""


class LayerwiseCopier(DeviceCopier, Protocol):
    """A copier that reports when each layer has arrived, and stores each layer as it is computed. It takes all of a
    step's plans at once; what inherits from this takes one after the other."""

    def load_each(self, plans: Sequence[TransferPlan]) -> Iterable[CopyEvent | KVError]:
        """`load` each of these plans, which the copies end in the order of. Of one that is refused its error, and the
        others are loaded. Nothing has begun before the iteration.
        """
        return (_tried(self.load, plan) for plan in plans)

    def store_each(self, plans: Sequence[TransferPlan]) -> Iterable[CopyEvent | KVError]:
        """`store` each of these plans, likewise."""
        return (_tried(self.store, plan) for plan in plans)

    def prepare(self, extents: Sequence[HostExtent]) -> None:
        """Prepare everything that copies of these extents need besides their plan, so that they cannot lack it later.

        Raises:
            ConfigError: the system does not let this process lock so much memory, or the device has too little left.
            InputError: the pool is not attached.
        """

    def load_layers(self, plan: TransferPlan) -> Sequence[CopyEvent]:
        """Like `load`, layer by layer: the events of the first layer, the second and so on, in order of completion."""

    def store_layers(self, plan: TransferPlan) -> LayerwiseStore | None:
        """Begin a store before any of its layers is computed; nothing is read before `LayerwiseStore.gather`.

        None: the plan gains nothing by this, or cannot be split into layers: `store` it once all layers are computed.

        Raises:
            InputError: as for `load`.
        """


def _tried(copy: Callable[[TransferPlan], CopyEvent], plan: TransferPlan) -> CopyEvent | KVError:
    try:
        return copy(plan)
    except KVError as error:
        return error


class FileRead(CopyEvent, Protocol):
    """A read of chunks from files to blocks. It ends well even if chunks could not be read: see `outcomes`."""

    @property
    def outcomes(self) -> Sequence[LoadOutcome]:
        """By chunk, once it is done. The blocks of a chunk that is not `Loaded` are unspecified."""

    @property
    def seconds(self) -> float:
        """How long it took, without its wait for others."""


class FileReader(Protocol):
    """Reads chunks from a tier's files straight into the blocks of one group of layers, one read after the other."""

    def read(
        self,
        files: Sequence[FileExtent],
        block_ids: Sequence[int],
        *,
        block_tokens: int,
        first_token: int,
        last_token: int,
    ) -> FileRead:
        """Begin to fill the slots of the prompt's tokens `first_token … last_token` (excluding the last), once what the
        engine has enqueued so far no longer uses them.

        files: the chunks that these tokens belong to, with their checksums. block_ids: the prompt's blocks.
        """

    def close(self) -> None:
        """Wait for reads in progress and release everything."""
