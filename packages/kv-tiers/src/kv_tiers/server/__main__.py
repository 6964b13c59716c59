"""`python -m kv_tiers.server` is `kv-server`."""

import sys

from kv_tiers.server.cli import main

if __name__ == "__main__":
    sys.exit(main())
