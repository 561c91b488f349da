"""To import this module refuses a vLLM that is not there or too old, before anything of it is imported."""

from kvcache.integrations.vllm.versions import check_version, installed_version

__all__ = ["VERSION"]

VERSION = installed_version()
check_version(VERSION)
