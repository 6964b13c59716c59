from kv_testing.fixtures import ending

__all__ = ["ending"]
