"""A core dump has no chunks in it, in whatever process that maps them, unless the settings say so."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from kv_server import launch
from kv_testing.cache_servers import join_at, settings_for
from kv_testing.service_contract import CHUNK_BYTES
from kv_tiers.build import build_local_cache
from kv_tiers.config import HostConfig
from kv_tiers.pool.core_dumps import chunk_memory
from kv_tiers.pool.host_pool import HostPool

MIB = 1 << 20


def flags_at(view: memoryview) -> set[str]:
    """What the kernel has for the mapping in this process that begins with this memory."""
    import numpy as np

    start = f"{np.frombuffer(view, np.uint8).ctypes.data:08x}-"
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    assert any(line.startswith(start) for line in lines)
    return set(next(line for line in lines if line.startswith("VmFlags:")).split()[1:])


@pytest.mark.parametrize("core_dump", [False, True])
def test_every_kind_of_pool_is_left_out(core_dump: bool, tmp_path: Path) -> None:
    name = f"dumped-{os.getpid()}"
    options = {"capacity_bytes": 8 * MIB, "core_dump": core_dump}
    configs = [HostConfig(**options), HostConfig(**options, name=name)]  # type: ignore[arg-type]
    for config, shared in [(configs[0], False), (configs[0], True), (configs[1], False)]:
        cache = build_local_cache(config, group_bytes=(MIB,), fingerprint="f", shared=shared)
        whole = memoryview(cache.pool.view.obj)  # with the directory of a named one
        assert ("dd" in flags_at(whole)) is not core_dump
        del whole
        cache.close()
    HostPool.unlink(name)
    server = launch(settings_for(tmp_path))
    client = join_at(server.socket, core_dump=core_dump)
    assert ("dd" in flags_at(client.pool.view)) is not core_dump
    client.close()
    server.stop()


def test_what_is_on_its_way_is_left_out() -> None:
    assert "dd" in flags_at(chunk_memory(CHUNK_BYTES))


# Writes a word into a pool of its own, of a server, and dumps core. The word is assembled, so that it is nowhere else.
DUMPS = """
import os, resource, sys
from pathlib import Path
from kv_core.testing import key_chain
from kv_testing.cache_servers import join_at
from kv_tiers.pool.host_pool import HostPool

resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
core_dump = sys.argv[2] == "True"
own = HostPool.anonymous("own", 1 << 20, 4, core_dump=core_dump)
cache = join_at(Path(sys.argv[1]), core_dump=core_dump)
lease = cache.begin_store(key_chain(1), "w")
at = lease.extents[0].offset
for view, word in ((own.view[:64], "nwo"), (cache.pool.view[at : at + 64], "derahs")):
    for number, letter in enumerate([*word[::-1], *"-prompt"]):
        for copy in range(3):
            view[copy * 20 + number] = ord(letter)
os.abort()
"""


@pytest.mark.parametrize("core_dump", [False, True])
def test_a_core_of_a_client_has_no_prompt(core_dump: bool, tmp_path: Path) -> None:
    pattern = Path("/proc/sys/kernel/core_pattern").read_text().strip()
    if "/" in pattern or "|" in pattern or resource.getrlimit(resource.RLIMIT_CORE)[1] == 0:
        pytest.skip("cores of this system are not written where the process is")
    server = launch(settings_for(tmp_path))
    command = [sys.executable, "-c", DUMPS, str(server.socket), str(core_dump)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    server.stop()
    assert done.returncode == -signal.SIGABRT, done.stderr
    (core,) = tmp_path.glob("core*")
    dumped = core.read_bytes()
    for word in (b"own-prompt", b"shared-prompt"):
        assert (word in dumped) is core_dump
