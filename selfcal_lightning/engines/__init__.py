"""Engines sample responses and read P(True): transformers, vLLM, and OpenAI-compatible servers."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "base": ["Engine", "EngineStoppedError", "Failure", "FailuresInARow", "RequestsFailedError", "generate"],
        "hidden_states": ["LevelSettings", "PromptStates", "check_gives_hidden_states"],
        "opening": ["check_can_draw", "check_engine", "expected_head_dtype", "load_chat", "open_engine", "serve_model"],
        "settings": ["EngineName", "EngineOptions", "EngineSettings", "memory_share"],
        "transformers.engine": ["TransformersEngine"],
        "transformers.model": ["exact_head", "load_network"],
        "vllm.engine": ["VLLMEngine"],
    },
)
