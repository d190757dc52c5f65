"""Small files that are ready as bytes: JSON, text, tokenizer files."""

from __future__ import annotations

from easyckpt_core.files.plan import FilePlan


class RawBytes:
    """The tree is the file's bytes."""

    def plan(self, tree: bytes, previous: FilePlan | None) -> FilePlan:
        return FilePlan(len(tree), ((0, tree),))
