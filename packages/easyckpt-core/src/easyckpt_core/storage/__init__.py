"""Durable places for committed steps."""

from easyckpt_core.storage.local import LocalStorage, Storage, open_storage

__all__ = ["LocalStorage", "Storage", "open_storage"]
