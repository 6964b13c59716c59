"""The prefix policy, the default: keep what is most likely to be used again, judged by its place in the tree of
prefixes.

segment.py   a node of the tree: what is known of chunks that were always used together
tree.py      the tree of prompts that share prefixes: where segments begin, branch and end
returns.py   how likely something comes back at which age, learnt while running; what keeping it is worth
queues.py    the choice: which segment loses its last chunk
policy.py    the three put together, as an `EvictionPolicy`

docs/eviction.md has a picture; docs/adr/0008-the-prefix-policy.md has hit ratios and what this policy cannot do.
"""

from kv_tiers.eviction.prefix.policy import PrefixPolicy

__all__ = ["PrefixPolicy"]
