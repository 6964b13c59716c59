"""This package's commands: `kv sim`, its part of `kv doctor`."""
