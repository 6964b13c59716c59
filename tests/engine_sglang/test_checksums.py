"""What SGLang compares of a hand-over with `--disaggregation-enable-kv-checksum`."""

from kv_sglang.transfer import KVManager
from sglang.srt.disaggregation.common.conn import CommonKVManager


def test_sglang_does_not_compare_whole_pages() -> None:
    """It would fail every request whose prompt ends within a page: its checksum is also of the prefill engine's rows
    behind the prompt, which are another request's and are not handed over."""
    assert CommonKVManager.__new__(CommonKVManager).should_verify_kv_checksum("prefill:8998")
    assert not KVManager.__new__(KVManager).should_verify_kv_checksum("prefill:8998")
