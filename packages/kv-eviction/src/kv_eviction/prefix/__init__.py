"""The prefix policy, the default: keep the chunks that save the most prefill, by the rule that does so at present.

returns.py   how soon chunks of each class return, learnt from a sample; what keeping one is worth
segments.py  the tree of prompts that share prefixes; which segment loses its last chunk, by one of four rules
policy.py    the same by the best rule, which small caches of the sample show

docs/eviction.md has a picture; docs/adr/0014-eviction.md has what it saves and what it cannot do.
"""

from kv_eviction.prefix.policy import PrefixPolicy

__all__ = ["PrefixPolicy"]
