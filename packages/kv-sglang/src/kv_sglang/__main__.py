"""`python -m kv_sglang flags`: the arguments that make SGLang use this cache."""

from kv_sglang.cli import main

raise SystemExit(main())
