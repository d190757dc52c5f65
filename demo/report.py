"""The demo's report: what happened as JSON, and as a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

_PLAIN, _KILLED, _ALERT = "#8a8f98", "#1f6feb", "#d1242f"


def write_report(outcome: dict[str, Any], folder: Path) -> None:
    """Write report.json and loss.png."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(outcome, indent=1) + "\n")
    figure, (losses, clock) = plt.subplots(
        2, 1, figsize=(10, 8), height_ratios=(3, 2), layout="constrained"
    )
    _draw_losses(losses, outcome)
    _draw_clock(clock, outcome)
    figure.savefig(folder / "loss.png", dpi=120)
    plt.close(figure)


def _draw_losses(axes: Axes, outcome: dict[str, Any]) -> None:
    plain, killed = outcome["undisturbed"], outcome["killed"]
    axes.plot(*_curve(plain), color=_PLAIN, linewidth=5, alpha=0.5, label="undisturbed job")
    axes.plot(*_curve(killed), color=_KILLED, linewidth=1.3, label="job with a killed worker")
    axes.axvline(outcome["killed_at"], color=_ALERT, linestyle="--", linewidth=1.2)
    axes.annotate(
        f"rank {outcome['killed_rank']} killed after step {outcome['killed_at']},\n"
        f"resumed at {outcome['resumed_at']} from {outcome['resumed_from']}",
        (outcome["killed_at"], 0.7),
        xycoords=("data", "axes fraction"),
        xytext=(6, 0),
        textcoords="offset points",
        verticalalignment="top",
        color=_ALERT,
    )
    snapshots = [event["step"] for event in outcome["events"] if event["event"] == "snapshot"]
    commits = [event["step"] for event in outcome["events"] if event["event"] == "committed"]
    transform = axes.get_xaxis_transform()
    axes.plot(
        snapshots,
        [0.012] * len(snapshots),
        "|",
        color=_KILLED,
        markersize=6,
        transform=transform,
        label=f"snapshot in host memory ({len(snapshots)})",
    )
    axes.plot(
        commits,
        [0.05] * len(commits),
        "^",
        color="#1a7f37",
        markersize=8,
        transform=transform,
        label=f"commit to storage ({len(commits)})",
    )
    equal = outcome["losses_equal"] and outcome["weights_equal"]
    axes.set_title(
        "Every loss and the final weights are equal, bit for bit"
        if equal
        else "The two jobs DIFFER"
    )
    axes.set_xlabel("step")
    axes.set_ylabel("training loss")
    axes.set_ylim(bottom=-0.06)
    axes.legend(loc="upper right", frameon=False)


def _draw_clock(axes: Axes, outcome: dict[str, Any]) -> None:
    for lines, color, width, label in (
        (outcome["undisturbed"], _PLAIN, 4.0, "undisturbed job"),
        (outcome["killed"], _KILLED, 1.5, "job with a killed worker"),
    ):
        start = lines[0]["time"]
        axes.plot(
            [line["time"] - start for line in lines],
            [line["step"] for line in lines],
            color=color,
            linewidth=width,
            alpha=0.6 if width > 2 else 1.0,
            label=label,
        )
    kill_seconds = outcome["kill_time"] - outcome["killed"][0]["time"]
    back_seconds = kill_seconds + outcome["seconds_to_first_new_step"]
    axes.axvspan(kill_seconds, back_seconds, color=_ALERT, alpha=0.15)
    axes.annotate(
        f"{outcome['seconds_to_first_new_step']:.1f} s from SIGKILL to the first new step",
        (0.98, 0.08),
        xycoords="axes fraction",
        horizontalalignment="right",
        color=_ALERT,
    )
    axes.set_xlabel("seconds since the first step")
    axes.set_ylabel("step")
    axes.legend(loc="upper left", frameon=False)


def _curve(lines: list[dict[str, Any]]) -> tuple[list[int], list[float]]:
    return [line["step"] for line in lines], [line["loss"] for line in lines]
