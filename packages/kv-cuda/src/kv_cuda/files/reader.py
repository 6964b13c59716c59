"""Reads for an engine's worker: a direct copier on a thread, as `kv_core.device.FileReader`.

The thread makes one read at a time and waits for its files, so that the engine does not. On a device its stream follows
what the engine has enqueued when a read is requested: until then, others may use the blocks.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from kv_core.errors import CopyFailed
from kv_core.format import ChunkFormat
from kv_core.outcome import LoadOutcome
from kv_core.transfer import FileExtent

from kv_cuda.copy.streams import make_queue
from kv_cuda.files.direct import make_direct_copier
from kv_cuda.layout import PagedLayout


@dataclass(slots=True)
class ThreadRead:
    """A read on the thread, as `kv_core.device.FileRead`."""

    outcomes: Sequence[LoadOutcome] = ()
    seconds: float = 0.0
    _ended: "Future[None]" = field(default_factory=Future)

    def done(self) -> bool:
        if self._ended.done():
            self.wait()
        return self._ended.done()

    def wait(self) -> None:
        if (error := self._ended.exception()) is not None:
            raise CopyFailed(f"reading files raised {type(error).__name__}: {error}") from error

    hold_engine = wait


class ThreadReader:
    """`kv_core.device.FileReader`. Its thread starts with the first read."""

    def __init__(
        self, layout: PagedLayout, tensors: Sequence[torch.Tensor], chunk_format: ChunkFormat, directory: Path
    ) -> None:
        """
        Raises:
            InputError: layout, tensors and format do not fit together.
            ConfigError: the system does not let this process lock memory for the staged path.
        """
        device = tensors[0].device
        self._copier = make_direct_copier(layout, tensors, chunk_format, directory)
        self._engines, self._own = make_queue(device), make_queue(device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-direct")

    def read(
        self,
        files: Sequence[FileExtent],
        block_ids: Sequence[int],
        *,
        block_tokens: int,
        first_token: int,
        last_token: int,
    ) -> ThreadRead:
        read = ThreadRead()
        self._engines.follow_current()
        blocks_are_free = self._engines.record()

        def run() -> None:
            if read._ended.done():
                return  # the executor keeps what it had no thread for, and the blocks are others' by now
            began_s = time.monotonic()
            try:
                with self._own.running():
                    self._own.follow(blocks_are_free)
                    carried = self._copier.load(
                        files, block_ids, block_tokens=block_tokens, first_token=first_token, last_token=last_token
                    )
                    carried.event.wait()
                read.outcomes, read.seconds = carried.outcomes, time.monotonic() - began_s
                read._ended.set_result(None)
            except BaseException as error:  # noqa: BLE001  # of any family: the engine's thread reports it
                read._ended.set_exception(error)

        try:
            self._thread.submit(run)
        except RuntimeError as error:  # the system has no more threads for us
            read._ended.set_exception(error)
        return read

    def close(self) -> None:
        self._thread.shutdown()
        self._copier.close()
