"""The trained model as a folder that other tools load."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

from torch import nn


def export_model(module: nn.Module, tokenizer: Any, folder: Path) -> str:
    """Write `module` (and `tokenizer`, unless None) to `folder` and return the weights' SHA-256.

    In Hugging Face format if the module can, else as model.safetensors alone. An export that
    is there is replaced when the new one is complete. One rank only.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(6)}.tmp")
    temporary.mkdir()
    try:
        save_pretrained: Any = getattr(module, "save_pretrained", None)
        if save_pretrained is not None:
            save_pretrained(temporary)
        else:
            from safetensors.torch import save_model

            save_model(module, str(temporary / "model.safetensors"))
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        digest = sha256_of(temporary / "model.safetensors")
        if folder.exists():
            old = folder.with_name(f".{folder.name}.{secrets.token_hex(6)}.old")
            os.rename(folder, old)
            os.rename(temporary, folder)
            shutil.rmtree(old)
        else:
            os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return digest


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, or an empty string if it is not there (sharded weights)."""
    if not path.exists():
        return ""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
