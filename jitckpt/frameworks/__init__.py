"""Frameworks whose unchanged programs are protected: one file each, behind the contract of protection.py."""

import importlib
from typing import Any

ADAPTERS = ("accelerate", "deepspeed", "lightning", "megatron", "torchtitan", "transformers")


def __getattr__(name: str) -> Any:
    # A module that names a framework imports it no sooner than it is asked for.
    if name not in ADAPTERS:
        raise AttributeError(f"module 'jitckpt.frameworks' has no attribute {name!r}")
    return importlib.import_module(f"jitckpt.frameworks.{name}")
