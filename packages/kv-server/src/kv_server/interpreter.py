"""Python in a process of its own, with the modules of this one and none of the directory that we happen to be in.

`python -m` puts the current directory first: a file `token.py` there hides the standard library's, and in a directory
where others may write it is their code that runs. And a new interpreter knows nothing of the paths that this one was
given while it ran (pex, Bazel, zip files, `site.addsitedir`).
"""

import os
import sys
from collections.abc import Mapping
from typing import Final

# With -P nothing of the current directory is imported before this has set the path. An engine that was itself started
# with `python -m` has it in its path, as have all that it spawned; it is kept only where the environment or an
# installed package names it. What the environment has had added since this process began comes last.
_START: Final = """\
import os, runpy, sys
module, count = sys.argv[1], int(sys.argv[2])
given, own = sys.argv[3:3 + count], set(sys.path)
del sys.argv[1:3 + count]
try:
    here = os.path.realpath(os.getcwd())
except OSError:
    here = None
given = [path for path in given if path in own or os.path.realpath(path) != here]
sys.path[:] = given + [path for path in sys.path if path not in given]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""
_FLAGS: Final = {"ignore_environment": "-E", "no_user_site": "-s", "no_site": "-S"}


def module_command(module: str) -> list[str]:
    """The command that runs this module as `python -m` would; append its arguments. Start it with `environment`."""
    flags = [flag for name, flag in _FLAGS.items() if getattr(sys.flags, name)]
    paths = [os.path.abspath(path) for path in sys.path if isinstance(path, str) and path]  # "": wherever we are
    return [sys.executable, "-P", *flags, "-c", _START, module, str(len(paths)), *paths]


def environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """These variables, without directories in PYTHONPATH that depend on the current one."""
    cleaned = dict(environ)
    if "PYTHONPATH" in cleaned:
        paths = [path for path in cleaned["PYTHONPATH"].split(os.pathsep) if os.path.isabs(path)]
        cleaned["PYTHONPATH"] = os.pathsep.join(paths)
    return cleaned
