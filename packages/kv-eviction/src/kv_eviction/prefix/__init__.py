"""The prefix policy, the default: retain the chunks that are most likely to be used again, judged by their place in the
tree of prefixes.

segment.py   a node of the tree: what is known of chunks that were always used together
tree.py      the tree of prompts that share prefixes: where segments begin, branch and end
returns.py   how likely a segment is to be used again at which age, learnt while running; what retaining it is worth
queues.py    the choice: which segment loses its last chunk
policy.py    the three put together, as an `EvictionPolicy`

docs/eviction.md has a picture; docs/adr/0014-eviction.md has hit ratios and what this policy cannot do.
"""

from kv_eviction.prefix.policy import PrefixPolicy

__all__ = ["PrefixPolicy"]
