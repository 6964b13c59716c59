"""Route by prefix with kv-core alone: send a prompt to the replica that already holds most of it.

A router needs no engine, no tensors and no cache: it remembers which digests it sent where. It runs on the standard
library and xxhash.
"""

from kv_core import ChainScheme, digests_of

SCHEME = ChainScheme(chunk_tokens=4)  # a real one has 256, as the replicas' caches do

SYSTEM_PROMPT = [101, 7, 7, 12, 40, 41, 42, 43]
PROMPTS = {
    "first question": [*SYSTEM_PROMPT, 900, 901, 902, 903],
    "its follow-up": [*SYSTEM_PROMPT, 900, 901, 902, 903, 77, 78, 79, 80],
    "another question": [*SYSTEM_PROMPT, 500, 501, 502, 503],
    "another topic": [5, 5, 5, 5, 6, 6, 6, 6],
}


def held_chunks(digests: list[bytes], held: set[bytes]) -> int:
    """How many leading chunks a replica has. A digest names its whole prefix, so the first miss ends the count."""
    for count, digest in enumerate(digests):
        if digest not in held:
            return count
    return len(digests)


def main() -> None:
    replicas: dict[str, set[bytes]] = {"left": set(), "right": set()}
    for name, tokens in PROMPTS.items():
        digests = digests_of(SCHEME, tokens)
        # Most chunks held wins; among equals, the replica that holds least.
        chosen = max(replicas, key=lambda replica: (held_chunks(digests, replicas[replica]), -len(replicas[replica])))
        reused = held_chunks(digests, replicas[chosen])
        replicas[chosen].update(digests)
        print(f"{name:17} → {chosen:5}  {reused} of {len(digests)} chunks are there already")

    # The same prompt under a tenant's salt shares nothing with anyone.
    salted = digests_of(SCHEME, PROMPTS["first question"], root=SCHEME.root(salt="tenant-7"))
    print(f"{'the first, salted':17} →        {held_chunks(salted, set().union(*replicas.values()))} of {len(salted)}")


if __name__ == "__main__":
    main()
