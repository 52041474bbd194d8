"""Engines: who samples responses and reads confidences."""

from __future__ import annotations

from selfcal_lightning.faces import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "base": ["Engine", "EngineStoppedError", "Failure", "FailuresInARow", "RequestsFailedError", "generate"],
        "checking": ["check_engine"],
        "hidden_states": ["LevelSettings", "PromptReader", "PromptStates", "check_gives_hidden_states"],
        "memory": ["memory_share"],
        "opening": [
            "check_can_draw",
            "expected_head_dtype",
            "load_chat",
            "open_engine",
            "serve_model",
        ],
        "settings": ["EngineName", "EngineOptions", "EngineSettings"],
        "transformers.engine": ["TransformersEngine"],
        "transformers.model": ["load_network"],
        "transformers.output_layer": ["exact_head"],
        "vllm.engine": ["VLLMEngine"],
    },
)
