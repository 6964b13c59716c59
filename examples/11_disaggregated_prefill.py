"""A proxy for disaggregated prefill: one engine computes the prompt, another one decodes.

It speaks vLLM's own protocol, so the proxies of vLLM's examples and of llm-d do as well. The prompt goes to a prefill
engine with max_tokens 1; what that answers in kv_transfer_params goes with the same prompt to a decode engine, which
loads what the first one stored (docs/disaggregated.md says how to start both).

    python 11_disaggregated_prefill.py --listen 127.0.0.1:8080 --prefill http://host-a:8000 --decode http://host-b:8000

Without arguments it shows what it does, with two engines that are made up.
"""

import argparse
import itertools
import json
import threading
from collections.abc import Sequence
from http.client import HTTPException, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

ASKS_FOR_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def post(url: str, body: dict[str, Any]) -> HTTPResponse:
    request = Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    answer = urlopen(request, timeout=600)
    assert isinstance(answer, HTTPResponse)
    return answer


class Proxy:
    """prefill, decode: the URLs of the engines of each kind, which take turns. One that is down loses its turn."""

    def __init__(self, prefill: Sequence[str], decode: Sequence[str]) -> None:
        self._engines = len(prefill), len(decode)
        self._prefill, self._decode = itertools.cycle(prefill), itertools.cycle(decode)

    def hand_over(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The body for the decode engine, once the prompt is computed. If no prefill engine does it, it is the same
        body, and the decode engine computes the prompt."""
        said = body.get("kv_transfer_params") or {}
        own = {"kv_tiers": said["kv_tiers"]} if "kv_tiers" in said else {}  # such as tags, which both engines must have
        first = body | {"max_tokens": 1, "stream": False, "kv_transfer_params": ASKS_FOR_PREFILL | own}
        if "max_completion_tokens" in first:
            first["max_completion_tokens"] = 1
        for name in ("stream_options", "min_tokens"):  # vLLM refuses them beside one token that is not streamed
            first.pop(name, None)
        for engine in itertools.islice(self._prefill, self._engines[0]):
            try:
                with post(engine + path, first) as answer:
                    params = json.load(answer).get("kv_transfer_params")
                return body | {"kv_transfer_params": params | own} if params else body
            except HTTPError as refused:
                print(f"{engine} does not compute the prompt beforehand: {refused}", flush=True)
                refused.close()
                if refused.code < 500:
                    break  # the others would refuse it, too
            except (OSError, HTTPException, ValueError) as error:
                print(f"{engine} does not compute the prompt beforehand: {error}", flush=True)
        return body

    def decode(self, path: str, body: dict[str, Any]) -> HTTPResponse | HTTPError | None:
        """A decode engine's answer, which may be an error; None: none answers."""
        for engine in itertools.islice(self._decode, self._engines[1]):
            try:
                return post(engine + path, body)
            except HTTPError as refused:
                return refused
            except (OSError, HTTPException) as error:
                print(f"{engine} does not answer: {error}", flush=True)
        return None

    def serve(self, host: str, port: int) -> ThreadingHTTPServer:
        """A server that is listening; `serve_forever` is the caller's to call."""
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                answer = proxy.decode(self.path, proxy.hand_over(self.path, body))
                if answer is None:
                    self.send_error(502, "no engine answers")
                    return
                with answer:
                    self.send_response(answer.status)
                    self.send_header("content-type", answer.headers["content-type"])
                    self.end_headers()
                    while part := answer.read1():  # as it comes: the answer may be a stream
                        self.wfile.write(part)

            def log_message(self, *_: object) -> None:
                return

        return ThreadingHTTPServer((host, port), Handler)


def demonstrate() -> None:
    """Two engines that say what they are asked for."""

    def engine(name: str) -> ThreadingHTTPServer:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                params = body["kv_transfer_params"]
                print(f"{name} is asked for {body['max_tokens']} tokens, and is told {json.dumps(params)}", flush=True)
                answer = {"choices": [{"text": f"by {name}"}]}
                if params["do_remote_decode"]:  # what kv-vllm answers
                    stored = {"remote_engine_id": name, "remote_num_tokens": len(body["prompt"])}
                    answer["kv_transfer_params"] = {"do_remote_prefill": True, "do_remote_decode": False, **stored}
                data = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                return

        return ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    engines = [engine("the prefill engine"), engine("the decode engine")]
    urls = [f"http://127.0.0.1:{server.server_port}" for server in engines]
    proxy = Proxy(urls[:1], urls[1:]).serve("127.0.0.1", 0)
    for server in (*engines, proxy):
        threading.Thread(target=server.serve_forever, daemon=True).start()
    with post(f"http://127.0.0.1:{proxy.server_port}/v1/completions", {"prompt": [7] * 600, "max_tokens": 8}) as answer:
        print(f"the client gets {json.load(answer)['choices'][0]['text']!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--listen", default="127.0.0.1:8080", metavar="HOST:PORT", help="default: 127.0.0.1:8080")
    parser.add_argument("--prefill", action="append", default=[], metavar="URL", help="repeat")
    parser.add_argument("--decode", action="append", default=[], metavar="URL", help="repeat")
    args = parser.parse_args()
    if not (args.prefill and args.decode):
        demonstrate()
        return
    host, _, port = args.listen.rpartition(":")
    Proxy(args.prefill, args.decode).serve(host, int(port)).serve_forever()


if __name__ == "__main__":
    main()
