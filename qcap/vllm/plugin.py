"""Entry point ``vllm.general_plugins``: makes the connector's name known, in every process, once."""

from __future__ import annotations


def register() -> None:
    """Register ``QcapConnector``, so that ``--kv-transfer-config '{"kv_connector": "QcapConnector", ...}'`` finds it. Idempotent."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "QcapConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("QcapConnector", "qcap.vllm.connector", "QcapConnector")
