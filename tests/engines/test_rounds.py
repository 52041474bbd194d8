import importlib.util
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, Timer
from support.module_batches import quiet_trainer
from support.training_runs import data_module, generation, module_of, trainer_with

from selfcal_lightning.callbacks.generation import SSCGeneration, check_can_regenerate, training_digest
from selfcal_lightning.data.store.manifest import StoreFingerprint
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.data.store.shards import SampleIndex
from selfcal_lightning.datamodules.questions import QuestionSource
from selfcal_lightning.engines.settings import EngineOptions
from selfcal_lightning.records import ModelIdentity, PromptIdentity, Question, QuestionSamples, Sample
from selfcal_lightning.training.model_parallel import AdapterModelParallelStrategy
from selfcal_lightning.training.rounds import adapter_folder, describe_round, describe_shift, question_targets

TWO = [QuestionSource("word_problems", split="train", limit=2)]
UNREADABLE = {"target": "p_true", "drop_none": False}  # two layers write no answers
ROUNDS = {"max_epochs": 2, "reload_dataloaders_every_n_epochs": 1}
SHALLOW = True


def digest(tiny_model: str, *, round: int = 1, **changes: dict[str, Any]) -> str:
    """The digest of a run of twelve steps; no store is there, and no loader is built."""
    module, data, trainer = (changes.get(part, {}) for part in ("module", "data", "trainer"))
    run = trainer_with(**{"max_epochs": -1, "max_steps": 12, **trainer})
    rows = data_module(tiny_model, Path("nowhere"), **{"regenerate_every_n_epochs": 1, **data})
    rows.trainer = run
    learner = module_of(tiny_model, **module)
    run._data_connector.attach_data(learner, datamodule=rows)
    return training_digest(run, learner, round=round)


OF_DATA = {"target": "consistency", "p_true": "raw", "drop_none": False, "num_samples": 3, "max_length": 300}
OF_DATA |= {"train": TWO, "eta": 0.5, "seed": 3, "num_buckets": 1, "batch_size": 2, "round_rule": "mix"}
CLIPPED = {"gradient_clip_val": 1.0}


@pytest.mark.parametrize(
    "changed",
    [
        *({"data": {name: value}} for name, value in OF_DATA.items()),
        {"data": {"train": [QuestionSource("word_problems", split="train", limit=8, offset=1)]}},
        {"data": {"regenerate_every_n_epochs": 2}},
        {"module": {"lr": 3e-3}},
        {"module": {"omega": 0.2}},
        {"trainer": CLIPPED},
        {"trainer": {**CLIPPED, "gradient_clip_algorithm": "value"}},
        {"trainer": {"precision": "bf16-mixed"}},
        {"trainer": {"max_steps": 11}},
        {"round": 2},
    ],
    ids=str,
)
def test_the_digest_of_a_training_changes_with_what_shapes_it(tiny_model: str, changed: dict[str, Any]) -> None:
    assert digest(tiny_model, **changed) != digest(tiny_model)


@pytest.mark.parametrize(
    "changed",
    [
        {"data": {"validation": []}},
        {"data": {"num_workers": 1, "validation_batch_size": 2, "token_budget": 10_000, "pad_to_multiple_of": 16}},
        {"data": {"batch_size": 2}, "trainer": {"accumulate_grad_batches": 2}},
        {"trainer": {"limit_val_batches": 0}},
        {"module": {"gradient_checkpointing": True, "recompute_above": 5, "attn_implementation": "sdpa"}},
    ],
    ids=str,
)
def test_the_digest_of_a_training_keeps_with_what_does_not(tiny_model: str, changed: dict[str, Any]) -> None:
    assert digest(tiny_model, **changed) == digest(tiny_model)


def test_the_digest_of_a_training_is_there_before_a_loader_is(tiny_model: str, tmp_path: Path) -> None:
    """With ``max_steps`` alone no loader is built before the first epoch."""
    digests: list[str] = []

    class Watch(Callback):
        def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
            digests.append(training_digest(trainer, pl_module, round=1))

        def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
            digests.append(training_digest(trainer, pl_module, round=1))

    short_run(tiny_model, tmp_path / "store", Watch(), max_epochs=-1, max_steps=1)
    assert len(digests) == 2
    assert digests[0] == digests[1]


NF4 = {"quantization": "nf4"}
EARLY = EarlyStopping("train/loss", check_on_train_epoch_end=True)


@pytest.mark.parametrize(
    ("module", "trainer", "engine", "message"),
    [
        ({"lora": None}, {}, {}, "`lora` settings"),
        ({}, {"strategy": AdapterModelParallelStrategy()}, {}, "FSDP2.*auto or ddp"),
        ({}, {"callbacks": [EarlyStopping("val/calibration/ECE")]}, {}, "EarlyStopping .*`check_on_train_epoch_end: f"),
        ({}, {"callbacks": [EARLY], "val_check_interval": 1}, {}, "EarlyStopping .*`check_on_train_epoch_end: false`"),
        ({}, {"callbacks": [Timer({"hours": 1}, interval="epoch")]}, {}, "Timer .*`interval: step`"),
        (NF4, {}, {"name": "vllm"}, r"`engine: transformers`.*got vllm"),
        (NF4, {}, {"dtype": "float16"}, r"`dtype: auto` \(or float32\)"),
    ],
)
def test_what_cannot_be_regenerated(
    tiny_model: str, module: dict[str, Any], trainer: dict[str, Any], engine: dict[str, Any], message: str
) -> None:
    run, learner = quiet_trainer(**ROUNDS, **trainer), module_of(tiny_model, **module)
    with pytest.raises(ValueError, match=message):
        check_can_regenerate(run, learner, EngineOptions(**engine), has_questions=True)


def test_it_is_refused_before_anything_is_sampled(tiny_model: str, tmp_path: Path) -> None:
    data = data_module(tiny_model, tmp_path / "store", regenerate_every_n_epochs=1, train=[])
    with pytest.raises(ValueError, match="`train` sources"):
        trainer_with(generation(), **ROUNDS).fit(module_of(tiny_model), datamodule=data)
    assert not (tmp_path / "store").exists()


class Stop(Callback):
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.should_stop or trainer.global_step >= 1


def short_run(
    tiny_model: str, store: Path, *callbacks: Callback, ckpt_path: Path | None = None, **settings: Any
) -> Trainer:
    """Train on two questions for one step an epoch, a new round after each."""
    module = module_of(tiny_model, **settings.pop("module", {}))
    changes = {**ROUNDS, "max_epochs": 1, "limit_val_batches": 0, **settings}
    trainer = trainer_with(generation(max_new_tokens=60), *callbacks, **changes)
    rows = {"train": TWO, "validation": [], "num_samples": 2, "total_tuples": 4, **UNREADABLE}
    data = data_module(tiny_model, store, regenerate_every_n_epochs=1, **rows)
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return trainer


def test_starting_a_finished_run_again_samples_nothing(tiny_model: str, tmp_path: Path) -> None:
    store, end = tmp_path / "store", tmp_path / "end.ckpt"
    short_run(tiny_model, store).save_checkpoint(end)
    short_run(tiny_model, store, ckpt_path=end)
    short_run(tiny_model, store, ckpt_path=end, max_epochs=-1, max_steps=1)
    assert not adapter_folder(store, 1).exists()


def test_a_stopped_run_samples_no_further_round(tiny_model: str, tmp_path: Path) -> None:
    store = tmp_path / "store"
    short_run(tiny_model, store, Stop(), max_epochs=3)
    assert not adapter_folder(store, 1).exists()
    short_run(tiny_model, store, Stop(), max_epochs=3, min_epochs=2)
    assert adapter_folder(store, 1).exists()
    assert not adapter_folder(store, 2).exists()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs the extra qlora")
def test_a_round_of_a_quantised_model_says_so(tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tmp_path / "store"
    short_run(tiny_model, store, max_epochs=2, module={"quantization": "nf4"})
    models = {number: record.fingerprint.model for number, record in SampleStore(store).manifest.rounds.items()}
    assert [models[number].quantization for number in (0, 1)] == [None, "nf4"]
    assert models[1].weights_sha256 == models[0].weights_sha256
    monkeypatch.setattr(SSCGeneration, "_start", Mock(side_effect=AssertionError("the engine must not be started")))
    short_run(tiny_model, store, max_epochs=2, module={"quantization": "nf4"})
    with pytest.raises(ValueError, match="in a training with other settings"):
        short_run(tiny_model, store, max_epochs=2)


Row = tuple[str | None, bool | None, float | None]


def index_of(path: Path, rounds: list[dict[str, list[Row]]]) -> list[SampleIndex]:
    """Write rounds of (answer, correct, P(True)) and return their indexes."""
    for round, questions in enumerate(rounds):
        fingerprint = StoreFingerprint(ModelIdentity("m"), PromptIdentity(), None, 0)
        store = SampleStore.create_or_open(path, fingerprint, num_samples=None, engine={}, round=round)
        with store.writer("a", round=round) as writer:
            for name, rows in questions.items():
                samples = tuple(
                    Sample(
                        name, i, round, "text", (1,), "length" if answer is None else "stop", answer, correct,
                        yes_mass=p, no_mass=None if p is None else 1.0 - p,
                    )
                    for i, (answer, correct, p) in enumerate(rows)
                )  # fmt: skip
                writer.append(QuestionSamples(Question(name, "gsm8k", ()), samples, "train", (1, 2)))
        store.join()
    return [SampleStore(path).index(round=round) for round in range(len(rounds))]


def test_shift_of_targets_by_hand(tmp_path: Path) -> None:
    rounds = [
        {
            "a": [("7", None, 0.75), ("8", None, 0.25)],  # targets .75, .25: mean .5, leader 7
            "b": [("1", None, 0.5), ("1", None, 0.5)],  # 1, 1
            "c": [("2", None, 0.5), ("3", None, 0.1), (None, None, 0.9)],  # 5/6, 1/6: mean .5, leader 2
            "d": [(None, None, 0.5), (None, None, 0.5)],  # no target
        },
        {
            "a": [("8", None, 0.8), ("8", None, 0.8), ("7", None, 0.4)],  # .8, .8, .2: mean .6, leader 8
            "b": [("1.0", None, 0.5), ("2", None, 0.5)],  # .5, .5: mean .5, leader 1 by another name
            "c": [("2", None, 0.5), ("2", None, 0.5)],  # 1, 1
            "d": [("5", None, 0.5), ("5", None, 0.5)],
        },
    ]
    earlier, later = index_of(tmp_path, rounds)
    before, after = question_targets(earlier), question_targets(later)
    assert {name: target.mean for name, target in before.items()} == pytest.approx({"a": 0.5, "b": 1.0, "c": 0.5})
    shift = describe_shift(before, after)
    assert shift["shift/Mean"] == pytest.approx((0.1 - 0.5 + 0.5) / 3)
    assert shift["shift/MeanAbsolute"] == pytest.approx((0.1 + 0.5 + 0.5) / 3)
    # Ranks 1.5, 3, 1.5 against 2, 1, 3: centred (-.5, 1, -.5) and (0, -1, 1).
    assert shift["shift/Spearman"] == pytest.approx(-1.5 / (1.5 * 2.0) ** 0.5)
    assert shift["shift/LeaderKept"] == pytest.approx(2 / 3)
    assert describe_shift(before, {}) == {}


def test_a_round_is_described_by_what_is_known_of_its_own_samples(tmp_path: Path) -> None:
    questions = {
        "a": [("7", True, 0.95), ("8", False, 0.95), (None, None, 0.15), ("7", True, None)],
        "b": [("3", False, 0.15)] * 4,
        "c": [("9", None, 0.6)] * 4,  # nobody knows
    }
    (index,) = index_of(tmp_path, [questions])
    values = describe_round(index)
    assert values["rate/Unreadable"] == values["rate/Truncated"] == values["rate/WithoutConfidence"] == 1 / 12
    assert values["accuracy/PassAt1"] == pytest.approx((2 / 4 + 0 / 4) / 2)
    # Bins: two at .95 of which one is right, five at .15 of which none is; the response without confidence is left out.
    assert values["calibration/ECE"] == pytest.approx((2 * 0.45 + 5 * 0.15) / 7)
    # The right one at .95 against one wrong at .95 (one half) and five below.
    assert values["discrimination/AUROC"] == pytest.approx(5.5 / 6)
    (index,) = index_of(tmp_path / "unknown", [{"a": [(None, None, None)] * 2}])
    assert describe_round(index) == {"rate/Unreadable": 1.0, "rate/Truncated": 1.0, "rate/WithoutConfidence": 1.0}
