"""Our lines are in vLLM's log at its default level, in whichever order a process loads the plugin and configures it."""

import os
import subprocess
import sys

import pytest

_PROCESS = """
import logging
from types import SimpleNamespace
from kv_core.errors import ConfigError
from kv_core.log import limited_logger
from kv_vllm.plugin import register

logging.getLogger("vllm").handlers.clear()
register()  # as in a process that has not read its configuration yet, or is forked from one
from vllm.config.logging import LoggingConfig
from vllm.logger import configure_logging
configure_logging(LoggingConfig())
from kv_vllm.connector import KVTiersConnector
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
transfer = SimpleNamespace(kv_connector_extra_config={"no such": "setting"}, engine_id="e")
try:
    KVTiersConnector(SimpleNamespace(kv_transfer_config=transfer), KVConnectorRole.SCHEDULER, None)
except ConfigError as refused:
    limited_logger("kv_connect.engine").info("refused: %s", refused)
"""


@pytest.mark.slow
def test_a_plugin_that_is_loaded_before_vllm_configures_its_log_is_heard() -> None:
    environ = {name: value for name, value in os.environ.items() if name != "VLLM_LOGGING_LEVEL"}
    done = subprocess.run(
        [sys.executable, "-c", _PROCESS], capture_output=True, text=True, timeout=120, check=True, env=environ
    )
    assert "INFO" in done.stdout and "refused: there is no setting" in done.stdout + done.stderr, done.stderr[-3000:]
