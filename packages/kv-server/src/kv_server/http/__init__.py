"""The server over HTTP, for operators: a status page, metrics, an API.

It runs on its own thread inside `kv-server`, with its own event loop, so that nothing here delays the serving thread.
What only the serving thread may touch is submitted to it between two requests (`relay`); what takes long is a job on
another thread (`PrefixJobs`). Starlette and uvicorn (`pip install 'kv-server[http]'`) are imported only by the modules
that need them, and only if HTTP is enabled. docs/http.md is the user's page.
"""
