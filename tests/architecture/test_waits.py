"""No test of the cache, its server or what connects engines waits without a deadline: one that hangs says nothing, and
keeps what runs it for ever."""

import ast
from pathlib import Path

PACKAGES = Path(__file__).parents[2] / "packages"
TESTS = [
    path
    for name in ("eviction", "tiers", "remote", "observe", "server", "cluster", "connect")
    for path in (PACKAGES / f"kv-{name}" / "tests").rglob("*.py")
]
BOUNDED_AT_THEIR_END = {
    ("test_redis_troubles.py", "self.listener.accept"),  # the listener is shut down by `close`
    ("test_trust.py", "self._listener.accept"),  # as above
    ("test_objects.py", "listener.accept"),  # has a timeout of its own
    ("test_lost_servers.py", "upgraded.accept"),
    ("test_fuzzed.py", "listener.accept"),
    ("test_directory_tables.py", "listener.accept"),
    ("test_directory_signatures.py", "stranger.accept"),  # somebody has connected
}
CACHES = ("served", "here", "there", "quiet", "Served()")
"""Whose `join` is a client's, not a thread's."""


def unbounded(tree: ast.AST) -> list[str]:
    return [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call) and is_unbounded(node)]


def is_unbounded(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    receiver, _, verb = name.rpartition(".")
    if receiver == "subprocess" and verb in ("run", "check_output", "check_call", "call"):
        return not any(keyword.arg == "timeout" for keyword in call.keywords)
    if not receiver or call.args or call.keywords:
        return False
    if verb == "join":
        return not receiver.endswith(CACHES)
    if verb == "read":
        return receiver.endswith(("stdout", "stderr"))
    return verb in ("wait", "communicate", "result", "readline", "readlines", "accept")


def test_every_wait_has_a_deadline() -> None:
    left = {(path.name, name) for path in TESTS for name in unbounded(ast.parse(path.read_text()))}
    assert left == BOUNDED_AT_THEIR_END


def test_what_would_hang_is_found() -> None:
    bounded = "served.join()\nt.join(5)\np.wait(1)\n','.join(x)\nsubprocess.run(x, timeout=1)\n"
    hanging = "t.join()\np.wait()\nsubprocess.run(x)\np.stdout.readline()\n"
    assert unbounded(ast.parse(bounded + hanging)) == ["t.join", "p.wait", "subprocess.run", "p.stdout.readline"]
