"""Recorded responses and their file formats."""

from __future__ import annotations

from selfcal_lightning.faces import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "exporting": ["ExportReport", "export_pool", "export_sampled"],
        "importing": ["ImportReport", "import_pool", "import_sampled"],
        "json_lines": ["count_lines", "open_imported"],
        "line_format": ["PoolLine", "is_written_pool", "judge_line", "pool_line"],
        "published_records": ["RecordsReport", "import_training_records"],
        "recorded": ["RecordedPool", "annotation_estimators", "check_place", "load_recorded_pool"],
        "task_rows": ["read_foreign_pool"],
        "texts": ["texts_digest"],
    },
)
