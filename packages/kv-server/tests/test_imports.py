"""A client is small: it loads neither the cache that it asks, nor a tier, nor what serves HTTP."""

import subprocess
import sys

# What a client needs of this package beside its own modules: a clock, the start of a thread, the mapping of a pool and
# its pages, and records.
CLIENT = {
    "kv_tiers",
    "kv_tiers.clock",
    "kv_server.report",
    "kv_tiers.events",
    "kv_tiers.events.changes",
    "kv_tiers.events.events",
    "kv_remote",
    "kv_remote.messages",
    "kv_tiers.payload_sizes",
    "kv_tiers.pool",
    "kv_tiers.pool.core_dumps",
    "kv_tiers.pool.populated",
    "kv_server",
    "kv_server.connection",
    "kv_server.remote_cache",
    "kv_server.wire",
    "kv_tiers.threads",
    "kv_tiers.tier_state",
    "kv_observe",
    "kv_observe.chunk_state",
    "kv_observe.lookup_uses",
}


def modules_after(statement: str) -> set[str]:
    """Of this package and of what serves HTTP, in a fresh process."""
    code = (
        f"import sys; {statement}\n"
        "ours = 'kv_eviction', 'kv_tiers', 'kv_remote', 'kv_observe', 'kv_server', 'starlette', 'uvicorn', 'yaml'\n"
        "print(*[name for name in sys.modules if name.split('.')[0] in ours])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.split())


def test_a_client_loads_no_cache_no_tier_and_no_http() -> None:
    assert modules_after("import kv_server.remote_cache") == CLIENT
    assert modules_after("from kv_server import RemoteCache") == CLIENT


def test_what_a_package_exports_is_no_module_of_its_own() -> None:
    """A module that has the name of what is exported lazily would stand in for it, once it is loaded."""
    both = "from kv_server.process import launch as one; from kv_server import launch as two"
    assert "kv_server.process" in modules_after(f"{both}; assert one is two")
