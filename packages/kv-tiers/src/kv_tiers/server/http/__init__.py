"""The server over HTTP: a status page, metrics, and a few operations for operators.

It lives on a thread of its own inside `kv-server`, with a loop of its own, so that nothing here delays the relay: what
only the relay's thread may touch is asked of it between two requests (`relay`), and what takes long is a job on another
thread (`jobs`). Starlette and uvicorn (`pip install 'kv-tiers[http]'`) are imported by the modules that need them, and
only when HTTP is asked for. docs/http.md is for its users.
"""
