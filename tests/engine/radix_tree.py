"""A router's tree, Dynamo's own, in the environment that `scripts/setup.sh dynamo` makes: run by tests, never imported.

A line of JSON in: what a worker says in vLLM's events, or a prompt. A line out for each prompt: how many of its blocks
the tree finds; for "blocks", those that it has.
"""

import json
import sys

from dynamo._core import RadixTree, compute_block_hash_for_seq

WORKER = 7


def main() -> None:
    tree, number = RadixTree(), 0
    for line in sys.stdin:
        said = json.loads(line)
        match said:
            case {"prompt": tokens, "block": block}:
                scores = tree.find_matches(compute_block_hash_for_seq(tokens, block)).scores
                print(scores.get((WORKER, 0), 0), flush=True)
                continue
            case "blocks":
                stored = [json.loads(event)["event"]["data"]["stored"] for event in tree.dump_tree_as_events()]
                print(json.dumps([block["block_hash"] for one in stored for block in one["blocks"]]), flush=True)
                continue
            case "gone":
                tree.remove_worker(WORKER)
                continue
            case {"removed": blocks}:
                data = {"removed": {"block_hashes": blocks}}
            case {"stored": blocks, "parent": parent, "tokens": tokens, "block": block}:
                hashes = compute_block_hash_for_seq(tokens, block)
                named = [{"block_hash": b, "tokens_hash": h} for b, h in zip(blocks, hashes, strict=True)]
                data = {"stored": {"parent_hash": parent, "blocks": named}}
        number += 1
        # Raises where a block is removed that is not there, or stored below one that is not.
        tree.apply_event(WORKER, json.dumps({"event_id": number, "data": data}).encode())


if __name__ == "__main__":
    main()
