"""The plan of a run, as lines to read before it starts."""

from __future__ import annotations

from collections.abc import Iterator

from rapidformer_cli.preflight import Checked


def plan_lines(checked: Checked) -> list[str]:
    """Return the plan: model, data, batches, steps, learning rate, checkpoints, processes."""
    rows = [*_source_rows(checked), *_training_rows(checked), *_saving_rows(checked)]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows]
    notes = (*checked.batch.notes, *(checked.source.data.notes if checked.source else ()))
    return [*lines, *(f"note: {note}" for note in notes)]


def _source_rows(checked: Checked) -> Iterator[tuple[str, str]]:
    config, source = checked.config, checked.source
    if source is None:
        yield "script", str(config.user_script)
        return
    model = source.pretrained
    yield "task", str(config.task)
    yield (
        "model",
        f"{model.name} ({model.config.model_type}, inputs up to {model.seq_length} tokens)",
    )
    sizes = f"{len(source.data.train)} training rows, {len(source.data.validation)} for evaluation"
    yield "data", f"{config.data_path} ({sizes})"
    columns = source.columns
    shown = ", ".join(columns.labels[:6]) + (", ..." if len(columns.labels) > 6 else "")
    yield "columns", f"text {' + '.join(columns.text)}; label {columns.label}"
    yield "labels", f"{len(columns.labels)}: {shown}"


def _training_rows(checked: Checked) -> Iterator[tuple[str, str]]:
    config, batch, rate = checked.config, checked.batch, checked.learning_rate
    yield (
        "batch",
        f"{batch.global_size} = {batch.micro} samples x {batch.accumulation} accumulated x "
        f"{batch.data_parallel_size} processes",
    )
    if checked.total_steps is not None and rate is not None:
        epochs = "" if config.epochs is None else f" ({config.epochs} epochs)"
        yield "steps", f"{checked.total_steps}{epochs}"
        points = sorted({0, rate.warmup_steps, checked.total_steps // 2, checked.total_steps - 1})
        shown = ", ".join(f"{rate.at(step):.2e} at step {step + 1}" for step in points)
        yield "learning rate", f"{rate.style}: {shown}"
    yield "processes", f"{checked.num_processes} on this machine"


def _saving_rows(checked: Checked) -> Iterator[tuple[str, str]]:
    config = checked.config
    parts = []
    if config.save_mem_interval is not None:
        parts.append(f"memory every {_steps(config.save_mem_interval)}")
    if config.save_storage_interval is not None:
        parts.append(
            f"storage every {_steps(config.save_storage_interval)}, "
            f"newest {config.max_ckpt_num} kept"
        )
    off = "off (turn on with --save-mem-interval 1 --save-storage-interval 100)"
    yield "checkpoints", "; ".join(parts) or off
    yield "folder", str(checked.folder.path)


def _steps(interval: int) -> str:
    return "step" if interval == 1 else f"{interval} steps"
