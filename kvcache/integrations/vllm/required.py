"""Importing this module refuses a missing or outdated vLLM before anything of vLLM is imported."""

from kvcache.integrations.vllm.versions import check_version, installed_version

__all__ = ["VERSION"]

VERSION = installed_version()
check_version(VERSION)
