"""Sampling file after file: where a run was stopped does not show, to the last bit."""

from pathlib import Path

import pytest
from support.store_samples import stored_groups

from selfcal_lightning.core.signals import Interrupt, PreemptedError, never
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.datamodules.questions import QuestionSource, load_questions
from selfcal_lightning.engines.sampling.sampler import GenerationReport, generate_samples
from selfcal_lightning.engines.transformers.engine import TransformersEngine
from selfcal_lightning.records import SamplingSettings

QUESTIONS = load_questions([QuestionSource("word_problems", split="train", limit=7)], role="train")


def sample(model: str, path: Path, interrupt: Interrupt = never, *, shard_by_shard: bool = True) -> GenerationReport:
    engine = TransformersEngine(model, max_batch=8)  # a new one, as after a kill
    report = generate_samples(
        QUESTIONS, path, split="train", engine=engine, chat=engine.chat, sampling=SamplingSettings(max_new_tokens=60),
        seed=0, num_samples=4, questions_per_shard=3, shard_by_shard=shard_by_shard, progress=False,
        interrupt=interrupt,
    )  # fmt: skip
    SampleStore(path).join()
    return report


class After:
    def __init__(self, looks: int) -> None:
        self.left = looks

    def __call__(self) -> None:
        self.left -= 1
        if not self.left:
            raise PreemptedError("SIGTERM asked this run to stop")


@pytest.mark.slow
def test_every_place_to_stop_gives_the_same_samples(tiny_model: str, tmp_path: Path) -> None:
    sample(tiny_model, tmp_path / "whole")
    whole, stops = stored_groups(tmp_path / "whole"), 0
    for looks in range(1, 100, 5):
        store = tmp_path / f"stopped-{looks}"
        try:
            sample(tiny_model, store, After(looks))
        except PreemptedError:
            stops += 1
        else:
            break
        committed = len(SampleStore(store).question_ids(include_parts=True))
        assert committed in {0, 3, 6}, "whole files only"
        assert sample(tiny_model, store).reused == committed
        assert stored_groups(store) == whole
    assert stops > 3
    assert [len(whole), sum(len(group.samples) for group in whole.values())] == [7, 28]


@pytest.mark.slow
def test_otherwise_what_is_complete_is_kept(tiny_model: str, tmp_path: Path) -> None:
    seen = set()
    for looks in (2, 4, 6, 8):
        store = tmp_path / str(looks)
        with pytest.raises(PreemptedError):
            sample(tiny_model, store, After(looks), shard_by_shard=False)
        seen.add(len(SampleStore(store).question_ids(include_parts=True)))
    assert seen - {0, 3, 6}, f"single questions are kept: {seen}"
