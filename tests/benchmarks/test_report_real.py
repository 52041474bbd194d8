import json
import math
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.house import ROOT, Script

from selfcal_lightning.engines.opening import load_chat
from selfcal_lightning.engines.settings import EngineOptions
from selfcal_lightning.models.chat_format import DEFAULT_QUERY
from selfcal_lightning.models.folders import BUNDLED_MODEL
from selfcal_lightning.records import Message, Question, QuestionSamples, Sample

ANSWERS = ("a", "a", "b", None, "a", "c", "c", "c")
LIKELIHOODS = (0.5, 0.25, 0.25, 1.0, 0.5, 0.5, 0.25, 0.25)


@pytest.fixture
def entry() -> QuestionSamples:
    samples = tuple(
        Sample("x/test/POL-capital", i, 0, "", (0, 0), "stop", answer, answer == "a", logprob=2 * math.log(likelihood))
        for i, (answer, likelihood) in enumerate(zip(ANSWERS, LIKELIHOODS, strict=True))
    )
    question = Question("x/test/POL-capital", "country_facts", (Message("user", "?"),), "a")
    return QuestionSamples(question, samples, "test")


def test_the_demonstration_is_one_task_with_its_own_report(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    report = script("report_real")
    monkeypatch.setattr(sys, "argv", ["report_real.py", "--demo"])
    options = report.STUDY.parse()
    assert [jobs.name for jobs in options.jobs] == ["country_facts"]
    assert options.results == options.output == report.DEMO["output"]


def test_a_task_that_a_model_lacks_is_told(
    script: Script, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["report_real.py", "--models", "gemma3", "--tasks", "arithmetic"])
    with pytest.raises(SystemExit):
        script("report_real").STUDY.parse()
    assert "--tasks arithmetic: no model of --models has them, but gemma3: country_facts" in capsys.readouterr().err


@pytest.mark.parametrize(("missing", "counts"), [(0, True), (1, True), (50, False)])
def test_when_a_confidence_counts(script: Script, monkeypatch: pytest.MonkeyPatch, missing: int, counts: bool) -> None:
    report = script("report_real")
    index = SimpleNamespace(confidences={"one": np.array([math.nan] * missing + [0.5] * (100 - missing))})
    monkeypatch.setattr(report, "annotation_names", lambda store: ["one"])
    monkeypatch.setattr(report, "SampleStore", lambda store: SimpleNamespace(index=lambda **options: index))
    assert report._is_whole(Path(), "test", "one") is counts


def test_shares_are_those_of_blocks(script: Script, entry: QuestionSamples) -> None:
    report = script("report_real")
    (found,) = report.with_cheap([entry], {"capital": 0.3}, [])

    def values(name: str) -> list[float]:
        return [sample.confidences[name] for sample in found.samples]

    assert values("likelihood") == pytest.approx(LIKELIHOODS)
    assert values("share_2") == [1.0, 1.0, 0.5, 0.0, 0.5, 0.5, 1.0, 1.0]
    assert values("share_4") == [0.5, 0.5, 0.25, 0.0, 0.25, 0.75, 0.75, 0.75]
    # The first four weigh .5, .25, .25 and, unreadable, 1: in all 2.
    assert values("share_4_likelihood")[:4] == pytest.approx([0.375, 0.375, 0.125, 0.0])
    assert values("share_8")[0] == 3 / 8
    assert values("share_4_others")[:4] == pytest.approx([1 / 3, 1 / 3, 0.0, 0.0])
    assert values("share_4_shrunk")[:4] == pytest.approx([(1 + 2 * 0.3) / 5] * 2 + [2 * 0.3 / 5, 0.0])
    assert values("cocoa")[0] == pytest.approx(0.5 * 3 / 8)
    assert values("kind") == [0.3] * 8
    entropy = -(2 * 3 / 8 * math.log(3 / 8) + 2 * 1 / 8 * math.log(1 / 8))
    assert values("semantic_entropy")[0] == pytest.approx(1 - entropy / math.log(8))


def test_agreement_of_a_kind_leaves_the_response_itself_out(script: Script, entry: QuestionSamples) -> None:
    # Of the seven others, 2 agree with each a, 2 with each c, none with b, and nothing with the unreadable one.
    assert script("report_real").agreement_of_kinds([entry]) == {"capital": pytest.approx(6 * 2 / 7 / 8)}


def test_jobs_run_at_the_same_time_where_they_may_and_a_failure_ends_the_report(script: Script, tmp_path: Path) -> None:
    machine = script("_real_jobs").Machine("gpu", at_once=2)
    both = threading.Barrier(2, timeout=20)
    machine.together(both.wait, both.wait)
    assert machine.alone(tmp_path) is machine.alone(tmp_path)
    with pytest.raises(SystemExit, match=r"no-such-verb. ended with 2"):
        machine.together(lambda: machine.run(tmp_path / "log.txt", "no-such-verb"), lambda: None)


def test_on_a_gpu_training_is_in_float32_too(script: Script, tmp_path: Path) -> None:
    jobs = script("_real_jobs")
    for device, dtype in (("cpu", None), ("gpu", "float32")):
        one = jobs.Jobs(tmp_path, tmp_path / "smollm2", jobs.FACTS, jobs.Sizes(), machine=jobs.Machine(device))
        config = one._configuration(jobs.LEAVE_ONE_OUT, 0, tmp_path)
        assert config["trainer"]["accelerator"] == device
        assert config["trainer"]["precision"] == "32-true"
        assert config["model"]["init_args"].get("torch_dtype") == dtype


def test_the_first_report_of_a_gpu_names_it(script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report = script("report_real")
    monkeypatch.setattr(report, "report_on", lambda jobs, seeds: {"costs": {}})
    (tmp_path / "gpu.json").write_text('{"name": "H200"}')
    jobs, places = [SimpleNamespace(name="country_facts")], {"output": tmp_path, "results": tmp_path}
    options = SimpleNamespace(jobs=jobs, seeds=[0], demo=False, device="gpu", num_samples=8, minutes=1.0, **places)
    assert report.assemble(options)["tasks"]["country_facts"] == {"costs": {}, "gpu": {"name": "H200"}}


def test_a_row_of_a_gpu_names_it_and_where_its_costs_come_from(script: Script) -> None:
    report = script("report_real")
    content = json.loads((ROOT / "benchmarks" / "results" / "report_real.json").read_text())
    content["tasks"]["arithmetic"]["gpu"] = {"name": "NVIDIA H200"}
    shown = report.as_markdown(content).partition("## Arithmetic in words")[2]
    assert "at temperature 0.4, on an NVIDIA H200. 240 training" in shown
    assert "\n\nOn two cores without a GPU, in an earlier run of these jobs:\n\n| job |" in shown


def test_states_of_a_response_do_not_depend_on_its_neighbours(script: Script) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    states = script("_states")
    chat = load_chat(EngineOptions(), "bundled", query=DEFAULT_QUERY)
    question = Question("q", "local_number", (Message("user", "How many?"),))
    texts = ("It is 4.", "First there were 3, and then there came 2, so that the answer is 5.")
    samples = [Sample("q", i, 0, text, chat.response_ids(text), "stop", None, None) for i, text in enumerate(texts)]
    found = states.read_states(BUNDLED_MODEL, None, [QuestionSamples(question, tuple(samples), "test")])
    network = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL, dtype=torch.bfloat16).eval()
    prompt = chat.prompt_ids(question.messages)
    for at, sample in enumerate(samples):
        ids = torch.tensor([[*prompt, *sample.token_ids, *chat.query.suffix_ids]])
        with torch.inference_mode():
            (alone,) = network.base_model(input_ids=ids).last_hidden_state.float().numpy()
        end = len(prompt) + len(sample.token_ids)
        for name, expected in (
            ("state_response", alone[end - 1]),
            ("state_query", alone[-1]),
            ("state_mean", alone[len(prompt) : end].mean(axis=0)),
        ):
            assert found[name][at] == pytest.approx(expected, abs=0.05)


def test_probes_of_states_learn_the_agreement_of_other_questions(script: Script, tmp_path: Path) -> None:
    states, rng = script("_states"), np.random.default_rng(0)
    pools, files = {}, {}
    for split, count in (("train", 60), ("validation", 20), ("test", 20)):
        pools[split] = [
            QuestionSamples(
                Question(f"{split}{q}", "local_number", ()),
                tuple(
                    Sample(f"{split}{q}", i, 0, "", (), "stop", answer, None)
                    for i, answer in enumerate("aaab" if q % 2 else "abcd")
                ),
                split,
            )
            for q in range(count)
        ]
        target = np.array([value for entry in pools[split] for value in states.agreement(entry)])
        rows = rng.normal(size=(len(target), 5)) * 0.01
        rows[:, 0] += target
        files[split] = tmp_path / f"{split}.npz"
        np.savez(files[split], **dict.fromkeys(states.STATES, rows))
    found = states.fit_probes(pools["train"], files, pools["validation"])
    assert set(target) == {0.0, 2 / 3}
    assert found.keys() == {"validation", "test"}
    for values in found["test"].values():
        assert np.abs(values - target).mean() < 0.03
