"""The wrapped Trainer is the Trainer: what it is, what it refuses, and what training gives."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from transformers import (
    EarlyStoppingCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from easyckpt_core import ConfigurationError, UnsupportedError
from easyckpt_core.testing import keeper_pids
from easyckpt_hf import TrainerWrapper


class FlippedLoss(Trainer):
    """A Trainer as users write them."""

    def compute_loss(self, model, inputs, **kwargs):
        inputs["labels"] = 1 - inputs["labels"]
        return super().compute_loss(model, inputs, **kwargs)


def same(trainer):
    return trainer


class StepCounter(TrainerCallback):
    def __init__(self):
        self.num_steps = 0

    def on_step_end(self, args, state, control, **kwargs):
        self.num_steps += 1


@pytest.fixture
def make_trainer(training_run, tmp_path):
    """Make a Trainer in this process."""

    def make(kind=Trainer, callbacks=(), **arguments):
        settings = training_run.ARGUMENTS | {"max_steps": 2} | arguments
        arguments_kind = (
            Seq2SeqTrainingArguments if issubclass(kind, Seq2SeqTrainer) else TrainingArguments
        )
        return kind(
            model=training_run.make_model("module"),
            args=arguments_kind(output_dir=str(tmp_path / "run"), **settings),
            train_dataset=training_run.make_examples("module"),
            eval_dataset=training_run.make_examples("module")[:8],
            callbacks=list(callbacks),
        )

    return make


@pytest.mark.parametrize("kind", [Trainer, Seq2SeqTrainer, FlippedLoss])
def test_the_wrapped_trainer_is_the_same_object_with_its_own_class(make_trainer, kind):
    trainer = make_trainer(kind)
    before = dict(vars(trainer))
    wrapped = TrainerWrapper(trainer)
    assert wrapped is trainer
    assert isinstance(wrapped, kind)
    assert isinstance(wrapped, TrainerWrapper)
    assert type(wrapped).__name__ == f"EasyCkpt{kind.__name__}"
    assert {name: vars(wrapped)[name] for name in before} == before


def test_an_overridden_loss_is_the_one_that_is_trained(make_trainer):
    losses = []
    for wrap, kind in [(TrainerWrapper, FlippedLoss), (same, FlippedLoss), (same, Trainer)]:
        set_seed(0)
        trainer = wrap(make_trainer(kind))
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]


def test_other_trainers_of_the_class_stay_plain(make_trainer):
    TrainerWrapper(make_trainer(FlippedLoss))
    assert not isinstance(make_trainer(FlippedLoss), TrainerWrapper)


def test_wrapping_twice_is_harmless(make_trainer):
    once = TrainerWrapper(make_trainer(), save_mem_interval=5)
    kind = type(once)
    twice = TrainerWrapper(once)
    assert twice is once
    assert type(twice) is kind
    assert twice.save_mem_interval == 5
    twice.train()
    assert twice.state.global_step == 2


def test_callbacks_added_before_and_after_are_called(make_trainer):
    before, after = StepCounter(), StepCounter()
    trainer = TrainerWrapper(make_trainer(callbacks=[before]))
    trainer.add_callback(after)
    trainer.train()
    assert (before.num_steps, after.num_steps) == (2, 2)


def test_train_can_be_called_again(make_trainer, steps_in, tmp_path):
    trainer = TrainerWrapper(make_trainer())
    trainer.train()
    trainer.args.max_steps = 4
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 4
    assert steps_in(tmp_path / "run") == [2, 4]
    assert keeper_pids(tmp_path) == []


def test_something_else_than_a_trainer_is_refused():
    with pytest.raises(ConfigurationError, match=r"TrainerWrapper got a str"):
        TrainerWrapper("trainer")


# -- refusals --------------------------------------------------------------------------------------

EVALUATED = {"eval_strategy": "steps", "eval_steps": 4}


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("load_best_model_at_end=True", EVALUATED | {"load_best_model_at_end": True}),
        (
            "save_strategy='best'",
            EVALUATED | {"save_strategy": "best", "metric_for_best_model": "loss"},
        ),
        ("save_only_model=True", {"save_only_model": True}),
        (
            "metric_for_best_model with save_total_limit",
            EVALUATED | {"metric_for_best_model": "loss", "save_total_limit": 2},
        ),
    ],
)
def test_an_unsupported_argument_is_refused_by_name(make_trainer, name, arguments):
    with pytest.raises(UnsupportedError) as caught:
        TrainerWrapper(make_trainer(**arguments))
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("name", "attribute", "value"),
    [
        ("DeepSpeed", "is_deepspeed_enabled", True),
        ("FSDP", "is_fsdp_enabled", True),
        ("PEFT adapters", "model.peft_config", {"default": None}),
        ("save_pretrained rewrites", "model._weight_conversions", ["conversion"]),
        ("save_pretrained rewrites", "model.hf_quantizer", "quantizer"),
        ("push_to_hub=True", "args.push_to_hub", True),
    ],
)
def test_an_unsupported_state_is_refused_by_name(make_trainer, name, attribute, value):
    # What these leave on a Trainer: the libraries that would do it are not installed here.
    trainer = make_trainer()
    owner, _, last = attribute.rpartition(".")
    setattr(getattr(trainer, owner) if owner else trainer, last, value)
    with pytest.raises(UnsupportedError, match=name):
        TrainerWrapper(trainer)


@pytest.mark.parametrize("method", ["_save_checkpoint", "_save", "save_model"])
def test_a_class_with_its_own_way_to_save_is_refused(make_trainer, method):
    kind = type("Custom", (FlippedLoss,), {method: lambda self, *args, **kwargs: None})
    with pytest.raises(UnsupportedError, match=f"its own {method}"):
        TrainerWrapper(make_trainer(kind))


def test_what_became_unsupported_after_wrapping_is_refused_by_train(make_trainer, tmp_path):
    trainer = TrainerWrapper(make_trainer())
    trainer.args.save_only_model = True
    with pytest.raises(UnsupportedError, match="save_only_model"):
        trainer.train()
    assert not (tmp_path / "run" / ".easyckpt").exists()


@pytest.mark.parametrize("text", ["0", "-1", "often", "1.5", "", "\u00b2"])
def test_a_bad_interval_in_the_environment_is_refused(make_trainer, monkeypatch, text):
    monkeypatch.setenv("EASYCKPT_SAVE_MEM_INTERVAL", text)
    with pytest.raises(ConfigurationError, match="EASYCKPT_SAVE_MEM_INTERVAL"):
        TrainerWrapper(make_trainer())


@pytest.mark.parametrize("interval", [0, -1, 1.5])
def test_a_bad_interval_in_the_call_is_refused(make_trainer, interval):
    with pytest.raises(ConfigurationError, match="save_mem_interval"):
        TrainerWrapper(make_trainer(), save_mem_interval=interval)


# -- training --------------------------------------------------------------------------------------


def test_training_is_undisturbed_bit_for_bit(plain, wrapped):
    assert wrapped.outcome.losses == plain.outcome.losses
    assert len(set(plain.outcome.losses)) == 10
    assert wrapped.outcome.digest == plain.outcome.digest


def test_nothing_is_left_after_a_normal_end(train, tmp_path):
    train(tmp_path / "run")
    assert keeper_pids(tmp_path) == []
    assert not train.runtime_folder.exists() or not any(train.runtime_folder.iterdir())
    assert not list(train.temporary_folder.iterdir())
    assert not list((tmp_path / "run").glob(".easyckpt/staging/*"))


@pytest.mark.parametrize("recomputes", [False, True])
def test_save_total_limit_keeps_the_newest(train, tmp_path, steps_in, recomputes):
    arguments = {"save_steps": 2, "save_total_limit": 2, "gradient_checkpointing": recomputes}
    train(tmp_path / "run", arguments=arguments)
    assert steps_in(tmp_path / "run") == [8, 10]


def test_a_negative_save_total_limit_keeps_all_as_for_the_trainer(make_trainer, steps_in, tmp_path):
    TrainerWrapper(make_trainer(save_steps=1, save_total_limit=-1)).train()
    assert steps_in(tmp_path / "run") == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        ({"save_strategy": "epoch"}, [7, 10]),
        ({"save_strategy": "no"}, []),
        ({"save_steps": 0.5}, [5, 10]),
    ],
)
def test_save_strategy_decides_what_reaches_storage(
    train, plain, tmp_path, steps_in, arguments, steps
):
    outcome = train(tmp_path / "run", arguments=arguments)
    assert steps_in(tmp_path / "run") == steps
    assert outcome.digest == plain.outcome.digest


def test_the_best_step_is_recorded_as_by_the_trainer(make_trainer, tmp_path):
    states = []
    for wrap in (same, TrainerWrapper):
        trainer = wrap(
            make_trainer(
                eval_strategy="steps", eval_steps=1, save_steps=1, metric_for_best_model="loss"
            )
        )
        trainer.add_callback(EarlyStoppingCallback(early_stopping_patience=5))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.train()
        states.append(trainer.state)
    assert states[1].best_model_checkpoint is not None
    assert states[1].best_model_checkpoint == states[0].best_model_checkpoint
    assert Path(states[1].best_model_checkpoint).is_dir()
