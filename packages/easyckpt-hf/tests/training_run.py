"""One training run of a tiny model, as a real process: plain or wrapped, killed or not.

    python training_run.py '{"output_dir": "out", "kill_at": 5}'
    python training_run.py --serve

The second form reads requests from stdin and forks a process for each run, because importing
transformers takes longer than a run. It has not imported EasyCkpt: every wrapped run does.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import sys
import traceback
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

# 28 examples in batches of 4: an epoch has 7 steps, and step 10 is in the middle of the second.
ARGUMENTS = {
    "use_cpu": True,
    "max_steps": 10,
    "save_steps": 4,
    "per_device_train_batch_size": 4,
    "logging_steps": 1,
    "learning_rate": 1e-3,
    "disable_tqdm": True,
    "report_to": "none",
    "seed": 1,
    "dataloader_pin_memory": False,
    "average_tokens_across_devices": False,
}


class Script(TrainerCallback):
    """Follows a run, and kills it before the step after `kill_at`."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.first_step: int | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.first_step is None:
            self.first_step = state.global_step + 1
        if self.is_due(args, state):
            if self.options.get("kills_keeper"):
                kill_keeper(args.output_dir, newest=self.options["kill_at"])
            os.kill(os.getpid(), signal.SIGKILL)

    def is_due(self, args: Any, state: Any) -> bool:
        return (
            state.global_step == self.options.get("kill_at")
            and args.process_index == self.options.get("kill_rank", 0)
            and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        )


def kill_keeper(output_dir: str, *, newest: int) -> None:
    """End the keeper by SIGKILL once it has committed the newest step that is due on storage."""
    from pathlib import Path

    from easyckpt_core.testing import events, keeper_pids, wait_until

    due = newest - newest % int(os.environ["TEST_SAVE_STEPS"])
    wait_until(lambda: any(e.get("step") == due for e in events(Path(output_dir))
                           if e["event"] == "committed"))  # fmt: skip
    for pid in keeper_pids(Path(output_dir)):
        os.kill(pid, signal.SIGKILL)


class Linear(torch.nn.Module):
    """A model that transformers did not make."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 16)
        self.dropout = torch.nn.Dropout(0.1)
        self.head = torch.nn.Linear(16, 2)

    def forward(self, input_ids: Any, labels: Any) -> dict[str, Any]:
        logits = self.head(self.dropout(self.embedding(input_ids).mean(1)))
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def make_model(kind: str) -> torch.nn.Module:
    if kind == "gpt2":
        return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=50))
    if kind == "module":
        return Linear()
    config = BertConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        vocab_size=50,
        num_labels=2,
    )
    return BertForSequenceClassification(config)


def make_examples(kind: str) -> list[dict[str, Any]]:
    numbers = random.Random(0)
    ids = [[numbers.randrange(50) for _ in range(8)] for _ in range(28)]
    return [{"input_ids": row, "labels": row if kind == "gpt2" else row[0] % 2} for row in ids]


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{number}": number for number in range(49)} | {"[UNK]": 49}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


def digest(model: torch.nn.Module) -> str:
    data = b"".join(tensor.detach().numpy().tobytes() for tensor in model.state_dict().values())
    return hashlib.sha256(data).hexdigest()


def run(options: dict[str, Any]) -> None:
    """Train as `options` say and write what came of it to `options["result"]`."""
    torch.set_num_threads(1)
    set_seed(0)
    kind = options.get("model", "bert")
    arguments = ARGUMENTS | options.get("arguments", {})
    os.environ["TEST_SAVE_STEPS"] = str(arguments["save_steps"])
    script = Script(options)
    examples = make_examples(kind)
    trainer = Trainer(
        model=make_model(kind),
        args=TrainingArguments(output_dir=options["output_dir"], **arguments),
        train_dataset=examples,
        eval_dataset=examples[:8],
        data_collator=default_data_collator,
        processing_class=make_tokenizer(),
        callbacks=[script],
    )
    if options.get("wrapped", True):
        from easyckpt_hf import TrainerWrapper

        trainer = TrainerWrapper(trainer)
    trainer.train(resume_from_checkpoint=options.get("resume"))
    if trainer.args.process_index == 0:
        history = trainer.state.log_history
        result = {
            "digest": digest(trainer.model),
            "losses": [entry["loss"] for entry in history if "loss" in entry],
            "first_step": script.first_step,
        }
        with open(options["result"], "w") as file:
            json.dump(result, file)


class NoEasyCkpt:
    """Makes EasyCkpt impossible to import, as on a machine that does not have it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.startswith(("easyckpt", "aimaster")):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def run_forked(options: dict[str, Any]) -> None:
    """Be the forked process of one request."""
    os.environ.update(options.get("environment", {}))
    log_fd = os.open(options["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    if options.get("without_easyckpt"):
        assert not any(name.startswith("easyckpt") for name in sys.modules)
        sys.meta_path.insert(0, NoEasyCkpt())
    if "code" in options:
        os.chdir(options["output_dir"])
        exec(compile(options["code"], "<code>", "exec"), {"__name__": "__main__"})
    else:
        run(options)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def fork(options: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        run_forked(options)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def serve() -> None:
    """Answer each line, a list of the options of runs at the same time, with exit statuses."""
    for line in sys.stdin:
        pids = [fork(options) for options in json.loads(line)]
        statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(json.dumps(statuses), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve()
    else:
        run(json.loads(sys.argv[1]))
