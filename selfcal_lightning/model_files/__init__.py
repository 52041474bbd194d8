"""Files of models and adapters: where they lie, whether they are whole, what identifies them."""

from __future__ import annotations

from selfcal_lightning.faces import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "attention_backends": ["exclude_cudnn", "without_cudnn"],
        "fingerprints": ["tensors_sha256", "weights_bytes", "weights_sha256"],
        "folders": ["check_adapter", "check_all_loaded", "check_model_folder", "local_adapter", "refusal_of_code"],
        "identity": ["base_model_identity", "same_base_model"],
        "locations": ["config_path", "indexed_files", "model_folder", "resolve_model"],
        "manifests": ["list_files", "read_manifest", "strange_files"],
        "names": ["check_adapter_name", "check_model", "check_name", "is_on_disk"],
    },
)
