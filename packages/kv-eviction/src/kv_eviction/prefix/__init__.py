"""The prefix policy, the default: keep the chunks that save the most prefill, by the rule that does so at present.

segment.py   a node of the tree: what is known of chunks that were always used together
tree.py      the tree of prompts that share prefixes: where segments begin, branch and end
absent.py    what is remembered of chunks that are not held
returns.py   how soon chunks of each class return, learnt from a sample; what keeping one is worth
order.py     the choice: which segment loses its last chunk, by one of four rules
segments.py  these put together, as an `EvictionPolicy` by a given rule
judge.py     which rule is best: each runs a small cache of the sample
policy.py    the same by the best rule

docs/eviction.md has a picture; docs/adr/0014-eviction.md has what it saves and what it cannot do.
"""

from kv_eviction.prefix.policy import PrefixPolicy

__all__ = ["PrefixPolicy"]
