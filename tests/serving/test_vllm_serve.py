from collections.abc import Iterator

import pytest
from support.serving import QUESTION, Server

pytestmark = [pytest.mark.slow, pytest.mark.vllm]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    folder = tmp_path_factory.mktemp("vllm")
    options = ("--task", "word_problems", "--engine.dtype", "float32")
    made = {
        name: Server((*options, "--engine.name", name), log=folder / name, patience=400)
        for name in ("vllm", "transformers")
    }
    yield made
    assert [server.end() for server in made.values()] == [0, 0]


def test_greedy_answers_and_confidences_are_equal(servers: dict[str, Server]) -> None:
    one, other = (servers[name].chat(QUESTION, temperature=0).json for name in ("vllm", "transformers"))
    assert one["choices"] == other["choices"]
    assert one["usage"]["completion_tokens"] == other["usage"]["completion_tokens"]
    assert one["selfcal"]["confidence"] == pytest.approx(other["selfcal"]["confidence"], abs=2e-3)
    body = {"model": "bundled", "messages": [{"role": "user", "content": QUESTION}], "response": "It is 286."}
    read = [servers[name].post("/v1/confidence", body).json["confidence"] for name in ("vllm", "transformers")]
    assert read[0] == pytest.approx(read[1], abs=2e-3)


def test_votes_streams_and_limits(servers: dict[str, Server]) -> None:
    vote = {"strategy": "self_consistency", "max_samples": 4, "seed": 3, "return": "all"}
    whole = servers["vllm"].chat(QUESTION, selfcal=vote)
    assert whole.selfcal["samples_used"] == 4
    assert len(whole.selfcal["samples"]) == 4
    chunks = servers["vllm"].chat(QUESTION, selfcal=vote, stream=True).chunks
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
    assert text == whole.json["choices"][0]["message"]["content"]
    late = servers["vllm"].chat(QUESTION, selfcal={"max_samples": 16, "threshold": 1.0, "deadline_s": 0.05})
    assert late.status == 504 or late.selfcal["stop_reason"] == "deadline"
