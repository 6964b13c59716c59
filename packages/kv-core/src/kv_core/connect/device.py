"""The worker half's interface to the engine's memory."""

from collections.abc import Sequence
from typing import Protocol

from kv_core.extent import HostExtent
from kv_core.transfer import TransferPlan


class CopyEvent(Protocol):
    """The completion of a copy."""

    def done(self) -> bool:
        """True once the bytes have arrived.

        Raises:
            CopyFailed: they never will.
        """

    def wait(self) -> None:
        """Return when the bytes have arrived.

        Raises:
            CopyFailed: they never will.
        """

    def hold_engine(self) -> None:
        """Order what the engine enqueues from now on after the arrival of the bytes. The caller goes on, unless the
        engine has no queue: then this is `wait`.
        """


class DeviceCopier(Protocol):
    """Copies between host extents and the engine's paged cache. One for each group and worker.

    A call that raises has left nothing under way.
    """

    @property
    def is_queued(self) -> bool:
        """Whether copies are enqueued on a device, and pools prepared for it."""

    @property
    def stores_behind(self) -> bool:
        """Whether a store may continue after the call that starts it, so that its blocks have to be held. False: it is
        complete when `store` returns."""

    def attach(self, pool: str, view: memoryview) -> None:
        """Make the host pool called `pool` known, and pin it where the device wants that. The view is writable."""

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
    """A store whose layers are gathered as the engine computes them. It keeps what it copies between alive."""

    @property
    def layers(self) -> int:
        """How many there are."""

    def gather(self, layers: Sequence[int]) -> CopyEvent:
        """Gather these layers of every chunk of the plan, each computed by what the engine has enqueued so far."""


class LayerwiseCopier(DeviceCopier, Protocol):
    """A copier that says of each layer when it is there, and takes each as it comes."""

    def prepare(self, extents: Sequence[HostExtent]) -> None:
        """Make all ready that copies of these need beside their plan, so that it cannot be missing then.

        Raises:
            ConfigError: the system does not let this process lock so much memory.
            InputError: the pool is not attached.
        """

    def load_layers(self, plan: TransferPlan) -> Sequence[CopyEvent]:
        """Like `load`, layer by layer: the events of the first layer, the second and so on, in order of completion."""

    def store_layers(self, plan: TransferPlan) -> LayerwiseStore | None:
        """Begin a store of which no layer is computed yet; nothing is read before `LayerwiseStore.gather` asks for it.

        None: such a plan gains nothing by it, or cannot be taken apart: `store` it once all layers are computed.

        Raises:
            InputError: as for `load`.
        """
