"""What our hooks cost a step of vLLM's that has nothing for us: everybody decodes, and no chunk is completed.

The real connector under vLLM's real scheduler, with as many requests as said, each in the middle of its decoding; the
step's plan is made, read and answered over and over. The limit is 30 us a step, for the scheduler's half and a worker's
together.

    make bench-hooks [JSON=1]
"""

import sys
from pathlib import Path

# This folder holds a copy.py, which must not stand in for the standard library's.
sys.path[0] = str(Path(__file__).parents[1])
sys.path.append(str(Path(__file__).parents[1] / "tests" / "engine"))

import statistics
import tempfile
import time
from typing import Any

from kv_testing.tiny import TinyLlama
from oracle import Oracle
from vllm.v1.outputs import KVConnectorOutput

from benchmarks._report import Row, parser, report

LIMIT_S = 30e-6
REQUESTS = (1, 8, 32, 128)
STEPS = 3000


def main() -> int:
    options = parser(__doc__ or "").parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = str(TinyLlama().write(Path(directory)))
        rows = [row for requests in REQUESTS for row in measured(model, requests)]
    return report(rows, options.json)


def measured(model: str, requests: int) -> list[Row]:
    oracle = Oracle(model, blocks=20 * requests + 600, sequences=requests, batch_tokens=max(96, 2 * requests))
    for number in range(requests):
        oracle.submit(f"r{number}", [3 + number] * 70, 200)
    for _ in range(40 + requests):  # until all of them decode
        oracle.step()
    scheduler, worker = oracle.scheduler.connector, oracle.worker
    assert worker is not None
    made: list[Any] = []
    build = scheduler.build_connector_meta

    def build_connector_meta(output: Any) -> Any:
        made.append((output, output.kv_connector_block_state))
        return build(output)

    scheduler.build_connector_meta = build_connector_meta
    oracle.step()
    del scheduler.build_connector_meta
    ((output, block_state),) = made
    output.kv_connector_block_state = block_state
    for request in oracle.scheduler.requests.values():
        request.num_computed_tokens -= 1  # as it stands when the hook is called
    samples: dict[str, list[float]] = {"scheduler": [], "worker": []}
    for _ in range(STEPS):
        start = time.perf_counter()
        metadata = scheduler.build_connector_meta(output)
        planned = time.perf_counter()
        answer = worker_step(worker, metadata)
        answered = time.perf_counter()
        scheduler.update_connector_output(answer)
        scheduler.has_pending_push_work()
        scheduler.get_kv_connector_stats()
        scheduler.take_events()
        samples["scheduler"].append(time.perf_counter() - answered + planned - start)
        samples["worker"].append(answered - planned)
    medians = {half: statistics.median(taken) for half, taken in samples.items()}
    medians["both halves"] = sum(medians.values())
    for request in list(oracle.scheduler.requests):
        oracle.abort(request)
    oracle.close()
    return [
        Row(f"{requests} decoding: {half}", seconds * 1e6, "us", LIMIT_S * 1e6, seconds / LIMIT_S, 1.0, True)
        for half, seconds in medians.items()
    ]


def worker_step(worker: Any, metadata: Any) -> KVConnectorOutput:
    """A step of the worker's, as vLLM's model runner has it."""
    worker.handle_preemptions(metadata)
    worker.bind_connector_metadata(metadata)
    worker.start_load_kv(None)
    worker.wait_for_save()
    results = worker.get_transfer_results(set())
    made = KVConnectorOutput(
        finished_sending=results.finished_sending,
        finished_recving=results.finished_recving,
        failed_recving=results.failed_recving,
    )
    made.invalid_block_ids = worker.get_block_ids_with_load_errors()
    made.kv_connector_stats = worker.get_kv_connector_stats()
    made.kv_connector_worker_meta = worker.build_connector_worker_meta()
    worker.clear_connector_metadata()
    return made


if __name__ == "__main__":
    sys.exit(main())
