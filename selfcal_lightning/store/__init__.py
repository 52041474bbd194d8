"""The store: sampled responses on disk, with the numbers on them."""

from __future__ import annotations

from selfcal_lightning.faces import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "annotations": ["Annotation", "annotation_names"],
        "columns": ["counted_samples"],
        "index": ["SampleIndex"],
        "manifest": ["StoreFingerprint", "check_place", "flatten", "round_file"],
        "parts": ["ShardWriter", "part_entries", "shard_metadata", "shard_name", "write_part"],
        "origins": ["origin_differences"],
        "plan": ["plan_sampling"],
        "question_annotations": ["QuestionAnnotation", "question_annotation_names", "question_values"],
        "records": ["PartManifest", "Reread", "ShardEntry"],
        "sample_store": ["OPEN_SHARDS", "PART_NAME", "SampleStore", "StoredQuestion", "StoredRow"],
        "shards": ["StoreCorruptError", "encode_shard", "question_digest", "read_shard"],
    },
)
