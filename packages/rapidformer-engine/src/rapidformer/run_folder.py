"""The folder of a run: where things are, and whether a run may go on in it."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rapidformer.config import RunConfig, flag
from rapidformer.errors import ResumeError

# Settings that do not change what is computed, so a run may go on with others.
_NEUTRAL = frozenset(
    {
        "save",
        "save_mem_interval",
        "save_storage_interval",
        "max_ckpt_num",
        "resume",
        "log_interval",
        "eval_interval",
        "nproc_per_node",
        "max_restarts",
        "num_workers",
        "dry_run",
    }
)


class RunFolder:
    """Paths below --save, and the configuration recorded there."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.config_path = self.path / "config.json"
        self.metrics_path = self.path / "metrics.json"
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model"
        self.cache = self.path / "cache"
        self.log = self.path / "log"

    def check(self, config: RunConfig, facts: Mapping[str, Any]) -> None:
        """Check that `config` may run here. Writes nothing.

        `facts` are what else decides the result: number of processes, hash of the data.

        Raises:
            ResumeError: --resume does not allow it; lists what differs from the recorded run.
        """
        if config.resume == "never":
            self._check_is_unused()
            return
        recorded = self.recorded()
        if recorded is None:
            if config.resume == "must":
                raise ResumeError(
                    f"--resume must: {self.path} holds no run to go on from; check --save, or give "
                    "--resume auto to start one"
                )
            return
        changes = _differences(recorded, _record(config, facts))
        if changes:
            raise ResumeError(
                f"--save {self.path} holds a run with another configuration:\n"
                + "\n".join(f"  {line}" for line in changes)
                + "\nGive the recorded values to go on with it, or another --save to start anew"
            )

    def record(self, config: RunConfig, facts: Mapping[str, Any]) -> None:
        """Write the configuration, for later runs to compare with. One rank only."""
        self.log.mkdir(parents=True, exist_ok=True)
        write_json(self.config_path, _record(config, facts))

    def recorded(self) -> dict[str, Any] | None:
        """Return the recorded configuration, or None where no run was."""
        return _read_json(self.config_path)

    def finished_metrics(self) -> dict[str, Any] | None:
        """Return the metrics of the finished run in this folder, or None."""
        metrics = _read_json(self.metrics_path)
        return metrics if metrics is not None and metrics.get("finished") else None

    def _check_is_unused(self) -> None:
        if self.checkpoints.is_dir() and any(self.checkpoints.iterdir()):
            raise ResumeError(
                f"--resume never: {self.checkpoints} is not empty, and nothing is deleted for you; "
                "remove that folder yourself, give another --save, or --resume auto to go on"
            )


def write_json(path: Path, value: Any) -> None:
    """Write `value` so that readers see the old file or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    with temporary.open("w") as file:
        json.dump(value, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as err:
        raise ResumeError(
            f"{path} is damaged ({err}); move it away or give another --save"
        ) from err
    return value if isinstance(value, dict) else {}


def _record(config: RunConfig, facts: Mapping[str, Any]) -> dict[str, Any]:
    settings = {name: value for name, value in asdict(config).items() if name not in _NEUTRAL}
    for name in ("pretrained_model_name_or_path", "data_path", "user_script"):
        if settings[name] is not None and os.path.exists(settings[name]):
            settings[name] = os.path.realpath(settings[name])
    return json.loads(json.dumps({"settings": settings, "facts": dict(facts)}))


def _differences(recorded: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    lines = []
    for part, name_of in (("settings", flag), ("facts", lambda name: name.replace("_", " "))):
        old, new = recorded.get(part, {}), wanted[part]
        for name in sorted(old.keys() | new.keys()):
            if old.get(name) != new.get(name):
                lines.append(
                    f"{name_of(name)}: recorded {_shown(old.get(name))}, "
                    f"now {_shown(new.get(name))}"
                )
    return lines


def _shown(value: Any) -> str:
    return "not set" if value in (None, []) else str(value)
