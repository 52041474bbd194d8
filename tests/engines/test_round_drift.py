from pathlib import Path

import pytest

from selfcal_lightning.data.store.manifest import StoreFingerprint
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.data.store.shards import SampleIndex
from selfcal_lightning.records import ModelIdentity, PromptIdentity, Question, QuestionSamples, Sample
from selfcal_lightning.training.rounds import describe_round, describe_shift, question_targets

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
    earlier, later = index_of(
        tmp_path,
        [
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
        ],
    )
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
    (index,) = index_of(
        tmp_path,
        [
            {
                "a": [("7", True, 0.95), ("8", False, 0.95), (None, None, 0.15), ("7", True, None)],
                "b": [("3", False, 0.15)] * 4,
                "c": [("9", None, 0.6)] * 4,  # nobody knows
            }
        ],
    )
    values = describe_round(index)
    assert values["rate/Unreadable"] == values["rate/Truncated"] == values["rate/WithoutConfidence"] == 1 / 12
    assert values["accuracy/PassAt1"] == pytest.approx((2 / 4 + 0 / 4) / 2)
    # Bins: two at .95 of which one is right, five at .15 of which none is; the response without confidence is left out.
    assert values["calibration/ECE"] == pytest.approx((2 * 0.45 + 5 * 0.15) / 7)
    # The right one at .95 against one wrong at .95 (one half) and five below.
    assert values["discrimination/AUROC"] == pytest.approx(5.5 / 6)
    (index,) = index_of(tmp_path / "unknown", [{"a": [(None, None, None)] * 2}])
    assert describe_round(index) == {"rate/Unreadable": 1.0, "rate/Truncated": 1.0, "rate/WithoutConfidence": 1.0}
