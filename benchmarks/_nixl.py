"""NIXL reading memory of another process, for the benchmarks that stand beside it. It takes no checksums."""

import importlib.util
import os
import subprocess
import sys
from contextlib import ExitStack
from typing import Any

import numpy as np

_OWNER = """
import sys
import numpy as np
from nixl._api import nixl_agent, nixl_agent_config
memory = np.frombuffer(np.random.default_rng(1).bytes(4096) * (int(sys.argv[1]) // 4096), np.uint8).copy()
agent = nixl_agent("owner", nixl_agent_config(backends=["UCX"]))
agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
print(memory.ctypes.data, agent.get_agent_metadata().hex(), flush=True)
sys.stdin.read()
"""


def is_installed() -> bool:
    return importlib.util.find_spec("nixl") is not None


class NixlReader:
    """Reads all memory of a process of its own."""

    def __init__(self, ending: ExitStack, pieces: int, nbytes: int, transports: str = "tcp") -> None:
        """pieces: as many transfers in one request, of so many bytes each. transports: UCX's; between processes of one
        host `all` copies straight out of the other's memory, and `tcp` is what two hosts without RDMA have."""
        os.environ |= {"UCX_TLS": transports, "NIXL_LOG_LEVEL": "ERROR"}
        from nixl._api import nixl_agent, nixl_agent_config

        owner = subprocess.Popen(
            [sys.executable, "-c", _OWNER, str(pieces * nbytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        ending.callback(owner.communicate)
        assert owner.stdout is not None
        line = next(words for words in map(str.split, owner.stdout) if len(words) == 2 and words[0].isdigit())
        self._memory = np.zeros(pieces * nbytes, np.uint8)
        # Whoever waits for a transfer makes its progress, so a thread of NIXL's would only be in the way.
        self._agent: Any = nixl_agent("reader", nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        self._agent.register_memory([(self._memory.ctypes.data, self._memory.nbytes, 0, "")], "DRAM")
        name = self._agent.add_remote_agent(bytes.fromhex(line[1]))
        here, there = (
            self._agent.get_xfer_descs([(start + piece * nbytes, nbytes, 0) for piece in range(pieces)], "DRAM")
            for start in (self._memory.ctypes.data, int(line[0]))
        )
        self._transfer = self._agent.initialize_xfer("READ", here, there, name)

    def close(self) -> None:
        self._agent.release_xfer_handle(self._transfer)
        del self._transfer, self._agent

    def read(self) -> None:
        state = self._agent.transfer(self._transfer)
        while state == "PROC":
            state = self._agent.check_xfer_state(self._transfer)
        assert state == "DONE", state
        assert self._memory[-1] or self._memory[-2] or self._memory[-3]
